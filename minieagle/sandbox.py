"""The program that runs a model's chat template, in a process of its own: `template.py` starts it and talks to it.

The one idea: a template is a program by a stranger. Jinja's sandbox keeps it from files and from Python; it can't
keep it from looping for ever or from building gigabytes, in one filter as well as in a loop. The operating system
can: a timer on the processor time ends the process, and an address limit turns greed into a MemoryError. Nothing else
lives here, so nothing else is lost.

One line of JSON in, one out. {"template"} asks for the names that the template reads: {"reads": [...]}. With
{"variables"} it asks for the text: {"text"}. A fault is {"error": what to tell the user, "broken": whether the template
is at fault whatever the conversation}.

Source: the conventions of Hugging Face chat templates (trimmed blocks, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, the `generation` block that marks the assistant's text for training).
"""

import json
import resource
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A conversation that fills a context of 256k tokens takes under a tenth of each.
MAX_CPU_S: Final = 1.0
MAX_MEMORY_BYTES: Final = 512 << 20
MAX_TEXT_CHARS: Final = 32 << 20


class _TooLong(Exception):
    """The text that a template makes exceeds the bound."""


class _Generation(Extension):
    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_ENVIRONMENT: Final = _environment()
_compiled = lru_cache(maxsize=8)(_ENVIRONMENT.from_string)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        template = _compiled(request["template"])
        if "variables" in request:
            return {"text": _joined(template.generate(request["variables"]))}
        return {"reads": sorted(meta.find_undeclared_variables(_ENVIRONMENT.parse(request["template"])))}
    except MemoryError:
        return {"error": f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB", "broken": True}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"it is not valid Jinja: {error}", "broken": True}
    except (_TooLong, SecurityError) as error:
        return {"error": str(error), "broken": True}
    except jinja2.TemplateError as error:
        return {"error": str(error)}
    except (ArithmeticError, RecursionError) as error:  # a range too long is an OverflowError
        return {"error": f"{type(error).__name__}: {error}", "broken": True}
    except Exception as error:  # whatever a template can provoke: a wrong type, a key that a message lacks
        return {"error": f"{type(error).__name__}: {error}"}


def _joined(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_TEXT_CHARS:
            raise _TooLong(f"its text exceeds {MAX_TEXT_CHARS} characters")
        kept.append(piece)
    return "".join(kept)


def main() -> None:
    """Answer requests until the asking process closes the pipe, which it does at the latest by ending."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process of the terminal; the pipe ends this one
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        reply = json.dumps(_answer(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

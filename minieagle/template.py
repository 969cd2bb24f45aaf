"""A model's chat template, run where it can do no harm.

The one idea: rendering is a question to another process (`sandbox.py`), which is limited in processor time and memory
and is ended when it exceeds them. So a template costs at most the request that it spoils, whatever it holds. One
process serves all templates; it starts with the first one (a tenth of a second) and ends with this process.
"""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

from minieagle import sandbox
from minieagle.errors import ModelError

MAX_TEMPLATE_CHARS: Final = 1 << 20  # the longest that are published have 20 thousand
_MAX_CAUSE_CHARS: Final = 400
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class TemplateFault(Exception):
    """A template failed on its variables, or was stopped; the text says why. `broken`: it would on any others too, as
    far as can be told. `Template`'s callers put it in words."""

    def __init__(self, cause: str, *, broken: bool = False) -> None:
        super().__init__(_printable(cause)[:_MAX_CAUSE_CHARS])
        self.broken = broken


class Template:
    """A chat template that compiles. Immutable; `reads` are the names of the variables that it uses, `where` names its
    file."""

    def __init__(self, source: str, where: str) -> None:
        """`where` names the file; ModelError naming it when the template is too long or does not compile."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"{where} has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}; copy it again")
        self._source, self.where = source, where
        try:
            self.reads = frozenset(_SANDBOX.ask({"template": source})["reads"])
        except TemplateFault as fault:
            raise ModelError(f"{where}: the chat template cannot be used: {fault}; mend it") from None

    def has(self, *texts: str) -> bool:
        """Whether the template's source holds one of `texts`."""
        return any(text in self._source for text in texts)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text for `variables`, which must be JSON. Raises TemplateFault."""
        text: str = _SANDBOX.ask({"template": self._source, "variables": variables})["text"]
        surrogate = _SURROGATE.search(text)
        if surrogate is not None:  # JSON has words for it, UTF-8 has none
            raise TemplateFault(
                f"it makes the lone surrogate U+{ord(surrogate[0]):04X}, which is not text", broken=True
            )
        return text


class _Sandbox:
    """The running process: started when first asked, and again after it ended. Asked by one thread at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            process = self._running()
            reply = _exchange(process, line)
            if not reply.endswith(b"\n"):
                self._process = None
                process.communicate()
                raise TemplateFault(_cause_of_end(process.returncode), broken=True)
        answer = json.loads(reply)
        if "error" in answer:
            raise TemplateFault(answer["error"], broken=answer.get("broken", False))
        return answer

    def stop(self) -> None:
        """End the process by closing its pipe."""
        if self._process is not None and self._owner == os.getpid():
            self._process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self._process.communicate()  # it was killed while nobody asked: this closes its pipes
        # None yet, a dead one, or a parent's, whose pipes a fork shares: two would read each other's replies. -P keeps
        # the folder of sandbox.py, this package, off the path on which its imports are searched.
        command = [sys.executable, "-P", sandbox.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._owner = os.getpid()
        return self._process


def _printable(text: str) -> str:
    """What may be shown in a terminal: a template's text could hold commands for it, or end the line of a log."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """The line that answers `line`; less than a line when the process ends first."""
    assert process.stdin is not None and process.stdout is not None, "opened as pipes"
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return b""


def _cause_of_end(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it was stopped after {sandbox.MAX_CPU_S:g} s of processor time"
    return f"the process that ran it ended with status {status}"


_SANDBOX: Final = _Sandbox()
atexit.register(_SANDBOX.stop)

"""The server as a script: `torchrun minieagle/serve.py`, `python minieagle/serve.py`, `minieagle serve`.

The one idea: it holds no class and no state. Run as a file it is the module `__main__`, and the package would load a
second copy of whatever stood here; everything lives in `server.py`. The address is taken before the weights are read,
so that a busy port costs no wait.
"""

import os
import sys

# As a file, Python puts this folder at the front of the path, where `import minieagle` finds nothing and a sibling can
# shadow the standard library. `os` and `sys` are loaded already and immune to that.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse  # noqa: E402
import logging  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

from minieagle import server  # noqa: E402
from minieagle.dist.group import from_environment  # noqa: E402
from minieagle.dist.job import job  # noqa: E402
from minieagle.dist.ranks import Ranks  # noqa: E402
from minieagle.engine import Engine  # noqa: E402
from minieagle.llm import load_engine, obey, set_threads  # noqa: E402
from minieagle.options import add_engine_options, engine_arguments  # noqa: E402
from minieagle.streams import run_command  # noqa: E402

EMBEDDED_NAME = "minieagle-demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Serves what `argv` asks for until SIGTERM; returns the exit status: 2 when it can't start. Rank 0 serves, the
    others do what it does."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return run_command("serve", lambda: _over_ranks(arguments))


def _over_ranks(arguments: argparse.Namespace) -> int:
    with job(from_environment(), hang_timeout_s=arguments.hang_timeout) as ranks:
        set_threads(arguments.threads, arguments.model)
        if ranks.leads:
            return _serve(arguments, ranks)
        obey(ranks, device=ranks.device, **engine_arguments(arguments))
        return 0


def _serve(arguments: argparse.Namespace, ranks: Ranks) -> int:
    with server.bind(arguments.host, arguments.port) as sock:
        engine = _load(arguments, ranks)
        print(f"speculation: {_effective_shape(engine)}", flush=True)
        return server.run(engine, sock=sock, served_model_names=arguments.served_model_name or [_name(arguments.model)])


def _load(arguments: argparse.Namespace, ranks: Ranks) -> Engine:
    """The engine, with a progress bar where there is somebody to see it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)
        return load_engine(
            **engine_arguments(arguments),
            ranks=ranks,
            device=ranks.device,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _effective_shape(engine: Engine) -> str:
    shape = engine.config.shape
    if engine.drafter is None:
        return "off"
    return f"num_steps {shape.num_steps}, topk {shape.topk}, num_draft_tokens {shape.num_draft_tokens}"


def _name(model: str | None) -> str:
    return EMBEDDED_NAME if model is None else Path(model).resolve().name


def _model_name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r:.80} names no model: give one or more printable characters")
    return text


def parser() -> argparse.ArgumentParser:
    """The options: those of every command that runs an engine, and the server's own."""
    options = argparse.ArgumentParser(
        prog="minieagle serve",
        description="Serve a model with the OpenAI API, sped up by an EAGLE-3 drafter and a tree verifier.",
        allow_abbrev=False,
    )
    add_engine_options(options)
    add = options.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    add(
        "--served-model-name",
        nargs="+",
        type=_model_name,
        default=(),
        metavar="NAME",
        help="names that requests may give; answers carry the first (default: its folder's)",
    )
    return options


if __name__ == "__main__":
    sys.exit(main())

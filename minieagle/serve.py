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
import contextlib  # noqa: E402
import logging  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

from minieagle import server  # noqa: E402
from minieagle.dist import group  # noqa: E402
from minieagle.engine import Engine  # noqa: E402
from minieagle.errors import MinieagleError  # noqa: E402
from minieagle.llm import load_engine, set_threads  # noqa: E402
from minieagle.spec.tree import TreeShape  # noqa: E402

EMBEDDED_NAME = "minieagle-demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Serves what `argv` asks for until SIGTERM; returns the exit status: 2 when it can't start."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with contextlib.ExitStack() as stack:
        try:
            ranks = group.from_environment()
            sock = stack.enter_context(server.bind(arguments.host, arguments.port))
            engine = _load(arguments, ranks)
        except (ValueError, OSError) as error:  # the user's to mend, whichever folder named it
            print(f"minieagle serve: {error}", file=sys.stderr)
            return 2
        print(f"speculation: {_effective_shape(engine)}", flush=True)
        return server.run(engine, sock=sock, served_model_names=arguments.served_model_name or [_name(arguments.model)])


def tree_shape(arguments: argparse.Namespace) -> TreeShape | None:
    """The tree that the three options name, None where they name none. Raises a ValueError on an incomplete trio.

    A number of steps alone is a chain; a tree needs all three.
    """
    num_steps, topk, num_nodes = arguments.num_steps, arguments.eagle_topk, arguments.num_draft_tokens
    if num_steps is None:
        if topk is not None or num_nodes is not None:
            raise MinieagleError("--eagle-topk and --num-draft-tokens need --num-steps; add it or leave all three out")
        return None
    if num_nodes is None:
        if topk not in (None, 1):
            raise MinieagleError(f"--eagle-topk {topk} needs --num-draft-tokens, the nodes to verify; add it")
        return TreeShape.chain(num_steps)
    return TreeShape(num_steps, 1 if topk is None else topk, num_nodes)


def _load(arguments: argparse.Namespace, ranks: group.Group) -> Engine:
    """The engine, with a progress bar where there is somebody to see it."""
    set_threads(arguments.threads, arguments.model)
    sizes = {name: getattr(arguments, name) for name in ("max_seqs", "page_size", "prefill_chunk")}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        return load_engine(
            arguments.model,
            drafter=arguments.drafter,
            spec=not arguments.no_spec,
            tree=tree_shape(arguments),
            device=ranks.device,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **{name: size for name, size in sizes.items() if size is not None},
        )


def _effective_shape(engine: Engine) -> str:
    shape = engine.config.shape
    if engine.drafter is None:
        return "off"
    return f"num_steps {shape.num_steps}, topk {shape.topk}, num_draft_tokens {shape.num_draft_tokens}"


def _name(model: str | None) -> str:
    return EMBEDDED_NAME if model is None else Path(model).resolve().name


def parser() -> argparse.ArgumentParser:
    """The options. Further names of one are those that SGLang or vLLM users know; absent ones mean the engine's
    default."""
    options = argparse.ArgumentParser(
        prog="minieagle serve",
        description="Serve a model with the OpenAI API, sped up by an EAGLE-3 drafter and a tree verifier.",
        allow_abbrev=False,
    )
    add = options.add_argument
    add("--model", "--model-path", metavar="DIR", help="directory of the target (default: the embedded model)")
    add("--drafter", "--speculative-draft-model-path", metavar="DIR", help="directory of the EAGLE-3 drafter")
    add("--no-spec", action="store_true", help="decode plainly; the text is the same")
    add("--num-steps", "--speculative-num-steps", type=int, metavar="N", help="levels of the draft tree")
    add("--eagle-topk", "--speculative-eagle-topk", type=int, metavar="K", help="children kept on each level")
    add(
        "--num-draft-tokens",
        "--speculative-num-draft-tokens",
        type=int,
        metavar="N",
        help="nodes of the tree that are verified, its root included",
    )
    add("--threads", type=int, metavar="N", help="CPU threads (default: one for a small model, else all cores)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    add("--max-seqs", "--max-num-seqs", "--max-running-requests", type=int, metavar="N", help="requests in one batch")
    add("--page-size", "--block-size", type=int, metavar="N", help="tokens in a page of the latent cache")
    add("--prefill-chunk", "--chunked-prefill-size", type=int, metavar="N", help="prompt tokens a step takes at most")
    add(
        "--served-model-name",
        nargs="+",
        default=(),
        metavar="NAME",
        help="names that requests may give; answers carry the first (default: its folder's)",
    )
    return options


if __name__ == "__main__":
    sys.exit(main())

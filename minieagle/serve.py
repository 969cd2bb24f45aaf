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

from minieagle import server  # noqa: E402
from minieagle.dist import group  # noqa: E402
from minieagle.llm import load_engine  # noqa: E402

EMBEDDED_NAME = "minieagle-demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Serves what `argv` asks for until SIGTERM; returns the exit status: 2 when it can't start."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        ranks = group.from_environment()
        sock = server.bind(arguments.host, arguments.port)
        engine = load_engine(
            arguments.model,
            drafter=arguments.drafter,
            spec=not arguments.no_spec,
            num_steps=arguments.num_steps,
            topk=arguments.eagle_topk,
            num_draft_tokens=arguments.num_draft_tokens,
            max_seqs=arguments.max_seqs,
            page_size=arguments.page_size,
            prefill_chunk=arguments.prefill_chunk,
            device=ranks.device,
        )
    except ValueError as error:  # the user's to mend, whichever folder named it
        print(f"minieagle serve: {error}", file=sys.stderr)
        return 2
    names = arguments.served_model_name or [Path(arguments.model).resolve().name if arguments.model else EMBEDDED_NAME]
    return server.run(engine, sock=sock, served_model_names=names)


def _parser() -> argparse.ArgumentParser:
    """Options; the second name of each is the one that SGLang or vLLM users know. An absent one means the default of
    `load_engine`."""
    parser = argparse.ArgumentParser(
        prog="minieagle serve",
        description="Serve a model with the OpenAI API, sped up by an EAGLE-3 drafter and a tree verifier.",
        allow_abbrev=False,
    )
    add = parser.add_argument
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
    return parser


if __name__ == "__main__":
    sys.exit(main())

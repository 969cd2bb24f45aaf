"""The options of every command that runs an engine, under this project's names and those that SGLang's and vLLM's users
know, and what load_engine makes of them."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

from minieagle.dist.watch import HANG_TIMEOUT_S
from minieagle.tracing import add_trace_options

MAX_HANG_TIMEOUT_S = 86_400


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Model, drafter, tree, sizes, ranks and traces."""
    _add_model_options(parser)
    _add_size_options(parser)
    _add_rank_options(parser)
    add_trace_options(parser)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", "--model-path", metavar="DIR", help="directory of the target (default: the embedded model)")
    add("--drafter", "--speculative-draft-model-path", metavar="DIR", help="directory of the EAGLE-3 drafter")
    add_wiring_options(parser)
    add("--no-spec", action="store_true", help="decode plainly; the text is the same")
    add("--tree", metavar="SHAPE", help="chain:N, dynamic:STEPS,TOPK,NODES or static:0,1,0.0 (default: chain:5)")
    add("--num-steps", "--speculative-num-steps", type=int, metavar="N", help="levels of the draft tree")
    add("--topk", "--eagle-topk", "--speculative-eagle-topk", type=int, metavar="K", help="children kept on each level")
    add("--num-draft-tokens", "--speculative-num-draft-tokens", type=int, metavar="N", help="nodes, the root included")
    add(
        "--no-exact",
        dest="exact",
        action="store_false",
        help="on a GPU: library kernels, faster on long prompts; speculation then changes tokens at near-ties",
    )
    add("--cuda-graph", action="store_true", help="on a GPU: record decode and verify steps and replay them")
    add("--dtype", choices=("bfloat16", "float32"), help="compute in this type (default: the checkpoint's)")


def add_wiring_options(parser: argparse.ArgumentParser) -> None:
    """What a user can say of a drafter whose files leave it open."""
    add = parser.add_argument_group("what the drafter's files don't say").add_argument
    add("--capture-convention", choices=("in", "out"), help="what its layer ids mean: input or output of layer i")
    add("--boundaries", type=int, nargs="+", metavar="B", help="the states it reads, 0 .. layers, instead of layer ids")


def _add_size_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sizes").add_argument
    add("--page-size", "--block-size", type=int, metavar="N", help="tokens in a page of the cache")
    add("--prefill-chunk", "--chunked-prefill-size", type=int, metavar="N", help="prompt tokens a step takes at most")
    add("--max-seqs", "--max-num-seqs", "--max-running-requests", type=int, metavar="N", help="sequences in one batch")
    add(
        "--max-context-tokens",
        "--context-length",
        "--max-model-len",
        type=int,
        metavar="N",
        help="prompt and answer together (default: the model's limit)",
    )
    add("--threads", type=int, metavar="N", help="CPU threads (default: one for a small model, else all cores)")


def _hang_timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= MAX_HANG_TIMEOUT_S:  # a NaN fails every comparison
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be a number of seconds in 1..{MAX_HANG_TIMEOUT_S}")
    return seconds


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks, under torchrun").add_argument
    add(
        "--reduction-slices",
        type=int,
        metavar="N",
        help="pieces of every sum over ranks (default: the number of ranks); with 8, 1, 2, 4 and 8 ranks give the same "
        "tokens bit for bit",
    )
    add(
        "--expert-parallel",
        "--enable-expert-parallel",
        action="store_true",
        help="each rank holds whole routed experts instead of a piece of each",
    )
    add(
        "--hang-timeout",
        type=_hang_timeout,
        default=HANG_TIMEOUT_S,
        metavar="S",
        help="end the job when a rank is silent or stuck for this many seconds (default: %(default)g)",
    )


_PASSED = (
    "drafter",
    "capture_convention",
    "boundaries",
    "tree",
    "num_steps",
    "topk",
    "num_draft_tokens",
    "page_size",
    "prefill_chunk",
    "max_seqs",
    "max_context_tokens",
    "reduction_slices",
    "expert_parallel",
    "exact",
    "cuda_graph",
    "trace",
    "trace_steps",
    "trace_layers",
)


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of load_engine and obey, `model` included."""
    passed = {name: getattr(options, name) for name in _PASSED}
    dtype = getattr(torch, options.dtype) if options.dtype else None
    return {"model": options.model, "spec": not options.no_spec, "dtype": dtype} | passed

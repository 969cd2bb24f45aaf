"""How close decoding comes to the memory's bandwidth, what a verify pass costs by its rows, and where the time goes.

    python bench/limits.py
    python bench/limits.py --model DIR --context 256 --rounds 9
    python bench/limits.py --profile

Decoding one token must read every weight that the token uses once, and the cached rows of its context; those bytes over
the measured bandwidth are the least time a token can take. Bytes are counted on the loaded modules as they lie in
memory (INT4 codes, and scales in the kernel's own layout), not from the file.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench.prompts import encode, read_prompts
from bench.report import Report, add_model_options, new_parser, percent
from bench.runs import load, run_all, variant
from minieagle.engine import Engine, Request
from minieagle.errors import ModelError
from minieagle.models.deepseek import Block, Target
from minieagle.models.int4 import Int4Linear
from minieagle.models.layers import Linear
from minieagle.models.moe import MixtureOfExperts, Router
from minieagle.models.rows import Rows, Span
from minieagle.sampling import SamplingParams
from minieagle.spec.tree import Tree

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
TOP_OPERATORS = 12
STREAM_PASSES = 9

NOTES = (
    "bandwidth: a sum over int64 on all cores, read only, over a buffer far larger than the caches; median of "
    f"{STREAM_PASSES} passes",
    "bytes per token: what one plain decode step reads; INT4 is codes and scales of the experts that one token uses",
    "measured: median step of the engine in plain decoding, sampling and bookkeeping included",
    "share of the limit: least time by bandwidth / measured time",
    "verify pass: target forward over the rows and argmax of their logits, on the model's own sampled text behind the "
    "context; tree: each node has two children, the last level cut; medians over rounds, row counts interleaved",
    "experts a layer: distinct routed experts that the chain's rows use, mean over the layers; least: the pass's bytes "
    "with so many experts / bandwidth",
)


def bandwidth(num_bytes: int) -> float:
    """Bytes a second that all cores together can read from a buffer of num_bytes, whatever --threads says."""
    buffer = torch.ones(num_bytes // 8, dtype=torch.int64)
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for _ in range(STREAM_PASSES):
        start = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return buffer.nbytes / median(times)


def _own_bytes(module: nn.Module) -> int:
    """Weights of one module, without its children."""
    if isinstance(module, Int4Linear):
        return module.nbytes
    if isinstance(module, Linear) and module.packed is not None:
        return module.packed.numel() * module.packed.element_size()
    return sum(parameter.nbytes for parameter in module.parameters(recurse=False))


def weight_bytes(module: nn.Module) -> int:
    return sum(map(_own_bytes, module.modules()))


@dataclass(frozen=True)
class Footprint:
    """Bytes of a target by how a forward reads them. expert: one routed expert, summed over the MoE layers (so that
    times the experts a layer gives what is read); rest: attention, norms, dense and shared feed-forward, router;
    cache_row: one position's rows in all layers; embedding_row: one token's."""

    expert: float
    rest: int
    head: int
    cache_row: int
    embedding_row: int
    num_experts_per_tok: int

    @staticmethod
    def of(target: Target) -> Footprint:
        mixtures = [module for module in target.modules() if isinstance(module, MixtureOfExperts)]
        experts = [weight_bytes(mixture.experts) for mixture in mixtures]
        blocks = sum(weight_bytes(block) for block in target.layers if isinstance(block, Block))
        config, size = target.config, target.embed_tokens.element_size()
        return Footprint(
            expert=sum(experts) / config.n_routed_experts,
            rest=blocks - sum(experts) + weight_bytes(target.norm),
            head=weight_bytes(target.lm_head),
            cache_row=config.num_hidden_layers * config.latent_width * size,
            embedding_row=config.hidden_size * size,
            num_experts_per_tok=config.num_experts_per_tok,
        )

    def read(self, *, context: int, num_rows: int = 1, experts: float | None = None) -> float:
        """Bytes of one forward of num_rows rows that use `experts` distinct experts a layer."""
        used = self.expert * (self.num_experts_per_tok if experts is None else experts)
        return used + self.rest + self.head + self.cache_row * (context + num_rows) + self.embedding_row * num_rows


def own_text(loaded: Engine, num_tokens: int) -> tuple[int, ...]:
    """num_tokens of a conversation that the model wrote itself, sampled (greedy text loops) and past its stops."""
    prompt = encode(loaded.tokenizer, read_prompts(None, 1))[0]
    if len(prompt) >= num_tokens:
        return prompt[:num_tokens]
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=num_tokens - len(prompt), ignore_eos=True)
    return prompt + run_all(variant(loaded, None), [prompt], [params])[0].token_ids


def begin_decoding(engine: Engine, prompt: tuple[int, ...], num_steps: int) -> None:
    """Run the prompt and its first token, so that num_steps plain decode steps are left."""
    engine.add(Request(prompt, SamplingParams(max_tokens=num_steps + 1, ignore_eos=True)))
    while not engine.step():
        pass


def decode_steps(engine: Engine) -> list[float]:
    """Seconds of each step that is left."""
    times = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times


def binary_tree(num_rows: int) -> Tensor:
    """Ancestors [num_rows, depth] of a tree in which node v hangs below node (v - 1) // 2."""
    return Tree((0,) * num_rows, tuple((node - 1) // 2 if node else -1 for node in range(num_rows))).ancestors


class VerifyPass:
    """Forwards of a few rows behind one committed context; each overwrites the last one's cache rows."""

    def __init__(self, target: Target, text: tuple[int, ...], context: int) -> None:
        self.target, self.context, self.tokens = target, context, torch.tensor(text)
        self.cache = target.new_cache(len(text) + 1)
        self.slots = torch.arange(1, len(text) + 1)
        target(Rows.of(self.tokens[:context], [Span(self.slots, 0, context)]), self.cache)

    def run(self, num_rows: int, *, tree: bool) -> float:
        """Seconds of one pass."""
        span = Span(self.slots, self.context, num_rows, binary_tree(num_rows) if tree and num_rows > 1 else None)
        start = time.perf_counter()
        rows = Rows.of(self.tokens[self.context : self.context + num_rows], [span])
        self.target(rows, self.cache).logits.argmax(-1).tolist()
        return time.perf_counter() - start

    def experts(self, num_rows: int) -> float:
        """Distinct routed experts a layer, mean over layers, of a chain of num_rows rows."""
        counts: list[int] = []

        def counted(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
            ids, weights = Router.forward(router, x)
            counts.append(len(ids.unique()))
            return ids, weights

        with patch.object(Router, "__call__", counted):  # layers have no hooks
            self.run(num_rows, tree=False)
        return mean(counts) if counts else 0.0


def verify_times(verify: VerifyPass, row_counts: Sequence[int], rounds: int) -> dict[tuple[int, bool], float]:
    """Median seconds by (rows, tree), interleaved; the first round warms up and is dropped."""
    times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for num_rows in row_counts:
            for tree in (False, True):
                times[num_rows, tree].append(verify.run(num_rows, tree=tree))
    return {key: median(found[1:]) for key, found in times.items()}


@dataclass(frozen=True)
class Limits:
    """What was measured: seconds, bytes, bytes a second."""

    footprint: Footprint
    context: int
    bandwidth: float
    step_s: float

    def rows(self) -> list[list[str]]:
        part = self.footprint
        total = part.read(context=self.context)
        used = part.num_experts_per_tok * part.expert
        cached = part.cache_row * (self.context + 1)
        least = total / self.bandwidth
        return [
            ["memory bandwidth", f"{self.bandwidth / 1e9:.1f} GB/s"],
            [f"experts' INT4 codes and scales, {part.num_experts_per_tok} a layer", f"{used / 1e6:.2f} MB"],
            ["attention, norms, router, dense and shared experts", f"{part.rest / 1e6:.2f} MB"],
            ["head and one embedding row", f"{(part.head + part.embedding_row) / 1e6:.2f} MB"],
            [f"cache rows of {self.context} tokens", f"{cached / 1e6:.2f} MB"],
            ["bytes per token", f"{total / 1e6:.2f} MB"],
            ["least time per token", f"{1e3 * least:.3f} ms"],
            ["measured time per token, plain", f"{1e3 * self.step_s:.3f} ms"],
            ["share of the limit", percent(least / self.step_s)],
        ]

    def verify_rows(self, verify: VerifyPass, times: dict[tuple[int, bool], float]) -> list[list[str]]:
        found = []
        for num_rows in sorted({count for count, _ in times}):
            chain, tree = times[num_rows, False], times[num_rows, True]
            experts = verify.experts(num_rows)
            least = self.footprint.read(context=self.context, num_rows=num_rows, experts=experts) / self.bandwidth
            one = times[min(times)]
            cells = [f"{1e3 * chain:.3f}", f"{chain / one:.2f}", f"{1e3 * tree:.3f}", f"{tree / one:.2f}"]
            found.append([str(num_rows), *cells, f"{experts:.1f}", f"{1e3 * least:.3f}"])
        return found


VERIFY_COLUMNS = ("rows", "chain ms", "x 1 row", "tree ms", "x 1 row", "experts a layer", "least ms")


def operator_rows(engine: Engine, prompt: tuple[int, ...], num_steps: int) -> list[list[str]]:
    """Where a plain decode step's time goes: operators by their own time, and what is left for Python around them."""
    begin_decoding(engine, prompt, num_steps)
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        decode_steps(engine)
        step_ms = 1e3 * (time.perf_counter() - start) / num_steps
    spent = [(e.key, e.self_cpu_time_total * 1e-3 / num_steps, e.count / num_steps) for e in profiler.key_averages()]
    spent.sort(key=lambda item: item[1], reverse=True)
    top, others = spent[:TOP_OPERATORS], spent[TOP_OPERATORS:]
    top.append(("all other operators", sum(ms for _, ms, _ in others), sum(calls for _, _, calls in others)))
    top.append(("outside operators (Python)", step_ms - sum(ms for _, ms, _ in top), 0.0))
    rows = [[name, f"{ms:.3f}", percent(ms / step_ms), f"{calls:.1f}" if calls else ""] for name, ms, calls in top]
    return [*rows, ["the step, with the profiler's own cost", f"{step_ms:.3f}", "100.0 %", ""]]


def parser() -> argparse.ArgumentParser:
    options = new_parser("limits", __doc__ or "")
    add_model_options(options, drafter=False)
    options.add_argument("--context", type=int, default=256, metavar="N", help="cached tokens (default: 256)")
    options.add_argument("--steps", type=int, default=64, metavar="N", help="plain decode steps timed (default: 64)")
    options.add_argument("--rounds", type=int, default=15, metavar="N", help="verify passes a row count (default: 15)")
    options.add_argument(
        "--rows", type=int, nargs="+", default=list(ROWS), metavar="N", help="row counts of the verify pass"
    )
    options.add_argument(
        "--buffer-mb", type=int, default=1024, metavar="N", help="buffer of the bandwidth test (default: 1024)"
    )
    options.add_argument("--profile", action="store_true", help="also show where a plain decode step's time goes")
    return options


def bench(options: argparse.Namespace, report: Report) -> None:
    if min(options.rows) < 1:
        raise ModelError(f"--rows {min(options.rows)} must be at least 1")
    loaded = load(options.model, None, [], options.threads)
    context, row_counts = options.context, sorted({1, *options.rows})
    ahead = max(options.steps + 1, row_counts[-1])
    if context + ahead > loaded.max_context_tokens:
        raise ModelError(
            f"--context {context} leaves no room for {ahead} rows in the model's {loaded.max_context_tokens}"
        )
    text = own_text(loaded, context + ahead)
    engine = variant(loaded, None)
    streamed = bandwidth(options.buffer_mb * 2**20)
    begin_decoding(engine, text[:context], options.steps)
    step_s = median(decode_steps(engine))
    limits = Limits(Footprint.of(loaded.target), context, streamed, step_s)
    report.table("Plain decoding against the bandwidth limit", ("what", "figure"), limits.rows())
    verify = VerifyPass(loaded.target, text, context)
    times = verify_times(verify, row_counts, options.rounds)
    report.table(f"A verify pass behind {context} tokens", VERIFY_COLUMNS, limits.verify_rows(verify, times))
    if options.profile:
        rows = operator_rows(engine, text[:context], options.steps)
        report.table(
            "A plain decode step by operator", ("operator, own time", "ms a step", "share", "calls a step"), rows
        )
    report.notes(NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(arguments)
    try:
        bench(options, Report.begin("limits", arguments))
    except ValueError as error:  # the user's to mend
        print(f"bench/limits.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

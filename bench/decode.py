"""Decoding speed: plain, chain, tree and transformers' generate on the same weights, interleaved in one run.

    python bench/decode.py
    python bench/decode.py --prompts FILE.jsonl --num-prompts 40 --rounds 5 --threads 1
    python bench/decode.py --model DIR --ignore-eos --max-tokens 64 --rounds 3 --twin DIR-BF16

Every round runs every prompt through every engine before the next prompt, so that a drift of the machine hits all of
them alike; ratios are taken within a round and the median over rounds is printed. transformers decodes greedily from a
bf16 copy of the same weights (INT4 dequantised), in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench import reference
from bench.prompts import encode, read_prompts
from bench.report import (
    ACCEPTANCE,
    REPEATED,
    TOKENS_PER_STEP,
    Report,
    add_model_options,
    depths,
    new_parser,
    peak_memory_bytes,
    percent,
)
from bench.runs import PLAIN, Run, check_room, load, repeated_4grams, run_all, total_stats, variant
from bench.twin import check_twin, write_twin
from minieagle.engine import Engine
from minieagle.llm import embedded
from minieagle.sampling import SamplingParams
from minieagle.spec.tree import Shape, parse_shape

TRANSFORMERS = "transformers"
Runner = Callable[[tuple[int, ...], SamplingParams], Run]
Rounds = list[list[Run]]
"""[round][prompt]"""

NOTES = (
    "tokens/s: emitted tokens after the first / seconds from first token to last (decode phase); median over rounds",
    "request tokens/s: all emitted tokens / seconds of the whole requests, prompt included; median over rounds",
    "x plain, x transformers: ratio of tokens/s within a round; median over rounds",
    TOKENS_PER_STEP,
    ACCEPTANCE,
    REPEATED,
    "peak memory: most resident memory of the process, loading included; plain, chain and tree share one process",
    "same text: prompts whose token ids equal plain's in every round; transformers multiplies dequantised weights, so "
    "near-ties may fall the other way",
)


def parser() -> argparse.ArgumentParser:
    options = new_parser("decode", __doc__ or "")
    add_model_options(options)
    options.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL of prompts (default: a few of its own)")
    options.add_argument(
        "--num-prompts", type=int, metavar="N", help="prompts taken, spread over the file (default: all)"
    )
    options.add_argument("--max-tokens", type=int, default=128, metavar="N", help="new tokens a prompt (default: 128)")
    options.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    options.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds over all prompts (default: 3)")
    options.add_argument("--chain", type=int, default=5, metavar="STEPS", help="the chain's length (default: 5)")
    options.add_argument("--tree", default="dynamic:4,4,16", metavar="SHAPE", help="the tree (default: dynamic:4,4,16)")
    options.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; transformers is always greedy")
    options.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    options.add_argument(
        "--twin", type=Path, metavar="DIR", help="bf16 copy for transformers: used, or written and kept"
    )
    return options


def engine_runner(engine: Engine) -> Runner:
    return lambda prompt, params: run_all(engine, [prompt], [params])[0]


@contextmanager
def transformers_pool(model: Path, twin: Path | None) -> Iterator[ProcessPoolExecutor]:
    """A process that holds transformers' copy of the model. The twin goes to a temporary directory unless named."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = twin or Path(scratch) / "twin"
        if directory.exists():
            check_twin(model, directory)
        else:
            write_twin(model, directory)
        context = multiprocessing.get_context("spawn")
        threads = torch.get_num_threads()
        with ProcessPoolExecutor(1, context, initializer=reference.load, initargs=(directory, threads)) as pool:
            yield pool


def transformers_runner(pool: ProcessPoolExecutor, stop_ids: Sequence[int]) -> Runner:
    def run(prompt: tuple[int, ...], params: SamplingParams) -> Run:
        stops = () if params.ignore_eos else tuple(stop_ids)
        return pool.submit(reference.generate, prompt, params.max_tokens, stops).result()

    return run


def measure(
    runners: dict[str, Runner], prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], num_rounds: int
) -> dict[str, Rounds]:
    """Round robin: prompt by prompt, every runner in turn. One prompt a runner first, untimed, to warm up."""
    for run in runners.values():
        run(prompts[0], params[0])
    found: dict[str, Rounds] = {name: [] for name in runners}
    for _ in range(num_rounds):
        for rounds in found.values():
            rounds.append([])
        for prompt, wish in zip(prompts, params, strict=True):
            for name, run in runners.items():
                found[name][-1].append(run(prompt, wish))
    return found


def decode_speed(runs: Sequence[Run]) -> float:
    """Tokens a second of the decode phase; runs that ended with their first token have none."""
    seconds = sum(run.total_s - run.first_s for run in runs)
    return sum(len(run.token_ids) - 1 for run in runs) / seconds if seconds else 0.0


def request_speed(runs: Sequence[Run]) -> float:
    return sum(len(run.token_ids) for run in runs) / sum(run.total_s for run in runs)


@dataclass(frozen=True)
class Line:
    """The figures of one engine, over all rounds."""

    name: str
    rounds: Rounds
    found: dict[str, Rounds]
    peak_bytes: int

    def ratio(self, other: str) -> str:
        if other not in self.found:
            return "-"
        speeds = [
            (decode_speed(mine), decode_speed(theirs))
            for mine, theirs in zip(self.rounds, self.found[other], strict=True)
        ]
        return (
            f"{median(mine / theirs for mine, theirs in speeds if theirs):.2f}"
            if all(theirs for _, theirs in speeds)
            else "-"
        )

    def same_text(self) -> str:
        pairs = [zip(*both, strict=True) for both in zip(self.rounds, self.found[PLAIN], strict=True)]
        per_prompt = zip(*[[mine.token_ids == plain.token_ids for mine, plain in pair] for pair in pairs], strict=True)
        same = [all(rounds) for rounds in per_prompt]
        return "yes" if all(same) else f"NO: {sum(same)} of {len(same)}"

    def cells(self) -> list[str]:
        last = self.rounds[-1]
        stats = total_stats(last)
        return [
            self.name,
            f"{median(map(decode_speed, self.rounds)):.1f}",
            f"{median(map(request_speed, self.rounds)):.1f}",
            self.ratio(PLAIN),
            self.ratio(TRANSFORMERS),
            f"{stats.tokens_per_step:.3f}",
            depths(stats.acceptance_by_depth),
            percent(repeated_4grams([run.token_ids for run in last])),
            f"{self.peak_bytes / 1e6:.0f} MB",
            self.same_text(),
        ]


COLUMNS = (
    "decoding",
    "tokens/s",
    "request tokens/s",
    "x plain",
    "x transformers",
    "tokens per step",
    "acceptance by depth",
    "repeated 4-grams",
    "peak memory",
    "same text",
)


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """Chain and tree; none where a model comes without a drafter."""
    if options.model is not None and options.drafter is None:
        return []
    return [parse_shape(f"chain:{options.chain}"), parse_shape(options.tree)]


def bench(options: argparse.Namespace, report: Report) -> bool:
    """Measure and print; True when chain and tree wrote plain's text."""
    shapes = shapes_of(options)
    loaded = load(options.model, options.drafter, shapes, options.threads)
    prompts = encode(loaded.tokenizer, read_prompts(options.prompts, options.num_prompts))
    check_room(loaded.max_context_tokens, prompts, options.max_tokens)
    params = [
        SamplingParams(
            temperature=options.temperature, seed=i, max_tokens=options.max_tokens, ignore_eos=options.ignore_eos
        )
        for i in range(len(prompts))
    ]
    runners = {PLAIN: engine_runner(variant(loaded, None))}
    runners |= {str(shape): engine_runner(variant(loaded, shape)) for shape in shapes}
    peaks: dict[str, int] = {}
    if options.no_transformers:
        found = measure(runners, prompts, params, options.rounds)
    else:
        with transformers_pool(options.model or embedded("target"), options.twin) as pool:
            runners[TRANSFORMERS] = transformers_runner(pool, sorted(loaded.tokenizer.stop_ids))
            found = measure(runners, prompts, params, options.rounds)
            peaks[TRANSFORMERS] = pool.submit(reference.peak_memory).result()
    lines = [Line(name, found[name], found, peaks.get(name, peak_memory_bytes())) for name in runners]
    print_report(report, options, lines, len(prompts))
    return all(line.same_text() == "yes" for line in lines if line.name != TRANSFORMERS)


def print_report(report: Report, options: argparse.Namespace, lines: Sequence[Line], num_prompts: int) -> None:
    stop = "past the end token" if options.ignore_eos else "to the model's own stop"
    title = (
        f"{num_prompts} prompts, at most {options.max_tokens} new tokens, {stop}, temperature {options.temperature:g}, "
        f"{options.rounds} rounds, one request at a time"
    )
    report.table(title, COLUMNS, [line.cells() for line in lines])
    missing = (
        []
        if len(lines) > 2 or options.drafter or not options.model
        else ["no --drafter given: chain and tree are left out"]
    )
    report.notes([*NOTES, *missing])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(arguments)
    try:
        if not options.no_transformers:
            reference.check_installed()
        return 0 if bench(options, Report.begin("decode", arguments)) else 1
    except ValueError as error:  # the user's to mend
        print(f"bench/decode.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Tensor parallel on this machine: the same tokens on 1, 2, 4 and 8 ranks, what the fixed order of sums costs, and how
long a job lives after one of its ranks has failed.

Each size is a job of its own under torchrun, which runs all prompts plainly and with speculation, half of them greedy
and half sampled, once with eight slices of every sum and once with as many as ranks. Faults are put into jobs of two
ranks (tests/rank_worker.py) by --faults. Ranks share the cores of one machine here, so that more of them are slower;
what counts is whether tokens and tokens per step stay, and the ratio of the two kinds of sum at one size.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench.prompts import encode, read_prompts
from bench.report import TOKENS_PER_STEP, Report, new_parser
from bench.runs import run_all, total_stats, variant
from minieagle.dist.group import from_environment
from minieagle.dist.job import job
from minieagle.dist.ranks import Ranks
from minieagle.engine import Engine
from minieagle.llm import load_engine, obey, set_threads
from minieagle.sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1, 2, 4, 8)
SLICES = 8
FAULTS: tuple[tuple[str, str], ...] = (
    ("kill", "load"),
    ("kill", "prefill"),
    ("kill", "decode"),
    ("kill", "idle"),
    ("memory", "load"),
    ("memory", "decode"),
    ("sleep", "decode"),
    ("stop", "decode"),
)
IDLE_S = 60.0
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """What a job of one size did: token ids of each prompt, tokens per step with speculation, seconds of each run."""

    plain: list[list[int]]
    spec: list[list[int]]
    tokens_per_step: float
    plain_s: float
    spec_s: float


def torchrun(size: int, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *arguments]


# ---- a rank


def work(options: argparse.Namespace) -> None:
    """What every process of a job does; rank 0 writes the outcome."""
    with job(from_environment()) as ranks:
        set_threads(1, None)
        if ranks.leads:
            options.worker.write_text(json.dumps(vars(_lead(options, ranks))))
        else:
            obey(ranks, reduction_slices=options.slices)


def _lead(options: argparse.Namespace, ranks: Ranks) -> Outcome:
    engine = load_engine(tree=options.tree, ranks=ranks, reduction_slices=options.slices)
    prompts = _prompts(engine, options.num_prompts)
    temperatures = (0.0, 0.8)
    params = [
        SamplingParams(temperature=temperatures[index % 2], seed=index, max_tokens=options.max_tokens)
        for index in range(len(prompts))
    ]
    found: dict[str, Any] = {}
    for name, shape in (("plain", None), ("spec", engine.config.shape)):
        started = time.perf_counter()
        runs = run_all(variant(engine, shape, max_seqs=options.max_seqs), prompts, params)
        found |= {name: [list(run.token_ids) for run in runs], f"{name}_s": time.perf_counter() - started}
    return Outcome(**found, tokens_per_step=total_stats(runs).tokens_per_step)


def _prompts(engine: Engine, count: int) -> list[tuple[int, ...]]:
    """`count` of the built-in prompts and of all pairs of them."""
    single = encode(engine.tokenizer, read_prompts(None, None))
    pairs = [one + other for one in single for other in single if one != other]
    return [*single, *pairs][:count]


# ---- the table of sizes


def _run(size: int, slices: int | None, options: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcome.json"
        passed = {"worker": path, "tree": options.tree, "num-prompts": options.num_prompts}
        passed |= {"max-tokens": options.max_tokens, "max-seqs": options.max_seqs}
        arguments = [f"--{name}={value}" for name, value in passed.items()]
        command = torchrun(size, __file__, *arguments, *([f"--slices={slices}"] if slices else []))
        subprocess.run(command, check=True, cwd=ROOT)
        return Outcome(**json.loads(path.read_text()))


def sameness(options: argparse.Namespace, report: Report) -> bool:
    """Print the table of sizes; returns whether all tokens were those of one rank."""
    rows, first, good = [], None, True
    for size in options.sizes:
        fixed = _run(size, SLICES, options)
        free = _run(size, None, options)
        first = first or fixed
        counts = [_num_same(found, first.plain) for found in (fixed.plain, fixed.spec, free.plain)]
        good = good and counts[:2] == [len(first.plain)] * 2
        rows.append(
            [
                str(size),
                *[f"{count} of {len(first.plain)}" for count in counts],
                f"{fixed.tokens_per_step:.3f}",
                f"{fixed.plain_s:.1f}",
                f"{fixed.spec_s:.1f}",
                f"{fixed.plain_s / free.plain_s:.2f}",
                f"{fixed.spec_s / free.spec_s:.2f}",
            ]
        )
    columns = ("ranks", "plain same", "spec same", "plain same, free sums", "tokens per step", "plain s", "spec s")
    report.table(
        f"{options.num_prompts} prompts, half of them sampled, {options.max_tokens} tokens each, {options.tree}",
        (*columns, "plain, fixed / free", "spec, fixed / free"),
        rows,
    )
    return good


def _num_same(found: list[list[int]], wanted: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(found, wanted, strict=True))


# ---- the table of faults


def fault_times(only: str, report: Report) -> bool:
    """Print seconds from each fault to the end of its job; returns whether all ended as they should."""
    rows, good = [], True
    for fault, stage in [entry for entry in FAULTS if only in entry[0]]:
        for rank in (0, 1):
            seconds, status, words = _suffer(fault, stage, rank)
            good = good and status != 0 and seconds is not None
            rows.append([f"{fault} rank {rank} at {stage}", "-" if seconds is None else f"{seconds:.1f}", words])
    report.table("faults in jobs of 2 ranks under torchrun", ("fault", "seconds to the end", "words"), rows)
    return good


def _suffer(fault: str, stage: str, rank: int) -> tuple[float | None, int | None, str]:
    """Seconds from the fault to the launcher's end (None: not within PATIENCE_S), its status, and the ranks' words."""
    command = torchrun(2, "-m", "tests.rank_worker", "suffer", fault, str(rank), stage, str(IDLE_S))
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
        try:
            status: int | None = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = None
        ended = time.time()
        said.seek(0)
        text = said.read()
    started = re.search(r"^fault ([\d.]+)$", text, re.MULTILINE)
    words = re.findall(r"^minieagle (rank .*)$", text, re.MULTILINE) or re.findall(r"Signal \d+ \(\w+\)", text)
    return (ended - float(started[1]) if started and status is not None else None), status, "; ".join(words)[:120]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = new_parser("ranks", __doc__ or "")
    add = parser.add_argument
    add("--sizes", type=int, nargs="*", choices=SIZES, default=list(SIZES), metavar="N", help="numbers of ranks")
    add("--num-prompts", type=int, default=8, metavar="N", help="up to 64 (default: %(default)s)")
    add("--max-tokens", type=int, default=16, metavar="N", help="new tokens a prompt (default: %(default)s)")
    add("--max-seqs", type=int, default=4, metavar="N", help="prompts in one batch (default: %(default)s)")
    add("--tree", default="dynamic:3,3,8", metavar="SHAPE", help="what speculation drafts (default: %(default)s)")
    add("--faults", action="store_true", help="measure faults instead")
    add("--only", default="", metavar="WORD", help="only faults of this name")
    add("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    add("--slices", type=int, metavar="N", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        work(options)
        return 0
    report = Report.begin("ranks", arguments)
    good = fault_times(options.only, report) if options.faults else sameness(options, report)
    report.notes(
        [TOKENS_PER_STEP]
        if options.faults is False
        else ["seconds from the fault to the end of torchrun, which polls and reports after its last rank has ended"]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

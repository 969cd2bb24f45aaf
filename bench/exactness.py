"""The exactness matrix: speculation must give plain decoding's tokens and logprobs bit for bit, whatever the setting.

    python bench/exactness.py --prompts FILE.jsonl --processes 2 --out DIR
    python bench/exactness.py --prompts FILE.jsonl --out DIR --cells 't0.7/*/page1/*'
    python bench/exactness.py --prompts FILE.jsonl --out DIR --sample 12 --num-prompts 20

A cell is temperature x (plain, chain or tree) x (alone, in a batch) x page size x prompt chunk. For each temperature
one plain run (alone, page 16, chunk 512) is the reference; every other cell must repeat its token ids and its float32
logprobs. Finished cells lie in DIR/cells.jsonl, so a run that was stopped goes on where it was; cells come in a
shuffled order, so that the time left can be told from those done. Exit status 1 on any difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench.prompts import encode, read_prompts
from bench.report import Report, new_parser
from bench.runs import PLAIN, Run, check_room, load, run_all, variant
from minieagle.engine import Engine
from minieagle.errors import ModelError
from minieagle.llm import embedded
from minieagle.models.config import read_json, target_config
from minieagle.sampling import SamplingParams
from minieagle.spec.tree import parse_shape
from minieagle.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEMPERATURES = (0.0, 0.7, 1.0)
SHAPES = ("chain:5", "dynamic:3,3,8", "dynamic:5,6,24")
BATCHES = (1, 8)
PAGE_SIZES = (1, 16, 64)
PREFILL_CHUNKS = (1, 7, 512)
SOURCES = ("minieagle", "models", "spec")


@dataclass(frozen=True)
class Cell:
    """One setting of the matrix. batch: requests at a time."""

    temperature: float
    shape: str
    batch: int
    page_size: int
    prefill_chunk: int

    @property
    def name(self) -> str:
        batch = "alone" if self.batch == 1 else f"batch{self.batch}"
        return f"t{self.temperature:g}/{self.shape}/{batch}/page{self.page_size}/chunk{self.prefill_chunk}"

    @staticmethod
    def reference(temperature: float) -> Cell:
        return Cell(temperature, PLAIN, 1, 16, 512)


def matrix(shapes: Sequence[str]) -> list[Cell]:
    """Every cell but the references, in an order that is shuffled the same way each time."""
    cells = [
        Cell(temperature, shape, batch, page_size, chunk)
        for temperature in TEMPERATURES
        for shape in (PLAIN, *shapes)
        for batch in BATCHES
        for page_size in PAGE_SIZES
        for chunk in PREFILL_CHUNKS
    ]
    references = {Cell.reference(temperature) for temperature in TEMPERATURES}
    cells = [cell for cell in cells if cell not in references]
    random.Random(0).shuffle(cells)
    return cells


@dataclass(frozen=True)
class Job:
    """What every cell of a run shares; sent to each worker once."""

    model: Path | None
    drafter: Path | None
    shapes: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    out: Path

    def params(self, temperature: float, logprobs: int = 0) -> list[SamplingParams]:
        """The seed is the prompt's number: the same noise in every cell."""
        wish = {"temperature": temperature, "max_tokens": self.max_tokens, "ignore_eos": True, "logprobs": logprobs}
        return [SamplingParams(seed=index, **wish) for index in range(len(self.prompts))]

    def reference_path(self, temperature: float) -> Path:
        return self.out / f"reference-{temperature:g}.safetensors"


@dataclass(frozen=True)
class Outcome:
    """What a cell came to. tokens: positions compared, each for its token id and for its logprob's bits; differing:
    positions where either differs; first: the first of them, in words."""

    name: str
    texts: int
    tokens: int
    differing: int
    seconds: float
    sources: str
    tokens_per_step: float
    first: str | None = None


class Worker:
    """A loaded model and the job. One for each process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.loaded = load(job.model, job.drafter, [parse_shape(shape) for shape in job.shapes], threads=1)
        self.sources = source_hash()

    def engine(self, cell: Cell) -> Engine:
        shape = None if cell.shape == PLAIN else parse_shape(cell.shape)
        sizes = {"max_seqs": cell.batch, "page_size": cell.page_size, "prefill_chunk": cell.prefill_chunk}
        return variant(self.loaded, shape, **sizes)

    def run(self, cell: Cell) -> list[Run]:
        return run_all(self.engine(cell), self.job.prompts, self.job.params(cell.temperature))

    def write_reference(self, temperature: float) -> None:
        path = self.job.reference_path(temperature)
        save_file(as_tensors(self.run(Cell.reference(temperature)), self.job.max_tokens), path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)  # whole or not at all, should the run be killed

    def compare(self, cell: Cell) -> Outcome:
        start = time.perf_counter()
        runs = self.run(cell)
        expected = load_file(self.job.reference_path(cell.temperature))
        found = as_tensors(runs, self.job.max_tokens)
        differing = differences(expected, found)
        first = self.describe(cell, expected, found, differing) if bool(differing.any()) else None
        steps, tokens = sum(run.stats.num_steps for run in runs), sum(run.stats.num_tokens for run in runs)
        return Outcome(
            name=cell.name,
            texts=len(runs),
            tokens=differing.numel(),
            differing=int(differing.sum()),
            seconds=round(time.perf_counter() - start, 1),
            sources=self.sources,
            tokens_per_step=round(tokens / max(1, steps), 3),
            first=first,
        )

    def describe(self, cell: Cell, expected: dict[str, Tensor], found: dict[str, Tensor], differing: Tensor) -> str:
        """The first differing position, what either side has there, and how close the best two tokens were."""
        prompt = int(differing.any(1).nonzero()[0])
        position = int(differing[prompt].nonzero()[0])
        sides = [
            f"{int(x['tokens'][prompt, position])} ({float(x['logprobs'][prompt, position]):.9g})"
            for x in (expected, found)
        ]
        gaps = [self.gap(side, prompt, position) for side in (Cell.reference(cell.temperature), cell)]
        return (
            f"prompt {prompt}, new token {position}: plain {sides[0]}, here {sides[1]}; top-2 logit gaps, run again: "
            f"plain {gaps[0]}, here {gaps[1]}"
        )

    def gap(self, cell: Cell, prompt: int, position: int) -> str:
        """Top-2 logit gap at a position in that setting, beside the neighbours that the prompt had."""
        first = prompt // cell.batch * cell.batch
        chosen = slice(first, first + cell.batch)
        engine = self.engine(cell)
        runs = gaps_of(engine, self.job.prompts[chosen], self.job.params(cell.temperature, logprobs=2)[chosen])
        gaps = runs[prompt - first]
        return f"{gaps[position]:.3g}" if position < len(gaps) else "none"


def gaps_of(engine: Engine, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> list[list[float]]:
    """Difference of the two best logprobs (equal to that of the logits) at each new token."""
    runs = run_all(engine, prompts, params)
    return [[entry.top[0][1] - entry.top[1][1] for entry in run.logprobs] for run in runs]


def as_tensors(runs: Sequence[Run], max_tokens: int) -> dict[str, Tensor]:
    """tokens [N, max_tokens] int32 and logprobs float32; -1 and NaN behind a text that ended early."""
    tokens = torch.full((len(runs), max_tokens), -1, dtype=torch.int32)
    logprobs = torch.full((len(runs), max_tokens), float("nan"))
    for index, run in enumerate(runs):
        tokens[index, : len(run.token_ids)] = torch.tensor(run.token_ids, dtype=torch.int32)
        logprobs[index, : len(run.logprobs)] = torch.tensor([entry.logprob for entry in run.logprobs])
    return {"tokens": tokens, "logprobs": logprobs}


def differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Tensor:
    """bool [N, max_tokens]: where a token id or the bits of a logprob differ."""
    bits = [side["logprobs"].view(torch.int32) for side in (expected, found)]
    return (expected["tokens"] != found["tokens"]) | (bits[0] != bits[1])


def source_hash() -> str:
    """Short hash of the engine's sources, so that a report tells whether all its cells ran the same code."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def directory_hash(directory: Path) -> str:
    """Hash of a model directory's weights and config. Raises ModelError when it holds none."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{directory} holds no *.safetensors file: pass a directory with weights and config.json")
    digest = hashlib.sha256(json.dumps(read_json(directory / "config.json"), sort_keys=True).encode())
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def settings_of(job: Job) -> dict[str, Any]:
    """What must be equal for finished cells to be kept."""
    drafter = job.drafter or embedded("drafter")
    return {
        "target": directory_hash(job.model or embedded("target")),
        "drafter": directory_hash(drafter),
        "prompts": hashlib.sha256(repr(job.prompts).encode()).hexdigest(),
        "num_prompts": len(job.prompts),
        "max_tokens": job.max_tokens,
        "torch": torch.__version__,
    }


def check_settings(job: Job) -> None:
    """Keep the settings with the results; refuse a directory that holds results of others."""
    path, mine = job.out / "settings.json", settings_of(job)
    if not path.exists():
        job.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(mine, indent=1))
        return
    theirs = json.loads(path.read_text())
    changed = [name for name, value in mine.items() if theirs.get(name) != value]
    if changed:
        raise ModelError(f"{job.out} holds cells of another run ({', '.join(changed)} differ): pass another --out")


def finished(job: Job) -> dict[str, Outcome]:
    """Cells done by an earlier run. A line cut short by a kill is no cell."""
    path = job.out / "cells.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines if line.endswith("\n")]
    return {outcome.name: outcome for outcome in outcomes}


_worker: list[Worker] = []
"""The one worker of a worker process."""


def start_worker(job: Job) -> None:
    _worker.append(Worker(job))


def write_reference(temperature: float) -> None:
    _worker[0].write_reference(temperature)


def compare(cell: Cell) -> Outcome:
    return _worker[0].compare(cell)


def in_processes(job: Job, temperatures: Sequence[float], cells: Sequence[Cell], count: int) -> Iterator[Outcome]:
    """Cells as they finish, from `count` processes of one thread each: small models decode best so."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by a worker when it imports torch
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=start_worker, initargs=(job,)) as pool:
        for waiting in [pool.submit(write_reference, temperature) for temperature in temperatures]:
            waiting.result()
        yield from (done.result() for done in as_completed([pool.submit(compare, cell) for cell in cells]))


def in_this_process(job: Job, temperatures: Sequence[float], cells: Sequence[Cell]) -> Iterator[Outcome]:
    worker = Worker(job)
    for temperature in temperatures:
        worker.write_reference(temperature)
    yield from map(worker.compare, cells)


def run(job: Job, cells: Sequence[Cell], processes: int, report: Report) -> list[Outcome]:
    """Run what is not done yet, saying each cell as it ends; returns the outcomes of all `cells`."""
    done = finished(job)
    due = [cell for cell in cells if cell.name not in done]
    needed = sorted({cell.temperature for cell in due})
    missing = [temperature for temperature in needed if not job.reference_path(temperature).exists()]
    report.say(f"{len(cells)} cells, {len(cells) - len(due)} done before; {len(missing)} reference runs to make")
    if not due:
        return [done[cell.name] for cell in cells]
    start = time.perf_counter()
    outcomes = in_this_process(job, missing, due) if processes == 1 else in_processes(job, missing, due, processes)
    with (job.out / "cells.jsonl").open("a") as file:
        for count, outcome in enumerate(outcomes, start=1):
            done[outcome.name] = outcome
            file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()
            left = timedelta(seconds=round((time.perf_counter() - start) / count * (len(due) - count)))
            report.say(
                f"{count}/{len(due)} {outcome.name}: {outcome.differing} differ, {outcome.seconds:.0f} s; {left} left"
            )
            if outcome.first is not None:
                report.say(f"  {outcome.first}")
    return [done[cell.name] for cell in cells]


def summary(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """One line for each temperature and shape, and one for all."""
    kinds = sorted({"/".join(outcome.name.split("/")[:2]) for outcome in outcomes})
    found = [(kind, [o for o in outcomes if o.name.startswith(kind + "/")]) for kind in kinds]
    return [_summary_row(kind, mine) for kind, mine in [*found, ("all", list(outcomes))]]


def _summary_row(kind: str, mine: Sequence[Outcome]) -> list[str]:
    taus = [outcome.tokens_per_step for outcome in mine]
    return [
        kind,
        str(len(mine)),
        str(sum(outcome.texts for outcome in mine)),
        str(2 * sum(outcome.tokens for outcome in mine)),
        str(sum(outcome.differing for outcome in mine)),
        "" if kind == "all" else f"{min(taus):.3f}..{max(taus):.3f}",
    ]


COLUMNS = ("temperature / decoding", "cells", "texts", "comparisons", "differences", "tokens per step")


def parser() -> argparse.ArgumentParser:
    options = new_parser("exactness", __doc__ or "")
    options.add_argument("--model", type=Path, metavar="DIR", help="a model directory (default: the embedded model)")
    options.add_argument("--drafter", type=Path, metavar="DIR", help="its drafter (the embedded model brings its own)")
    options.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL of prompts (default: a few of its own)")
    options.add_argument(
        "--num-prompts", type=int, metavar="N", help="prompts taken, spread over the file (default: all)"
    )
    options.add_argument("--max-tokens", type=int, default=256, metavar="N", help="new tokens a prompt (default: 256)")
    options.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), metavar="SHAPE", help=f"default: {' '.join(SHAPES)}"
    )
    options.add_argument(
        "--cells", nargs="+", default=["*"], metavar="PATTERN", help="cells by name, such as 't0/*/alone/*'"
    )
    options.add_argument("--sample", type=int, metavar="N", help="only N of those cells")
    options.add_argument("--processes", type=int, default=1, metavar="N", help="worker processes, one thread each")
    options.add_argument("--out", type=Path, required=True, metavar="DIR", help="where finished cells are kept")
    return options


def chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells asked for. Raises ModelError when there are none."""
    cells = [cell for cell in matrix(options.shapes) if any(fnmatchcase(cell.name, p) for p in options.cells)]
    if not cells:
        some = matrix(options.shapes)[0].name
        raise ModelError(f"--cells {' '.join(options.cells)} matches no cell: names look like {some}")
    if options.sample is not None and not 1 <= options.sample <= len(cells):
        raise ModelError(f"--sample {options.sample} must be in 1..{len(cells)}, the cells that match")
    return cells[: options.sample]


def new_job(options: argparse.Namespace) -> Job:
    """Encode the prompts, once for all cells."""
    directory = options.model or embedded("target")
    prompts = encode(Tokenizer(directory), read_prompts(options.prompts, options.num_prompts))
    limit = target_config(read_json(directory / "config.json")).max_position_embeddings
    check_room(limit, prompts, options.max_tokens)
    return Job(options.model, options.drafter, tuple(options.shapes), tuple(prompts), options.max_tokens, options.out)


def bench(options: argparse.Namespace, report: Report) -> bool:
    """Run, print; True when nothing differs."""
    cells = chosen(options)
    if options.processes < 1:
        raise ModelError(f"--processes {options.processes} must be at least 1")
    if options.model is not None and options.drafter is None:
        raise ModelError(f"--model {options.model} needs --drafter: speculation is what is tested")
    job = new_job(options)
    check_settings(job)
    outcomes = run(job, cells, options.processes, report)
    report.table(
        f"{len(job.prompts)} prompts x {job.max_tokens} new tokens, past the end token", COLUMNS, summary(outcomes)
    )
    versions = sorted({outcome.sources for outcome in outcomes})
    report.notes(
        [
            "comparisons: token ids and logprobs (float32, bit for bit), each at every new token, with one plain run "
            "per temperature (alone, page 16, chunk 512)",
            "differences: new tokens whose id or logprob differs",
            "tokens per step: emitted tokens / target forwards of the decode phase, the bonus token included; lowest "
            "and highest cell",
            f"engine sources: {', '.join(versions)}" + (" (these are different versions)" if len(versions) > 1 else ""),
        ]
    )
    return not any(outcome.differing for outcome in outcomes)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(arguments)
    try:
        return 0 if bench(options, Report.begin("exactness", arguments)) else 1
    except ValueError as error:  # the user's to mend
        print(f"bench/exactness.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

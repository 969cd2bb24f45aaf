"""A target streamed from disk layer by layer: the same bits as in memory, its peak memory, and its rate of reading.

    python bench/stream.py
    python bench/stream.py --model DIR --drafter DIR --num-tokens 400

Without --model it writes the 1.6 B synthetic model of bench/synthetic.py to a temporary directory (1.2 GB). Each pass
whose memory is measured runs in a process of its own. Rates are of files that the system no longer holds in memory, the
different ways to read them in turns; a busy machine or a shared disk spoils them, but not the bits and the memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench.report import Report, add_model_options, new_parser, peak_memory_bytes, percent
from bench.synthetic import write_drafter, write_target
from minieagle import diagnosis
from minieagle.errors import ModelError
from minieagle.llm import LLM
from minieagle.models.readahead import RUN_BYTES, ReadAhead
from minieagle.models.stream import StreamedTarget
from minieagle.models.target_weights import open_target
from minieagle.passages import Passage
from minieagle.source import add_source_options, drafter_directory, open_source
from minieagle.spec.observe import observe_texts

KINDS = ("resident", "streamed")
WRITER = "write"
ROUNDS = 5
LENGTHS = (16, 70, 300)
"""Tokens of the texts whose passes are timed."""
NOTES = (
    "states: a hash over captured states, greedy choices and log-probabilities; doctor: a hash over its whole table",
    "peak: the most resident memory of the process in the pass; over the imports: less what it had before the target "
    "was opened; with the trials: the same once the doctor has tried all readings of the drafter",
    "size: the bytes of the model's tensors as they lie on disk",
    "plain: the files read from end to end into one buffer; read-ahead: the reading thread, what it reads thrown away; "
    f"median of {ROUNDS}, in turns",
    "a pass also builds the layers and computes, so that its rate is the disk's or the processor's, whichever is lower",
    "2 x active parameters / size is 0.46 operations a byte and token here and 0.11 in Kimi-K2.5: 70 tokens here stand "
    "for 300 there",
)


def parser() -> argparse.ArgumentParser:
    options = new_parser("stream", __doc__ or "")
    add_model_options(options)
    options.add_argument("--num-tokens", type=int, default=300, metavar="N", help="tokens of the text (default: 300)")
    options.add_argument("--no-rates", action="store_true", help="leave out the reading of files by themselves")
    options.add_argument("--pass", dest="kind", choices=(WRITER, *KINDS), help=argparse.SUPPRESS)  # see `apart`
    options.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    return options


PROMPT = range(16, 32)


def write_text(options: argparse.Namespace) -> list[int]:
    """What the target in memory writes greedily: the doctor judges by nothing else."""
    llm = LLM(options.model, spec=False, max_seqs=1, max_context_tokens=len(PROMPT) + options.num_tokens)
    found = llm.generate(tuple(PROMPT), max_tokens=options.num_tokens, ignore_eos=True)
    return [*PROMPT, *found.token_ids]


def one_pass(options: argparse.Namespace) -> dict[str, Any]:
    """The doctor's own pass over a text, and its verdict."""
    asked = argparse.ArgumentParser()
    add_source_options(asked)
    arguments = ["--model", str(options.model), "--drafter", str(options.drafter)]
    source_options = asked.parse_args(arguments + ["--stream-layers"] * (options.kind == "streamed"))
    source_options.threads = options.threads
    before, started = peak_memory_bytes(), time.perf_counter()
    console = Console(stderr=True, quiet=True)
    source = open_source(source_options, console)
    drafter, wiring, _ = diagnosis.open_undecided(drafter_directory(source_options), source)
    text = Passage("written", tuple(json.loads(options.text.read_text())), len(PROMPT))
    recording = diagnosis.record(source, drafter, [text], console)
    figures = {"before": before, "peak": peak_memory_bytes(), "pass_s": time.perf_counter() - started}
    found, _ = diagnosis.judge(source, drafter, wiring, recording, drafter_directory(source_options))
    figures["judged"] = peak_memory_bytes()
    table = [[result.name, result.gain.mean, result.score.rates, result.nats.mean] for result in found.results]
    states = [part for text in recording.texts for part in vars(text).values()]
    return figures | {"states": _hash(*states), "doctor": hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]}


def _hash(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def apart(options: argparse.Namespace, kind: str, text: Path) -> Any:
    """`one_pass`, or `write_text`, in a process of its own."""
    arguments = ["--model", options.model, "--drafter", options.drafter, "--num-tokens", options.num_tokens]
    arguments += ["--pass", kind, "--text", text]
    if options.threads is not None:
        arguments += ["--threads", options.threads]
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ModelError(f"the {kind} pass failed (see above): {' '.join(command)}")
    return json.loads(done.stdout.splitlines()[-1])


def _drop(paths: Sequence[Path]) -> None:
    """Have the system forget the files' pages, the written ones after they are on disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_plainly(paths: Sequence[Path]) -> None:
    buffer = bytearray(RUN_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _read_ahead(model: Path) -> None:
    """What a pass reads, in its order, thrown away."""
    _, fill = open_target(model)
    stored = sorted(fill.checkpoint.stored.values(), key=lambda one: (one.path, one.start))
    files = [list(part) for _, part in groupby(stored, key=lambda one: one.path)]
    ahead = ReadAhead(files)
    for part in files:
        for one in part:
            ahead.take(one)
    ahead.close()


def _pass(model: Path, num_tokens: int) -> None:
    source = StreamedTarget(model)
    last = source.config.num_hidden_layers
    observe_texts(source, [range(PROMPT.start, PROMPT.start + num_tokens)], (1, last // 2, last - 2))


def _seconds(run: Callable[[], None], paths: Sequence[Path]) -> float:
    _drop(paths)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def rates(model: Path) -> list[tuple[str, float]]:
    """Bytes a second of each way to read the files."""
    paths = sorted(model.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in paths)
    ways: dict[str, Callable[[], None]] = {"plain": partial(_read_plainly, paths)}
    ways |= {"read-ahead": partial(_read_ahead, model)}
    ways |= {f"a pass over {length} tokens": partial(_pass, model, length) for length in LENGTHS}
    times = [{name: _seconds(way, paths) for name, way in ways.items()} for _ in range(ROUNDS)]
    return [(name, size / median(turn[name] for turn in times)) for name in ways]


def _mb(count: float) -> str:
    return f"{count / 1e6:.0f} MB"


def bench(options: argparse.Namespace, report: Report) -> None:
    size = sum(path.stat().st_size for path in options.model.glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "text.json"
        text.write_text(json.dumps(apart(options, WRITER, text)))
        passes: dict[str, dict[str, Any]] = {kind: apart(options, kind, text) for kind in KINDS}
    rows = []
    for kind, found in passes.items():
        over = found["peak"] - found["before"]
        memory = [_mb(found["peak"]), _mb(over), percent(over / size), _mb(found["judged"] - found["before"])]
        rows.append([kind, found["states"], found["doctor"], *memory, f"{found['pass_s']:.1f} s"])
    columns = ("pass", "states", "doctor", "peak", "over the imports", "of the size", "with the trials", "time")
    report.table(f"{_mb(size)} of weights, {options.num_tokens} tokens", columns, rows)
    first, second = passes.values()
    same = all(first[name] == second[name] for name in ("states", "doctor"))
    report.say(f"\nbits: {'the same' if same else 'DIFFERENT'}")
    if not options.no_rates:
        found = rates(options.model)
        rows = [[name, f"{_mb(rate)}/s", percent(rate / found[0][1])] for name, rate in found]
        report.table("Reading, cold", ("what", "rate", "of plain"), rows)
    report.notes(NOTES)


def run(options: argparse.Namespace, report: Report) -> None:
    if options.model is not None:
        if options.drafter is None:
            raise ModelError(f"--model {options.model} needs --drafter: the doctor's table is compared too")
        bench(options, report)
        return
    with tempfile.TemporaryDirectory() as directory:
        options.model, options.drafter = Path(directory) / "target", Path(directory) / "drafter"
        write_target(options.model, {}, 0)
        write_drafter(options.drafter, options.model, 0)
        bench(options, report)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(arguments)
    try:
        if options.kind is not None:
            print(json.dumps(write_text(options) if options.kind == WRITER else one_pass(options)))
        else:
            run(options, Report.begin("stream", arguments))
    except ValueError as error:  # the user's to mend
        print(f"bench/stream.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

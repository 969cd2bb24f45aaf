"""`minieagle doctor`: why a drafter is accepted less than it should be, measured, in a table, JSON and a picture.

The one idea: everything that can be known is gathered into one `Report`, also when the drafter is refused at load, and
table, JSON and HTML are views of it. The measuring is spec/doctor.py's, the checks without a model run are
spec/checks.py's. By default the target writes the text itself, greedily, from a few prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from minieagle.errors import ModelError
from minieagle.heatmap import page
from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import ConfigError, read_json
from minieagle.models.deepseek import Target
from minieagle.models.eagle3 import Drafter
from minieagle.passages import Passage, read_passages, written
from minieagle.source import add_source_options, drafter_directory, model_directory, open_source, reading
from minieagle.spec.boundary import BoundaryError, default_inputs
from minieagle.spec.checks import Finding, check_config, check_fusion, check_vocabulary, check_weights
from minieagle.spec.doctor import NUM_STEPS, Cause, Diagnosis, Recording, Result, check_lengths, diagnose
from minieagle.spec.fingerprint import tokenizer_fingerprint
from minieagle.spec.formats import UndecidedError
from minieagle.spec.golden import check_golden, golden_vectors
from minieagle.spec.hypotheses import Reading, Setting, boundaries_needed
from minieagle.spec.observe import Source, observe_texts
from minieagle.spec.wiring import FILE, Wiring, check_tokenizer, make_wiring, open_drafter, write_wiring
from minieagle.tokenizer import Tokenizer

NEW_TOKENS = 112
PASSAGE_TOKENS = 512
MAX_TOKENS = 2048
"""Of a text file: the first so many tokens, in passages; more would tell no more, only take longer."""

NOTES = (
    "agreement by depth: share of positions where the drafter's first choice is the target's greedy one, given the "
    "text's own tokens above; a choice outside the draft vocabulary is a miss",
    "tokens per step: 1 + the mean run of right drafts from every position, an estimate of a greedy chain of 5; gains "
    "are over the same positions, with their standard error",
    "log-probability: mean over the target's choices that are in the draft vocabulary, each at least -10",
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the doctor found. refusal: why the drafter can't be loaded; then there is no diagnosis. undecided: what the
    drafter's files leave open and was measured instead. causes: likeliest first, none when all is well."""

    model: str
    drafter: str
    refusal: str | None = None
    undecided: str | None = None
    num_positions: int = 0
    diagnosis: Diagnosis | None = None
    findings: tuple[Finding, ...] = ()
    causes: tuple[Cause, ...] = ()
    fixed: str | None = None
    wiring: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.refusal is not None:
            return "refused"
        return "fault" if self.causes else "healthy"

    def to_json(self) -> dict[str, Any]:
        """Everything, with one entry a reading."""
        found = self.diagnosis
        return {
            "verdict": self.verdict,
            "model": self.model,
            "drafter": self.drafter,
            "refusal": self.refusal,
            "undecided": self.undecided,
            "num_positions": self.num_positions,
            "causes": [_cause_json(cause) for cause in self.causes],
            "best": found.best.name if found else None,
            "alike": [result.name for result in found.alike] if found else [],
            "findings": [vars(finding) for finding in self.findings],
            "readings": [_result_json(result, found.base) for result in found.results] if found else [],
            "fixed": self.fixed,
            "wiring": self.wiring,
            "meaning": list(NOTES),
        }


def _cause_json(cause: Cause) -> dict[str, Any]:
    gain = cause.result.gain if cause.result else None
    return {
        "cause": cause.sentence,
        "remedy": cause.remedy,
        "reading": cause.result.name if cause.result else None,
        "gain": gain.mean if gain else None,
        "error": gain.error if gain else None,
    }


def _result_json(result: Result, base: Result) -> dict[str, Any]:
    return {
        "reading": result.name,
        "tokens_per_step": base.score.tokens_per_step + result.gain.mean,
        "gain": result.gain.mean,
        "error": result.gain.error,
        "agreement_by_depth": result.score.rates,
        "log_prob": base.score.log_prob + result.nats.mean,
        "positions": len(result.score.hits),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `minieagle doctor`."""
    add = parser.add_argument
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="measure on this text: plain, or .jsonl with token ids as `train` writes it (default: the target writes)",
    )
    add("--json", metavar="FILE", help="write the report as JSON; - is standard output, the table then goes to stderr")
    add("--html", type=Path, metavar="FILE", help="write the report as one HTML page with the grid as a picture")
    add("--fix", action="store_true", help=f"write the likeliest wiring into the drafter's {FILE}")
    add_source_options(parser)


def run(options: argparse.Namespace) -> int:
    """`minieagle doctor`; returns the exit status: 0 healthy, 1 a fault or a drafter that can't be loaded."""
    if options.stream_layers and not options.text:
        raise ModelError("--stream-layers needs --text FILE: a target that is read from disk can't write texts itself")
    errors = Console(stderr=True)
    report = examine(options, errors)
    _show(report, errors if options.json == "-" else Console())
    if options.json == "-":
        print(json.dumps(report.to_json(), indent=1))
    elif options.json:
        Path(options.json).write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if options.html:
        options.html.write_text(page(report.to_json()), encoding="utf-8")
    if options.fix and report.causes and not report.fixed:
        errors.print(f"--fix wrote nothing: no {FILE} mends this", markup=False)
    return 0 if report.verdict == "healthy" or report.fixed else 1


def examine(options: argparse.Namespace, console: Console) -> Report:
    """Load, measure and judge. Raises what a target or a text that can't be used raises; a drafter that can't be used
    is a result."""
    directory = drafter_directory(options)
    tokenizer = Tokenizer(model_directory(options))
    passages = _read(options.text, tokenizer) if options.text else None
    source = open_source(options, console)
    report = Report(model=str(model_directory(options)), drafter=str(directory))
    try:
        drafter, wiring, undecided = _open(options, directory, source)
        check_tokenizer(wiring, tokenizer_fingerprint(model_directory(options)))
    except (ConfigError, CheckpointError, BoundaryError) as error:
        return replace(report, refusal=str(error))
    passages = passages or written(cast(Target, source), tokenizer, NEW_TOKENS, ignore_eos=True)
    recording = record(source, drafter, passages, console)
    with console.status("scoring readings") as status:
        found, findings = judge(
            source,
            drafter,
            wiring,
            recording,
            directory,
            progress=lambda done: status.update(f"scoring readings: {done}"),
        )
    report = replace(
        report,
        undecided=undecided,
        num_positions=recording.num_roots,
        diagnosis=found,
        findings=tuple(findings),
        causes=ranked_causes(found, findings, undecided),
        wiring=wiring.config.to_json() | {"d2t": wiring.d2t, "sources": dict(wiring.sources)},
    )
    return replace(report, fixed=fix(report, directory, source, wiring, options)) if options.fix else report


def _open(options: argparse.Namespace, directory: Path, source: Source) -> tuple[Drafter, Wiring, str | None]:
    """The drafter as the user says. With --fix, a stated wiring that is stale or another target's is set aside."""
    said = options.capture_convention, options.boundaries
    try:
        return open_undecided(directory, source, *said)
    except ConfigError:
        stated, aside = directory / FILE, directory / f"{FILE}.old"
        if not options.fix or not stated.exists():
            raise
        stated.rename(aside)
        try:
            return open_undecided(directory, source, *said)
        except ValueError:
            aside.rename(stated)
            raise


def open_undecided(
    directory: Path, source: Source, convention: Any = None, boundaries: Sequence[int] | None = None
) -> tuple[Drafter, Wiring, str | None]:
    """The drafter in float32, its wiring, and why some of that is a guess, to be measured: None when nothing is.
    Raises ConfigError, CheckpointError or BoundaryError for what can't be loaded under any guess."""
    target = cast(Target, source)  # a drafter takes its config, place, embedding and head, which both kinds have
    plain: dict[str, Any] = {"dtype": torch.float32, "max_positions": PASSAGE_TOKENS + 2 * NUM_STEPS}
    try:
        return *open_drafter(directory, target, convention=convention, boundaries=boundaries, **plain), None
    except (BoundaryError, UndecidedError) as error:
        said = {"convention": convention, "boundaries": boundaries}
        for guess in _guesses(said, target.config.num_hidden_layers):
            try:
                return *open_drafter(directory, target, **guess, norm_output="head", **plain), str(error)
            except BoundaryError:
                continue
        raise


def _guesses(said: dict[str, Any], num_layers: int) -> Iterator[dict[str, Any]]:
    """What the user says of the boundaries, or else each meaning that they could have."""
    yield said
    if said == dict.fromkeys(said):
        yield from ({"convention": "in"}, {"convention": "out"}, {"boundaries": default_inputs(num_layers)})


def _read(path: Path, tokenizer: Tokenizer) -> list[Passage]:
    """The first MAX_TOKENS tokens of a text file. Raises TextError or RecordingError, before any model is loaded."""
    kept: list[Passage] = []
    for passage in read_passages(path, tokenizer, PASSAGE_TOKENS):
        if sum(len(other.tokens) for other in kept) < MAX_TOKENS:
            kept.append(replace(passage, tokens=passage.tokens[:PASSAGE_TOKENS]))
    check_lengths([len(passage.tokens) for passage in kept], [passage.prompt_len for passage in kept])
    return kept


def record(source: Source, drafter: Drafter, passages: Sequence[Passage], console: Console) -> Recording:
    """One pass of the target over the passages, all boundaries that the grid needs kept."""
    boundaries = boundaries_needed(drafter.config, source.config.num_hidden_layers)
    with reading("reading layers", console) as progress:
        texts = observe_texts(source, [passage.tokens for passage in passages], boundaries, progress=progress)
    recording = Recording(boundaries, texts, tuple(passage.prompt_len for passage in passages))
    recording.check()
    return recording


def judge(
    source: Source, drafter: Drafter, wiring: Wiring, recording: Recording, directory: Path, **options: Any
) -> tuple[Diagnosis, list[Finding]]:
    """The grid's verdict, and the findings of the checks that need no grid. options: those of `diagnose`."""
    setting = Setting(source.config, recording.boundaries, own_format=wiring.format == "minieagle")
    found = diagnose(drafter, source, recording, Reading(config=drafter.config, d2t=wiring.d2t), setting, **options)
    weights: dict[str, torch.Tensor] = dict(drafter.named_parameters())
    if drafter.config.own_embeddings:
        weights["embed_tokens"] = drafter.embed_tokens
    raw = read_json(directory / "config.json")
    findings = [
        *check_weights(weights),
        *check_vocabulary(drafter, recording),
        *check_config(drafter.config, raw, source.config.max_position_embeddings),
        *([] if found.is_healthy else check_fusion(drafter, recording)),
        *(Finding(False, note) for note in wiring.notes),
    ]
    if wiring.golden is not None and isinstance(source, Target):
        differences = check_golden(source, drafter, wiring.golden)
        remedy = "take the target that the drafter was wired for, or remove wiring.json to wire it anew"
        findings += [Finding(True, f"the wiring's proof fails: {text}", remedy) for text in differences]
    return found, findings


def ranked_causes(found: Diagnosis, findings: Sequence[Finding], undecided: str | None = None) -> tuple[Cause, ...]:
    """What was seen of the files and is decisive, then a measured mend, then what else was seen; where no reading
    mends, the last two the other way round."""
    faults = [finding for finding in findings if finding.is_fault]
    decisive = [Cause(finding.sentence, finding.remedy) for finding in faults if finding.is_decisive]
    seen = [Cause(finding.sentence, finding.remedy) for finding in faults if not finding.is_decisive]
    measured = list(found.causes)
    causes = decisive + (measured + seen if measured and measured[0].result else seen + measured)
    return (_undecided(found), *[c for c in causes if c.result is not found.best]) if undecided else tuple(causes)


def _undecided(found: Diagnosis) -> Cause:
    """That the drafter's files leave the boundaries open, and which are right by measurement."""
    listed = " ".join(map(str, found.best.reading.config.boundaries))
    remedy = next((cause.remedy for cause in found.causes if cause.result is found.best), f"pass --boundaries {listed}")
    sentence = f"the drafter's files don't say which states it reads; measured: boundaries {listed}"
    return Cause(sentence, remedy, found.best)


def fix(report: Report, directory: Path, source: Source, wiring: Wiring, options: argparse.Namespace) -> str | None:
    """Write the likeliest wiring beside the weights and prove that it loads; returns what was written, or None where
    the fault is none of wiring or where a stated wiring is right. One that is wrong is replaced."""
    assert report.diagnosis is not None, "a refused drafter is reported before"
    path = directory / FILE
    best = next((cause.result for cause in report.causes if cause.result), report.diagnosis.base)
    mends = all(change.expressible for change in best.changes) and all(cause.result for cause in report.causes)
    if not mends or (path.exists() and not report.causes):
        return None
    before = path.read_bytes() if path.exists() else None
    made = make_wiring(
        directory,
        best.reading.config,
        source.config,
        tokenizer=tokenizer_fingerprint(model_directory(options)),
        d2t=best.reading.d2t,
        position_base=wiring.position_base,
        source="measured by minieagle doctor",
    )
    write_wiring(directory, made)
    try:
        drafter, _ = open_drafter(directory, cast(Target, source), max_positions=PASSAGE_TOKENS)
        if isinstance(source, Target):
            write_wiring(directory, replace(made, golden=golden_vectors(source, drafter)))
    except ValueError as error:
        path.unlink() if before is None else path.write_bytes(before)
        raise ModelError(f"--fix: the wiring found ({best.name}) can't be stated: {error}") from error
    return f"{path} now states {best.name}"


def _show(report: Report, console: Console) -> None:
    if report.refusal is not None:
        console.print(f"refused: {report.refusal}", markup=False, soft_wrap=True)
        return
    assert report.diagnosis is not None, "what is not refused was measured"
    console.print(table(report.diagnosis))
    for line in lines(report):
        console.print(line, markup=False, soft_wrap=True)


def table(found: Diagnosis, limit: int = 16) -> Table:
    """The best readings, and the drafter as it is wired wherever it ranks."""
    shown = Table("reading", "tokens per step", "gain", "by depth", "log-probability")
    ranked = [r for i, r in enumerate(found.results) if i < limit or r is found.base]
    for result in ranked:
        gain = "" if result is found.base else f"{result.gain.mean:+.3f} +- {result.gain.error:.3f}"
        figures = (f"{found.base.score.tokens_per_step + result.gain.mean:.3f}", gain)
        depths = " ".join(f"{rate:.2f}" for rate in result.score.rates)
        style = "bold" if result is found.base else None
        log_prob = f"{found.base.score.log_prob + result.nats.mean:.2f}"
        shown.add_row(result.name, *figures, depths, log_prob, style=style)
    return shown


def lines(report: Report) -> list[str]:
    """The verdict in words."""
    found = report.diagnosis
    assert found is not None, "what is not refused was measured"
    said = [f"{len(found.results)} readings, {report.num_positions} positions"]
    said += [f"note: {finding.sentence}" for finding in report.findings if not finding.is_fault]
    if report.undecided:
        said.append(f"undecided: {report.undecided}")
    said += [_line(cause, index) for index, cause in enumerate(report.causes[:3])]
    if found.alike:
        said.append(f"can't be told from {found.best.name!r} by this text: {', '.join(r.name for r in found.alike)}")
    said += [f"fixed: {report.fixed}"] if report.fixed else []
    return said if report.causes else [*said, "healthy: no other reading surely agrees better with the target"]


def _line(cause: Cause, index: int) -> str:
    gain = cause.result.gain if cause.result else None
    measured = f" (measured gain: {gain.mean:+.2f} +- {gain.error:.2f} tokens per step)" if gain and gain.mean else ""
    return f"{'likeliest cause' if index == 0 else 'or'}: {cause.sentence}: {cause.remedy}{measured}"

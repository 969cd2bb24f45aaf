"""`minieagle doctor`: why a drafter is accepted less than it should be, measured.

The one idea: everything that can be known is gathered into one `Report` (report.py), also when the drafter is refused
at load. The measuring is spec/doctor.py's, the checks without a model run are spec/checks.py's. By default the target
writes the text itself, greedily, from a few prompts; a fault that a text which is not its own seems to show is measured
again on one that is. What the files leave open (`Question`) is guessed, and the guess is measured as any reading is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from minieagle.errors import ModelError
from minieagle.heatmap import page
from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import ConfigError, TargetConfig, read_json
from minieagle.models.deepseek import Target
from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.drafter_weights import check_fits, load_drafter
from minieagle.models.eagle3 import Drafter
from minieagle.passages import Passage, read_passages, written
from minieagle.report import Report, show
from minieagle.source import add_source_options, drafter_directory, model_directory, open_source, reading
from minieagle.spec.boundary import BoundaryError, default_inputs
from minieagle.spec.checks import (
    Finding,
    check_config,
    check_fusion,
    check_vocabulary,
    check_weights,
    looks_untrained,
)
from minieagle.spec.doctor import (
    NUM_STEPS,
    OWN_TEXT,
    Cause,
    Diagnosis,
    Recording,
    check_lengths,
    diagnose,
    is_mended,
)
from minieagle.spec.fingerprint import tokenizer_fingerprint
from minieagle.spec.formats import PLACES, NormOutput, UndecidedError
from minieagle.spec.golden import check_golden, golden_vectors
from minieagle.spec.hypotheses import Change, Reading, Setting, boundaries_needed
from minieagle.spec.observe import Source, observe_texts
from minieagle.spec.wiring import (
    FILE,
    Wiring,
    check_tokenizer,
    derive_wiring,
    make_wiring,
    open_drafter,
    read_wiring,
    write_wiring,
)
from minieagle.tokenizer import Tokenizer

NEW_TOKENS = 112
PASSAGE_TOKENS = 512
MAX_TOKENS = 2048
"""Of a text file: the first so many tokens, in passages; more would tell no more, only take longer."""

STAMP = "measured by minieagle doctor"


@dataclass(frozen=True)
class Question:
    """What the drafter's files leave open. why: the words of the refusal; fields: those of DrafterConfig that are
    measured instead, none where a wiring.json is set aside because it is damaged, stale or another target's."""

    why: str
    fields: tuple[str, ...] = ()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `minieagle doctor`."""
    add = parser.add_argument
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="measure on this text, which must be the target's own output: plain, or .jsonl with token ids as `train` "
        "writes it (default: the target writes some, which is surest)",
    )
    add("--json", metavar="FILE", help="write the report as JSON; - is standard output, the table then goes to stderr")
    add("--html", type=Path, metavar="FILE", help="write the report as one HTML page with the grid as a picture")
    add("--fix", action="store_true", help=f"write the likeliest wiring into the drafter's {FILE}")
    add_source_options(parser)


def run(options: argparse.Namespace) -> int:
    """`minieagle doctor`; returns the exit status: 0 healthy, 1 a fault, a drafter that can't be loaded or one that the
    text can't tell."""
    if options.stream_layers and not options.text:
        raise ModelError("--stream-layers needs --text FILE: a target that is read from disk can't write texts itself")
    errors = Console(stderr=True)
    report = examine(options, errors)
    show(report, errors if options.json == "-" else Console())
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
        drafter, wiring, question = open_undecided(directory, source, options.capture_convention, options.boundaries)
        check_tokenizer(wiring, tokenizer_fingerprint(model_directory(options)))
    except (ConfigError, CheckpointError, BoundaryError) as error:
        return replace(report, refusal=_own_words(error))
    report = replace(report, undecided=question.why if question else None)
    passages, own = passages or _written(source, tokenizer), passages is None
    measure = partial(_measured, report, source, drafter, wiring, question, directory, console)
    report = measure(passages)
    if not own and report.causes and report.own_share < OWN_TEXT and isinstance(source, Target):
        report = replace(measure(_written(source, tokenizer)), notes=(_confirming(report),))
    return replace(report, fixed=fix(report, directory, source, wiring, question, options)) if options.fix else report


def _written(source: Source, tokenizer: Tokenizer) -> list[Passage]:
    return written(cast(Target, source), tokenizer, NEW_TOKENS, ignore_eos=True)


def _confirming(report: Report) -> str:
    return (
        f"only {100 * report.own_share:.0f} % of the text is the target's choice, on which a healthy drafter agrees "
        "badly too: measured again, as shown, on what the target writes itself"
    )


def _measured(
    report: Report,
    source: Source,
    drafter: Drafter,
    wiring: Wiring,
    question: Question | None,
    directory: Path,
    console: Console,
    passages: Sequence[Passage],
) -> Report:
    """The report with what was found on these passages."""
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
    return replace(
        report,
        num_positions=recording.num_roots,
        diagnosis=found,
        findings=tuple(findings),
        causes=ranked_causes(found, findings, question),
        wiring=wiring.config.to_json() | {"d2t": wiring.d2t, "sources": dict(wiring.sources)},
    )


def _own_words(error: ValueError) -> str:
    """A refusal without the advice to run this command, which others give."""
    return re.sub(r",? or let `minieagle doctor[^`]*` [a-z ]*it( anew)?", "", str(error))


def open_undecided(
    directory: Path, source: Source, convention: Any = None, boundaries: Sequence[int] | None = None
) -> tuple[Drafter, Wiring, Question | None]:
    """The drafter in float32, its wiring, and what of that is a guess, to be measured: None when nothing is.

    A stated wiring that is damaged, stale or another target's is set aside, so that what is wrong with the tensors
    themselves is said first. Raises ConfigError, CheckpointError or BoundaryError for what can't be loaded under any
    guess."""
    target = cast(Target, source)  # a drafter takes its config, place, embedding and head, which both kinds have
    said = {"convention": convention, "boundaries": boundaries}
    try:
        return *_load(directory, target, read_wiring(directory, target.config, **said)), None
    except (ConfigError, BoundaryError) as error:
        refusal: ValueError = error
    is_stated = (directory / FILE).exists()  # a BoundaryError then says that the user contradicts it
    if not isinstance(refusal, ConfigError if is_stated else (BoundaryError, UndecidedError)):
        raise refusal
    for guess in _guesses(said, target.config.num_hidden_layers):
        try:
            wiring, fields = _guessed(directory, target.config, guess, said)
            return *_load(directory, target, wiring), Question(_own_words(refusal), fields)
        except BoundaryError:
            continue
    raise refusal


def _load(directory: Path, target: Target, wiring: Wiring) -> tuple[Drafter, Wiring]:
    plain: dict[str, Any] = {"dtype": torch.float32, "max_positions": PASSAGE_TOKENS + 2 * NUM_STEPS}
    return load_drafter(directory, target, config=wiring.config, d2t=wiring.d2t, **plain), wiring


def _guessed(
    directory: Path, target: TargetConfig, guess: dict[str, Any], said: dict[str, Any]
) -> tuple[Wiring, tuple[str, ...]]:
    """The wiring under a guess, whatever wiring.json says, and the fields that are guessed."""
    fields = ("boundaries",) if guess != said else ()
    try:
        wiring = derive_wiring(directory, target, **guess)
    except UndecidedError:
        meaning = _plain_meaning(read_json(directory / "config.json"))
        wiring = derive_wiring(directory, target, norm_output=meaning, **guess)
        fields = (*fields, "norm_output", "norm_before_head")
    check_fits(wiring.config, target)
    return wiring, fields


def _plain_meaning(raw: dict[str, Any]) -> NormOutput:
    """The meaning of norm_output that makes a plain EAGLE-3 drafter, which most are: its own state is fed back as it
    is, and the head reads the normed one."""
    parts = [raw, *(raw.get(place) or {} for place in PLACES[1:])]
    return "feedback" if any(part.get("norm_output") is False for part in parts) else "head"


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
    own, stated = wiring.format == "minieagle", (directory / FILE).exists()
    setting = Setting(source.config, recording.boundaries, own_format=own, stated=stated)
    found = diagnose(drafter, source, recording, Reading(config=drafter.config, d2t=wiring.d2t), setting, **options)
    weights: dict[str, torch.Tensor] = dict(drafter.named_parameters())
    if drafter.config.own_embeddings:
        weights["embed_tokens"] = drafter.embed_tokens
    raw = read_json(directory / "config.json")
    findings = [
        *check_weights(weights),
        *check_vocabulary(drafter, recording),
        *check_config(drafter.config, raw, source.config.max_position_embeddings),
        *([] if found.is_healthy or looks_untrained(weights) else check_fusion(drafter, recording)),
        *(Finding(False, note) for note in wiring.notes),
    ]
    if wiring.golden is not None and isinstance(source, Target):
        differences = check_golden(source, drafter, wiring.golden)
        remedy = "take the target that the drafter was wired for, or remove wiring.json to wire it anew"
        findings += [Finding(True, f"the wiring's proof fails: {text}", remedy) for text in differences]
    return found, findings


def ranked_causes(found: Diagnosis, findings: Sequence[Finding], question: Question | None = None) -> tuple[Cause, ...]:
    """What was seen of the files and is decisive, then a measured mend, then what else was seen; where no reading
    mends, the last two the other way round. What the files leave open comes first, where it could be measured."""
    faults = [finding for finding in findings if finding.is_fault]
    decisive = [Cause(finding.sentence, finding.remedy) for finding in faults if finding.is_decisive]
    seen = [Cause(finding.sentence, finding.remedy) for finding in faults if not finding.is_decisive]
    measured = list(found.causes)
    if not found.is_judged:
        return tuple(decisive + measured)  # nor do the checks that look at how it agrees say anything
    causes = decisive + (measured + seen if measured and measured[0].result else seen + measured)
    if question is None or not is_mended(found.best):
        return tuple(causes)
    return (_answer(found, question), *[c for c in causes if c.result is not found.best])


def _answer(found: Diagnosis, question: Question) -> Cause:
    """What the measurement says to a question, with all that the best reading changes."""
    config, changes = found.best.reading.config, {change.aspect: change for change in found.best.changes}
    said = [_field(name, getattr(config, name)) for name in question.fields]
    others = [change.cause for aspect, change in changes.items() if aspect not in question.fields]
    what = "don't say how it is wired" if question.fields else f"hold a {FILE} that can't be used"
    sentence = "; and ".join([f"measured: {', '.join(said)}"] * bool(said) + others)
    remedy = "; and ".join(_remedies(list(changes.values()), config, question))
    return Cause(f"the drafter's files {what}{'; ' + sentence if sentence else ''}", remedy, found.best)


def _field(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"{name} {' '.join(map(str, cast('tuple[int, ...]', value)))}"
    return f"{name} {str(value).lower()}"


def _remedies(changes: Sequence[Change], config: DrafterConfig, question: Question) -> list[str]:
    """Only the boundaries can be said in other words than those of a wiring.json."""
    if question.fields == ("boundaries",):
        listed = " ".join(map(str, config.boundaries))
        return [change.remedy for change in changes] or [f"pass --boundaries {listed}, or pass --fix"]
    weights = [change.remedy for change in changes if not change.expressible]
    return [*weights, f"pass --fix, which states all of it in its {FILE}"]


def fix(
    report: Report,
    directory: Path,
    source: Source,
    wiring: Wiring,
    question: Question | None,
    options: argparse.Namespace,
) -> str | None:
    """Write the likeliest wiring beside the weights and prove that it loads; returns what was written, or None where
    the fault is none of wiring or where a stated wiring is right. One that is wrong is replaced."""
    assert report.diagnosis is not None, "a refused drafter is reported before"
    path, best = directory / FILE, report.diagnosis.best
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
    )
    made = replace(made, sources=_sources(report.diagnosis, wiring, question))
    write_wiring(directory, made)
    try:
        drafter, _ = open_drafter(directory, cast(Target, source), max_positions=PASSAGE_TOKENS)
        if isinstance(source, Target):
            write_wiring(directory, replace(made, golden=golden_vectors(source, drafter)))
    except ValueError as error:
        path.unlink() if before is None else path.write_bytes(before)
        raise ModelError(f"--fix: the wiring found ({best.name}) can't be stated: {error}") from error
    asked = [_field(name, getattr(made.config, name)) for name in (question.fields if question else ())]
    return f"{path} now states {', '.join([best.name, *asked])}"


def _sources(found: Diagnosis, wiring: Wiring, question: Question | None) -> dict[str, str]:
    """Where each field of the best reading comes from: measured is only what was changed or asked. A field whose other
    reading can't be told from this one is only the likelier one."""
    best = found.best.reading.config
    changed = {name for name in best.__dataclass_fields__ if getattr(best, name) != getattr(wiring.config, name)}
    rivals = {
        name
        for result in found.alike
        for name in best.__dataclass_fields__
        if getattr(best, name) != getattr(result.reading.config, name)
    }
    asked = changed | set(question.fields if question else ())
    stamps = {name: f"likelier, {STAMP}, but not surely" if name in rivals else STAMP for name in asked}
    return {name: wiring.sources.get(name, "default") for name in best.__dataclass_fields__} | stamps

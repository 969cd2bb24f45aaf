"""The doctor's report: everything that was found of a drafter, and its views as a table, words and JSON.

The one idea: one `Report` holds all, also of a drafter that is refused at load, so that no view knows more than another
(the picture, heatmap.py, is drawn from the JSON).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from minieagle.spec.checks import Finding
from minieagle.spec.doctor import Cause, Diagnosis, Result

NOTES = (
    "agreement by depth: share of positions where the drafter's first choice is the target's greedy one, given the "
    "text's own tokens above; a choice outside the draft vocabulary is a miss",
    "tokens per step: 1 + the mean run of right drafts from every position, an estimate of a greedy chain of 5; gains "
    "are over the same positions, with their standard error",
    "log-probability: mean over the target's choices that are in the draft vocabulary, each at least -10",
    "the text to measure on is the target's own output: on other text a healthy drafter agrees badly too",
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the doctor found. refusal: why the drafter can't be loaded; then there is no diagnosis. undecided: what the
    drafter's files leave open and was measured instead. causes: likeliest first, none when all is well. notes: what
    else is to be said of the measuring."""

    model: str
    drafter: str
    refusal: str | None = None
    undecided: str | None = None
    notes: tuple[str, ...] = ()
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
        if self.diagnosis and not self.diagnosis.is_judged and self.causes == self.diagnosis.causes:
            return "unjudged"
        return "fault" if self.causes else "healthy"

    @property
    def own_share(self) -> float:
        """How much of the text is the target's choice; 1 where there is none."""
        return self.diagnosis.own_share if self.diagnosis else 1.0

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
            "own_share": found.own_share if found else None,
            "suspect": found.suspect.name if found and found.suspect else None,
            "notes": list(self.notes),
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
        "ruled_out": result.ruled_out,
    }


def show(report: Report, console: Console) -> None:
    if report.refusal is not None:
        console.print(f"refused: {report.refusal}", markup=False, soft_wrap=True)
        return
    assert report.diagnosis is not None, "what is not refused was measured"
    console.print(table(report.diagnosis))
    for line in (*[f"- {note}" for note in NOTES], *lines(report)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def table(found: Diagnosis, limit: int = 12) -> Table:
    """The best readings, and the drafter as it is wired wherever it ranks; 80 columns hold it."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown.add_column("reading", overflow="fold", ratio=1)
    for title in ("tokens\nper step", "gain", "agreement by\ndepth, %", "log-prob-\nability"):
        shown.add_column(title, justify="right", no_wrap=True)
    ranked = [r for i, r in enumerate(found.results) if i < limit or r in (found.base, found.best)]
    for result in ranked:
        gain = "" if result is found.base else f"{result.gain.mean:+.2f} +- {result.gain.error:.2f}"
        figures = (f"{found.base.score.tokens_per_step + result.gain.mean:.2f}", gain)
        depths = " ".join(f"{100 * rate:2.0f}" for rate in result.score.rates)
        log_prob = f"{found.base.score.log_prob + result.nats.mean:.2f}"
        style = "bold" if result in (found.base, found.best) else "dim" if result.ruled_out else None
        shown.add_row(_label(result, found), *figures, depths, log_prob, style=style)
    return shown


def _label(result: Result, found: Diagnosis) -> str:
    """A reading's name, short where it goes on from the likeliest one, as most of a search's last round do."""
    best = found.best.changes
    if result is found.best and best:
        return f"{result.name} (likeliest)"
    name = result.name
    if best and result.changes[: len(best)] == best:
        name = replace(result, changes=result.changes[len(best) :]).name
        name = f"likeliest + {name}"
    return f"{name} (ruled out)" if result.ruled_out else name


def lines(report: Report) -> list[str]:
    """The verdict in words."""
    found = report.diagnosis
    assert found is not None, "what is not refused was measured"
    said = [f"{len(found.results)} readings, {report.num_positions} positions"]
    said += [f"note: {note}" for note in (*report.notes, *_remarks(found))]
    said += [f"note: {finding.sentence}" for finding in report.findings if not finding.is_fault]
    if report.undecided:
        said.append(f"undecided: {report.undecided}")
    first = "unjudged" if report.verdict == "unjudged" else "likeliest cause"
    said += [_line(cause, "or" if index else first) for index, cause in enumerate(report.causes[:3])]
    if found.alike and found.is_judged:
        said.append(f"can't be told from {found.best.name!r} by this text: {', '.join(r.name for r in found.alike)}")
    said += [f"fixed: {report.fixed}"] if report.fixed else []
    return said if report.causes else [*said, "healthy: no other reading surely agrees better with the target"]


def _remarks(found: Diagnosis) -> list[str]:
    """What the ranking of the table doesn't say by itself."""
    ahead = [r for r in found.results if r.ruled_out and r.gain.mean > 0]
    said = [f"{r.name!r} is ruled out as a cause: {r.ruled_out}, as any drafter gains by that" for r in ahead[:1]]
    if found.suspect:
        nats, gain = found.suspect.nats, found.suspect.gain
        said.append(
            f"{found.suspect.name!r} makes the target's choices more probable ({nats.mean:+.3f} +- {nats.error:.3f} "
            f"nats), but gains too few tokens per step ({gain.mean:+.2f} +- {gain.error:.2f}) to be a cause"
        )
    return said


def _line(cause: Cause, label: str) -> str:
    gain = cause.result.gain if cause.result else None
    measured = f" (measured gain: {gain.mean:+.2f} +- {gain.error:.2f} tokens per step)" if gain and gain.mean else ""
    return f"{label}: {cause.sentence}: {cause.remedy}{measured}"

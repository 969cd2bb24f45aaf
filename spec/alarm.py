"""Alarms in use: the shape of the acceptance curve, counted while serving, names the fault that lowers it.

A wiring fault never shows in the text, only in the counts, and each kind bends them its own way: depth 1 low means that
the drafter reads the wrong things; depth 2 low beside depth 1, that its own output is fed back wrongly; low in long
contexts only, positions it was not trained for; low after chunked prompts only, a wrong token at a chunk's last row. So
steps are counted by condition and context length, and one pure function, `diagnose`, judges the counts by confidence
bounds. A step costs a few host integers; judging, a few more every MIN_TRIALS steps. Shapes and their causes are of the
public bug reports behind the doctor's hypotheses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from minieagle.spec.tree import Tree

Condition = Literal["whole prompt", "chunked prompt", "prefix hit", "high temperature"]
Kind = Literal["wiring", "feedback", "long context", "long context or chunks", "chunked prompt", "prefix hit"]
Ratio = tuple[int, int]
"""(successes, trials)."""

MIN_TRIALS = 64
"""Fewer say nothing: even with none accepted of 64, the upper bound below is 0.16."""
Z = 2.5
"""One-sided error of 0.6 % for a curve that lies on its bound; both sides of a comparison are bounded so. Comparisons
are many in an engine's life and steps of one text are not independent: the distance of the three bounds below from
healthy curves covers that."""
DEPTH_1_LOW = 0.3
"""Published: a wrong layer list 0.04 (vLLM #50170). The embedded drafter: 0.20 with states a position off, 0.23 with
another model's embeddings, 0.24 with the fusion's order reversed; healthy 0.68 greedy, 0.51 at temperature 1."""
FALL_BY_DEPTH = 0.6
"""Depth 2 beside depth 1. Healthy is 1.0 or more (the embedded drafter), and 0.77 for a layer trained on one step only
(published survival 0.79, 0.48); with feedback post-norm instead of pre-norm 0.37 in a chain, 0.44 in a tree."""
FALL_BY_PART = 0.5
"""Some of the steps beside the others. Published: 2.3 tokens a step in short contexts, 1.1 beyond the trained length
(speculators #684), so 0.1 of the depth 1 acceptance at most; contexts of healthy runs differ by 0.63 where a text goes
on past its own end, and kinds of text by as much. So only gross faults sound here (rows missing or garbage): one wrong
row a chunk costs the embedded drafter 0.73 to 0.69 in chunks of 5, to 0.52 in chunks of 1, and `minieagle trace diff`
of two chunk sizes finds it for certain."""
MAX_TEMPERATURE = 1.0
"""Beyond it the target's own choice is close to noise, which nobody can draft."""

REMEDIES: dict[Kind, str] = {
    "wiring": "depth 1 is low: the boundaries may be a layer off, the embeddings or the head another model's, d2t or "
    "the fusion layer misread, or the drafter untrained for such text; run `minieagle doctor`",
    "feedback": "depth 2 falls off beside depth 1: the drafter's own state may be fed back pre-norm where it was "
    "trained post-norm (norm_output), or the reverse; run `minieagle doctor`",
    "long context": "only long contexts are low: they are beyond the drafter's trained length, or its RoPE scaling "
    "(YaRN) is missing; run `minieagle doctor` with a long text",
    "long context or chunks": "long contexts are low, and came from prompts in chunks: either the drafter's trained "
    "length or RoPE scaling, or the token at a chunk's last row; raise prefill_chunk to tell",
    "chunked prompt": "only prompts in chunks are low: the drafter's row at the end of a chunk may carry the wrong "
    "next token (chunk tail token); raise prefill_chunk to compare",
    "prefix hit": "only prefix hits are low: the drafter's rows behind a shared prefix may carry another text's next "
    "token, or be missing",
}
"""What to say, in the doctor's words."""


@dataclass(frozen=True)
class Group:
    """Steps of one condition and context bucket. context: the bucket's least length, a power of two; tried[k]: steps
    whose tree had a node at depth k + 1 below an accepted one; reached[k]: those that accepted it."""

    condition: Condition
    context: int
    tried: tuple[int, ...]
    reached: tuple[int, ...]


@dataclass(frozen=True)
class Alarm:
    """A fault that the counts point to, and what to say of it: the rate, what it is held against, the remedy."""

    kind: Kind
    message: str


@dataclass(frozen=True)
class Snapshot:
    """All counts of an engine's life, and the alarms it raised."""

    groups: tuple[Group, ...]
    alarms: tuple[Alarm, ...]

    def rates(self, condition: Condition | None = None, context: int | None = None) -> tuple[float, ...]:
        """Conditional acceptance at depth 1, 2, ...: of the steps that could, how many did; nan without any."""
        chosen = [g for g in self.groups if condition in (None, g.condition) and context in (None, g.context)]
        depth = max((len(group.tried) for group in chosen), default=0)
        return tuple(_rate(_ratio(chosen, level)) for level in range(depth))


class Acceptance:
    """Mutable: counts steps, and says once for each kind what their shape points to."""

    def __init__(self, num_steps: int) -> None:
        """num_steps: the deepest level of any tree."""
        self._depth, self._steps = num_steps, 0
        self._counts: dict[tuple[Condition, int], tuple[list[int], list[int]]] = {}
        self._alarms: dict[Kind, Alarm] = {}

    def count(self, tree: Tree, path: Sequence[int], *, context: int, condition: Condition) -> Alarm | None:
        """Count a step that accepted `path`, nodes from the root down. context: tokens before the root. Returns an
        alarm when one is due."""
        key = condition, context.bit_length()
        if key not in self._counts:
            self._counts[key] = [0] * self._depth, [0] * self._depth
        tried, reached = self._counts[key]
        accepted = len(path) - 1
        for level in range(accepted):
            tried[level] += 1
            reached[level] += 1
        if path[-1] in tree.parents:  # it had children, none of which was the target's choice
            tried[accepted] += 1
        self._steps += 1
        is_due = self._steps % MIN_TRIALS == 0
        return self._new_alarm() if is_due else None

    def _new_alarm(self) -> Alarm | None:
        alarm = diagnose(self._groups())
        if alarm is None or alarm.kind in self._alarms:
            return None
        self._alarms[alarm.kind] = alarm
        return alarm

    def _groups(self) -> tuple[Group, ...]:
        return tuple(
            Group(condition, 1 << (bits - 1) if bits else 0, tuple(tried), tuple(reached))
            for (condition, bits), (tried, reached) in self._counts.items()
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(self._groups(), tuple(self._alarms.values()))


def diagnose(groups: Iterable[Group]) -> Alarm | None:
    """The one fault that the counts point to, None when they are sound or too few. What is low in part of the steps
    only is looked for first, since it lowers the whole as well."""
    judged = [group for group in groups if group.condition != "high temperature"]
    return _after(judged, "prefix hit") or _after(judged, "chunked prompt") or _long(judged) or _everywhere(judged)


def _after(groups: Sequence[Group], condition: Literal["prefix hit", "chunked prompt"]) -> Alarm | None:
    """Low after `condition` beside whole prompts of the same context length."""
    for group in groups:
        if group.condition == condition:
            beside = [g for g in groups if g.condition == "whole prompt" and g.context == group.context]
            low, high = _ratio([group]), _ratio(beside)
            if _falls(low, high, FALL_BY_PART):
                return _alarm(condition, 1, low, f"{_rate(high):.2f} after whole prompts of the same length")
    return None


def _long(groups: Sequence[Group]) -> Alarm | None:
    """Low above some context length beside below it: within one condition, else over all of them."""
    conditions = dict.fromkeys(group.condition for group in groups)
    for condition in conditions:
        alarm = _split([g for g in groups if g.condition == condition], "long context")
        if alarm is not None:
            return alarm
    return _split(groups, "long context or chunks")


def _split(groups: Sequence[Group], kind: Kind) -> Alarm | None:
    """The context length that parts high from low most clearly, where one does."""
    found: list[tuple[float, int, Ratio, Ratio]] = []
    for start in {group.context for group in groups}:
        low = _ratio([g for g in groups if g.context >= start])
        high = _ratio([g for g in groups if g.context < start])
        if _falls(low, high, FALL_BY_PART):
            found.append((_rate(high) - _rate(low), start, low, high))
    if not found:
        return None
    _, start, low, high = max(found)
    return _alarm(kind, 1, low, f"{_rate(high):.2f} in contexts below {start} tokens")


def _everywhere(groups: Sequence[Group]) -> Alarm | None:
    first, second = _ratio(groups, 0), _ratio(groups, 1)
    if first[1] >= MIN_TRIALS and wilson(first)[1] < DEPTH_1_LOW:
        return _alarm("wiring", 1, first, f"at least {DEPTH_1_LOW}")
    if _falls(second, first, FALL_BY_DEPTH):
        return _alarm("feedback", 2, second, f"{_rate(first):.2f} at depth 1")
    return None


def _alarm(kind: Kind, depth: int, low: Ratio, beside: str) -> Alarm:
    share = f"drafts at depth {depth} are accepted in {_rate(low):.2f} of {low[1]} steps"
    return Alarm(kind, f"{share}, against {beside}: {REMEDIES[kind]}")


def _ratio(groups: Iterable[Group], level: int = 0) -> Ratio:
    """Accepted and tried at depth level + 1."""
    counted = [(g.reached[level], g.tried[level]) for g in groups if level < len(g.tried)]
    return sum(reached for reached, _ in counted), sum(tried for _, tried in counted)


def _rate(ratio: Ratio) -> float:
    return ratio[0] / ratio[1] if ratio[1] else float("nan")


def _falls(low: Ratio, high: Ratio, share: float) -> bool:
    """Whether low is certainly below this share of high."""
    enough = min(low[1], high[1]) >= MIN_TRIALS
    return enough and wilson(low)[1] < share * wilson(high)[0]


def wilson(ratio: Ratio, z: float = Z) -> tuple[float, float]:
    """Confidence bounds of a share: Wilson's score interval (1927), sound at few trials and near 0 and 1."""
    successes, trials = ratio
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / trials + spread / (4 * trials)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)

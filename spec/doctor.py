"""The doctor: what is wrong with a drafter's wiring, found by measuring.

The one idea: a wrong wiring never fails, it only lowers acceptance, so every hypothesis of hypotheses.py is scored on
the same recording. The target runs once over a text and its states at all needed boundaries are kept; the drafter,
which is small, is run again for each reading, by the unrolled steps of training: from every position a chain fed with
the text's own tokens, compared with the target's greedy choice. Readings are compared by the same positions, and a
gain counts only where it exceeds its own error many times over, so that noise never accuses a healthy drafter.

R roots (positions that a chain starts from), K draft steps, S tokens of a text.
"""

# torch annotates some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minieagle.models.eagle3 import Drafter
from minieagle.models.target_weights import give_back_memory
from minieagle.spec.alarm import DEPTH_1_LOW
from minieagle.spec.hypotheses import Change, Reading, Setting, Unreadable, grid, reread
from minieagle.spec.observe import Observed, Source
from minieagle.spec.train import rollout

NUM_STEPS = 5
BLOCK_ROOTS = 16
"""Neighbouring roots share most of their context, so errors are taken over blocks of so many."""
MIN_ROOTS = 200
"""A dozen blocks: fewer make the error of a gain a guess."""
Z = 4.0
"""Errors that a gain must exceed: some 100 hypotheses at a one-sided 3e-5 accuse one healthy drafter in 300."""
Z_BETWEEN = 3.0
"""The same between two readings of a drafter that is at fault anyway; below Z_ALIKE they can't be told apart."""
Z_ALIKE = 2.0
MIN_GAIN = 0.02
MIN_NATS = 0.01
"""Tokens per step, and nats per token, below which nobody would mind."""
LEAST_LOG_PROB = -10.0
"""A choice given less is as wrong as can be; a few much lower ones would drown the mean in their error."""
AHEAD_AGREEMENT = 0.5
"""A reading that sees ahead counts only with this agreement at depth 1: a drafter trained so has it, as it was given
the answer, and one that was not gains a few per cent on text that it knows badly."""
MIN_SHARE = 0.1
"""Of what the drafter lacks to a chain that is always right: a cause must give back so much of it, since a reading that
gains less is not what is wrong. The true causes in bench/faults.py give back 0.3 to 0.8, weak ones 0.04, which is a
note."""
OWN_TEXT = 0.8
"""Share of a text's tokens that must be the target's choice before low agreement condemns a drafter: on other text the
embedded one, which is healthy, agrees at 1 position in 5. Its own greedy text has 1."""
LOW = 0.5
"""Agreement at depth 1 over the target's own text below which a drafter isn't called healthy. The embedded one has 0.7,
published ones 0.7 to 0.8 (arXiv 2503.01840)."""
FALL = 0.6
"""The same of agreement at the last depth beside the first: 1 for the embedded one; 0.56 with gate and up exchanged,
which depth 1 hardly shows."""
MIN_OWN = 0.3
"""Share of a text's tokens that must be the target's choice: 0.5 to 0.7 on ordinary text, 1 on its own greedy text. On
text that the target itself can't guess, a healthy drafter agrees as badly as a wrong one."""
MAX_CHANGES = 3
SCREEN_ROOTS = 100
KEPT = 3, 12
"""Most of a grid is hopeless, which so many roots tell: only those not surely worse than the best there, at least and
at most so many, are scored on the whole recording. It saves three quarters of the time."""


class RecordingError(ValueError):
    """A text too short to judge by."""


@dataclass(frozen=True)
class Recording:
    """What one pass of the target left. boundaries: those that each text's `captured` holds, in order; first[i]: the
    position of text i from which chains are scored (behind the prompt, where the text is the target's own)."""

    boundaries: tuple[int, ...]
    texts: Sequence[Observed]
    first: tuple[int, ...]

    def check(self) -> None:
        """Raises RecordingError when there is too little to judge by, or it is not text that the target would write."""
        check_lengths([len(text.tokens) for text in self.texts], self.first)
        if self.own_share < MIN_OWN:
            raise RecordingError(
                f"{100 * self.own_share:.0f} % of the text's tokens are the target's choice, {100 * MIN_OWN:.0f} % are "
                "needed to judge a drafter by: pass text that this target wrote, or none, and it writes some; if it is "
                "its own, the target itself is not loaded right"
            )

    @property
    def own_share(self) -> float:
        """How much of the text is the target's greedy choice."""
        pairs = [(text.best[:-1], text.tokens[1:], self.roots(index)) for index, text in enumerate(self.texts)]
        return float(torch.cat([(best[roots] == token[roots]).float() for best, token, roots in pairs]).mean())

    def roots(self, index: int) -> slice:
        """The scored slots of a text: those with a whole chain before its end, one position left over for shifts."""
        return _roots(len(self.texts[index].tokens), self.first[index])

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(len(text.tokens) for text in self.texts)

    @property
    def num_roots(self) -> int:
        return sum(_length(self.roots(index)) for index in range(len(self.texts)))

    def screen(self) -> Recording:
        """The first texts, enough of them for SCREEN_ROOTS."""
        count, num_roots = 0, 0
        while num_roots < SCREEN_ROOTS:
            num_roots, count = num_roots + _length(self.roots(count)), count + 1
        return Recording(self.boundaries, self.texts[:count], self.first[:count])

    def blocks(self) -> Tensor:
        """[R] int64: which block each root belongs to."""
        found: list[Tensor] = []
        for index in range(len(self.texts)):
            start = int(found[-1].max()) + 1 if found else 0
            found.append(start + torch.arange(_length(self.roots(index))) // BLOCK_ROOTS)
            found = [block for block in found if len(block)]
        return torch.cat(found)


def _roots(length: int, first: int) -> slice:
    start = max(1, first)
    return slice(start, max(start, length - NUM_STEPS - 1))


def _length(roots: slice) -> int:
    return roots.stop - roots.start


def check_lengths(lengths: Sequence[int], first: Sequence[int]) -> None:
    """Raises RecordingError when texts of these lengths, drafted from these positions on, are too little to judge by:
    to be known before the target is run over them."""
    num_roots = sum(_length(_roots(length, start)) for length, start in zip(lengths, first, strict=True))
    if num_roots < MIN_ROOTS:
        raise RecordingError(
            f"the text gives {num_roots} positions to draft from, {MIN_ROOTS} are needed to tell a fault from noise: "
            "pass a longer one"
        )


@dataclass(frozen=True)
class Gain:
    """The mean difference of two readings over the same roots and its standard error. least: what nobody would mind."""

    mean: float
    error: float

    least: float = MIN_GAIN

    def exceeds(self, errors: float) -> bool:
        """Whether it is more than so many errors, and than nothing."""
        return self.mean >= self.least and self.mean > errors * self.error

    @property
    def is_sure(self) -> bool:
        return self.exceeds(Z)

    @property
    def is_noise(self) -> bool:
        """Whether the two can't be told apart."""
        return abs(self.mean) < self.least or abs(self.mean) < Z_ALIKE * self.error


@dataclass(frozen=True, eq=False)
class Score:
    """hits [R, K] bool: the drafter's first choice is the target's; one outside the draft vocabulary is a miss.
    log_probs [R, K] float32: what the drafter gives the target's choice, at least LEAST_LOG_PROB, NaN outside the
    draft vocabulary. blocks [R]. Scores of a recording and of its first texts are compared over the roots that both
    have."""

    hits: Tensor
    log_probs: Tensor
    blocks: Tensor

    @property
    def rates(self) -> list[float]:
        """Top-1 agreement at each depth, given the text's own tokens above (conditional)."""
        return self.hits.float().mean(0).tolist()

    @property
    def lengths(self) -> Tensor:
        """[R] float32: how many drafts are right before the first wrong one."""
        return self.hits.int().cumprod(1).sum(1).float()

    @property
    def tokens_per_step(self) -> float:
        """1 + the mean length: an estimate, over all roots alike and with the target's choices by depth."""
        return 1 + float(self.lengths.mean())

    @property
    def log_prob(self) -> float:
        """Mean over positions and depths where the target's choice is in the draft vocabulary; -inf without any."""
        mean = float(self.log_probs.nanmean())
        return mean if math.isfinite(mean) else -math.inf

    def gain_over(self, other: Score) -> Gain:
        """In tokens per step."""
        shared = min(len(self.hits), len(other.hits))
        return _gain(self.lengths[:shared] - other.lengths[:shared], self.blocks[:shared], MIN_GAIN)

    def log_prob_over(self, other: Score) -> Gain:
        """In nats per token, where both have the target's choice in their vocabulary."""
        shared = min(len(self.hits), len(other.hits))
        differences = self.log_probs[:shared] - other.log_probs[:shared]
        return _gain(differences.nanmean(1).nan_to_num(0.0), self.blocks[:shared], MIN_NATS)


def _gain(differences: Tensor, blocks: Tensor, least: float) -> Gain:
    """Mean and its error over blocks (the ratio estimator of cluster sampling)."""
    num_blocks = int(blocks.max()) + 1
    sums = torch.zeros(num_blocks).index_add_(0, blocks, differences.cpu())
    counts = torch.bincount(blocks, minlength=num_blocks).float()
    mean = float(sums.sum() / counts.sum())
    spread = float((sums - mean * counts).square().sum().sqrt())
    return Gain(mean, spread / float(counts.sum()) * math.sqrt(num_blocks / max(1, num_blocks - 1)), least)


@dataclass(frozen=True, eq=False)
class Result:
    """One reading's score; changes: how it differs from the drafter as it is wired, none for that one itself; gain and
    nats: over that one, in tokens per step and in log-probability; is_whole: scored on the whole recording, not on its
    first texts."""

    changes: tuple[Change, ...]
    reading: Reading
    score: Score
    gain: Gain = Gain(0.0, 0.0)
    nats: Gain = Gain(0.0, 0.0)
    is_whole: bool = True

    @property
    def name(self) -> str:
        names = {change.aspect: change.name for change in self.changes}  # the last of an aspect has it whole
        return " + ".join(f"{aspect}: {name}" for aspect, name in names.items()) or "as wired"

    @property
    def ruled_out(self) -> str | None:
        """Why a reading is no cause however much it gains: it is given what serving doesn't have yet, which helps any
        drafter, and doesn't know the answer all the same."""
        if not self.reading.sees_ahead or self.score.rates[0] >= AHEAD_AGREEMENT:
            return None
        return f"sees ahead, yet agrees below {100 * AHEAD_AGREEMENT:.0f} % at depth 1"


@dataclass(frozen=True)
class Cause:
    """A likely cause and its remedy, a sentence each; result: the reading that mends it, None where none does."""

    sentence: str
    remedy: str
    result: Result | None = None


@dataclass(frozen=True)
class Diagnosis:
    """base: the drafter as it is wired. best: the likeliest reading, base itself when none is surely better. results:
    all readings, highest score first. causes: likeliest first, none when healthy. alike: readings that can't be told
    from the best one by this text. own_share: how much of the text is the target's choice. suspect: the reading that
    makes the target's choices surely more probable, but not surely more tokens per step: it accuses nobody."""

    base: Result
    best: Result
    results: tuple[Result, ...]
    causes: tuple[Cause, ...]
    alike: tuple[Result, ...]
    own_share: float
    suspect: Result | None = None

    @property
    def is_healthy(self) -> bool:
        return not self.causes

    @property
    def is_judged(self) -> bool:
        """Whether something can be said: a drafter that agrees badly under all readings may be a healthy one where the
        text is not the target's own."""
        return self.best is not self.base or is_mended(self.best) or self.own_share >= OWN_TEXT


@torch.inference_mode()
def score(drafter: Drafter, reading: Reading, recording: Recording) -> Score:
    """The agreement of a drafter, already read as `reading` says, with the target's choices."""
    draft_id = torch.full((reading.config.vocab_size,), -1, device=drafter.target_ids.device)
    draft_id[drafter.target_ids] = torch.arange(drafter.target_ids.shape[0], device=draft_id.device)
    hits: list[Tensor] = []
    log_probs: list[Tensor] = []
    for index, text in enumerate(recording.texts):
        parts = list(_score_text(drafter, reading, recording, index, draft_id[text.best]))
        hits.append(torch.stack([hit for hit, _ in parts], dim=1).cpu())
        log_probs.append(torch.stack([log_prob for _, log_prob in parts], dim=1).cpu())
    return Score(torch.cat(hits), torch.cat(log_probs), recording.blocks())


def _score_text(
    drafter: Drafter, reading: Reading, recording: Recording, index: int, best: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per depth: hits [r] and log-probabilities [r] at the roots of a text. best [S]: the draft id of the target's
    choice behind each token, -1 outside."""
    text, roots = recording.texts[index], recording.roots(index)
    states = drafter.fuse(captured_states(text, recording.boundaries, reading))
    tokens = text.tokens.roll(-reading.token_shift)
    for step, logits in enumerate(rollout(drafter, tokens[None], states, NUM_STEPS)):
        wanted = best[roots.start + 1 + step : roots.stop + 1 + step]
        mine = logits[0, roots]
        log_prob = mine.log_softmax(-1).gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        yield mine.argmax(-1) == wanted, log_prob.clamp(min=LEAST_LOG_PROB).where(wanted >= 0, math.nan)


def captured_states(text: Observed, boundaries: Sequence[int], reading: Reading) -> Tensor:
    """[S, taps, hidden]: what the drafter is fed under a reading."""
    where = {b: index for index, b in enumerate(boundaries)}
    taps = [_rank_share(text.captured, where, b, reading.num_ranks) for b in reading.config.boundaries]
    return torch.stack(taps, dim=1).roll(-reading.state_shift, dims=0) * reading.scale


def _rank_share(captured: Tensor, where: dict[int, int], boundary: int, num_ranks: int) -> Tensor:
    full = captured[:, where[boundary]].float()
    if num_ranks == 1 or boundary == 0:
        return full
    before = captured[:, where[boundary - 1]].float()
    return before + (full - before) / num_ranks


@torch.inference_mode()
def diagnose(
    drafter: Drafter,
    target: Source,
    recording: Recording,
    original: Reading,
    setting: Setting,
    *,
    wired: Reading | None = None,
    max_changes: int = MAX_CHANGES,
    progress: Callable[[int], None] = lambda done: None,
) -> Diagnosis:
    """Score the grid around a drafter's wiring and judge it.

    original: how `drafter` was loaded; wired: the reading under judgement where that is another one. max_changes: how
    many faults at once are looked for. progress: called with the number of readings scored so far. Raises
    RecordingError for too short a text.
    """
    recording.check()
    search = _Search(drafter, target, recording, original, setting, wired or original, progress)
    lead = search.base
    for _ in range(max_changes):
        search.try_around(lead)
        if search.likeliest(_hints) is lead:
            break
        lead = search.likeliest(_hints)
    best = search.likeliest(_mends)
    ranked = sorted(search.results, key=_rank, reverse=True)
    share = recording.own_share
    causes = _causes(search.base, best, ranked, share)
    suspect = None if _mends(lead, search.base) or lead is search.base else lead
    return Diagnosis(search.base, best, tuple(ranked), causes, _alike(best, ranked), share, suspect)


class _Search:
    """Mutable: the readings scored so far, each once."""

    def __init__(
        self,
        drafter: Drafter,
        target: Source,
        recording: Recording,
        original: Reading,
        setting: Setting,
        wired: Reading,
        progress: Callable[[int], None],
    ) -> None:
        self.drafter, self.target, self.original, self.setting = drafter, target, original, setting
        self.recording, self.progress = recording, progress
        self.seen = {wired}
        self.base = Result((), wired, score(reread(drafter, target, original, wired), wired, recording))
        self.results = [self.base]

    def try_around(self, result: Result) -> None:
        """Score the grid around a reading: all of it on the first texts, what is not hopeless there on all."""
        screen = self.recording.screen()
        found: list[Result] = []
        for change in grid(result.reading, self.setting):
            if change.reading not in self.seen and _recorded(change.reading, self.setting):
                self.seen.add(change.reading)
                found += self._score((*result.changes, change), screen)
                self.progress(len(self.results) + len(found))
        found.sort(key=_rank, reverse=True)
        best = max([*found[:1], result], key=_rank).score
        for index, screened in enumerate(found):
            hopeless = index >= KEPT[0] and (index >= KEPT[1] or not _may_be_as_good(screened.score, best))
            self.results += [screened] if hopeless else self._score(screened.changes, self.recording)

    def _score(self, changes: tuple[Change, ...], recording: Recording) -> list[Result]:
        """One result; none for a reading that these weights don't have."""
        reading = changes[-1].reading
        try:
            variant = reread(self.drafter, self.target, self.original, reading)
        except Unreadable:
            return []
        scored = score(variant, reading, recording)
        give_back_memory()  # a hundred readings' copies and logits leave holes of several times their size
        is_whole = len(recording.texts) == len(self.recording.texts)
        gains = scored.gain_over(self.base.score), scored.log_prob_over(self.base.score)
        return [Result(changes, reading, scored, *gains, is_whole)]

    def likeliest(self, is_better: Callable[[Result, Result], bool]) -> Result:
        """Of the readings that are better than the drafter as wired and than which none is clearly better, by tokens
        per step and then by log-probability: the one with the fewest changes, of equals the most probable. The base
        when none is better."""
        ranked = sorted(self.results, key=_rank, reverse=True)
        better = [r for r in ranked if r.is_whole and is_better(r, self.base)]
        if not better:
            return self.base
        near = [r for r in better if not better[0].score.gain_over(r.score).exceeds(Z_BETWEEN)]
        first = max(near, key=lambda r: r.score.log_prob)
        equal = [r for r in near if not first.score.log_prob_over(r.score).exceeds(Z_BETWEEN)]
        return min(equal, key=lambda r: (len(r.changes), -r.score.log_prob))


def _rank(result: Result) -> tuple[float, float]:
    return result.gain.mean, result.nats.mean


def _may_be_as_good(one: Score, best: Score) -> bool:
    gain = one.gain_over(best)
    return gain.mean > -MIN_GAIN - Z * gain.error


def _recorded(reading: Reading, setting: Setting) -> bool:
    """Whether the states that a reading takes were kept; a rank's share takes the boundary before, too."""
    taken = set(reading.config.boundaries)
    if reading.num_ranks > 1:
        taken |= {b - 1 for b in taken if b > 0}
    return taken <= set(setting.recorded)


def _mends(result: Result, base: Result) -> bool:
    """Whether a reading is what is wrong: surely more tokens per step, and so many that it matters. Log-probability
    alone never accuses."""
    gain = result.score.gain_over(base.score)
    lacking = 1 + NUM_STEPS - base.score.tokens_per_step
    return result.ruled_out is None and gain.is_sure and gain.mean >= MIN_SHARE * lacking


def _hints(result: Result, base: Result) -> bool:
    """Whether a reading is worth searching around: at no clear loss of tokens per step, log-probability tells, which is
    what training raised and which sees weaker faults."""
    if result.ruled_out is not None:
        return False
    gain = result.score.gain_over(base.score)
    return gain.is_sure or (gain.mean >= -Z_ALIKE * gain.error and result.score.log_prob_over(base.score).is_sure)


def _alike(best: Result, ranked: Sequence[Result]) -> tuple[Result, ...]:
    """Other readings, as near to the wiring, that neither measure tells from the best one."""
    most = max(1, len(best.changes))
    rivals = [r for r in ranked if r.is_whole and r is not best and 0 < len(r.changes) <= most]
    return tuple(r for r in rivals if _is_noise(best.score, r.score))


def _is_noise(one: Score, other: Score) -> bool:
    return one.gain_over(other).is_noise and one.log_prob_over(other).is_noise


def _causes(base: Result, best: Result, ranked: Sequence[Result], own_share: float) -> tuple[Cause, ...]:
    """The best reading's changes as one cause, then others that are not surely worse; before them, that no reading
    explains how badly a drafter agrees."""
    others = [r for r in ranked if r is not best and 0 < len(r.changes) <= len(best.changes)]
    rivals = [r for r in others if not best.score.gain_over(r.score).exceeds(Z_BETWEEN)]
    rivals = [r for r in rivals if not best.score.log_prob_over(r.score).exceeds(Z_BETWEEN)]
    found = [_cause(r) for r in (best, *rivals) if r is not base and _mends(r, base)]
    is_low = best is base and own_share >= OWN_TEXT and _is_low(best.score)
    return tuple(found) if is_mended(best) and not is_low else (_unexplained(best, own_share), *found)


def _is_low(score: Score) -> bool:
    return score.rates[0] < LOW or score.rates[-1] < FALL * score.rates[0]


def is_mended(result: Result) -> bool:
    """Whether a reading agrees as drafters that work do, at depth 1."""
    return result.score.rates[0] >= DEPTH_1_LOW


def _cause(result: Result) -> Cause:
    sentence = "; and ".join(change.cause for change in result.changes)
    remedies = {change.aspect: change.remedy for change in result.changes}
    return Cause(sentence, "; and ".join(remedies.values()), result)


def _unexplained(best: Result, own_share: float) -> Cause:
    rates = [f"{100 * best.score.rates[depth]:.0f} %" for depth in (0, -1)]
    low = f"acceptance is low, {rates[0]} at depth 1 and {rates[1]} at depth {NUM_STEPS}, and no reading explains it"
    if own_share < OWN_TEXT:
        return Cause(
            f"this text can't tell: {low}, but only {100 * own_share:.0f} % of the text is the target's choice, and on "
            "text that the target would not write a healthy drafter agrees as badly",
            "pass text that the target wrote, or leave --text out, and it writes some",
        )
    return Cause(
        f"{low}: the weights may be untrained or trained for fewer steps, damaged, exchanged among themselves, or of "
        "another target (another base, a fine-tune, a rotated quantisation)",
        "fetch or export the drafter again, take the one that was trained for these very weights, or train one",
    )

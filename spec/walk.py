"""The offline score of a drafter: tokens per step over a text that the target wrote greedily, without decoding again.

Online, rounds do not start at uniformly drawn positions but where the last round ended. So the score walks: a chain is
drafted at every position, from the same committed caches and by the same functions as in use; then t goes to
t + accepted + 1 until the text ends. On the target's own greedy text the result is the engine's tokens per step for a
greedy chain, exactly. On any other text there are no such rounds, and what is scored is the agreement by depth.

What it needs of the target is what one pass over the text says (observe.py), so the target may be streamed from disk.
"""

# torch annotates some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minieagle.models.eagle3 import Drafter, DrafterOutput
from minieagle.models.rows import Rows, Span
from minieagle.spec.draft import Root, grow
from minieagle.spec.observe import Observed, Source, observe_texts
from minieagle.spec.tree import TreeShape

ROOTS_AT_ONCE = 64


@dataclass(frozen=True)
class Agreement:
    """How often a draft is the target's greedy choice, on any text.

    counts[k]: of the positions that a chain is drafted from, those whose first k drafted tokens are the text's own, so
    that the target's view of the text tells its next choice. hits[k]: those where drafted token k is that choice.
    """

    hits: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """By depth, conditional on the depths before."""
        return tuple(hit / count if count else 0.0 for hit, count in zip(self.hits, self.counts, strict=True))


@dataclass(frozen=True)
class Walk:
    """num_steps rounds that emit num_tokens; reached[k]: rounds whose accepted path reaches depth k + 1."""

    num_steps: int
    num_tokens: int
    reached: tuple[int, ...]

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 0.0


def _chains(
    drafter: Drafter, tokens: Sequence[int], captured: Tensor, first: int, num_steps: int
) -> list[tuple[int, ...]]:
    """The chain drafted at each root position first .. len - 1: num_steps token ids. The text's rows are committed some
    at a time, as in use, and every root among them gets spare slots of its own behind the shared committed ones."""
    num_rows = len(tokens) - 1
    ids = torch.tensor(tokens, device=captured.device)
    shared = torch.arange(1, 1 + num_rows, device=ids.device)
    spare = torch.arange(1 + num_rows, 1 + num_rows + ROOTS_AT_ONCE * num_steps, device=ids.device).split(num_steps)
    cache = drafter.new_cache(1 + num_rows + ROOTS_AT_ONCE * num_steps)
    drafted: list[tuple[int, ...]] = []
    for start in range(0, num_rows, ROOTS_AT_ONCE):
        stop = min(start + ROOTS_AT_ONCE, num_rows)
        rows = Rows.of(ids[start + 1 : stop + 1], [Span(shared, start, stop - start)])
        out = drafter(rows, drafter.fuse(captured[start:stop]), cache)
        positions = range(max(first, start + 1), stop + 1)  # the root at position p reads row p - 1
        roots = [
            Root(tokens[position], torch.cat([shared[:position], own]), position, 0.0, 0)
            for position, own in zip(positions, spare, strict=False)
        ]
        if roots:
            mine = slice(stop - start - len(roots), None)
            at = DrafterOutput(out.logits[mine], out.states[mine])
            drafted += [tree.tokens[1:] for tree in grow(drafter, cache, roots, at, TreeShape.chain(num_steps))]
    return drafted


@dataclass(frozen=True)
class TextScore:
    """The score of one text. walk: None unless the target itself wrote it greedily."""

    walk: Walk | None
    agreement: Agreement


def score(drafter: Drafter, seen: Observed, prompt_len: int, num_steps: int) -> TextScore:
    """Score a drafter on a text of which tokens[prompt_len:] was written after the prompt. seen: the target's view of
    it, with the drafter's boundaries captured."""
    tokens: list[int] = seen.tokens.tolist()
    best: list[int] = seen.best.tolist()
    drafts = _chains(drafter, tokens, seen.captured, prompt_len, num_steps) if len(tokens) > prompt_len else []
    greedy = is_greedy(seen, prompt_len)
    walked = _walk(drafts, tokens, prompt_len, num_steps) if greedy else None
    return TextScore(walked, _agreement(drafts, tokens, best, prompt_len, num_steps))


def is_greedy(seen: Observed, prompt_len: int) -> bool:
    """Whether tokens[prompt_len:] is the target's own greedy continuation, as far as it goes."""
    return torch.equal(seen.tokens[prompt_len:], seen.best[prompt_len - 1 : -1])


def walk(target: Source, drafter: Drafter, tokens: Sequence[int], prompt_len: int, num_steps: int) -> Walk:
    """Score a text of which tokens[prompt_len:] is the target's greedy continuation. The first of those comes from the
    prompt's own pass; decoding starts behind it."""
    if prompt_len >= len(tokens) - 1:
        return Walk(0, 0, (0,) * num_steps)
    seen = observe_texts(target, [tokens], drafter.config.boundaries)[0]
    return _walk(_chains(drafter, tokens, seen.captured, prompt_len, num_steps), tokens, prompt_len, num_steps)


def _walk(drafts: Sequence[tuple[int, ...]], tokens: Sequence[int], first: int, num_steps: int) -> Walk:
    last = len(tokens) - 1
    reached = [0] * num_steps
    position, steps = first, 0
    while position < last:
        left = last - position
        accepted = _matches(drafts[position - first], tokens[position + 1 :])
        emitted = min(accepted + 1, left)
        for depth in range(emitted - 1):
            reached[depth] += 1
        position, steps = position + emitted, steps + 1
    return Walk(steps, max(0, last - first), tuple(reached))


def _agreement(
    drafts: Sequence[tuple[int, ...]], tokens: Sequence[int], best: Sequence[int], first: int, num_steps: int
) -> Agreement:
    hits, counts = [0] * num_steps, [0] * num_steps
    for position, draft in enumerate(drafts, start=first):
        known = _matches(draft, tokens[position + 1 :])
        for depth, token in enumerate(draft[: known + 1]):
            if position + depth < len(best):
                counts[depth] += 1
                hits[depth] += token == best[position + depth]
    return Agreement(tuple(hits), tuple(counts))


def _matches(draft: Sequence[int], text: Sequence[int]) -> int:
    count = 0
    while count < min(len(draft), len(text)) and draft[count] == text[count]:
        count += 1
    return count


def total(walks: Sequence[Walk]) -> Walk:
    """All rounds of several texts together."""
    depth = max(len(walk.reached) for walk in walks)
    reached = [sum(w.reached[k] for w in walks if k < len(w.reached)) for k in range(depth)]
    return Walk(sum(w.num_steps for w in walks), sum(w.num_tokens for w in walks), tuple(reached))

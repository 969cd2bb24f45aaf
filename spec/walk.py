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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minieagle.models.cache import PagedCache
from minieagle.models.eagle3 import Drafter, DrafterOutput
from minieagle.models.rows import Rows, Span
from minieagle.spec.draft import Root, grow
from minieagle.spec.observe import Observed, Source, observe_texts
from minieagle.spec.tree import TreeShape

ROOTS_AT_ONCE = 64
MAX_STEPS = 32
"""The longest chain; deeper drafts are never accepted."""

Draft = Callable[[PagedCache, Sequence[Root], DrafterOutput], list[tuple[int, ...]]]
"""Drafts a chain for each root, whose last rows gave this output."""


@dataclass(frozen=True)
class Agreement:
    """How often a draft is the target's greedy choice, on any text: at hits[k] of counts[k] positions. The drafter was
    fed the text's tokens up to depth k, as in training, and its own states. Not conditional on lesser depths."""

    hits: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(hit / max(1, count) for hit, count in zip(self.hits, self.counts, strict=True))


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
    drafter: Drafter, tokens: Sequence[int], captured: Tensor, first: int, draft: Draft
) -> list[tuple[int, ...]]:
    """What is drafted at each root position first .. len - 1. The text's rows are committed some at a time, as in use,
    and every root among them gets spare slots of its own behind the shared committed ones."""
    num_rows = len(tokens) - 1
    ids = torch.tensor(tokens, device=captured.device)
    shared = torch.arange(1, 1 + num_rows, device=ids.device)
    spare = torch.arange(1 + num_rows, 1 + num_rows + ROOTS_AT_ONCE * MAX_STEPS, device=ids.device).split(MAX_STEPS)
    cache = drafter.new_cache(1 + num_rows + ROOTS_AT_ONCE * MAX_STEPS)
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
            drafted += draft(cache, roots, DrafterOutput(out.logits[mine], out.states[mine]))
    return drafted


def _free_chains(
    drafter: Drafter, tokens: Sequence[int], captured: Tensor, first: int, num_steps: int
) -> list[tuple[int, ...]]:
    """num_steps tokens drafted at each root, each fed the one drafted before it: what is drafted in use."""

    def draft(cache: PagedCache, roots: Sequence[Root], output: DrafterOutput) -> list[tuple[int, ...]]:
        return [tree.tokens[1:] for tree in grow(drafter, cache, roots, output, TreeShape.chain(num_steps))]

    return _chains(drafter, tokens, captured, first, draft)


def _forced_chains(
    drafter: Drafter, tokens: Sequence[int], captured: Tensor, first: int, num_steps: int
) -> list[tuple[int, ...]]:
    """num_steps tokens drafted at each root, each fed the text's token before it: what is drafted in training."""

    def draft(cache: PagedCache, roots: Sequence[Root], output: DrafterOutput) -> list[tuple[int, ...]]:
        levels = [drafter.target_ids[output.logits.argmax(-1)]]
        for level in range(1, num_steps):
            behind = [min(root.committed + level, len(tokens) - 1) for root in roots]
            fed = torch.tensor([tokens[position] for position in behind], device=captured.device)
            spans = [Span(root.slots, root.committed + level - 1, 1) for root in roots]
            output = drafter(Rows.of(fed, spans), output.states, cache)
            levels.append(drafter.target_ids[output.logits.argmax(-1)])
        return [tuple(chain) for chain in torch.stack(levels, dim=1).tolist()]

    return _chains(drafter, tokens, captured, first, draft)


def score(drafter: Drafter, seen: Observed, prompt_len: int, num_steps: int) -> Walk | Agreement:
    """Score a drafter on a text whose tokens[prompt_len:] follow a prompt: the walk when they are the target's own
    greedy writing, the agreement when not. seen: the target's view of it, with the drafter's boundaries captured."""
    tokens: list[int] = seen.tokens.tolist()
    text = drafter, tokens, seen.captured, prompt_len, num_steps
    if is_greedy(seen, prompt_len):
        return _walk(_free_chains(*text), tokens, prompt_len, num_steps)
    best: list[int] = seen.best[prompt_len:].tolist()
    forced = _forced_chains(*text)
    counts = [max(0, len(best) - depth) for depth in range(num_steps)]
    hits = [sum(forced[i][depth] == best[i + depth] for i in range(count)) for depth, count in enumerate(counts)]
    return Agreement(tuple(hits), tuple(counts))


def is_greedy(seen: Observed, prompt_len: int) -> bool:
    """Whether tokens[prompt_len:] is the target's own greedy continuation, as far as it goes."""
    return torch.equal(seen.tokens[prompt_len:], seen.best[prompt_len - 1 : -1])


def walk(target: Source, drafter: Drafter, tokens: Sequence[int], prompt_len: int, num_steps: int) -> Walk:
    """Score a text of which tokens[prompt_len:] is the target's greedy continuation. The first of those comes from the
    prompt's own pass; decoding starts behind it."""
    seen = observe_texts(target, [tokens], drafter.config.boundaries)[0]
    drafts = _free_chains(drafter, tokens, seen.captured, prompt_len, num_steps)
    return _walk(drafts, tokens, prompt_len, num_steps)


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


def total_agreement(agreements: Sequence[Agreement]) -> Agreement:
    """All positions of several texts together."""
    hits = zip(*[agreement.hits for agreement in agreements], strict=True)
    counts = zip(*[agreement.counts for agreement in agreements], strict=True)
    return Agreement(tuple(map(sum, hits)), tuple(map(sum, counts)))

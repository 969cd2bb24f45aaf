"""The offline score of a drafter: tokens per step over a text that the target wrote greedily, without decoding again.

Online, rounds do not start at uniformly drawn positions but where the last round ended. So the score walks: a chain is
drafted at every position, from the same committed caches and by the same functions as in use; then t goes to
t + accepted + 1 until the text ends. On the target's own greedy text the result is the engine's tokens per step for a
greedy chain, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minieagle.models.cache import PagedCache
from minieagle.models.deepseek import Target
from minieagle.models.eagle3 import Drafter, DrafterOutput
from minieagle.models.rows import Rows, Span
from minieagle.spec.draft import Root, grow
from minieagle.spec.tree import TreeShape

ROOTS_AT_ONCE = 64


@dataclass(frozen=True)
class Walk:
    """num_steps rounds that emit num_tokens; reached[k]: rounds whose accepted path reaches depth k + 1."""

    num_steps: int
    num_tokens: int
    reached: tuple[int, ...]

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 0.0


def _drafts(
    drafter: Drafter, cache: PagedCache, tokens: Sequence[int], out: DrafterOutput, first: int, num_steps: int
) -> list[tuple[int, ...]]:
    """The chain drafted at each root position first .. len - 1: num_steps token ids. Every root gets spare slots of its
    own behind the shared committed ones."""
    num_rows = len(tokens) - 1
    shared = torch.arange(1, 1 + num_rows, device=out.logits.device)
    drafted: list[tuple[int, ...]] = []
    for start in range(first, len(tokens), ROOTS_AT_ONCE):
        positions = range(start, min(start + ROOTS_AT_ONCE, len(tokens)))
        roots: list[Root] = []
        for i, position in enumerate(positions):
            own = 1 + num_rows + i * num_steps + torch.arange(num_steps, device=shared.device)
            roots.append(Root(tokens[position], torch.cat([shared[:position], own]), position, 0.0, 0))
        rows = torch.tensor([position - 1 for position in positions], device=shared.device)
        at = DrafterOutput(out.logits.index_select(0, rows), out.states.index_select(0, rows))
        trees = grow(drafter, cache, roots, at, TreeShape.chain(num_steps))
        drafted += [tree.tokens[1:] for tree in trees]
    return drafted


def _committed(
    target: Target, drafter: Drafter, tokens: Sequence[int], num_spare: int
) -> tuple[PagedCache, DrafterOutput]:
    """The drafter's cache and outputs over all committed rows of a text: row t has the token at t + 1."""
    ids = torch.tensor(tokens, device=target.device)
    slots = torch.arange(1, 1 + len(tokens), device=target.device)
    cache = target.new_cache(1 + len(tokens))
    seen = target(Rows.of(ids, [Span(slots, 0, len(tokens))]), cache, boundaries=drafter.config.boundaries)
    draft_cache = drafter.new_cache(len(tokens) + num_spare)
    rows = Rows.of(ids[1:], [Span(slots, 0, len(tokens) - 1)])
    return draft_cache, drafter(rows, drafter.fuse(seen.captured[:-1]), draft_cache)


def walk(target: Target, drafter: Drafter, tokens: Sequence[int], prompt_len: int, num_steps: int) -> Walk:
    """Score a text of which tokens[prompt_len:] is the target's greedy continuation. The first of those comes from the
    prompt's own pass; decoding starts behind it."""
    first, last = prompt_len, len(tokens) - 1
    if first >= last:
        return Walk(0, 0, (0,) * num_steps)
    cache, out = _committed(target, drafter, tokens, ROOTS_AT_ONCE * num_steps)
    drafts = _drafts(drafter, cache, tokens, out, first, num_steps)
    reached = [0] * num_steps
    position, steps = first, 0
    while position < last:
        left = last - position
        accepted = _matches(drafts[position - first], tokens[position + 1 :])
        emitted = min(accepted + 1, left)
        for depth in range(emitted - 1):
            reached[depth] += 1
        position, steps = position + emitted, steps + 1
    return Walk(steps, last - first, tuple(reached))


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

"""Drafting: bring the drafter's cache up to the committed rows, then grow the next trees from them.

After every verify the committed rows are run again with the target's own states (`extend`), so that the committed
cache never holds what the drafter guessed; the rows of a tree lie behind them and are overwritten by the next extend.
Proposals use the noise that the target will use at the same positions, which makes sampled drafts match far more often
than the drafter's own argmax would (facts about keyed noise: spec/noise.py). Sources: EAGLE-2 (arXiv 2406.16858)
section 4 for the growth, EAGLE-3 (arXiv 2503.01840) for the drafter.

B sequences, F frontier nodes, W draft vocabulary, D drafter width.
"""

# torch and safetensors annotate some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minieagle.models.cache import PagedCache
from minieagle.models.eagle3 import Drafter, DrafterOutput
from minieagle.models.rows import Rows, Span
from minieagle.models.staging import staged
from minieagle.spec.noise import gumbel
from minieagle.spec.tree import Pool, Shape, Tree, TreeShape, top_children


@dataclass(frozen=True)
class Commit:
    """Rows of one sequence that the target has just run and the engine has kept: the drafter's rows start .. start + n.

    slots: the sequence's cache slots; next_tokens[i]: the token at position start + i + 1; captured
    [n, taps, target hidden]: the target's states at positions start .. start + n.
    """

    slots: Tensor
    start: int
    next_tokens: tuple[int, ...]
    captured: Tensor


@dataclass(frozen=True)
class Root:
    """Where a tree grows: the last token of a sequence whose drafter rows up to `committed` are in the cache."""

    token: int
    slots: Tensor
    committed: int
    temperature: float
    seed: int


Observer = Callable[[Tensor, Tensor, DrafterOutput], None]
"""Sees what `extend` computed for all T rows: captured [T, taps, target hidden], fused states [T, D], and the drafter's
output, states [T, D] and logits [B, W] of each commit's last row."""


def extend(
    drafter: Drafter, cache: PagedCache, commits: Sequence[Commit], *, observer: Observer | None = None
) -> DrafterOutput:
    """Run the committed rows; returns logits [B, W] and states [B, D] of the last row of each commit."""
    spans = [Span(commit.slots, commit.start, len(commit.next_tokens)) for commit in commits]
    tokens = [token for commit in commits for token in commit.next_tokens]
    device = commits[0].captured.device
    captured = torch.cat([commit.captured for commit in commits])
    states = drafter.fuse(captured)
    last = staged([span.num_rows for span in spans], device).cumsum(0) - 1
    out = drafter(Rows.of(staged(tokens, device), spans), states, cache, logit_rows=last)
    if observer is not None:
        observer(captured, states, out)
    return DrafterOutput(out.logits, out.states.index_select(0, last))


def _noise(drafter: Drafter, roots: Sequence[Root], num_steps: int) -> Tensor | None:
    """[B, num_steps, W] the target's noise at the positions to be drafted, 0 for greedy; None when all are greedy."""
    if all(root.temperature == 0 for root in roots):
        return None
    device = drafter.target_ids.device
    positions = staged([root.committed + 1 for root in roots], device)
    positions = positions[:, None] + torch.arange(num_steps, device=device)
    seeds = staged([root.seed for root in roots], device)[:, None].expand_as(positions)
    noise = gumbel(seeds.flatten(), positions.flatten(), drafter.config.vocab_size, drafter.target_ids)
    sampled = staged([root.temperature > 0 for root in roots], device, torch.bool)
    return noise.view(*positions.shape, -1) * sampled[:, None, None]


class _Keys:
    """What children are ranked by: logits, or logits / temperature + noise where the target will sample."""

    def __init__(self, drafter: Drafter, roots: Sequence[Root], num_steps: int) -> None:
        self.noise = _noise(drafter, roots, num_steps)
        heat = [root.temperature or 1.0 for root in roots]
        self.temperature = staged(heat, drafter.target_ids.device, torch.float32)[:, None, None]

    def at(self, logits: Tensor, level: int) -> Tensor:
        """logits [B, F, W] of the nodes whose children sit on `level` (0 = the root's children)."""
        if self.noise is None:
            return logits
        return logits / self.temperature + self.noise[:, level : level + 1]


def grow(drafter: Drafter, cache: PagedCache, roots: Sequence[Root], output: DrafterOutput, shape: Shape) -> list[Tree]:
    """Draft one tree per root, all of one shape. output: logits [B, W] and states [B, D] of the roots' last rows."""
    keys = _Keys(drafter, roots, shape.num_steps)
    if isinstance(shape, TreeShape) and shape.topk == 1:
        return _grow_chain(drafter, cache, roots, output, shape.num_steps, keys)
    batch = len(roots)
    pool = Pool.empty(batch, output.logits.device)
    frontier, logits, states = pool.roots, output.logits[:, None], output.states[:, None]
    ancestors = pool.tokens.new_empty(batch, 1, 0)
    num_rows = 0
    for level in range(shape.num_steps):
        ranked = keys.at(logits, level)
        ids = top_children(ranked, shape.topk)
        pool = pool.expand(frontier, drafter.target_ids[ids], ranked.log_softmax(-1).gather(-1, ids))
        if level == shape.num_steps - 1:
            break
        frontier = shape.frontier(pool)
        width, above = frontier.shape[1], pool.slots(frontier)[:, :, None]
        own = torch.arange(num_rows, num_rows + width, device=above.device).expand(batch, -1)[:, :, None]
        ancestors = torch.cat([ancestors.gather(1, above.expand(-1, -1, level)), own], dim=-1)
        states = states.gather(1, above.expand(-1, -1, states.shape[-1]))
        spans = [Span(root.slots, root.committed, width, ancestors[b], num_rows) for b, root in enumerate(roots)]
        rows = Rows.of(pool.tokens.gather(1, frontier).flatten(), spans)
        out = drafter(rows, states.flatten(0, 1), cache)
        logits, states = out.logits.view(batch, width, -1), out.states.view(batch, width, -1)
        num_rows += width
    return pool.trees([root.token for root in roots], shape.chosen(pool))


def _grow_chain(
    drafter: Drafter, cache: PagedCache, roots: Sequence[Root], output: DrafterOutput, num_steps: int, keys: _Keys
) -> list[Tree]:
    """A chain needs no pool: the best child of each node, and the rows drafted so far count as committed."""
    levels: list[Tensor] = []
    for level in range(num_steps):
        best = keys.at(output.logits[:, None], level)[:, 0].argmax(-1)
        levels.append(drafter.target_ids[best])
        if level < num_steps - 1:
            spans = [Span(root.slots, root.committed + level, 1) for root in roots]
            output = drafter(Rows.of(levels[-1], spans), output.states, cache)
    tokens: list[list[int]] = torch.stack(levels, dim=1).tolist()
    parents = tuple(range(-1, num_steps))
    return [Tree((root.token, *row), parents) for root, row in zip(roots, tokens, strict=True)]


def draft_rows(shape: Shape) -> int:
    """Cache rows that drafting and verifying a tree of this shape may take behind the committed ones."""
    drafted = shape.topk * (shape.num_steps - 1) if isinstance(shape, TreeShape) else shape.num_draft_tokens
    return max(drafted, shape.num_draft_tokens)

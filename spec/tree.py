"""Draft trees: their shapes, the trees themselves, and the tensor code that grows them. No model in it.

The one idea: a tree is a list of tokens with a list of parents in which parents come first. Growing one for EAGLE-2/3
is two selections: `expand` puts every child of the frontier into a pool and the best of them form the next frontier;
`rerank` takes the best num_draft_tokens - 1 of the pool. A child never scores above its parent, and among equals the
earlier (so the parent) wins, so that what is kept is ancestor-closed whatever the scores: ties, NaN and infinities
included. Source: Li et al., "EAGLE-2" (2024), section 4; static trees as in EAGLE-1 and Medusa. The best n nodes by
path score maximise the expected accepted length among all trees of n nodes from the pool when the score is monotone in
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from minieagle.models.staging import staged

Path = tuple[int, ...]


class ShapeError(ValueError):
    """A tree shape that contradicts itself: names the value, the bound and the remedy."""


@dataclass(frozen=True)
class TreeShape:
    """num_steps levels, topk children kept per level, num_draft_tokens nodes including the root.

    topk 1 is a chain. Raises ShapeError on an inconsistent trio: nothing is ever adjusted.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        for name, low in (("num_steps", 1), ("topk", 1), ("num_draft_tokens", 2)):
            _check_int(name, getattr(self, name), low)
        steps, topk, nodes = self.num_steps, self.topk, self.num_draft_tokens
        if topk == 1 and nodes != steps + 1:
            raise ShapeError(
                f"topk 1 is a chain: num_steps {steps} needs num_draft_tokens {steps + 1}, got {nodes}: the root counts"
            )
        if nodes > (most := 1 + topk + (steps - 1) * topk**2):
            raise ShapeError(
                f"num_draft_tokens is {nodes}, but num_steps {steps} and topk {topk} draft at most {most} nodes with "
                "the root: lower it, or raise topk or num_steps"
            )

    def __str__(self) -> str:
        """The spelling that `parse_shape` reads."""
        if self.topk == 1:
            return f"chain:{self.num_steps}"
        return f"dynamic:{self.num_steps},{self.topk},{self.num_draft_tokens}"

    @staticmethod
    def chain(num_steps: int) -> TreeShape:
        _check_int("num_steps", num_steps, 1)
        return TreeShape(num_steps, 1, num_steps + 1)

    def frontier(self, pool: Pool) -> Tensor:
        """[B, F] pool indices of the topk best of the newest level, in pool order: the nodes to expand next."""
        newest = pool.scores[:, pool.start :]
        return _best(newest, min(self.topk, newest.shape[1])) + pool.start

    def chosen(self, pool: Pool) -> Tensor:
        """[B, num_draft_tokens - 1] pool indices of the nodes to verify."""
        return rerank(pool.scores, pool.parents, self.num_draft_tokens - 1)


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree, each node named by the path of child ranks from the root: (0, 2) is the third child of the first.

    choices are put in level order; node i + 1 of the tree is choices[i]. Raises ShapeError unless they are unique,
    non-empty paths of ranks >= 0 whose every prefix is a choice too.
    """

    choices: tuple[Path, ...]
    parents: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        choices = _checked_choices(self.choices)
        node = {(): 0} | {choice: i + 1 for i, choice in enumerate(choices)}
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "parents", (-1, *(node[choice[:-1]] for choice in choices)))

    def __str__(self) -> str:
        """The spelling that `parse_shape` reads."""
        return "static:" + ",".join(".".join(map(str, choice)) for choice in self.choices)

    @cached_property
    def num_steps(self) -> int:
        return len(self.choices[-1])

    @cached_property
    def topk(self) -> int:
        return 1 + max(choice[-1] for choice in self.choices)

    @cached_property
    def num_draft_tokens(self) -> int:
        return 1 + len(self.choices)

    @cached_property
    def _inner(self) -> list[list[Path]]:
        """The choices with children, by depth: the frontier of each level. [0] is the root's."""
        inner = {choice[:-1] for choice in self.choices}
        return [sorted(path for path in inner if len(path) == depth) for depth in range(self.num_steps)]

    @cached_property
    def _pool_index(self) -> dict[Path, int]:
        """Where `Pool.expand` puts each choice: topk entries per frontier node, level after level."""
        slots = [path for level in self._inner for path in level]
        return {choice: slots.index(choice[:-1]) * self.topk + choice[-1] for choice in self.choices}

    def frontier(self, pool: Pool) -> Tensor:
        """[B, F] pool indices of the nodes with children on the newest level."""
        return self._indices(pool, self._inner[pool.num_levels])

    def chosen(self, pool: Pool) -> Tensor:
        """[B, num_draft_tokens - 1] pool indices of the nodes to verify."""
        return self._indices(pool, self.choices)

    def _indices(self, pool: Pool, paths: Sequence[Path]) -> Tensor:
        assert pool.topk == self.topk, f"a pool of {pool.topk} children per node, not {self.topk}"
        row = staged([self._pool_index[path] for path in paths], pool.tokens.device)
        return row.sort().values.expand(pool.tokens.shape[0], -1)


Shape = TreeShape | StaticTree


def parse_shape(text: str) -> Shape:
    """Read "chain:5", "dynamic:NUM_STEPS,TOPK,NUM_DRAFT_TOKENS" or "static:0,1,0.0,0.1" (paths of child ranks)."""
    kind, _, rest = text.partition(":")
    try:
        paths = tuple(tuple(int(rank) for rank in path.split(".")) for path in rest.split(","))
    except ValueError:
        paths = ()
    flat = [path[0] for path in paths if len(path) == 1]
    if kind == "static" and paths:
        return StaticTree(paths)
    if kind == "chain" and len(flat) == len(paths) == 1:
        return TreeShape.chain(flat[0])
    if kind == "dynamic" and len(flat) == len(paths) == 3:
        return TreeShape(*flat)
    raise ShapeError(f"{text!r:.80} is no tree: write chain:5, dynamic:STEPS,TOPK,NODES or static:0,1,0.0")


@dataclass(frozen=True)
class Tree:
    """One sequence's draft tree, on the host.

    tokens[0] is the root: the last emitted token, whose row is not computed yet. parents[0] is -1; every other parent
    precedes its child. Whatever is derived is computed on first use.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) >= 1, f"{len(self.tokens)} tokens, {len(self.parents)} parents"
        assert self.parents[0] == -1, f"the root's parent is {self.parents[0]}, not -1"
        for node, parent in enumerate(self.parents[1:], 1):
            assert 0 <= parent < node, f"node {node} has parent {parent}: parents must precede children"

    @staticmethod
    def root(token: int) -> Tree:
        """The one-node tree: plain decoding."""
        return Tree((token,), (-1,))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges from the root; a node's absolute position is the root's plus its depth."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def lineages(self) -> tuple[Path, ...]:
        """Each node's path from the root, itself included."""
        lineages: list[Path] = [(0,)]
        for node, parent in enumerate(self.parents[1:], 1):
            lineages.append((*lineages[parent], node))
        return tuple(lineages)

    @cached_property
    def ancestors(self) -> Tensor:
        """int64 [N, M], M = max depth + 1: entry [v, d] is v's ancestor at depth d, v itself at its own, -1 beyond."""
        width = max(self.depths) + 1
        return torch.tensor([lineage + (-1,) * (width - len(lineage)) for lineage in self.lineages])

    @cached_property
    def mask(self) -> Tensor:
        """bool [N, N]: [v, u] says that v sees u, its ancestor or itself."""
        seen = torch.zeros(len(self.tokens), len(self.tokens), dtype=torch.bool)
        for node, lineage in enumerate(self.lineages):
            seen[node, list(lineage)] = True
        return seen

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """Root-to-leaf paths of node indices, one per leaf, in leaf order."""
        inner = set(self.parents)
        return tuple(lineage for node, lineage in enumerate(self.lineages) if node not in inner)

    def cut(self, max_depth: int) -> Tree:
        """The tree without the nodes deeper than max_depth >= 0, in the same order (near the end of the context)."""
        assert max_depth >= 0, f"max_depth is {max_depth}: the root cannot be cut"
        kept = [node for node, depth in enumerate(self.depths) if depth <= max_depth]
        slot = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return Tree(tuple(self.tokens[v] for v in kept), tuple(slot[self.parents[v]] for v in kept))


@dataclass(frozen=True)
class Pool:
    """Every node drafted so far for B sequences, level after level, so that parents come first. Tensors [B, P].

    tokens int64. scores float32: the path's summed log-probability; never above the parent's, never NaN; -inf means "no
    such child". parents int64: a pool index, -1 the root. The newest level starts at `start` and has topk children per
    node of the frontier it grew from.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    start: int = 0
    topk: int = 1
    num_levels: int = 0

    @staticmethod
    def empty(batch: int, device: torch.device | str = "cpu") -> Pool:
        none = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return Pool(none, none.float(), none)

    @cached_property
    def roots(self) -> Tensor:
        """[B, 1] filled with -1: the frontier of the first level."""
        return self.tokens.new_full((self.tokens.shape[0], 1), -1)

    def expand(self, frontier: Tensor, tokens: Tensor, logprobs: Tensor) -> Pool:
        """The pool with the children of `frontier` [B, F]; tokens and logprobs are [B, F, topk]. A NaN is no child."""
        above = torch.nn.functional.pad(self.scores, (1, 0)).gather(1, frontier + 1)[:, :, None]
        scores = torch.minimum(_no_nan(above + logprobs), above)
        return Pool(
            tokens=torch.cat([self.tokens, tokens.flatten(1)], 1),
            scores=torch.cat([self.scores, scores.flatten(1)], 1),
            parents=torch.cat([self.parents, frontier.repeat_interleave(tokens.shape[2], 1)], 1),
            start=self.tokens.shape[1],
            topk=tokens.shape[2],
            num_levels=self.num_levels + 1,
        )

    def slots(self, nodes: Tensor) -> Tensor:
        """For nodes [B, F] of the newest level: which slot of the frontier they grew from holds their parent. [B, F]"""
        return (nodes - self.start) // self.topk

    def trees(self, roots: Sequence[int], chosen: Tensor) -> list[Tree]:
        """One tree per sequence from `chosen` [B, n], an ancestor-closed ascending choice. One copy to the host.

        Nodes of score -inf are left out, so a tree may be smaller than n + 1.
        """
        size = self.tokens.shape[1]
        real = self.scores.gather(1, chosen) > -math.inf
        nodes = torch.where(real, chosen, size).sort().values  # the unreal ones last
        kept = nodes.clamp(max=size - 1)
        slots = torch.searchsorted(torch.cat([self.roots, nodes], 1), self.parents.gather(1, kept))
        packed = torch.cat([real.sum(1, keepdim=True), self.tokens.gather(1, kept), slots], 1)
        rows = cast("list[list[int]]", packed.tolist())  # pyright: ignore[reportUnknownMemberType]
        return [_tree(root, row[0], row[1:]) for root, row in zip(roots, rows, strict=True)]


def top_children(keys: Tensor, topk: int) -> Tensor:
    """int64 [..., topk]: the ids of the largest keys of [..., V], best first. Ties fall as torch.topk lets them."""
    return _no_nan(keys).topk(topk, dim=-1).indices


def rerank(scores: Tensor, parents: Tensor, num_nodes: int) -> Tensor:
    """The best num_nodes of the pool: int64 [B, num_nodes] pool indices, ascending, always ancestor-closed.

    scores float [B, P]; parents int64 [B, P], the parent's pool index, less than the child's own, -1 the root. NaN
    counts as -inf, a child as no better than its parent, and of equals the earlier pool index wins: then a parent
    ranks before its child always. EAGLE's and SGLang's rerank rely on strict inequality and link a node to a wrong
    parent on a tie.
    """
    assert num_nodes <= scores.shape[1], f"{num_nodes} nodes from a pool of {scores.shape[1]}"
    order = _no_more_than_ancestors(_no_nan(scores), parents).sort(dim=1, descending=True, stable=True).indices
    return order[:, :num_nodes].sort().values


def _no_more_than_ancestors(scores: Tensor, parents: Tensor) -> Tensor:
    """Every score lowered to the least of its own and its ancestors'.

    Each round doubles the reach, so no depth is needed.
    """
    scores = torch.nn.functional.pad(scores, (1, 0), value=math.inf)
    jump = torch.nn.functional.pad(parents + 1, (1, 0))
    for _ in range((scores.shape[1] - 1).bit_length()):
        scores = torch.minimum(scores, scores.gather(1, jump))
        jump = jump.gather(1, jump)
    return scores[:, 1:]


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest `count` of each row, ascending; of equals the earlier."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort().values


def _no_nan(scores: Tensor) -> Tensor:
    return torch.where(scores.isnan(), -math.inf, scores)


def _tree(root: int, num_nodes: int, row: list[int]) -> Tree:
    """row: n tokens, then n parent slots; only the first num_nodes of each are real."""
    half = len(row) // 2
    return Tree((root, *row[:num_nodes]), (-1, *row[half : half + num_nodes]))


def _check_int(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ShapeError(f"{name} is {value!r:.80}: it must be an integer of at least {low}")


def _checked_choices(choices: Sequence[Sequence[int]]) -> tuple[Path, ...]:
    paths = sorted((tuple(choice) for choice in choices), key=lambda path: (len(path), path))
    known = {(), *paths}
    for path in paths:
        for rank in path:
            _check_int(f"a rank of choice {path!s:.80}", rank, 0)
        if path[:-1] not in known:
            raise ShapeError(f"choice {path!s:.80} has no parent: add the path without its last rank")
    if not paths or () in paths or len(known) != len(paths) + 1:
        raise ShapeError(
            f"choices {paths!s:.80} must be at least one path, none empty (the root is implied), none twice"
        )
    return tuple(paths)

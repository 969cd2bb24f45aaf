"""Acceptance: how far the target's own tokens walk down a drafted tree.

The one idea: the target emits a token at every node, by argmax or by position-keyed noise (noise.py), without looking
at the tree. Verification then is a look-up: emit the token at a node; if a child carries it step down, else stop. The
tree decides only how far one forward reaches, never which tokens come out, so it is lossless for any tree, at any
temperature: the "target-only" walk of tree-shaped sampling with the draws made before the walk. One rule for greedy
and sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minieagle.spec.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """path: accepted node indices from the root (0) down; tokens: what the target emits at each of them.

    Both have the same length >= 1. tokens[:-1] are the accepted drafts, which are path[1:]'s own tokens; tokens[-1] is
    the bonus token, which no row carries yet.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def accept(tree: Tree, emitted: Sequence[int]) -> Accepted:
    """Walk `tree` by the tokens that the target emits. emitted[v]: the token drawn at node v, given v's path.

    Of children that carry the same token the first wins. One scan, O(N): parents precede children, so every child of
    the node reached lies ahead of it.
    """
    assert len(emitted) == len(tree.tokens), f"{len(emitted)} emitted tokens for {len(tree.tokens)} nodes"
    path = [0]
    for node in range(1, len(tree.tokens)):
        if tree.parents[node] == path[-1] and tree.tokens[node] == emitted[path[-1]]:
            path.append(node)
    return Accepted(tuple(path), tuple(emitted[node] for node in path))

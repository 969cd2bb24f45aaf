"""Acceptance against a plain walk, and what follows from it for every tree."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minieagle.spec.accept import Accepted, accept
from minieagle.spec.tree import Tree


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tree, list[int]]:
    """A random tree over three tokens, duplicates included, and a token emitted at each node."""
    size = draw(st.integers(1, 14))
    token = st.integers(0, 2)
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))
    return Tree(tuple(draw(token) for _ in parents), parents), [draw(token) for _ in parents]


def naive(tree: Tree, emitted: Sequence[int], node: int = 0) -> list[int]:
    for child, parent in enumerate(tree.parents):
        if parent == node and tree.tokens[child] == emitted[node]:
            return [node, *naive(tree, emitted, child)]
    return [node]


@settings(max_examples=200)
@given(cases())
def test_equals_the_naive_walk(case: tuple[Tree, list[int]]) -> None:
    tree, emitted = case
    path = naive(tree, emitted)
    assert accept(tree, emitted) == Accepted(tuple(path), tuple(emitted[node] for node in path))


@given(cases())
def test_accepted_drafts_are_what_was_emitted(case: tuple[Tree, list[int]]) -> None:
    tree, emitted = case
    result = accept(tree, emitted)
    assert result.path == tree.lineages[result.path[-1]]
    assert result.tokens[:-1] == tuple(tree.tokens[node] for node in result.path[1:])


@given(cases(), st.data())
def test_nodes_off_the_path_do_not_matter(case: tuple[Tree, list[int]], data: st.DataObject) -> None:
    tree, emitted = case
    path = accept(tree, emitted).path
    other = [token if node in path else data.draw(st.integers(0, 2)) for node, token in enumerate(emitted)]
    assert accept(tree, other) == accept(tree, emitted)


def test_first_of_duplicates_wins() -> None:
    tree = Tree((0, 5, 5, 7), (-1, 0, 0, 2))
    assert accept(tree, [5, 7, 7, 1]) == Accepted((0, 1), (5, 7))


def test_one_node_is_plain_decoding() -> None:
    assert accept(Tree.root(3), [8]) == Accepted((0,), (8,))


def test_every_node_needs_a_token() -> None:
    with pytest.raises(AssertionError, match="1 emitted tokens for 2 nodes"):
        accept(Tree((0, 1), (-1, 0)), [1])

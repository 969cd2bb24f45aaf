"""Attention over pages and trees against a softmax written out in float64, and its bits against themselves.

The last part breaks the summation order on purpose: the bit tests must notice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minieagle.models import attention
from minieagle.models.attention import KEY_BLOCK, AttentionPlan, attend
from minieagle.models.rows import Rows, Span
from tests.strategies import SEEDS, ancestors, near_blocks, parents, path, shuffled_slots


@dataclass(frozen=True)
class Layout:
    """How heads, keys and values lie in a cache row: MLA reads values out of the key, GQA behind it."""

    num_heads: int
    num_kv_heads: int
    key_width: int
    value_start: int
    width: int


MLA = Layout(8, 1, 40, 8, 40)
GQA = Layout(6, 2, 16, 16, 32)
ODD = Layout(3, 1, 24, 0, 24)
LAYOUTS = st.sampled_from([MLA, GQA, ODD])


class Store:
    """A cache layer of random rows, and random queries keyed by slot: a row's inputs never depend on its batch."""

    def __init__(self, layout: Layout, num_slots: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.cache = torch.randn(num_slots, layout.num_kv_heads, layout.width, generator=draw)
        self.cache[0] = 0
        self.queries = torch.randn(num_slots, layout.num_heads, layout.key_width, generator=draw)

    def attend(self, *spans: Span) -> Tensor:
        rows = Rows.of(torch.zeros(sum(s.num_rows for s in spans), dtype=torch.int64), spans)
        queries, layout = self.queries[rows.write_slots()], self.layout
        plan = AttentionPlan.of(rows)
        return attend(queries, self.cache, plan, key_width=layout.key_width, value_start=layout.value_start)

    def naive(self, slots: Tensor) -> Tensor:
        """The last of these slots attending to all of them: [H, R] float64."""
        layout, keys = self.layout, self.cache[slots].double()
        out = []
        for head, q in enumerate(self.queries[slots[-1]].double()):
            mine = keys[:, head * layout.num_kv_heads // layout.num_heads]
            out.append((mine[:, : layout.key_width] @ q).softmax(0) @ mine[:, layout.value_start :])
        return torch.stack(out)


def visible(span: Span, tree: list[int] | None, row: int) -> Tensor:
    """The slots that a row sees: the committed ones and its own path."""
    nodes = torch.arange(row + 1) if tree is None else torch.tensor(path(tree, row))
    return torch.cat((span.slots[: span.committed], span.slots[span.committed + nodes]))


def drawn_span(committed: int, tree: list[int] | None, num: int, slots: Tensor) -> Span:
    return Span(slots, committed, num, None if tree is None else ancestors(tree))


SPANS = st.tuples(near_blocks(), st.none() | parents(8), st.integers(1, 6))


@given(LAYOUTS, st.lists(SPANS, min_size=1, max_size=4), SEEDS)
def test_every_row_attends_to_its_ancestors(
    layout: Layout, drawn: list[tuple[int, list[int] | None, int]], seed: int
) -> None:
    num = [length if tree is None else len(tree) for _, tree, length in drawn]
    pool = shuffled_slots(sum(c for c, _, _ in drawn) + sum(num), 1, seed)
    parts = pool.split([c + n for (c, _, _), n in zip(drawn, num, strict=True)])
    spans = [drawn_span(c, tree, n, s) for (c, tree, _), n, s in zip(drawn, num, parts, strict=True)]
    store = Store(layout, int(pool.max()) + 1, seed)
    got = store.attend(*spans)
    wanted = [
        store.naive(visible(s, d[1], row)) for s, d in zip(spans, drawn, strict=True) for row in range(s.num_rows)
    ]
    torch.testing.assert_close(got.double(), torch.stack(wanted), atol=1e-5, rtol=0)


def chain_bits(store: Store, slots: Tensor) -> Tensor:
    """The last of these slots attending to all of them, as one step of plain decoding."""
    return store.attend(Span(slots, len(slots) - 1, 1))[0]


def tree_has_the_bits_of_chains(layout: Layout, committed: int, tree: list[int], seed: int) -> bool:
    slots = shuffled_slots(committed + len(tree), 16, seed)
    store, span = Store(layout, int(slots.max()) + 1, seed), drawn_span(committed, tree, len(tree), slots)
    together = store.attend(span)
    return all(torch.equal(together[row], chain_bits(store, visible(span, tree, row))) for row in range(len(tree)))


def chunk_has_the_bits_of_steps(layout: Layout, committed: int, num: int, seed: int) -> bool:
    slots = shuffled_slots(committed + num, 16, seed)
    store = Store(layout, int(slots.max()) + 1, seed)
    together = store.attend(Span(slots, committed, num))
    return all(torch.equal(together[i], chain_bits(store, slots[: committed + i + 1])) for i in range(num))


@settings(max_examples=50)
@given(LAYOUTS, near_blocks(4), parents(12), SEEDS)
def test_tree_rows_have_the_bits_of_chains(layout: Layout, committed: int, tree: list[int], seed: int) -> None:
    assert tree_has_the_bits_of_chains(layout, committed, tree, seed)


@settings(max_examples=50)
@given(LAYOUTS, near_blocks(4), st.integers(1, 70), SEEDS)
def test_chunk_rows_have_the_bits_of_steps(layout: Layout, committed: int, num: int, seed: int) -> None:
    assert chunk_has_the_bits_of_steps(layout, committed, num, seed)


@given(LAYOUTS, near_blocks(), parents(10), SEEDS, st.data())
def test_a_tree_grown_level_by_level_has_the_same_bits(
    layout: Layout, committed: int, tree: list[int], seed: int, data: st.DataObject
) -> None:
    """Upper nodes stored by earlier forwards, `first` saying how many."""
    cut = data.draw(st.integers(1, len(tree)))
    slots = shuffled_slots(committed + len(tree), 16, seed)
    store, table = Store(layout, int(slots.max()) + 1, seed), ancestors(tree)
    whole = store.attend(Span(slots, committed, len(tree), table))
    upper = store.attend(Span(slots, committed, cut, table[:cut]))
    lower = store.attend(Span(slots, committed, len(tree) - cut, table[cut:], cut)) if cut < len(tree) else whole[cut:]
    assert torch.equal(torch.cat((upper, lower)), whole)


def test_what_lies_behind_the_committed_rows_is_not_seen() -> None:
    """Another sequence's rows, stale drafts and NaN in the pages change nothing."""
    slots = shuffled_slots(80, 16, 0)
    store = Store(MLA, int(slots.max()) + 1, 0)
    span = Span(slots, 70, 3, ancestors([-1, 0, 0]))
    before = store.attend(span)
    unseen = torch.ones(len(store.cache), dtype=torch.bool).index_fill_(0, slots[:73], False)
    unseen[0] = False
    store.cache[unseen] = float("nan")
    assert torch.equal(store.attend(span), before)


# ---- mutants: other summation orders, each as exact as the true one, must be seen by the bit tests

Sum = Callable[[Tensor, Tensor], Tensor]


def in_one_product(weights: Tensor, values: Tensor) -> Tensor:
    return torch.bmm(weights, values)


def last_block_first(weights: Tensor, values: Tensor) -> Tensor:
    """In the chain the newest block comes first; in the tree the shared blocks come first."""
    parts = [
        weights[..., i : i + KEY_BLOCK] @ values[:, i : i + KEY_BLOCK] for i in range(0, values.shape[1], KEY_BLOCK)
    ]
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = total + part
    return total


def halves(weights: Tensor, values: Tensor) -> Tensor:
    """A split that depends on how many keys there are."""
    cut = values.shape[1] // 2
    return weights[..., :cut] @ values[:, :cut] + weights[..., cut:] @ values[:, cut:]


BLOCKS_AND_TREES = [(c, [-1, 0, 1, 0]) for c in (1, 63, 64, 65, 127, 128, 191, 200, 257)]


def all_bits_hold() -> bool:
    return all(tree_has_the_bits_of_chains(MLA, c, tree, c) for c, tree in BLOCKS_AND_TREES)


@pytest.mark.parametrize("mutant", [in_one_product, last_block_first, halves])
def test_another_summation_order_is_noticed(mutant: Sum, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_bits_hold()
    monkeypatch.setattr(attention, "_weighted_sum", mutant)
    assert not all_bits_hold()


@pytest.mark.parametrize("block", [1, 16, 48])
def test_a_split_that_moves_with_the_committed_length_is_noticed(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail beginning at a multiple of something other than KEY_BLOCK."""

    def moved(span: Span, width: int) -> Tensor:
        start = span.committed // block * block
        slots = torch.zeros(span.num_rows, width, dtype=torch.int64)
        for row in range(span.num_rows):
            mine = visible(span, [-1, 0, 1, 0], row)[start:]
            slots[row, : len(mine)] = mine
        return slots

    def group(spans: list[Span]) -> tuple[attention.Keys | None, attention.Keys | None]:
        start = spans[0].committed // block * block
        seen = torch.full((1, spans[0].num_rows), start - 1)
        shared = attention._shared_keys(spans, [start], seen) if start else None
        slots = moved(spans[0], 2 * KEY_BLOCK).unsqueeze(0)
        return shared, attention.Keys(slots, attention._mask(slots != 0))

    monkeypatch.setattr(attention, "_tree_group", group)
    assert not all_bits_hold()

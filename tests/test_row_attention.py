"""The attention kernel, in Triton's interpreter, under the tests of tests/test_attention.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minieagle.models import attention
from minieagle.models.attention import KEY_BLOCK
from tests.strategies import SEEDS, near_blocks, parents, shuffled_slots
from tests.test_attention import (
    LAYOUTS,
    MLA,
    Layout,
    Store,
    chunk_has_the_bits_of_steps,
    drawn_span,
    tree_has_the_bits_of_chains,
    visible,
)

pytest.importorskip("triton", reason="Triton is not installed: its kernels can't be tried")

FEW = settings(max_examples=6)


@pytest.fixture(autouse=True, scope="module")
def _on_a_gpu():
    """Attention as it is dispatched where tensors lie on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_attend_group", attention._attend_on_gpu)
        yield


@FEW
@given(LAYOUTS, near_blocks(), parents(6) | st.none(), SEEDS)
def test_every_row_attends_to_its_ancestors(layout: Layout, committed: int, tree: list[int] | None, seed: int) -> None:
    num = 3 if tree is None else len(tree)
    slots = shuffled_slots(committed + num, 16, seed)
    store, span = Store(layout, int(slots.max()) + 1, seed), drawn_span(committed, tree, num, slots)
    wanted = torch.stack([store.naive(visible(span, tree, row)) for row in range(num)])
    torch.testing.assert_close(store.attend(span).double(), wanted, atol=1e-5, rtol=0)


@FEW
@given(LAYOUTS, near_blocks(), parents(6), SEEDS)
def test_tree_rows_have_the_bits_of_chains(layout: Layout, committed: int, tree: list[int], seed: int) -> None:
    assert tree_has_the_bits_of_chains(layout, committed, tree, seed)


@FEW
@given(LAYOUTS, near_blocks(), st.integers(1, 8), SEEDS)
def test_chunk_rows_have_the_bits_of_steps(layout: Layout, committed: int, num: int, seed: int) -> None:
    assert chunk_has_the_bits_of_steps(layout, committed, num, seed)


def test_sequences_of_unequal_length_keep_their_bits_side_by_side() -> None:
    first, second = shuffled_slots(150, 10, 0)[:150].split([10, 140])
    store = Store(MLA, 500, 0)
    spans = [drawn_span(len(slots) - 2, None, 2, slots) for slots in (first, second)]
    alone = torch.cat([store.attend(span) for span in spans])
    assert torch.equal(store.attend(*spans), alone)


def test_what_is_not_seen_may_be_anything() -> None:
    slots = shuffled_slots(KEY_BLOCK + 9, 16, 0)
    store = Store(MLA, int(slots.max()) + 1, 0)
    span = drawn_span(KEY_BLOCK + 2, [-1, 0, 0], 3, slots)
    before = store.attend(span)
    unseen = torch.ones(len(store.cache), dtype=torch.bool).index_fill_(0, slots[: KEY_BLOCK + 5], False)
    store.cache[unseen] = float("nan")
    assert torch.equal(store.attend(span), before)

"""The paged cache: nothing is given out twice or lost, and moving rows equals gathering them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minieagle.models.cache import OutOfPages, PagedCache, PagePool

CPU = torch.device("cpu")


class Pool(RuleBasedStateMachine):
    """Any order of allocations and frees; a plain list of what is owned is the model."""

    @initialize(num_pages=st.integers(0, 12), page_size=st.integers(1, 5))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool, self.owned = PagePool(num_pages, page_size), list[tuple[int, ...]]()

    @rule(num=st.integers(0, 5))
    def allocate(self, num: int) -> None:
        if num <= self.pool.num_free:
            self.owned.append(self.pool.allocate(num))
            assert len(self.owned[-1]) == num
        else:
            with pytest.raises(OutOfPages, match=f"{num} pages wanted"):
                self.pool.allocate(num)

    @rule(which=st.integers(0, 100))
    def free(self, which: int) -> None:
        if self.owned:
            self.pool.free(self.owned.pop(which % len(self.owned)))

    @rule()
    def free_twice(self) -> None:
        if self.owned and self.owned[-1]:
            pages = self.owned.pop()
            self.pool.free(pages)
            with pytest.raises(AssertionError):
                self.pool.free(pages)

    @invariant()
    def used_and_free_are_all(self) -> None:
        pages = [page for some in self.owned for page in some]
        assert len(set(pages)) == len(pages) and 0 not in pages
        assert all(page <= self.pool.num_pages for page in pages)
        assert len(pages) + self.pool.num_free == self.pool.num_pages


TestPool = Pool.TestCase


@given(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=5, unique=True))
def test_slots_follow_the_pages_in_order(page_size: int, pages: list[int]) -> None:
    pool = PagePool(20, page_size)
    wanted = [page * page_size + i for page in pages for i in range(page_size)]
    assert pool.slots(tuple(pages), CPU).tolist() == wanted
    assert max(wanted) < pool.num_slots


@given(st.integers(0, 100), st.integers(1, 9))
def test_pages_for_is_the_least_that_holds(rows: int, page_size: int) -> None:
    pages = PagePool(1, page_size).pages_for(rows)
    assert pages * page_size >= rows > (pages - 1) * page_size


def filled(num_slots: int = 16) -> PagedCache:
    cache = PagedCache(2, num_slots, 3, 4, torch.float32, CPU)
    cache.data.copy_(torch.arange(cache.data.numel()).view_as(cache.data))
    return cache


SLOTS = st.lists(st.integers(0, 15), unique=True, max_size=16)


@given(SLOTS, st.data())
def test_keep_equals_a_gather_even_when_rows_overlap(source: list[int], data: st.DataObject) -> None:
    target = data.draw(st.lists(st.integers(0, 15), unique=True, min_size=len(source), max_size=len(source)))
    cache, before = filled(), filled().data
    cache.keep(torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    wanted = before.clone()
    for s, t in zip(source, target, strict=True):
        wanted[:, t] = before[:, s]
    assert torch.equal(cache.data, wanted)


@given(SLOTS, st.integers(0, 1))
def test_write_touches_its_layer_and_slots_only(slots: list[int], layer: int) -> None:
    cache, wanted = filled(), filled().data
    rows = -torch.ones(len(slots), 3, 4)
    cache.write(layer, torch.tensor(slots, dtype=torch.int64), rows)
    for slot in slots:
        wanted[layer, slot] = -1
    assert torch.equal(cache.data, wanted)


def test_a_new_cache_is_zero() -> None:
    cache = PagedCache(2, 3, 1, 4, torch.bfloat16, CPU)
    assert not cache.data.any() and cache.nbytes == 2 * 3 * 4 * 2

"""What rank 0 announces is what the others decode: rows of any shape, slots by their handles, ticks while idle."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minieagle.dist.ranks import ALONE, Ranks
from minieagle.models import lockstep
from minieagle.models.cache import PagedCache
from minieagle.models.deepseek import Target
from minieagle.models.lockstep import Lead, Op, Reader, decode_rows, encode_list, encode_rows, follow
from minieagle.models.rows import Rows, Span
from tests.rank_worker import NotedCache, recorded
from tests.strategies import SEEDS, ancestors, parents, shuffled_slots, tiny_target, tokens

CPU = torch.device("cpu")


class Heard(Ranks):
    """Rank 0 of two, whose announcements are kept instead of sent."""

    def __init__(self) -> None:
        super().__init__(ALONE)
        self.size = 2
        self.said: list[list[int]] = []
        self.shared: list[Tensor] = []
        self.spoke = threading.Event()

    def announce(self, numbers: list[int]) -> None:
        self.said.append([int(number) for number in numbers])
        self.spoke.set()

    def share(self, x: Tensor) -> None:
        self.shared.append(x.clone())

    def ops(self) -> list[Op]:
        return [Op(message[0]) for message in self.said if message[0] != Op.TICK]


class Replay(Ranks):
    """A rank that hears what was said."""

    def __init__(self, heard: Heard) -> None:
        super().__init__(ALONE)
        self.rank, self._said, self._shared = 1, iter(heard.said), iter(heard.shared)

    def listen(self) -> list[int]:
        return next(self._said)

    def share(self, x: Tensor) -> None:
        x.copy_(next(self._shared))


# ---- integers


@given(st.lists(st.none() | st.lists(st.integers(-(2**62), 2**62)), max_size=5), st.lists(st.integers()))
def test_lists_come_back_in_order(lists: list[list[int] | None], rest: list[int]) -> None:
    reader = Reader([number for one in lists for number in encode_list(one)] + rest)
    assert [reader.list() for _ in lists] == lists
    assert list(reader.rest()) == rest


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """A chunk or a tree, anywhere in a sequence whose slots lie anywhere."""
    tree = draw(st.none() | parents())
    count = draw(st.integers(1, 8)) if tree is None else len(tree)
    committed, first = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    slots = shuffled_slots(committed + first + count, draw(st.sampled_from([1, 4])), draw(SEEDS))
    return Span(slots, committed, count, None if tree is None else ancestors(tree), first)


@given(st.lists(spans(), min_size=1, max_size=5), SEEDS)
def test_rows_come_back_as_they_were(drawn: list[Span], seed: int) -> None:
    rows = Rows.of(tokens(sum(span.num_rows for span in drawn), seed), drawn)
    handles = [100 + index for index in range(len(drawn))]
    slots = {handle: span.slots for handle, span in zip(handles, drawn, strict=True)}
    reader = Reader([*encode_rows(rows, handles), 7])
    same(decode_rows(reader, slots, CPU), rows)
    assert reader.rest() == [7]


def same(found: Rows, wanted: Rows) -> None:
    assert torch.equal(found.token_ids, wanted.token_ids) and torch.equal(found.positions, wanted.positions)
    assert torch.equal(found.write_slots(), wanted.write_slots())
    for one, other in zip(found.spans, wanted.spans, strict=True):
        assert (one.committed, one.num_rows, one.first) == (other.committed, other.num_rows, other.first)
        assert torch.equal(one.slots, other.slots)
        assert (one.ancestors is None) == (other.ancestors is None)
        assert one.ancestors is None or other.ancestors is None or torch.equal(one.ancestors, other.ancestors)


# ---- a follower does what was done


@contextmanager
def led(heard: Heard) -> Iterator[tuple[Target, Lead]]:
    """The TINY model while a Lead speaks for it."""
    target, lead = tiny_target(), Lead(heard)
    target.lead = lead
    try:
        yield target, lead
        lead.stop()
    finally:
        target.lead = None


def run(target: Target, cache: PagedCache, slots: Tensor, ids: Sequence[int], committed: int = 0) -> None:
    target(Rows.of(torch.tensor(ids), [Span(slots, committed, len(ids))]), cache, boundaries=(1,))


def followed(heard: Heard) -> list[NotedCache]:
    """The caches of a follower that did all of what was said."""
    with recorded() as caches:
        follow(Replay(heard), tiny_target(), None)
    return caches


def pages(seed: int) -> tuple[Tensor, ...]:
    """Slots of several sequences, in any order."""
    return (torch.randperm(60, generator=torch.Generator().manual_seed(seed)) + 1).split(20)


@given(st.lists(st.integers(0, 32), min_size=1, max_size=6), st.integers(1, 4), SEEDS)
def test_a_follower_ends_with_the_caches_of_rank_0(ids: list[int], moved: int, seed: int) -> None:
    heard, (first, second, spare) = Heard(), pages(seed)
    with led(heard) as (target, _):
        cache = target.new_cache(61)
        for slots in (first, second, first):
            run(target, cache, slots, ids)
        cache.keep(first[:moved], spare[:moved])
    (found,) = followed(heard)
    assert torch.equal(found.data, cache.data)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=4, max_size=10), SEEDS)
def test_slots_that_come_and_go_never_get_mixed_up(uses: list[tuple[int, bool]], seed: int) -> None:
    """Sequences end and others take their places, often at the address of the tensors that went."""
    heard, kept, places = Heard(), dict[int, Tensor](), pages(seed)
    with led(heard) as (target, _):
        cache = target.new_cache(61)
        for step, (index, ends) in enumerate(uses):
            slots = kept.setdefault(index, places[(index + step) % 3].roll(step))
            run(target, cache, slots, [step % 33, 5])
            del slots
            if ends:
                del kept[index]
    (found,) = followed(heard)
    assert torch.equal(found.data, cache.data)


def test_slots_are_said_once_and_forgotten_when_their_sequence_has_ended() -> None:
    heard = Heard()
    with led(heard) as (target, _):
        cache = target.new_cache(61)
        for _ in range(3):
            slots = torch.arange(1, 9)
            for committed in (0, 2, 4):
                run(target, cache, slots, [1, 2], committed)
            del slots
    once = [Op.SLOTS, Op.TARGET, Op.TARGET, Op.TARGET]
    assert heard.ops() == [Op.CACHE, *once, Op.FORGET, *once, Op.FORGET, *once, Op.STOP]


def test_a_cache_that_went_is_forgotten_too() -> None:
    heard = Heard()
    with led(heard) as (target, _):
        for _ in range(2):
            cache = target.new_cache(9)
            run(target, cache, torch.arange(1, 9), [1])
            del cache
            gc.collect()
    handle = heard.said[0][1]
    forgotten = [number for message in heard.said if message[0] == Op.FORGET for number in message[1:]]
    assert handle in forgotten and len(followed(heard)) == 2


def test_negative_control_a_handle_among_the_slots_shows_in_a_second_sequence() -> None:
    """Slots that begin with their own handle are consistent, and collide only with other sequences' slots."""
    heard, (first, second, _) = Heard(), pages(0)
    with led(heard) as (target, _lead):
        cache = target.new_cache(61)
        run(target, cache, first, [1, 2, 3])
        run(target, cache, second, [4, 5, 6])
    for message in heard.said:
        if message[0] == Op.SLOTS:
            message.insert(2, message[1])
    assert not torch.equal(followed(heard)[0].data, cache.data)


# ---- ticks and the end


@given(st.integers(0, 2**16), st.integers(1, 3))
def test_ticks_between_any_two_operations_change_nothing(at: int, num: int) -> None:
    heard = Heard()
    with led(heard) as (target, _):
        cache = target.new_cache(61)
        run(target, cache, torch.arange(1, 9), [1, 2, 3])
    at %= len(heard.said)
    heard.said[at:at] = [[int(Op.TICK)]] * num
    assert torch.equal(followed(heard)[0].data, cache.data)


def test_an_idle_rank_0_ticks_and_ticks_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "TICK_S", 0.01)
    heard = Heard()
    lead = Lead(heard)
    before = heard.activity.count
    assert heard.spoke.wait(60) and heard.said[0] == [Op.TICK]
    assert heard.activity.waiting and heard.activity.count == before
    lead.stop()
    assert heard.said[-1] == [Op.STOP]


def test_a_note_reaches_a_follower_with_its_own_states() -> None:
    heard, (slots, *_) = Heard(), pages(0)
    with led(heard) as (target, lead):
        cache = target.new_cache(61)
        run(target, cache, slots, [3, 5])
        lead.note([4, 2])
    notes: list[tuple[list[int], Tensor]] = []
    follow(Replay(heard), tiny_target(), None, lambda numbers, seen: notes.append((list(numbers), seen)))
    ((numbers, captured),) = notes
    assert numbers == [4, 2] and captured.shape[:2] == (2, 1)


def test_the_end_is_said_once() -> None:
    heard = Heard()
    lead = Lead(heard)
    lead.stop()
    assert heard.farewell is not None
    heard.farewell()
    assert heard.ops() == [Op.STOP]


def test_rank_0_rests_between_operations_and_works_within_them() -> None:
    """Others depend on it from an announcement to the gathering of the logits, which this stand-in leaves out."""
    heard = Heard()
    with led(heard) as (target, lead):
        assert heard.activity.waiting
        cache = target.new_cache(9)
        assert heard.activity.waiting
        lead.target(Rows.of(torch.tensor([1]), [Span(torch.arange(1, 9), 0, 1)]), cache, (), None)
        assert not heard.activity.waiting


def test_a_follower_without_a_drafter_says_so() -> None:
    heard = Heard()
    heard.said = [[Op.CACHE, 1, 1, 8]]
    with pytest.raises(AssertionError, match="rank 0 has a drafter"):
        follow(Replay(heard), tiny_target(), None)

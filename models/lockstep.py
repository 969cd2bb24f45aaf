"""Ranks in lockstep: rank 0 decides and says what it does; the others do the same and decide nothing.

The one idea: what rank 0 announces is not a plan to be interpreted but the next operation itself, as integers: run
these rows through the target, move these cache rows, run these rows through the drafter. A follower is a loop that
listens and obeys; it holds weights and caches, and no queue, clock, sampler, tree or tokenizer, so it can't disagree.
The cache slots of a sequence are said once and named by a number afterwards. While rank 0 has nothing to say it ticks,
so that the others know it to be alive.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from minieagle.dist.ranks import Ranks
from minieagle.models.cache import PagedCache
from minieagle.models.deepseek import Target
from minieagle.models.eagle3 import Drafter
from minieagle.models.rows import Rows, Span

TICK_S = 5.0

OnNote = Callable[[Sequence[int], Tensor], None]
"""(what rank 0 noted, this rank's captured states of the forward it is about)."""


class Op(IntEnum):
    """The first integer of every announcement."""

    TICK = 0
    STOP = 1
    SLOTS = 2  # handle, slots...
    FORGET = 3  # handles...
    CACHE = 4  # handle, 0 target or 1 drafter, num_slots
    KEEP = 5  # cache, count, sources..., targets...
    TARGET = 6  # cache, rows, boundaries, logit rows
    DRAFT = 7  # cache, rows, logit rows; states follow as a tensor
    NOTE = 8  # whatever rank 0 says of the target's last forward, for who traces it


def encode_list(numbers: Sequence[int] | None) -> list[int]:
    """A list behind its length; None is length -1."""
    return [-1] if numbers is None else [len(numbers), *numbers]


class Reader:
    """Reads announced integers from left to right. Mutable."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers, self._at = numbers, 0

    def one(self) -> int:
        self._at += 1
        return self._numbers[self._at - 1]

    def some(self, count: int) -> Sequence[int]:
        self._at += count
        return self._numbers[self._at - count : self._at]

    def list(self) -> Sequence[int] | None:
        count = self.one()
        return None if count < 0 else self.some(count)

    def rest(self) -> Sequence[int]:
        return self._numbers[self._at :]


def encode_rows(rows: Rows, handles: Sequence[int]) -> list[int]:
    """Token ids, then each span: the handle of its slots, three numbers, and a tree's ancestors."""
    numbers = [*encode_list(rows.token_ids.tolist()), len(rows.spans)]
    for span, handle in zip(rows.spans, handles, strict=True):
        numbers += [handle, span.committed, span.num_rows, span.first]
        depth = -1 if span.ancestors is None else span.ancestors.shape[1]
        numbers += [depth, *([] if span.ancestors is None else span.ancestors.flatten().tolist())]
    return numbers


def decode_rows(reader: Reader, slots: dict[int, Tensor], device: torch.device) -> Rows:
    """What `encode_rows` wrote."""
    token_ids = torch.tensor(reader.list(), dtype=torch.int64, device=device)
    spans = [_decode_span(reader, slots, device) for _ in range(reader.one())]
    return Rows.of(token_ids, spans)


def _decode_span(reader: Reader, slots: dict[int, Tensor], device: torch.device) -> Span:
    own, committed, num_rows, first = slots[reader.one()], reader.one(), reader.one(), reader.one()
    depth = reader.one()
    if depth < 0:
        return Span(own, committed, num_rows, None, first)
    ancestors = torch.tensor(reader.some(num_rows * depth), dtype=torch.int64, device=device)
    return Span(own, committed, num_rows, ancestors.view(num_rows, depth), first)


class Lead:
    """Rank 0's voice. Mutable: it remembers which slots and caches the others know. `announce` of the ranks is used by
    nobody else; the lock keeps ticks from falling into the middle of an announcement."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._spoke = threading.Event()
        self._stopped = False
        self._handles: dict[int, int] = {}
        self._gone: list[int] = []
        self._count = 0
        ranks.farewell = self.stop
        ranks.activity.rest()
        threading.Thread(target=self._tick, name="minieagle-tick", daemon=True).start()

    def _say(self, op: Op, *numbers: int) -> None:
        with self._ranks.activity, self._lock:
            self._ranks.announce([op, *numbers])
        self._spoke.set()

    def _tick(self) -> None:
        """A connection that breaks here breaks for rank 0's own thread or its watch too, and they say so."""
        with contextlib.suppress(RuntimeError):
            while not self._stopped:
                if not self._spoke.wait(TICK_S):
                    self._say_tick()
                self._spoke.clear()

    def _say_tick(self) -> None:
        """Not activity of rank 0's own thread. Nobody listens behind a STOP."""
        with self._lock:
            if not self._stopped:
                self._ranks.announce([Op.TICK])

    def _new_handle(self, thing: object) -> int:
        """A number for a tensor or cache, as long as it lives."""
        self._count += 1
        key, handle = id(thing), self._count
        self._handles[key] = handle
        weakref.finalize(thing, self._forget, key, handle)
        return handle

    def _forget(self, key: int, handle: int) -> None:
        """Called by the garbage collector, at any moment: only notes what to say later."""
        if self._handles.get(key) == handle:
            del self._handles[key]
        self._gone.append(handle)

    def _slots(self, span: Span) -> int:
        known = self._handles.get(id(span.slots))
        if known is not None:
            return known
        if self._gone:
            gone, self._gone = self._gone, []
            self._say(Op.FORGET, *gone)
        handle = self._new_handle(span.slots)
        self._say(Op.SLOTS, handle, *span.slots.tolist())
        return handle

    def cache(self, cache: PagedCache, *, of_drafter: bool, num_slots: int) -> None:
        """A cache was made."""
        cache.lead = self
        self._say(Op.CACHE, self._new_handle(cache), int(of_drafter), num_slots)

    def keep(self, cache: PagedCache, source: Tensor, target: Tensor) -> None:
        """Rows move in a cache."""
        moves = source.tolist()
        self._say(Op.KEEP, self._handles[id(cache)], len(moves), *moves, *target.tolist())

    def target(self, rows: Rows, cache: PagedCache, boundaries: Sequence[int], logit_rows: Tensor | None) -> None:
        """The target runs; the others depend on rank 0 until it has gathered the logits."""
        self._ranks.activity.work()
        encoded = encode_rows(rows, [self._slots(span) for span in rows.spans])
        wanted = None if logit_rows is None else logit_rows.tolist()
        self._say(Op.TARGET, self._handles[id(cache)], *encoded, *encode_list(list(boundaries)), *encode_list(wanted))

    def drafter(self, rows: Rows, states: Tensor, cache: PagedCache, logit_rows: Tensor | None) -> None:
        """The drafter runs; its states, which rank 0 chose, follow as they are."""
        self._ranks.activity.work()
        encoded = encode_rows(rows, [self._slots(span) for span in rows.spans])
        wanted = None if logit_rows is None else logit_rows.tolist()
        self._say(Op.DRAFT, self._handles[id(cache)], *encoded, *encode_list(wanted))
        self._ranks.share(states.contiguous())

    def note(self, numbers: Sequence[int]) -> None:
        """Something to note about the target's last forward: `on_note` of `follow` understands it."""
        self._say(Op.NOTE, *numbers)

    def stop(self) -> None:
        """The others may go. Said once."""
        with self._ranks.activity, self._lock:
            if not self._stopped:
                self._stopped = True
                self._ranks.announce([Op.STOP])
        self._spoke.set()


def follow(ranks: Ranks, target: Target, drafter: Drafter | None, on_note: OnNote | None = None) -> None:
    """Obey rank 0 until it stops. Weights must be loaded, and of the same model. on_note: what a trace does here."""
    captured = torch.empty(0)
    slots: dict[int, Tensor] = {}
    caches: dict[int, PagedCache] = {}
    while True:
        reader = Reader(ranks.listen())
        op = Op(reader.one())
        if op is Op.STOP:
            return
        if op is Op.SLOTS:
            handle = reader.one()
            slots[handle] = torch.tensor(reader.rest(), dtype=torch.int64, device=ranks.device)
        elif op is Op.FORGET:
            for handle in reader.rest():
                slots.pop(handle, None)
                caches.pop(handle, None)
        elif op is Op.CACHE:
            handle, of_drafter, num_slots = reader.rest()
            model = drafter if of_drafter else target
            assert model is not None, "rank 0 has a drafter and this rank has none"
            caches[handle] = model.new_cache(num_slots)
        elif op is Op.KEEP:
            cache, count = caches[reader.one()], reader.one()
            moves = torch.tensor(reader.rest(), dtype=torch.int64, device=ranks.device)
            cache.keep(moves[:count], moves[count:])
        elif op is Op.TARGET:
            captured = _run_target(reader, target, caches, slots)
        elif op is Op.NOTE and on_note is not None:
            on_note(reader.rest(), captured)
        elif op is Op.DRAFT:
            assert drafter is not None, "rank 0 has a drafter and this rank has none"
            _run_drafter(ranks, reader, drafter, caches, slots)


def _index(numbers: Sequence[int] | None, device: torch.device) -> Tensor | None:
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int64, device=device)


def _run_target(reader: Reader, target: Target, caches: dict[int, PagedCache], slots: dict[int, Tensor]) -> Tensor:
    """The captured states of the forward."""
    cache, rows = caches[reader.one()], decode_rows(reader, slots, target.device)
    boundaries = reader.list() or ()
    return target(rows, cache, boundaries=boundaries, logit_rows=_index(reader.list(), target.device)).captured


def _run_drafter(
    ranks: Ranks, reader: Reader, drafter: Drafter, caches: dict[int, PagedCache], slots: dict[int, Tensor]
) -> None:
    cache, rows = caches[reader.one()], decode_rows(reader, slots, ranks.device)
    logit_rows = _index(reader.list(), ranks.device)
    like = drafter.norm.weight
    states = like.new_empty(rows.token_ids.shape[0], drafter.config.hidden_size)
    ranks.share(states)
    drafter(rows, states, cache, logit_rows=logit_rows)

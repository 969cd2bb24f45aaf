"""CUDA graphs of verify steps: a forward recorded once for a size, then replayed with other rows.

A decode step of a large model is a thousand short kernels, and starting them costs as much as running them. A graph
starts them all at once, but holds addresses and sizes fixed. So a step is padded to the next bucket of rows and of
keys, its tables are copied into the tensors that were recorded, and the outputs are cut back. Padding rows are copies
of the first row: what they write is what it writes, to the same place, and nobody reads what they return. Since a row's
bits depend on no other row, the bucket changes nothing.

Every row brings its own tables, as a span of one row: shared slots up to the last whole key block, and a tail with
its ancestors (models/attention.py). What is recorded and replayed is given by `Record`, so that the logic runs without
a GPU too.

T rows of a step, R of its bucket, S keys of its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from minieagle.models.attention import KEY_BLOCK, NULL_SLOT, AttentionPlan, Group, Keys, tail_slots
from minieagle.models.cache import PagedCache
from minieagle.models.rows import Rows, Span
from minieagle.models.staging import staged

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""Steps of more rows are prompts, whose kernels are long enough."""
SMALLEST_KEYS, MOST_KEYS = 2**8, 2**15
"""Key buckets are the powers of 2 between: attention skips the padding. A longer context would make large tables, and
has kernels that are long enough."""


@dataclass(frozen=True)
class Inputs:
    """All that a recorded forward reads: token_ids, positions, write_slots [R]; shared slots [R, S] and mask [R, 1, S];
    tail slots [R, 1, W] and mask [R, 1, W]."""

    token_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    shared_slots: Tensor
    shared_mask: Tensor
    tail_slots: Tensor
    tail_mask: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())

    def plan(self) -> AttentionPlan:
        shared, tail = Keys(self.shared_slots, self.shared_mask), Keys(self.tail_slots, self.tail_mask)
        return AttentionPlan((Group(None, self.token_ids.shape[0], 1, shared, tail),))


Output = tuple[Tensor, Tensor]
"""Logits [R, vocab] float32 and captured boundaries [R, count, hidden]."""
Body = Callable[[Inputs], Output]
Record = Callable[[Callable[[], Output]], tuple[Callable[[], None], Output]]
"""Runs and records a forward; returns what replays it, and the tensors that every replay fills."""


_pool = cache(torch.cuda.graph_pool_handle)
"""Memory that all graphs share: one runs at a time, and its outputs are read before the next one does."""


def record_cuda(run: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
    """A CUDA graph of `run`. Runs it first beside the graph, so that kernels are compiled and libraries have their
    workspaces."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool()):
        output = run()
    return graph.replay, output


@dataclass(frozen=True)
class _Recorded:
    inputs: Inputs
    replay: Callable[[], None]
    output: Output


class VerifyGraphs:
    """Recorded forwards, one for each cache, bucket and set of boundaries, made when first needed. Mutable."""

    def __init__(self, record: Record = record_cuda) -> None:
        self._record = record
        self._recorded: WeakKeyDictionary[PagedCache, dict[tuple[int, ...], _Recorded]] = WeakKeyDictionary()

    @staticmethod
    def takes(rows: Rows, logit_rows: Tensor | None) -> bool:
        """Whether a step is recorded: logits of every row, as verify and decode steps want them, few rows, and contexts
        of at most MOST_KEYS."""
        longest = max(span.committed for span in rows.spans)
        return logit_rows is None and rows.token_ids.shape[0] <= ROW_BUCKETS[-1] and longest <= MOST_KEYS

    def run(self, rows: Rows, cache: PagedCache, boundaries: Sequence[int], body: Body) -> Output:
        """What body gives for the rows. body: the forward over the tables it is handed, into `cache`."""
        inputs = padded(rows)
        of_cache = self._recorded.setdefault(cache, {})
        key = (*inputs.shared_slots.shape, *boundaries)
        found = of_cache.get(key)
        if found is None:
            replay, output = self._record(lambda: body(inputs))
            of_cache[key] = found = _Recorded(inputs, replay, output)
        for recorded, new in zip(found.inputs.tensors(), inputs.tensors(), strict=True):
            if recorded is not new:
                recorded.copy_(new)
        found.replay()
        num_rows = rows.token_ids.shape[0]
        logits, captured = found.output
        return logits[:num_rows].clone(), captured[:num_rows].clone()  # the next replay overwrites them


def padded(rows: Rows) -> Inputs:
    """The tables of a step, for its bucket."""
    num_rows = next(size for size in ROW_BUCKETS if size >= rows.token_ids.shape[0])
    starts = [span.committed // KEY_BLOCK * KEY_BLOCK for span in rows.spans]
    num_keys = SMALLEST_KEYS
    while num_keys < max(starts):
        num_keys *= 2
    seen = [start for span, start in zip(rows.spans, starts, strict=True) for _ in range(span.num_rows)]
    seen += [seen[0]] * (num_rows - len(seen))
    positions = torch.arange(num_keys, device=rows.token_ids.device)
    shared_mask = _mask(positions < staged(seen, positions.device).view(-1, 1, 1))
    shared = torch.cat([_shared(span, start, num_keys) for span, start in zip(rows.spans, starts, strict=True)])
    tail = _fill(torch.cat([_tail(span) for span in rows.spans]), num_rows).unsqueeze(1)
    token_ids, own_positions, write_slots = (
        _fill(column, num_rows) for column in (rows.token_ids, rows.positions, rows.write_slots())
    )
    return Inputs(
        token_ids, own_positions, write_slots, _fill(shared, num_rows), shared_mask, tail, _mask(tail != NULL_SLOT)
    )


def _mask(allowed: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, float("-inf"))


def _fill(column: Tensor, num_rows: int) -> Tensor:
    """[T, ...] -> [R, ...], ending in copies of the first row."""
    return torch.cat((column, column[:1].expand(num_rows - column.shape[0], *column.shape[1:])))


def _shared(span: Span, start: int, num_keys: int) -> Tensor:
    """[n, S]: the slots of the committed whole blocks, once for each row."""
    slots = F.pad(span.slots[:start], (0, num_keys - start), value=NULL_SLOT)
    return slots.expand(span.num_rows, -1)


TAIL_KEYS = KEY_BLOCK + -(-ROW_BUCKETS[-1] // KEY_BLOCK) * KEY_BLOCK
"""The committed rest of a block, and a chain of as many rows as the largest bucket."""


def _tail(span: Span) -> Tensor:
    """[n, W]: each row's tail; a chain is a tree without branches."""
    if span.ancestors is None:
        own = torch.arange(span.first + span.num_rows, device=span.slots.device).expand(span.num_rows, -1)
        last = torch.arange(span.first, span.first + span.num_rows, device=span.slots.device).unsqueeze(1)
        span = replace(span, ancestors=own.masked_fill(own > last, -1))
    return tail_slots(span, TAIL_KEYS)

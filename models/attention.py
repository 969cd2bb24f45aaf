"""Attention whose result for a row depends on that row and its ancestors only, to the last bit.

Two rules make it so. Sums over keys are cut into blocks of KEY_BLOCK absolute positions, each block is one matrix
product of fixed inner size, and block results are added in order of position; a masked key adds an exact zero. And a
key takes its place by its absolute position, whether it lies in the committed pages or among the rows of this forward:
a tree row gets its own copy of the last block(s), its ancestors filled in at their positions. So plain decoding, a
prompt chunk and a tree verify see the same partial sums. Everything here is float32; the cache may be bf16.

Cost: a tree row copies one or two key blocks per layer (KEY_BLOCK x width numbers); chains share one copy.

Shapes: B spans of a group, n rows each, K key heads, G query heads per key head, S shared keys, W tail keys.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minieagle.models.layers import HAS_TRITON
from minieagle.models.rows import Rows, Span
from minieagle.models.staging import moved, staged

KEY_BLOCK = 64
NULL_SLOT = 0
"""A cache slot that always holds zeros; what a masked key points to."""


@dataclass(frozen=True)
class Keys:
    """Which cache slots are attended to: slots [.., keys] int64 and mask [.., keys] float32 (0 or -inf)."""

    slots: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Group:
    """Spans of equal shape, computed together. rows: their indices in the flat batch, None when they are all of it."""

    rows: Tensor | None
    num_spans: int
    num_rows: int
    shared: Keys | None
    tail: Keys | None


def _whole_blocks(num_keys: int) -> int:
    return -(-num_keys // KEY_BLOCK) * KEY_BLOCK


def _mask(allowed: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, float("-inf"))


def _shared_keys(spans: list[Span], num_keys: list[int], last_seen: Tensor) -> Keys:
    """Keys that all rows of a span read by position: the first num_keys[b] of each; last_seen [B, n] cuts per row."""
    width = _whole_blocks(max(num_keys))
    slots = pad_sequence([span.slots[:n] for span, n in zip(spans, num_keys, strict=True)], True, NULL_SLOT)
    slots = F.pad(slots, (0, width - slots.shape[1]), value=NULL_SLOT)
    return Keys(slots, _mask(torch.arange(width, device=slots.device) <= last_seen.unsqueeze(-1)))


def tail_slots(span: Span, width: int) -> Tensor:
    """[n, width] slots of one tree's own last block(s): the committed rest of the block, then each row's ancestors."""
    assert span.ancestors is not None
    start = span.committed // KEY_BLOCK * KEY_BLOCK
    slots = torch.full((span.num_rows, width), NULL_SLOT, dtype=torch.int64, device=span.slots.device)
    rest = span.committed - start
    slots[:, :rest] = span.slots[start : span.committed]
    mine = span.slots[span.committed :]
    own = slots[:, rest : rest + span.ancestors.shape[1]]
    own.copy_(torch.where(span.ancestors >= 0, mine[span.ancestors], NULL_SLOT))
    return slots


def _chain_group(spans: list[Span]) -> tuple[Keys | None, Keys | None]:
    seen = torch.stack([span.positions() for span in spans])
    return _shared_keys(spans, [span.committed + span.num_rows for span in spans], seen), None


def _tree_group(spans: list[Span]) -> tuple[Keys | None, Keys | None]:
    starts = [span.committed // KEY_BLOCK * KEY_BLOCK for span in spans]
    shared = None
    if max(starts):
        seen = staged(starts, spans[0].slots.device).sub(1).unsqueeze(1)
        shared = _shared_keys(spans, starts, seen.expand(-1, spans[0].num_rows))
    deepest = [span.committed - start + span.ancestors.shape[1] for span, start in zip(spans, starts, strict=True)]  # type: ignore[union-attr]
    width = _whole_blocks(max(deepest))
    slots = torch.stack([tail_slots(span, width) for span in spans])
    return shared, Keys(slots, _mask(slots != NULL_SLOT))


def _group(spans: list[Span], rows: Tensor | None) -> Group:
    shared, tail = _chain_group(spans) if spans[0].ancestors is None else _tree_group(spans)
    return Group(rows, len(spans), spans[0].num_rows, shared, tail)


class Plan(Protocol):
    """How the rows of one forward attend; made once and used by every layer."""

    def attend(self, q: Tensor, cache: Tensor, *, key_width: int, value_start: int) -> Tensor:
        """As `attend` below."""
        ...


@dataclass(frozen=True)
class AttentionPlan:
    """Index tables of one forward."""

    groups: tuple[Group, ...]

    @staticmethod
    def of(rows: Rows) -> AttentionPlan:
        members: dict[tuple[bool, int], list[int]] = defaultdict(list)
        for index, span in enumerate(rows.spans):
            members[span.ancestors is None, span.num_rows].append(index)
        if len(members) == 1:
            return AttentionPlan((_group(list(rows.spans), None),))
        starts = [0]
        for span in rows.spans:
            starts.append(starts[-1] + span.num_rows)
        groups = []
        for indices in members.values():
            flat = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in indices])
            groups.append(_group([rows.spans[i] for i in indices], moved(flat, rows.token_ids.device)))
        return AttentionPlan(tuple(groups))

    def attend(self, q: Tensor, cache: Tensor, *, key_width: int, value_start: int) -> Tensor:
        return attend(q, cache, self, key_width=key_width, value_start=value_start)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Cached rows at slots [N, keys] as [N * K, keys, width + 1] float32; the last column is 1, so that the product
    with the values also sums the weights."""
    found = cache.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])
    ones = found.new_empty(*found.shape[:-1], found.shape[-1] + 1, dtype=torch.float32)
    ones[..., :-1] = found
    ones[..., -1] = 1.0
    return ones.transpose(1, 2).reshape(-1, slots.shape[1], ones.shape[-1])


def _in_fours(x: Tensor) -> Tensor:
    """x [N, m, D] with zero rows up to a multiple of 4: CPU fp32 products of fewer than 4 rows, or of fewer than 12
    that two threads share, take kernels that round otherwise. (So do those of fewer than 12 columns, at any number of
    rows; no model is that narrow.)"""
    return F.pad(x, (0, 0, 0, -x.shape[1] % 4)) if x.shape[1] % 4 else x


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """q [N, m, D] times keys [N, S, D] -> [N, m, S]."""
    return torch.bmm(_in_fours(q), keys.transpose(1, 2))[:, : q.shape[1]]


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """weights [N, m, S] times values [N, S, R] -> [N, m, R], summed block by block in order of position."""
    n, m, num_keys = weights.shape
    blocks = num_keys // KEY_BLOCK
    cut = weights.view(n, m, blocks, KEY_BLOCK).transpose(1, 2).reshape(n * blocks, m, KEY_BLOCK)
    parts = torch.bmm(_in_fours(cut), values.reshape(n * blocks, KEY_BLOCK, -1)).view(n, blocks, -1, values.shape[-1])[
        :, :, :m
    ]
    total = parts[:, 0]
    for block in range(1, blocks):
        total = total + parts[:, block]
    return total


def _attend_group(q: Tensor, cache: Tensor, group: Group, key_width: int, value_start: int) -> Tensor:
    """q [B * n, H, D] -> [B * n, H, R]: scores of the shared keys and of each row's own tail, one softmax over both."""
    b, n, k = group.num_spans, group.num_rows, cache.shape[1]
    g = q.shape[1] // k

    def by_span(x: Tensor) -> Tensor:  # rows [B * n, K * G, ...] -> [B * K, n * G, ...]
        return x.view(b, n, k, g, -1).transpose(1, 2).reshape(b * k, n * g, -1)

    def by_row(x: Tensor) -> Tensor:  # [B * K, n * G, ...] -> rows [B * n * K, G, ...]
        return x.view(b, k, n, g, -1).transpose(1, 2).reshape(b * n * k, g, -1)

    if group.shared is not None:
        shared = _gather(cache, group.shared.slots)
        scores = _scores(by_span(q), shared[..., :key_width]).view(b, k, n, g, -1)
        scores = scores.add_(group.shared.mask[:, None, :, None]).view(b * k, n * g, -1)
        peak = scores.amax(-1, keepdim=True)
        if group.tail is None:
            total = _weighted_sum(scores.sub_(peak).exp_(), shared[..., value_start:])
            return _normalised(by_row(total)).view(q.shape[0], q.shape[1], -1)
    else:
        shared = scores = peak = None

    assert group.tail is not None, "a group without keys"
    tail = _gather(cache, group.tail.slots.flatten(0, 1))
    own = _scores(q.reshape(b * n * k, g, -1), tail[..., :key_width]).view(b * n, k, g, -1)
    own = own.add_(group.tail.mask.flatten(0, 1)[:, None, None]).view(b * n * k, g, -1)
    own_peak = own.amax(-1, keepdim=True)
    total = None
    if shared is not None and scores is not None and peak is not None:
        own_peak = torch.maximum(own_peak, by_row(peak))
        weights = scores.sub_(by_span(own_peak.view(b * n, -1, 1))).exp_()
        total = by_row(_weighted_sum(weights, shared[..., value_start:]))
    weights = own.sub_(own_peak).exp_()
    for start in range(0, weights.shape[-1], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        part = _weighted_sum(weights[..., block], tail[:, block, value_start:])
        total = part if total is None else total + part
    assert total is not None, "a tail has at least one block"
    return _normalised(total).view(q.shape[0], q.shape[1], -1)


def _attend_on_gpu(q: Tensor, cache: Tensor, group: Group, key_width: int, value_start: int) -> Tensor:
    """As _attend_group: a library's products there round by the number of rows."""
    # Triton comes with CUDA builds of torch only
    from minieagle.models.row_attention import attend_rows

    shared, tail = ((keys.slots, keys.mask) if keys is not None else None for keys in (group.shared, group.tail))
    return attend_rows(q, cache, shared, tail, rows_a_span=group.num_rows, key_width=key_width, value_start=value_start)


def _normalised(total: Tensor) -> Tensor:
    return total[..., :-1] / total[..., -1:]


def attend(q: Tensor, cache: Tensor, plan: AttentionPlan, *, key_width: int, value_start: int) -> Tensor:
    """Softmax attention of scaled queries over one layer's cache.

    q: [T, H, key_width] float32, softmax scale applied; cache: [num_slots, K, width], a key in [:key_width], its value
    in [value_start:] (they may overlap, as in MLA). Returns [T, H, width - value_start] float32.
    """
    attend_group = _attend_on_gpu if q.is_cuda and HAS_TRITON else _attend_group
    if len(plan.groups) == 1:
        return attend_group(q, cache, plan.groups[0], key_width, value_start)
    out = q.new_empty(q.shape[0], q.shape[1], cache.shape[-1] - value_start)
    for group in plan.groups:
        out[group.rows] = attend_group(q[group.rows], cache, group, key_width, value_start)
    return out

"""The attention of models/attention.py on a GPU: one Triton kernel with the same rules, so with the same promise.

One program takes one row and up to HEADS query heads of one key head, and walks that row's keys in order of absolute
position, KEYS at a time: the shared blocks, then the row's own tail. Softmax is online: a running peak, and sums that
are scaled when it rises. What a program computes depends on its own row's keys and on nothing else; a step without a
visible key is skipped, so padded tables cost little and change nothing.

A row's keys are not shared out over programs, which costs time at long contexts (a decode step of few rows leaves
processors idle). Products are float32 in precision: three TF32 products each, as exact as float32 where keys are
bfloat16. Imported only where tensors lie on a GPU (see models/tiled_linear.py).

Shapes as in models/attention.py.
"""

# Kernels are read by Triton's compiler; as plain Python their types make no sense.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS = 16
CHUNK = 64
KEYS, WARPS = 32, 8
"""Keys of one step, a divisor of KEY_BLOCK so that steps too lie at absolute positions; with so many warps the sums
[HEADS, 512] and a step's values [KEYS, 512] stay in registers, by the compiler's own count."""


@triton.jit
def _block(
    q,
    cache,
    slots,
    visible,
    peak,
    norm,
    total,
    heads,
    is_head,
    q_head,
    cache_slot,
    KEY_WIDTH: tl.constexpr,
    VALUE_START: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One step's keys: scores, the risen peak, and their share of the sums."""
    scores = tl.zeros((HEADS, KEYS), tl.float32)
    keys = cache + slots * cache_slot
    for start in range(0, KEY_WIDTH, CHUNK):
        inner = start + tl.arange(0, CHUNK)
        is_inner = inner < KEY_WIDTH
        left = tl.load(
            q + heads[:, None] * q_head + inner[None, :], mask=is_head[:, None] & is_inner[None, :], other=0.0
        )
        right = tl.load(keys[None, :] + inner[:, None], mask=visible[None, :] & is_inner[:, None], other=0.0)
        scores = tl.dot(left, right.to(tl.float32), scores, input_precision="tf32x3")
    scores = tl.where(visible[None, :], scores, float("-inf"))
    risen = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp(scores - risen[:, None])
    fall = tl.exp(peak - risen)
    place = tl.arange(0, VALUE_TILE)
    values = tl.load(
        keys[:, None] + VALUE_START + place[None, :],
        mask=visible[:, None] & (place < VALUE_WIDTH)[None, :],
        other=0.0,
    )
    total = tl.dot(weights, values.to(tl.float32), total * fall[:, None], input_precision="tf32x3")
    return risen, norm * fall + tl.sum(weights, 1), total


# Triton compiles another kernel where a count is 1 or a multiple of 16: not by the number of rows or keys.
@triton.jit(do_not_specialize=["num_shared", "num_tail", "rows_a_span"])
def _attend(
    q,
    cache,
    out,
    shared_slots,
    shared_mask,
    tail_slots,
    tail_mask,
    num_shared,
    num_tail,
    rows_a_span,
    heads_a_key,
    q_row,
    q_head,
    cache_slot,
    cache_head,
    KEY_WIDTH: tl.constexpr,
    VALUE_START: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One row, HEADS query heads of one key head. Tables: shared slots [B, S] and mask [B * n, S], tail slots and mask
    [B * n, W]."""
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    of_key = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = of_key < heads_a_key
    heads = key_head * heads_a_key + of_key
    mine, keys_at = q + row * q_row, cache + key_head * cache_head
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    norm = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, VALUE_TILE), tl.float32)
    for start in range(0, num_shared, KEYS):
        places = start + tl.arange(0, KEYS)
        visible = tl.load(shared_mask + row * num_shared + places) == 0.0
        if tl.max(visible.to(tl.int32), 0) > 0:
            slots = tl.load(shared_slots + (row // rows_a_span) * num_shared + places)
            peak, norm, total = _block(
                mine, keys_at, slots, visible, peak, norm, total, heads, is_head, q_head, cache_slot,
                KEY_WIDTH, VALUE_START, VALUE_WIDTH, VALUE_TILE, CHUNK, HEADS, KEYS,
            )  # fmt: skip
    for start in range(0, num_tail, KEYS):
        places = start + tl.arange(0, KEYS)
        visible = tl.load(tail_mask + row * num_tail + places) == 0.0
        if tl.max(visible.to(tl.int32), 0) > 0:
            slots = tl.load(tail_slots + row * num_tail + places)
            peak, norm, total = _block(
                mine, keys_at, slots, visible, peak, norm, total, heads, is_head, q_head, cache_slot,
                KEY_WIDTH, VALUE_START, VALUE_WIDTH, VALUE_TILE, CHUNK, HEADS, KEYS,
            )  # fmt: skip
    place = tl.arange(0, VALUE_TILE)
    end = out + (row * (tl.num_programs(2) * heads_a_key) + heads[:, None]) * VALUE_WIDTH + place[None, :]
    tl.store(end, total / norm[:, None], mask=is_head[:, None] & (place < VALUE_WIDTH)[None, :])


Table = tuple[Tensor, Tensor]
"""Slots and mask of keys, as models/attention.py's `Keys`."""


def attend_rows(
    q: Tensor,
    cache: Tensor,
    shared: Table | None,
    tail: Table | None,
    *,
    rows_a_span: int,
    key_width: int,
    value_start: int,
) -> Tensor:
    """Attention of spans of equal shape: q [B * n, H, key_width] float32 and one layer's cache [num_slots, K, width] ->
    [B * n, H, width - value_start] float32. shared: slots [B, S], mask [B, n, S]; tail: both [B, n, W]."""
    num_rows, num_heads, _ = q.shape
    _, num_keys, width = cache.shape
    value_width = width - value_start
    assert q.stride(2) == 1 and cache.stride(2) == 1, "rows are read as they lie"
    out = q.new_empty(num_rows, num_heads, value_width)
    tables = [(out, out, 0) if table is None else _read(*table) for table in (shared, tail)]
    each = num_heads // num_keys
    _attend[num_rows, triton.cdiv(each, HEADS), num_keys](
        q,
        cache,
        out,
        *tables[0][:2],
        *tables[1][:2],
        tables[0][2],
        tables[1][2],
        rows_a_span,
        each,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        KEY_WIDTH=key_width,
        VALUE_START=value_start,
        VALUE_WIDTH=value_width,
        VALUE_TILE=max(16, triton.next_power_of_2(value_width)),
        CHUNK=CHUNK,
        HEADS=HEADS,
        KEYS=KEYS,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return out


def _read(slots: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, int]:
    return slots.contiguous(), mask.contiguous(), slots.shape[-1]

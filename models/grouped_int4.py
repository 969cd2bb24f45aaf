"""One product over all routed experts that a step uses, on a GPU: a Triton kernel that reads INT4 words as published.

Rows are sorted by expert into tiles of ROWS, each with one expert, the last of every expert padded. Which expert a tile
has is a table on the device, so the host never waits to learn it: the grid has as many programs as there can be tiles,
and those without one leave at once. Words are unpacked in registers; a code times a bfloat16 has no rounding, the sum
over a group is float32, and the group's scale is applied to that sum. Tiles are fixed and a program runs through the
whole inner dimension in order, so a row's bits don't depend on how many rows share its expert.

Experts without INT4 take the same path with plain weights. Imported only where tensors lie on a GPU (see
models/tiled_linear.py).

T rows, A experts a row, P = T * A pairs, E experts.
"""

# Kernels are read by Triton's compiler; as plain Python their types make no sense.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minieagle.models.int4 import WORD
from minieagle.models.tiled_linear import COLUMNS, INNER, ROWS, dot_dtype, result_dtype


@dataclass(frozen=True)
class Tiles:
    """Which pairs each tile computes: expert [M] int64, E or more where a tile is not needed; pairs [M, ROWS] int64, P
    where a row is padding. Pair p is row p // A's choice p % A."""

    expert: Tensor
    pairs: Tensor

    @staticmethod
    def of(ids: Tensor, num_experts: int) -> Tiles:
        """ids [T, A] int64, each row's experts; E for one that is not computed here. The number of tiles depends on T
        and A only, and nothing here makes the host wait."""
        flat = ids.flatten()
        num_pairs, device = flat.shape[0], flat.device
        num_tiles = num_pairs // ROWS + min(num_pairs, num_experts + 1)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        ends = (counts + (ROWS - 1)).div(ROWS, rounding_mode="floor").cumsum(0)  # in tiles
        order = flat.argsort(stable=True)
        expert = flat[order]
        first_pair, first_tile = counts.cumsum(0) - counts, torch.nn.functional.pad(ends, (1, -1))
        within = torch.arange(num_pairs, device=device) - first_pair[expert]
        pairs = torch.full((num_tiles * ROWS,), num_pairs, dtype=torch.int64, device=device)
        pairs.scatter_(0, first_tile[expert] * ROWS + within, order)
        owner = torch.searchsorted(ends, torch.arange(num_tiles, device=device), right=True)
        return Tiles(owner, pairs.view(num_tiles, ROWS))


# Triton compiles another kernel where a count is 1 or a multiple of 16: not by the number of rows.
@triton.jit(do_not_specialize=["num_pairs"])
def _grouped(
    x,
    weight,
    scale,
    out,
    tile_expert,
    tile_pairs,
    num_pairs,
    num_experts,
    num_columns,
    num_inner,
    x_row,
    PAIRS_A_ROW: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile [ROWS, COLUMNS]. weight [E, columns, inner / WORD] words or, WORD 1, numbers; scale [E, columns,
    inner / INNER]; out [P, columns]."""
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < num_experts:
        pairs = tl.load(tile_pairs + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        is_row, is_column = pairs < num_pairs, columns < num_columns
        left_rows = x + (pairs // PAIRS_A_ROW)[:, None] * x_row
        line = expert * num_columns + columns
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, num_inner, INNER):
            inner = start + tl.arange(0, INNER)
            is_inner = inner < num_inner
            left = tl.load(left_rows + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
            place = weight + line[None, :] * (num_inner // WORD) + (inner // WORD)[:, None]
            right = tl.load(place, mask=is_column[None, :] & is_inner[:, None], other=0)
            if PACKED:
                codes = ((right >> ((inner % WORD) * 4)[:, None]) & 15) - 8
                part = tl.dot(left.to(DOT), codes.to(DOT), input_precision="ieee")
                group = scale + line * (num_inner // INNER) + start // INNER
                total += part * tl.load(group, mask=is_column, other=0.0).to(tl.float32)[None, :]
            else:
                total = tl.dot(left.to(DOT), right.to(DOT), total, input_precision="ieee")
        place = out + pairs[:, None] * num_columns + columns[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def grouped_product(
    x: Tensor, weight: Tensor, scale: Tensor | None, tiles: Tiles, *, num_pairs: int, pairs_a_row: int
) -> Tensor:
    """Each pair's row of x times its expert's weight -> [P, out] in x's dtype.

    x: [P / pairs_a_row, in]; weight: [E, out, in / 8] int32 words with scale [E, out, in / group], group a power of 2
    from 16 on, or plain [E, out, in] in x's dtype without a scale.
    """
    num_experts, num_columns, width = weight.shape
    word = WORD if scale is not None else 1
    inner = width * word
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows are read as they lie"
    out = x.new_zeros(num_pairs, num_columns, dtype=result_dtype(x))  # a pair without a tile stays zero
    _grouped[tiles.pairs.shape[0], triton.cdiv(num_columns, COLUMNS)](
        x,
        weight,
        weight if scale is None else scale,
        out,
        tiles.expert,
        tiles.pairs,
        num_pairs,
        num_experts,
        num_columns,
        inner,
        x.stride(0),
        PAIRS_A_ROW=pairs_a_row,
        WORD=word,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        INNER=INNER if scale is None else inner // scale.shape[2],
        PACKED=scale is not None,
        DOT=dot_dtype(x),
        enable_fp_fusion=True,
    )
    return out.to(x.dtype)

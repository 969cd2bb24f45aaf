"""Matrix products on a GPU whose result for a row does not depend on the number of rows: one Triton kernel.

A library picks its kernel, its tile and its split of the inner dimension by the shape of the whole product, so that a
row's last bits change with the rows beside it. Here all of that is fixed: ROWS rows a tile, the last one padded, and
one program that runs through the whole inner dimension in order, INNER columns at a time, with a float32 sum. The price
is paid by long prompts, where taller tiles would read a weight less often; a decode step reads every weight once in
either case.

Imported only where tensors lie on a GPU: Triton comes with CUDA builds of torch. It also runs in Triton's interpreter,
which neither multiplies bfloat16 nor rounds to it: there operands are widened first, which changes no product, and the
result is rounded outside.
"""

# Kernels are read by Triton's compiler; as plain Python their types make no sense.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
COLUMNS = 32
INNER = 128


# Triton compiles another kernel where a count is 1 or a multiple of 16: not by the number of rows.
@triton.jit(do_not_specialize=["num_rows", "x_batch", "out_batch"])
def _product(
    x,
    weight,
    out,
    num_rows,
    num_columns,
    num_inner,
    x_batch,
    x_row,
    x_inner,
    weight_batch,
    weight_column,
    weight_inner,
    out_batch,
    out_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile [ROWS, COLUMNS] of one product of a batch. Arguments after the sizes are strides in elements."""
    batch = tl.program_id(2).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_inner, INNER):
        inner = start + tl.arange(0, INNER)
        left = tl.load(
            x + batch * x_batch + rows[:, None] * x_row + inner[None, :] * x_inner,
            mask=(rows < num_rows)[:, None] & (inner < num_inner)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + batch * weight_batch + columns[None, :] * weight_column + inner[:, None] * weight_inner,
            mask=(columns < num_columns)[None, :] & (inner < num_inner)[:, None],
            other=0.0,
        )
        # "ieee": plain float32 products, never TF32; says nothing where operands are bfloat16.
        total = tl.dot(left.to(DOT), right.to(DOT), total, input_precision="ieee")
    place = out + batch * out_batch + rows[:, None] * out_row + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def dot_dtype(x: Tensor) -> tl.dtype:
    """What operands are multiplied in: their own dtype on a GPU, float32 in the interpreter."""
    return tl.bfloat16 if x.is_cuda and x.dtype == torch.bfloat16 else tl.float32


def result_dtype(x: Tensor) -> torch.dtype:
    """What a kernel stores: x's dtype on a GPU, float32 in the interpreter."""
    return x.dtype if x.is_cuda else torch.float32


def _launch(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x [B, T, in] times weight [B, out, in] into out [B, T, out], all of any strides but out's last, which is 1."""
    (batch, num_rows, num_inner), num_columns = x.shape, weight.shape[1]
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS), batch)
    sizes = num_rows, num_columns, num_inner
    strides = *x.stride(), *weight.stride(), *out.stride()[:2]
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "INNER": INNER}
    _product[grid](x, weight, out, *sizes, *strides, **tile, DOT=dot_dtype(x), enable_fp_fusion=True)


def tiled_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in] -> [T, out] in x's dtype, float32 sums rounded once."""
    assert x.dtype == weight.dtype, f"{x.dtype} times {weight.dtype}"
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=result_dtype(x))
    _launch(x[None], weight[None], out[None])
    return out.to(x.dtype)


def tiled_per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, a] times weight [H, a, b] -> [T, H, b] in x's dtype."""
    assert x.dtype == weight.dtype, f"{x.dtype} times {weight.dtype}"
    out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[2], dtype=result_dtype(x))
    _launch(x.transpose(0, 1), weight.transpose(1, 2), out.transpose(0, 1))
    return out.to(x.dtype)

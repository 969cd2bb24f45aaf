"""FP8 weights with one scale per block, as DeepSeek-V3, R1, V3.1 and Kimi-K2-Instruct ship them.

On disk: `weight` [out, in] float8_e4m3fn, and `weight_scale_inv` [ceil(out / rows), ceil(in / columns)], most often in
float32, one scale per block of rows x columns (128 x 128 in every published model). The weight is fp8 * scale, despite
the name. The last block of a dimension is cut, not stretched: 576 rows have 5 scales, and the last serves 64 rows.

Dequantised once at load, which costs the memory of plain weights: no product here reads FP8. A rank's piece of a weight
need not begin where a block does: what is read of the scales is those of the blocks that it touches.
Source: the DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.2, and its published weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minieagle.models.headers import CheckpointError

SCALE = "_scale_inv"  # behind the weight's name
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)  # e8m0: powers of two (scale_fmt ue8m0)


def dequantize(
    weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype, *, first: tuple[int, int] = (0, 0)
) -> Tensor:
    """weight [out, in] float8_e4m3fn times the scale of its block, the fp32 product rounded once to dtype. A band of
    rows at a time, since float32 copies are four times as large.

    first: row and column of the whole weight at which this piece of it begins; scale holds the blocks that it touches.
    """
    row, column = first[0] % block[0], first[1] % block[1]
    columns = scale.float().repeat_interleave(block[1], dim=1)[:, column : column + weight.shape[1]]
    out = torch.empty(weight.shape, dtype=dtype)
    for index, factor in enumerate(columns):
        band = slice(max(index * block[0] - row, 0), (index + 1) * block[0] - row)
        out[band] = weight[band].float() * factor
    return out


def touched(scale: Tensor, block: tuple[int, int], dim: int, start: int, length: int) -> Tensor:
    """The scales of the blocks that rows (dim 0) or columns (dim 1) start..start+length of the weight touch."""
    begin = start // block[dim]
    return scale.narrow(dim, begin, -(-(start + length) // block[dim]) - begin)


def check_scaled(
    name: str, weight: Tensor, scale: Tensor, block: tuple[int, int] | None, *, first: tuple[int, int] = (0, 0)
) -> tuple[int, int]:
    """The block, when weight and scale are what dequantize takes. Raises CheckpointError naming what is not."""
    if block is None:
        raise CheckpointError(f"{name}{SCALE} is there, but config.json states no weight_block_size")
    if weight.dtype != torch.float8_e4m3fn or scale.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{name} is stored as {weight.dtype} with {scale.dtype} scales; only float8_e4m3fn with scales of one of "
            f"{[str(dtype) for dtype in _SCALE_DTYPES]} is read"
        )
    wanted = [-(-(start % step + size) // step) for start, size, step in zip(first, weight.shape, block, strict=True)]
    if list(scale.shape) != wanted:
        raise CheckpointError(
            f"{name}{SCALE} has shape {list(scale.shape)}; {list(weight.shape)} in blocks of {list(block)} has {wanted}"
        )
    return block

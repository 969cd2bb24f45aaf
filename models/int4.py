"""INT4 weights in the compressed-tensors `pack-quantized` layout, as Kimi-K2-Thinking and K2.5 ship their experts.

On disk: `weight_packed` [out, in / 8] int32 holds eight columns a word, column 8j + k in bits 4k..4k+3 of word j, each
as q + 8 with q in [-8, 7]; `weight_scale` [out, in / group] holds one scale per `group` input columns; `weight_shape`
is (out, in). The weight is q * scale. In memory the codes stay 4 bits wide: PyTorch's own INT4 product where it takes
the shape, the packed words and a plain dequantise-then-multiply everywhere else.

PyTorch has one such product for CPUs and one for GPUs (bfloat16 only; aten/src/ATen/native/cuda/int4mm.cu), each with
its own layout of the codes. Both compute (q * scale + zero) rounded to the input's dtype, times x, with float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from minieagle.models.layers import HAS_TRITON, ROW_TILE, pad_rows, tiled_product

WORD = 8  # 4-bit codes in an int32
CPU_ROWS = 64  # PyTorch's layout for CPUs interleaves rows within blocks of 64
GROUP_SIZES = (32, 64, 128, 256)
"""Columns that share a scale, where PyTorch's products take them."""
_CPU_PRODUCT = torch.ops.aten._weight_int4pack_mm_for_cpu.default
_GPU_PRODUCT = torch.ops.aten._weight_int4pack_mm.default
_GPU_LAYOUT = torch.ops.aten._convert_weight_to_int4pack.default


def pack(codes: Tensor) -> Tensor:
    """q [out, in] integers in [-8, 7], in % 8 == 0 -> packed words [out, in / 8] int32."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=codes.device)
    words = ((codes.to(torch.int64) + 8).unflatten(-1, (-1, WORD)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(packed: Tensor) -> Tensor:
    """Packed words [out, in / 8] int32 -> q [out, in] int32 in [-8, 7]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2) - 8


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> codes [out, in] int32 and scales [out, in / group_size] in the weight's dtype.

    The library's symmetric rule: scale = amax / 7.5 (rounded to the stored dtype first), round to nearest, clamp.
    """
    groups = weight.float().unflatten(-1, (-1, group_size))
    scale = (groups.abs().amax(-1) / 7.5).to(weight.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    codes = (groups / safe.unsqueeze(-1)).round().clamp(-8, 7)
    return codes.flatten(-2).to(torch.int32), scale


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed words and scales -> weight [out, in], the fp32 product rounded once to dtype."""
    codes = unpack(packed).unflatten(-1, (scale.shape[-1], -1))
    return (codes.float() * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


# ---- PyTorch's layout for CPUs


def _cpu_takes(packed: Tensor, scale: Tensor) -> bool:
    return packed.device.type == "cpu" and scale.shape[0] % 16 == 0 and _group_size(packed, scale) in GROUP_SIZES


def _group_size(packed: Tensor, scale: Tensor) -> int:
    return packed.shape[1] * WORD // scale.shape[1]


def _cpu_codes(parts: Sequence[Tensor]) -> Tensor:
    """Packed words [rows, in / 8] of each part, one below the other -> codes [out, in / 2] uint8."""
    heights = [part.shape[0] for part in parts]
    codes = torch.empty(sum(heights), parts[0].shape[1] * WORD // 2, dtype=torch.uint8)
    if _interleaves() and all(height % CPU_ROWS == 0 for height in heights):
        for part, out in zip(parts, codes.split(heights), strict=True):
            _interleave(part, out)
    else:
        _convert(torch.cat(list(parts)), codes)
    return codes


def _convert(packed: Tensor, out: Tensor) -> None:
    """By PyTorch's own conversion. Some rows at a time: unpacked codes are 8 times as large, and blocks of that size
    amid lasting ones leave holes that peak memory pays for."""
    for start in range(0, packed.shape[0], CPU_ROWS):
        rows = slice(start, start + CPU_ROWS)
        out[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack(packed[rows]) + 8, 1)


_LOW_HALVES = 0x0F0F0F0F0F0F0F0F


def _interleave(packed: Tensor, out: Tensor) -> None:
    """The same by a rearrangement of half bytes, 16 at a time, in a thirtieth of the time: of each 64 rows, column
    after column, 32 bytes with row i in the low and row i + 32 in the high half."""
    low, high = packed.view(torch.int64).view(-1, 2, CPU_ROWS // 2, packed.shape[1] // 2).unbind(1)
    swapped = low >> 4  # the high halves of `low`, to change places with the low halves of `high`
    swapped ^= high
    swapped &= _LOW_HALVES
    odd = high ^ swapped
    even = low ^ (swapped << 4)
    columns = out.view(-1, packed.shape[1] * WORD // 2, 2, CPU_ROWS // 2)
    columns[:, :, 0] = even.view(torch.uint8).transpose(1, 2)
    columns[:, :, 1] = odd.view(torch.uint8).transpose(1, 2)


@cache
def _interleaves() -> bool:
    """Whether this processor's layout is that of `_interleave`; others use other blocks."""
    sample = torch.arange(CPU_ROWS * 8, dtype=torch.int64).mul(0x9E3779B1).to(torch.int32).view(CPU_ROWS, 8)
    mine, theirs = (torch.empty(CPU_ROWS, 8 * WORD // 2, dtype=torch.uint8) for _ in range(2))
    _interleave(sample, mine)
    _convert(sample, theirs)
    return torch.equal(mine, theirs)


# ---- PyTorch's layout for GPUs


def _on_gpu(packed: Tensor) -> bool:
    """Whether it lies on a GPU that multiplies bfloat16."""
    return packed.is_cuda and torch.cuda.get_device_capability(packed.device) >= (8, 0)


def _gpu_takes(packed: Tensor, scale: Tensor) -> bool:
    fits = packed.shape[0] % 8 == 0 and _group_size(packed, scale) in GROUP_SIZES and scale.dtype == torch.bfloat16
    return fits and _on_gpu(packed)


def _gpu_codes(packed: Tensor) -> Tensor:
    """Packed words [out, in / 8] -> [out / 8, in / (16 tiles), 32, tiles / 2] int32. The conversion reads a row's even
    columns from the high half bytes, words have them in the low."""
    halves = packed.view(torch.uint8)
    tiles = next(tiles for tiles in (8, 4, 2) if packed.shape[1] * WORD % (16 * tiles) == 0)  # of 16 columns, in a load
    return _GPU_LAYOUT((halves << 4) | (halves >> 4), tiles)


def _scales_and_zeros(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [out, groups] -> [groups, out, 2]: either product wants a zero point beside each."""
    pairs = scale.new_zeros(*scale.t().shape, 2, dtype=dtype)
    pairs[..., 0] = scale.t()
    return pairs


class Int4Linear(nn.Module):
    """x [T, in] -> [T, out] with a 4-bit weight. A row's bits don't depend on T.

    On a CPU PyTorch's product serves from the start. On a GPU the words stay as published, for the one kernel over all
    experts (models/grouped_int4.py); where that doesn't serve, `pack` turns to PyTorch's product.
    """

    def __init__(
        self, packed: Tensor | Sequence[Tensor], scale: Tensor, dtype: torch.dtype, *, native: bool = True
    ) -> None:
        """packed: words [out, in / 8], or several tensors of them to be put one below the other; scale [out, groups].
        Both are copied. native: False for the words and the reference path."""
        super().__init__()
        parts = [packed] if isinstance(packed, Tensor) else list(packed)
        self.out_features = scale.shape[0]
        self.group_size = _group_size(parts[0], scale)
        self.product: Callable[[Tensor, Tensor, int, Tensor], Tensor] | None = None
        if native and _cpu_takes(parts[0], scale):
            self.codes, self.scale = _cpu_codes(parts), _scales_and_zeros(scale, dtype)
            self.product = _CPU_PRODUCT
        else:
            self.codes, self.scale = torch.cat(parts), scale.clone()

    def pack(self) -> None:
        """On a GPU: PyTorch's product from now on, if it takes the shape. A row has the same bits in any batch there
        too: tiles of 16 rows, each summed over all columns in one order."""
        if self.product is None and _gpu_takes(self.codes, self.scale):
            self.codes, self.scale = _gpu_codes(self.codes), _scales_and_zeros(self.scale, torch.bfloat16)
            self.product = _GPU_PRODUCT

    @property
    def native(self) -> bool:
        """Whether PyTorch's product serves."""
        return self.product is not None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def forward(self, x: Tensor) -> Tensor:
        if self.product is not None:
            return self.product(x, self.codes, self.group_size, self.scale)
        weight = dequantize(self.codes, self.scale, x.dtype)
        if x.is_cuda and HAS_TRITON:
            return tiled_product(x, weight)
        if x.dtype == torch.float32 and x.shape[0] < ROW_TILE:
            return nn.functional.linear(pad_rows(x), weight)[: x.shape[0]]
        return nn.functional.linear(x, weight)

    __call__ = forward

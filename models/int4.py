"""INT4 weights in the compressed-tensors `pack-quantized` layout, as Kimi-K2-Thinking and K2.5 ship their experts.

On disk: `weight_packed` [out, in / 8] int32 holds eight columns a word, column 8j + k in bits 4k..4k+3 of word j, each
as q + 8 with q in [-8, 7]; `weight_scale` [out, in / group] holds one scale per `group` input columns; `weight_shape`
is (out, in). The weight is q * scale. In memory the codes stay 4 bits wide: PyTorch's own INT4 product where it takes
the shape, the packed words and a plain dequantise-then-multiply everywhere else.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from minieagle.models.layers import ROW_TILE, pad_rows

WORD = 8  # 4-bit codes in an int32
_INT4_PRODUCT = torch.ops.aten._weight_int4pack_mm_for_cpu.default
NATIVE_ROWS = 64  # the native layout interleaves rows within blocks of 64


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


def _native(out_features: int, group_size: int, device: torch.device) -> bool:
    """Whether PyTorch's CPU INT4 product takes this shape."""
    return device.type == "cpu" and out_features % 16 == 0 and group_size in (32, 64, 128, 256)


def _native_codes(packed: Tensor) -> Tensor:
    """Packed words [out, in / 8] in the layout of PyTorch's product, [out, in / 2] uint8."""
    if packed.shape[0] % NATIVE_ROWS == 0 and _interleaves():
        return _interleaved(packed)
    return _converted(packed)


def _converted(packed: Tensor) -> Tensor:
    """The layout by PyTorch's own conversion. Some rows at a time: unpacked codes are 8 times as large, and blocks of
    that size amid lasting ones leave holes that peak memory pays for."""
    codes = torch.empty(packed.shape[0], packed.shape[1] * WORD // 2, dtype=torch.uint8)
    for start in range(0, packed.shape[0], NATIVE_ROWS):
        rows = slice(start, start + NATIVE_ROWS)
        codes[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack(packed[rows]) + 8, 1)
    return codes


def _interleaved(packed: Tensor) -> Tensor:
    """The same by a rearrangement of half bytes, in a twentieth of the time: of each 64 rows, column after column, 32
    bytes with row i in the low and row i + 32 in the high half."""
    low, high = packed.view(torch.uint8).view(-1, 2, NATIVE_ROWS // 2, packed.shape[1] * 4).unbind(1)
    even, odd = (low & 15) | (high << 4), (low >> 4) | (high & 0xF0)
    columns = torch.stack((even, odd), dim=-1).flatten(2)
    return columns.transpose(1, 2).contiguous().view(packed.shape[0], -1)


@cache
def _interleaves() -> bool:
    """Whether this processor's layout is that of `_interleaved`; others use other blocks."""
    sample = torch.arange(NATIVE_ROWS * 8, dtype=torch.int64).mul(0x9E3779B1).to(torch.int32).view(NATIVE_ROWS, 8)
    return torch.equal(_interleaved(sample), _converted(sample))


class Int4Linear(nn.Module):
    """x [T, in] -> [T, out] with a 4-bit weight. A row's bits don't depend on T."""

    def __init__(self, packed: Tensor, scale: Tensor, dtype: torch.dtype, *, native: bool = True) -> None:
        super().__init__()
        self.out_features = packed.shape[0]
        self.group_size = packed.shape[1] * WORD // scale.shape[1]
        self.native = native and _native(self.out_features, self.group_size, packed.device)
        if self.native:
            self.codes = _native_codes(packed)
            columns = scale.to(dtype).t()
            self.scale = torch.stack((columns, torch.zeros_like(columns)), dim=-1).contiguous()
        else:
            self.codes, self.scale = packed.clone(), scale.clone()

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def forward(self, x: Tensor) -> Tensor:
        if self.native:
            return _INT4_PRODUCT(x, self.codes, self.group_size, self.scale)
        weight = dequantize(self.codes, self.scale, x.dtype)
        if x.dtype == torch.float32 and x.shape[0] < ROW_TILE:
            return nn.functional.linear(pad_rows(x), weight)[: x.shape[0]]
        return nn.functional.linear(x, weight)

    __call__ = forward

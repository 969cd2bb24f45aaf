"""Rotary positions (arXiv 2104.09864) with YaRN (arXiv 2309.00071), as DeepSeek-V3 and Kimi-K2 use them.

The target's checkpoints store interleaved pairs (x0, x1), (x2, x3), ...; llama-style drafters store half-split pairs
(x0, x_{d/2}), .... Angles are always computed in float32: bf16 loses whole radians beyond a few hundred positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minieagle.models.config import Yarn

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, H, dim], cos, sin) -> x rotated: one of the two pairings at the end of this file."""


def _correction_dim(num_rotations: float, dim: int, theta: float, yarn: Yarn) -> float:
    """The pair index that turns `num_rotations` times over the original context."""
    return dim * math.log(yarn.original_max_position_embeddings / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None) -> Tensor:
    """[dim/2] float32 angles per position. With YaRN: a ramp from extrapolated to interpolated frequencies."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float32)
    frequencies = 1.0 / theta ** (pairs / dim)
    if yarn is None:
        return frequencies
    low = max(math.floor(_correction_dim(yarn.beta_fast, dim, theta, yarn)), 0)
    high = min(math.ceil(_correction_dim(yarn.beta_slow, dim, theta, yarn)), dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / yarn.factor * ramp


def _mscale(yarn: Yarn, scale: float) -> float:
    return 0.1 * scale * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0


def cos_sin_scale(yarn: Yarn | None) -> float:
    """What cos and sin are multiplied with: the quotient of the two mscale terms, m(1) when one is missing."""
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn, yarn.mscale) / _mscale(yarn, yarn.mscale_all_dim)
    return _mscale(yarn, 1.0)


def softmax_scale(qk_head_dim: int, yarn: Yarn | None) -> float:
    """qk_head_dim^-0.5, times m(mscale_all_dim)^2 where the checkpoint sets mscale_all_dim."""
    scale = qk_head_dim**-0.5
    if yarn is not None and yarn.mscale_all_dim:
        scale *= _mscale(yarn, yarn.mscale_all_dim) ** 2
    return scale


class RotaryTable(torch.nn.Module):
    """cos and sin for every position up to the engine's limit: [max_positions, dim/2] float32 each."""

    def __init__(self, dim: int, theta: float, max_positions: int, yarn: Yarn | None = None) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(dim, theta, yarn))
        scale = cos_sin_scale(yarn)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos() * scale, persistent=False)
        self.register_buffer("sin", angles.sin() * scale, persistent=False)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, dim/2] at positions [T], ready to broadcast over heads."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x0, x1), (x2, x3), ... of x [T, H, dim] in float32; the result stays interleaved, in x's dtype."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x_i, x_{i + dim/2}) of x [T, H, dim] in float32, in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


ROTATIONS: dict[str, Rotate] = {"half": rotate_half, "interleaved": rotate_interleaved}
"""By the name of the style in a drafter's config."""

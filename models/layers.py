"""The plain layers: RMSNorm and Linear, both with the same bits for a row whatever the number of rows beside it.

bf16 matrix products on a CPU have that property as they are. fp32 ones switch kernels below a dozen rows, so few rows
are padded to 16. A GPU's library has it for neither, so loaded weights take our own kernel there
(models/tiled_linear.py), unless `set_exact` gives the promise up for speed. Element-wise functions that treat a
vector's tail by scalar code (exp, sigmoid) differ in the last bit between the two, so they too are given whole vectors.

Layers have no hooks: `__call__ = forward` makes calling one a plain call, 1 us less, 140 times a token.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROW_TILE = 16
VECTOR = 32
"""Numbers that element-wise functions take at once on a CPU, at most."""
_PACKED_LINEAR = torch.ops.mkldnn._linear_pointwise.default
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""CUDA builds of torch bring it where it exists; without it a GPU computes by library calls, right but not row by row
the same."""


def pad_rows(x: Tensor, multiple: int = ROW_TILE) -> Tensor:
    """x [T, ...] with zero rows appended up to a multiple of `multiple`."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), in fp32 inside and rounded once to the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)

    __call__ = forward


class Linear(nn.Module):
    """x [T, in] -> [T, out], no bias. `pack()`, once the weight is there, turns a bf16 CPU weight into oneDNN's blocked
    layout: half the time of a one-row product, the same bits; the plain weight is freed. On a GPU it chooses the tiled
    kernel."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.packed: Tensor | None = None
        self.tiled = False

    def pack(self) -> None:
        self.tiled = self.weight.is_cuda and HAS_TRITON
        if (
            self.weight.device.type == "cpu"
            and self.weight.dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
        ):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
            self.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)

    def dense_weight(self) -> Tensor:
        """[out, in], also after packing."""
        return self.weight if self.packed is None else self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return _PACKED_LINEAR(x, self.packed, None, "none", [], "")
        if self.tiled:
            return tiled_product(x, self.weight)
        if x.dtype == torch.float32 and x.shape[0] < ROW_TILE and not torch.is_grad_enabled():
            return F.linear(pad_rows(x), self.weight)[: x.shape[0]]
        return F.linear(x, self.weight)

    __call__ = forward


def tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in], on a GPU."""
    # Triton comes with CUDA builds of torch only
    from minieagle.models.tiled_linear import tiled_linear

    return tiled_linear(x, weight)


def set_exact(model: nn.Module, exact: bool) -> None:
    """Whether a model on a GPU keeps a row's bits in any batch (the default) or takes the library's products, which
    long prompts gain from. Says nothing on a CPU, where both hold."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.tiled = exact and module.weight.is_cuda and HAS_TRITON


class SlicedLinear(nn.Module):
    """The partial products of a Linear over equal slices of its input columns, side by side: x [T, in] ->
    [T, num_slices * out]. Their sum, which models/shards.py takes, is the product."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        slices = x.chunk(len(self.parts), dim=-1)
        return torch.cat([part(piece.contiguous()) for part, piece in zip(self.parts, slices, strict=True)], dim=-1)

    __call__ = forward


def summed_linear(in_features: int, out_features: int, num_slices: int) -> Linear | SlicedLinear:
    """A product whose output is a sum over num_slices slices of the input: plain where there is one."""
    if num_slices == 1:
        return Linear(in_features, out_features)
    return SlicedLinear(Linear(in_features // num_slices, out_features) for _ in range(num_slices))


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), gate and up fused into one product; with num_slices partial sums side by side."""

    def __init__(self, width: int, intermediate: int, num_slices: int = 1) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * intermediate)
        self.down = summed_linear(intermediate, width, num_slices)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))

    __call__ = forward


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second: [..., 2 I] -> [..., I]. Rows that are no whole vectors, such as a rank's
    share of the columns, are padded to them."""
    gate, up = gate_up.chunk(2, dim=-1)
    width = gate.shape[-1]
    if width % VECTOR:
        return F.silu(F.pad(gate, (0, -width % VECTOR)))[..., :width] * up
    return F.silu(gate) * up

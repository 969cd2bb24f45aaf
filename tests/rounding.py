"""How far a float32 sum of products may lie from the exact one."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_float32_sums(got: Tensor, sums: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> None:
    """got: sums of products of x and weight in float32, in any order, rounded once to got's dtype; sums: the same,
    called in float64 for what is wanted and with absolute values for what the rounding grows with (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1; its bound holds for any luck, 2 eps is over twice what was ever seen
    of 200 products)."""
    x, weight = x.double(), weight.double()
    wanted, magnitude = sums(x, weight), sums(x.abs(), weight.abs())
    step = 2.0**-8 if got.dtype == torch.bfloat16 else 1e-6
    beyond = (got.double() - wanted).abs() - step * wanted.abs() - 2 * torch.finfo(torch.float32).eps * magnitude
    assert float(beyond.max()) <= 0, f"{float(beyond.max()):.3g} beyond the rounding at {int(beyond.argmax())}"

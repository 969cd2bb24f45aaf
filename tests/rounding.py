"""How far a float32 sum of products may lie from the exact one."""

import torch
from torch import Tensor


def assert_float32_sums(got: Tensor, wanted: Tensor, magnitude: Tensor) -> None:
    """got: sums of products in float32, in any order, rounded once to got's dtype; wanted: the same in float64;
    magnitude: the sums of the products' absolute values, which the rounding grows with (Higham, Accuracy and Stability
    of Numerical Algorithms, section 3.1; its bound holds for any luck, 4 eps for what is ever seen of a few hundred
    products)."""
    step = 2.0**-8 if got.dtype == torch.bfloat16 else 1e-6
    beyond = (got.double() - wanted).abs() - step * wanted.abs() - 4 * torch.finfo(torch.float32).eps * magnitude
    assert float(beyond.max()) <= 0, f"{float(beyond.max()):.3g} beyond the rounding at {int(beyond.argmax())}"

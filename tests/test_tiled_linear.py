"""Products in fixed tiles, in Triton's interpreter: right, and with the same bits for a row in any batch."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.rounding import assert_float32_sums
from tests.strategies import SEEDS

pytest.importorskip("triton", reason="Triton is not installed: its kernels can't be tried")

from minieagle.models import tiled_linear as kernel  # noqa: E402
from minieagle.models.tiled_linear import ROWS, tiled_linear, tiled_per_head  # noqa: E402

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
FEW = settings(max_examples=8)


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@FEW
@given(st.integers(1, 35), st.sampled_from([(7, 24), (33, 128), (64, 200)]), DTYPES, SEEDS)
def test_products_are_right(num: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    x, weight = random(num, shape[1], seed=seed, dtype=dtype), random(*shape, seed=seed + 1, dtype=dtype)
    assert_float32_sums(tiled_linear(x, weight), lambda x, weight: x @ weight.t(), x, weight)


@FEW
@given(st.integers(1, 18), st.sampled_from([(2, 16, 40), (3, 24, 7)]), DTYPES, SEEDS)
def test_products_per_head_are_right(num: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    heads, inner, columns = shape
    x = random(num, heads, inner, seed=seed, dtype=dtype)
    weight = random(heads, inner, columns, seed=seed + 1, dtype=dtype)
    per_head = partial(torch.einsum, "tha,hab->thb")
    assert_float32_sums(tiled_per_head(x, weight), per_head, x, weight)


@FEW
@given(st.integers(1, 39), DTYPES, SEEDS)
def test_rows_keep_their_bits_whatever_comes_behind_them(num: int, dtype: torch.dtype, seed: int) -> None:
    """At one place in a tile: the interpreter multiplies by numpy, whose rows differ by place. A GPU's do not, which
    bench/gpu_check.py tests."""
    x, weight = random(40, 200, seed=seed, dtype=dtype), random(33, 200, seed=seed + 1, dtype=dtype)
    whole = tiled_linear(x, weight)
    assert torch.equal(tiled_linear(x[:num], weight), whole[:num])
    assert torch.equal(tiled_linear(x[ROWS:], weight), whole[ROWS:])


def test_another_inner_tile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that went by the number of rows would change bits."""
    x, weight = random(5, 512, seed=0, dtype=torch.float32), random(33, 512, seed=1, dtype=torch.float32)
    before = kernel.tiled_linear(x, weight)
    monkeypatch.setattr(kernel, "INNER", 32)
    assert not torch.equal(kernel.tiled_linear(x, weight), before)


def test_rows_of_a_wider_tensor_are_read_where_they_lie() -> None:
    wide, weight = random(5, 64, seed=0, dtype=torch.float32), random(9, 24, seed=1, dtype=torch.float32)
    part = wide[:, 8:32]
    assert not part.is_contiguous() and torch.equal(tiled_linear(part, weight), tiled_linear(part.clone(), weight))

"""FP8 blocks: every element has its own block's scale, partial last blocks too; anything else is refused by name."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minieagle.models.checkpoint import CheckpointError
from minieagle.models.fp8 import check_scaled, dequantize

SIZES = st.integers(1, 40)
BLOCKS = st.integers(1, 16)


def drawn(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    return codes, 0.01 + torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=draw)


@given(SIZES, SIZES, st.tuples(BLOCKS, BLOCKS), st.sampled_from([torch.float32, torch.bfloat16]))
def test_every_element_has_its_blocks_scale(
    rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype
) -> None:
    codes, scale = drawn(rows, columns, block)
    got = dequantize(codes, scale, block, dtype)
    wanted = [[c * scale[i // block[0], j // block[1]] for j, c in enumerate(r)] for i, r in enumerate(codes.float())]
    assert torch.equal(got, torch.tensor(wanted).to(dtype))


def test_the_product_is_rounded_once() -> None:
    """1.75 * 1.03 in float32, then to bfloat16; a scale rounded to bfloat16 first gives another number."""
    codes, scale = torch.tensor([[1.75]]).to(torch.float8_e4m3fn), torch.tensor([[1.0273]])
    assert dequantize(codes, scale, (128, 128), torch.bfloat16).item() == torch.tensor(1.75 * 1.0273).bfloat16().item()
    assert (codes.bfloat16() * scale.bfloat16()).item() != torch.tensor(1.75 * 1.0273).bfloat16().item()


def test_scales_may_be_powers_of_two_in_a_byte() -> None:
    codes, scale = drawn(5, 7, (4, 4))
    powers = scale.log2().round().exp2()
    stored = powers.to(torch.float8_e8m0fnu)
    assert check_scaled("w", codes, stored, (4, 4)) == (4, 4)
    assert torch.equal(
        dequantize(codes, stored, (4, 4), torch.float32), dequantize(codes, powers, (4, 4), torch.float32)
    )


@pytest.mark.parametrize("shape", [(4, 5), (5, 56), (56, 5), (5, 4, 1), (20,), (0, 0)])
def test_a_scale_of_another_shape_is_named(shape: tuple[int, ...]) -> None:
    codes = torch.zeros(576, 512).to(torch.float8_e4m3fn)
    with pytest.raises(
        CheckpointError, match=r"w_scale_inv has shape .* \[576, 512\] in blocks of \[128, 128\] has \[5, 4\]"
    ):
        check_scaled("w", codes, torch.ones(shape), (128, 128))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.bfloat16])
def test_other_codes_are_named(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"w is stored as {dtype}"):
        check_scaled("w", torch.zeros(4, 4).to(dtype), torch.ones(1, 1), (128, 128))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_other_scales_are_named(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"with {dtype} scales"):
        check_scaled("w", torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1).to(dtype), (128, 128))


def test_scales_without_a_stated_block_are_refused() -> None:
    with pytest.raises(CheckpointError, match="no weight_block_size"):
        check_scaled("w", torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1), None)

"""The product over all experts, in Triton's interpreter, against dequantised weights and one expert at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minieagle.models.int4 import dequantize, pack, quantize
from tests.rounding import assert_float32_sums
from tests.strategies import SEEDS

pytest.importorskip("triton", reason="Triton is not installed: its kernels can't be tried")

from minieagle.models.grouped_int4 import Tiles, grouped_product  # noqa: E402
from minieagle.models.tiled_linear import ROWS  # noqa: E402

FEW = settings(max_examples=8)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.sampled_from([(7, 64, 16), (40, 64, 32), (33, 128, 64)])  # out, in, group
CHOICES = st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(3, 9))  # rows, experts a row, experts


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chosen(choices: tuple[int, int, int], seed: int) -> Tensor:
    """[T, A] distinct experts of each row."""
    rows, each, experts = choices
    return random(rows, experts, seed=seed).topk(each, dim=-1).indices


def packed_experts(num: int, shape: tuple[int, int, int], seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, inner, group = shape
    made = [quantize(random(out, inner, seed=seed + e, dtype=dtype), group) for e in range(num)]
    return torch.stack([pack(codes) for codes, _ in made]), torch.stack([scale for _, scale in made])


def by_loop(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every pair alone, in float64."""
    return torch.stack([weights[e].double() @ x[t].double() for t, row in enumerate(ids.tolist()) for e in row])


@given(CHOICES, SEEDS)
def test_every_pair_has_one_place_in_a_tile_of_its_expert(choices: tuple[int, int, int], seed: int) -> None:
    ids = chosen(choices, seed)
    tiles, num_pairs = Tiles.of(ids, choices[2]), ids.numel()
    assert tiles.pairs[tiles.pairs < num_pairs].sort().values.tolist() == list(range(num_pairs))
    for expert, pairs in zip(tiles.expert.tolist(), tiles.pairs.tolist(), strict=True):
        mine = [pair for pair in pairs if pair < num_pairs]
        assert all(ids.flatten()[pair] == expert for pair in mine)
        assert mine or expert > choices[2]
    assert len(tiles.expert) == num_pairs // ROWS + min(num_pairs, choices[2] + 1)


def test_experts_of_other_ranks_give_zero() -> None:
    weights, x = random(2, 9, 16, seed=0), random(3, 16, seed=1)
    ids = torch.tensor([[0, 2], [2, 2], [1, 0]])
    got = grouped_product(x, weights, None, Tiles.of(ids, 2), num_pairs=6, pairs_a_row=2)
    assert [bool(row.any()) for row in got] == [True, False, False, False, True, True]


@FEW
@given(CHOICES, SHAPES, DTYPES, SEEDS)
def test_int4_experts_equal_dequantised_ones(
    choices: tuple[int, int, int], shape: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> None:
    ids, x = chosen(choices, seed), random(choices[0], shape[1], seed=seed, dtype=dtype)
    packed, scale = packed_experts(choices[2], shape, seed, dtype)
    tiles = Tiles.of(ids, choices[2])
    got = grouped_product(x, packed, scale, tiles, num_pairs=ids.numel(), pairs_a_row=choices[1])
    weights = torch.stack([dequantize(*e, torch.float32) for e in zip(packed, scale, strict=True)])
    assert_float32_sums(got, lambda x, weights: by_loop(x, ids, weights), x, weights)


@FEW
@given(CHOICES, DTYPES, SEEDS)
def test_plain_experts_are_right(choices: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    ids, x = chosen(choices, seed), random(choices[0], 200, seed=seed, dtype=dtype)
    weights, tiles = random(choices[2], 33, 200, seed=seed + 1, dtype=dtype), Tiles.of(ids, choices[2])
    got = grouped_product(x, weights, None, tiles, num_pairs=ids.numel(), pairs_a_row=choices[1])
    assert_float32_sums(got, lambda x, weights: by_loop(x, ids, weights), x, weights)


@FEW
@given(st.integers(1, 30), SEEDS)
def test_a_row_keeps_its_bits_however_many_share_its_expert(num: int, seed: int) -> None:
    """Rows behind it in the same tile or in later ones; before it, see tests/test_tiled_linear.py."""
    shape = (40, 64, 32)
    packed, scale = packed_experts(1, shape, seed, torch.bfloat16)
    x = random(31, 64, seed=seed, dtype=torch.bfloat16)

    def product(rows: Tensor) -> Tensor:
        tiles = Tiles.of(torch.zeros(rows.shape[0], 1, dtype=torch.int64), 1)
        return grouped_product(rows, packed, scale, tiles, num_pairs=rows.shape[0], pairs_a_row=1)

    assert torch.equal(product(x[:num]), product(x)[:num])

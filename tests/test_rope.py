"""Rotary positions: published constants, complex multiplication, and the two storage orders."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minieagle.models.config import Yarn
from minieagle.models.rope import (
    RotaryTable,
    cos_sin_scale,
    inverse_frequencies,
    rotate_half,
    rotate_interleaved,
    softmax_scale,
)
from tests.strategies import SEEDS

EVEN = st.integers(1, 12).map(lambda half: 2 * half)


def yarn(factor: float, beta_fast: float, mscale: float = 1.0, mscale_all_dim: float = 1.0) -> Yarn:
    return Yarn(
        factor=factor,
        original_max_position_embeddings=4096,
        beta_fast=beta_fast,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )


@pytest.mark.parametrize(
    ("theta", "scaling", "low", "high", "scale"),
    [
        (10000.0, yarn(40, 32), 10, 23, 0.1352338),  # DeepSeek-V3
        (50000.0, yarn(32, 1), 19, 20, 0.1308608),  # Kimi-K2-Instruct: a step, not a ramp
        (50000.0, yarn(64, 1), 19, 20, 0.1446796),  # Kimi-K2-0905 and K2-Thinking
        (50000.0, yarn(64, 32), 8, 20, 0.1446796),  # Kimi-K2.5
    ],
)
def test_published_constants(theta: float, scaling: Yarn, low: int, high: int, scale: float) -> None:
    plain, found = inverse_frequencies(64, theta, None), inverse_frequencies(64, theta, scaling)
    assert torch.equal(found[: low + 1], plain[: low + 1])
    torch.testing.assert_close(found[high:], plain[high:] / scaling.factor, rtol=1e-6, atol=0)
    between = found[low + 1 : high]
    assert bool((between < plain[low + 1 : high]).all() and (between > plain[low + 1 : high] / scaling.factor).all())
    assert softmax_scale(192, scaling) == pytest.approx(scale, abs=5e-8)
    assert cos_sin_scale(scaling) == 1.0


def test_without_yarn_nothing_is_scaled() -> None:
    assert softmax_scale(192, None) == pytest.approx(0.0721688, abs=5e-8)
    assert cos_sin_scale(None) == 1.0


@pytest.mark.parametrize(
    ("mscale", "all_dim", "cos_scale", "score_scale"),
    [
        (0.7, 1.0, (0.07 * math.log(40) + 1) / (0.1 * math.log(40) + 1), (0.1 * math.log(40) + 1) ** 2),
        (0.0, 1.0, 0.1 * math.log(40) + 1, (0.1 * math.log(40) + 1) ** 2),
        (1.0, 0.0, 0.1 * math.log(40) + 1, 1.0),
        (0.0, 0.0, 0.1 * math.log(40) + 1, 1.0),
    ],
)
def test_mscale_terms(mscale: float, all_dim: float, cos_scale: float, score_scale: float) -> None:
    scaling = yarn(40, 32, mscale, all_dim)
    assert cos_sin_scale(scaling) == pytest.approx(cos_scale)
    assert softmax_scale(64, scaling) == pytest.approx(score_scale / 8)


def drawn(dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, H, dim], its angles [T, 1, dim / 2], and their cos and sin."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 3, dim, generator=draw)
    angles = torch.rand(5, 1, dim // 2, generator=draw) * 1000
    return x, angles, angles.cos(), angles.sin()


@given(EVEN, SEEDS)
def test_interleaved_pairs_turn_like_complex_numbers(dim: int, seed: int) -> None:
    x, angles, cos, sin = drawn(dim, seed)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotate_interleaved(x, cos, sin), torch.view_as_real(turned).flatten(-2))


@given(EVEN, SEEDS)
def test_half_split_is_interleaved_in_another_order(dim: int, seed: int) -> None:
    x, _, cos, sin = drawn(dim, seed)
    order = torch.arange(dim).view(-1, 2).t().flatten()  # 0, 2, 4, ..., 1, 3, 5, ...
    assert torch.equal(rotate_half(x[..., order], cos, sin), rotate_interleaved(x, cos, sin)[..., order])


@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 100), SEEDS)
def test_scores_see_distances_only(m: int, n: int, shift: int, seed: int) -> None:
    table, draw = RotaryTable(16, 10000.0, 512), torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 16, generator=draw)

    def score(a: int, b: int) -> Tensor:
        turned_q = rotate_interleaved(q, *table.at(torch.tensor([a])))
        return (turned_q * rotate_interleaved(k, *table.at(torch.tensor([b])))).sum()

    torch.testing.assert_close(score(m, n), score(m + shift, n + shift), atol=2e-3, rtol=0)


def test_angles_stay_float32_for_bfloat16_rows() -> None:
    """Position 4001 is no bfloat16 number; rounding it would turn the first pair by a radian and more."""
    x = torch.tensor([[[1.0, 0.0]]], dtype=torch.bfloat16)
    turned = rotate_interleaved(x, *RotaryTable(2, 10000.0, 4002).at(torch.tensor([4001])))
    torch.testing.assert_close(
        turned.float().flatten(), torch.tensor([math.cos(4001), math.sin(4001)]), atol=4e-3, rtol=0
    )


@given(
    st.sampled_from([2, 8, 16, 64]),
    st.sampled_from([10.0, 100.0, 10000.0]),
    st.sampled_from([1.0, 4.0, 40.0]),
    st.sampled_from([8, 4096, 10**6]),
    st.sampled_from([(1, 1), (32, 1), (4, 2)]),
)
def test_frequencies_equal_transformers(
    dim: int, theta: float, factor: float, original: int, betas: tuple[int, int]
) -> None:
    """Also where the ramp begins or ends outside the pairs, or has no width."""
    scaling = Yarn(factor=factor, original_max_position_embeddings=original, beta_fast=betas[0], beta_slow=betas[1])
    described = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "beta_fast": betas[0],
        "beta_slow": betas[1],
    }
    described["original_max_position_embeddings"] = original
    config = DeepseekV3Config(qk_rope_head_dim=dim, rope_parameters=described)
    wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    torch.testing.assert_close(inverse_frequencies(dim, theta, scaling), wanted, rtol=1e-5, atol=1e-9)
    assert cos_sin_scale(scaling) == pytest.approx(scale)

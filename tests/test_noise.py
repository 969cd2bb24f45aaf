"""Keyed noise: equal to plain integer arithmetic, keyed by nothing else, uniform, independent, and a sampler of p.

The statistics use fixed seeds, so they are as repeatable as any other test; limits are five standard deviations.
"""

import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minieagle.spec.noise import gumbel

WORDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**31)
WEYL, WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def naive_mix(x: int) -> int:
    x &= WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def naive_gumbel(seed: int, position: int, token: int) -> float:
    key = naive_mix(naive_mix(seed + WEYL) + position)
    uniform = ((naive_mix(key + (token + 1) * WEYL) & 2**52 - 1) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def uniforms(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    return (-(-gumbel(seeds, positions, vocab).double()).exp()).exp()


def chi_square_excess(counts: Tensor, expected: Tensor | float) -> float:
    """Standard deviations by which the chi-square statistic exceeds its mean."""
    freedom = counts.numel() - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


@given(WORDS, POSITIONS, st.integers(0, 200_000))
def test_equals_plain_integer_arithmetic(seed: int, position: int, token: int) -> None:
    got = gumbel(torch.tensor([seed]), torch.tensor([position]), token + 1, torch.tensor([token]))
    assert got.item() == pytest.approx(naive_gumbel(seed, position, token), rel=2e-7, abs=1e-9)


@given(st.lists(st.tuples(WORDS, POSITIONS), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_row_does_not_see_the_others(keys: list[tuple[int, int]], random: Random) -> None:
    rows = torch.tensor(keys)
    order = torch.tensor(random.sample(range(len(keys)), len(keys)))
    together = gumbel(rows[:, 0], rows[:, 1], 37)
    shuffled = gumbel(rows[order, 0], rows[order, 1], 37)
    alone = torch.cat([gumbel(row[:1], row[1:], 37) for row in rows])
    assert torch.equal(together, alone) and torch.equal(together[order], shuffled)


@given(WORDS, POSITIONS, st.lists(st.integers(0, 999), min_size=1, max_size=40))
def test_subset_equals_the_whole_at_its_ids(seed: int, position: int, ids: list[int]) -> None:
    key = torch.tensor([seed, seed + 1 if seed < 0 else seed - 1]), torch.tensor([position, position])
    subset = gumbel(*key, 1000, torch.tensor(ids))
    assert torch.equal(subset, gumbel(*key, 1000)[:, ids])


def test_arguments_stay_and_values_are_finite() -> None:
    seeds, positions, ids = torch.arange(-3, 3), torch.arange(6), torch.arange(9)
    noise = gumbel(seeds, positions, 9, ids)
    assert noise.dtype == torch.float32 and noise.isfinite().all()
    assert torch.equal(seeds, torch.arange(-3, 3)) and torch.equal(positions, torch.arange(6))
    assert torch.equal(ids, torch.arange(9))


def test_extreme_words_stay_inside_the_open_interval() -> None:
    from minieagle.spec.noise import _uniform  # the ends cannot be reached through the hash at will

    ends = _uniform(torch.tensor([0, -1]))
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53]


@pytest.mark.parametrize("axis", ["seeds", "positions", "ids"])
def test_uniform_along_each_axis(axis: str) -> None:
    run, one = torch.arange(2**17), torch.zeros(2**17, dtype=torch.long)
    drawn = {
        "seeds": lambda: uniforms(run, one, 1),
        "positions": lambda: uniforms(one, run, 1),
        "ids": lambda: uniforms(one[:1], one[:1], 2**17),
    }[axis]()
    assert abs(chi_square_excess(drawn.flatten().histc(256, 0, 1), 2**17 / 256)) < 5


@pytest.mark.parametrize("lag", [1, 2, 64, 1024])
@pytest.mark.parametrize("axis", ["seeds", "positions", "ids"])
def test_neighbours_are_independent(axis: str, lag: int) -> None:
    """Joint law of pairs in 16 x 16 cells, and the correlation of the noise itself."""
    run, one = torch.arange(4096), torch.ones(4096, dtype=torch.long)
    noise = {
        "seeds": lambda: gumbel(run, one, 16),
        "positions": lambda: gumbel(one, run, 16),
        "ids": lambda: gumbel(run[:16], one[:16], 4096).T,
    }[axis]().double()
    first, second = noise[:-lag].flatten(), noise[lag:].flatten()
    cells = [((-(-x).exp()).exp() * 16).long() for x in (first, second)]
    counts = torch.bincount(cells[0] * 16 + cells[1], minlength=256).double()
    assert abs(chi_square_excess(counts, len(first) / 256)) < 5
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) * math.sqrt(len(first)) < 5


def test_seed_and_position_do_not_trade_places() -> None:
    """A sum of the two as the key would give seed 1 at position 5 the noise of seed 5 at position 1."""
    grid = torch.cartesian_prod(torch.arange(64), torch.arange(64))
    assert len(gumbel(grid[:, 0], grid[:, 1], 2).unique(dim=0)) == 64 * 64


def test_moments_are_gumbels() -> None:
    noise = gumbel(torch.arange(64), torch.arange(64), 4096).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.013)  # sd of the mean 0.0025
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_argmax_samples_the_law(axis: str) -> None:
    law = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.05, 0.0125, 0.0])
    run, one = torch.arange(40_000), torch.full((40_000,), 11)
    noise = gumbel(run, one, 7) if axis == "seeds" else gumbel(one, run, 7)
    counts = torch.bincount((law.log() + noise).argmax(-1), minlength=7)
    assert counts[6] == 0
    assert chi_square_excess(counts[:6], law[:6] * 40_000) < 5

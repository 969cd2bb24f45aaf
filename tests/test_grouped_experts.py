"""A mixture whose experts are computed together, in Triton's interpreter, against the same mixture one by one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from minieagle.models.grouped_experts import GroupedExperts
from minieagle.models.int4 import Int4Linear, pack, quantize
from minieagle.models.layers import SlicedLinear
from minieagle.models.moe import Expert, MixtureOfExperts
from tests.strategies import SEEDS, experts
from tests.test_moe import config_of, random_moe

pytest.importorskip("triton", reason="Triton is not installed: its kernels can't be tried")

FEW = settings(max_examples=6)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int4(rows: int, columns: int, seed: int) -> Int4Linear:
    codes, scale = quantize(random(rows, columns, seed=seed) * columns**-0.5, 32)
    return Int4Linear(pack(codes), scale, torch.float32, native=False)


def int4_expert(seed: int, slices: int = 1) -> Expert:
    parts = [int4(64, 64 // slices, seed + i) for i in range(slices)]
    return Expert(int4(128, 64, seed), parts[0] if slices == 1 else SlicedLinear(parts))


def products(num: int, slices: int, seed: int) -> list[Any]:
    made = [int4_expert(seed + 10 * i, slices) for i in range(num)]
    return [(expert.gate_up, expert.down) for expert in made]


@torch.inference_mode()
@FEW
@given(experts(), SEEDS)
def test_grouped_equals_one_by_one(changes: dict[str, Any], seed: int) -> None:
    moe = random_moe(config_of(changes), seed)
    x = random(9, moe.router.weight.shape[1], seed=seed)
    before = moe(x)
    assert GroupedExperts.takes(moe.products)
    moe.group()
    torch.testing.assert_close(moe(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slices", [1, 2])
def test_grouped_int4_equals_one_by_one(slices: int) -> None:
    made, x = products(5, slices, 0), random(7, 64, seed=1)
    ids = random(7, 5, seed=2).topk(2, dim=-1).indices
    wanted = [down(torch.nn.functional.silu(a) * b) for g, down in made for a, b in [g(x).chunk(2, dim=-1)]]
    assert GroupedExperts.takes(made)
    got = GroupedExperts(made)(x, ids)
    for t, row in enumerate(ids.tolist()):
        for place, e in enumerate(row):
            torch.testing.assert_close(got[t, place], wanted[e][t], rtol=1e-5, atol=1e-5)


def test_weights_are_held_once() -> None:
    made = products(3, 1, 0)
    grouped = GroupedExperts(made)
    for e, (gate_up, down) in enumerate(made):
        assert gate_up.codes.data_ptr() == grouped.gate_up.weight[e].data_ptr()
        scales = grouped.down[0].scale
        assert scales is not None and down.scale.data_ptr() == scales[e].data_ptr()


def test_what_the_kernel_does_not_take_is_left_alone() -> None:
    assert not GroupedExperts.takes([])
    codes, scale = quantize(random(16, 24, seed=0), 8)
    odd = Int4Linear(pack(codes), scale, torch.float32, native=False)
    assert not GroupedExperts.takes([(odd, odd)])
    native = Int4Linear(*packed_of_32(), torch.float32)
    assert native.native and not GroupedExperts.takes([(native, native)])


def packed_of_32() -> tuple[Tensor, Tensor]:
    codes, scale = quantize(random(32, 64, seed=0), 32)
    return pack(codes), scale


def test_a_mixture_on_a_cpu_is_not_grouped() -> None:
    moe: MixtureOfExperts = random_moe(config_of({}), 0)
    moe.pack()
    assert moe.grouped is None

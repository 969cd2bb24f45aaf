"""The router and the experts against plain Python loops over the published rule, one token and one expert at a time."""

import math
from typing import Any

import torch
from hypothesis import assume, given
from torch import Tensor

from minieagle.models.config import TargetConfig, target_config
from minieagle.models.int4 import Int4Linear, pack, quantize
from minieagle.models.layers import Linear
from minieagle.models.moe import Expert, MixtureOfExperts, Router
from tests.int4_on_gpu import as_on_a_gpu
from tests.oracles import TINY
from tests.strategies import SEEDS, experts, splits

WIDTH = 24


def config_of(changes: dict[str, Any]) -> TargetConfig:
    return target_config(TINY | {"hidden_size": WIDTH, "moe_intermediate_size": 20} | changes)


def random_router(config: TargetConfig, seed: int) -> Router:
    draw = torch.Generator().manual_seed(seed)
    router = Router(config)
    router.weight = torch.nn.Parameter(torch.randn(config.n_routed_experts, WIDTH, generator=draw), requires_grad=False)
    bias = torch.randn(config.n_routed_experts, generator=draw)  # often below -1: a real choice can be negative
    router.e_score_correction_bias = torch.nn.Parameter(bias, requires_grad=False)
    return router


def rows(num: int, seed: int) -> Tensor:
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(seed + 1))


def routed(config: TargetConfig, router: Router, x: Tensor) -> dict[int, float]:
    """One token's experts and weights by the published rule, in Python floats."""
    scores = [1 / (1 + math.exp(-float(w.double() @ x.double()))) for w in router.weight]
    choice = [s + float(b) for s, b in zip(scores, router.e_score_correction_bias, strict=True)]
    size = config.n_routed_experts // config.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(config.n_group)]
    best = sorted(groups, key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
    allowed = [e for group in best[: config.topk_group] for e in group]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) + 1e-20 if config.norm_topk_prob else 1.0
    return {e: scores[e] / total * config.routed_scaling_factor for e in chosen}


@given(experts(), SEEDS)
def test_router_follows_the_published_rule(changes: dict[str, Any], seed: int) -> None:
    config, x = config_of(changes), rows(9, seed)
    router = random_router(config, seed)
    ids, weights = router(x)
    for t in range(9):
        wanted = routed(config, router, x[t])
        assert set(ids[t].tolist()) == set(wanted)
        got = dict(zip(ids[t].tolist(), weights[t].tolist(), strict=True))
        assert all(math.isclose(got[e], wanted[e], abs_tol=1e-5) for e in wanted)


@given(experts(), SEEDS)
def test_bias_takes_part_in_the_choice_only(changes: dict[str, Any], seed: int) -> None:
    """Raising every bias by the same amount changes neither the choice nor the weights."""
    router, x = random_router(config_of(changes), seed), rows(6, seed)
    before = router(x)
    router.e_score_correction_bias.add_(2.0)
    after = router(x)
    assume(torch.equal(before[0].sort().values, after[0].sort().values))  # near-ties may turn by rounding
    torch.testing.assert_close(after[1].sort().values, before[1].sort().values)


@given(experts(), splits(40), SEEDS)
def test_router_rows_keep_their_bits_in_any_batch(changes: dict[str, Any], sizes: list[int], seed: int) -> None:
    router, x = random_router(config_of(changes), seed), rows(40, seed)
    parts = [router(part) for part in x.split(sizes)]
    for i, whole in enumerate(router(x)):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole)


def linear(weight: Tensor) -> Linear:
    module = Linear(weight.shape[1], weight.shape[0])
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def random_moe(config: TargetConfig, seed: int) -> MixtureOfExperts:
    draw, inner = torch.Generator().manual_seed(seed + 2), config.moe_intermediate_size
    moe = MixtureOfExperts(config)
    moe.router = random_router(config, seed)

    def random(rows: int, columns: int) -> Linear:
        return linear(torch.randn(rows, columns, generator=draw) * columns**-0.5)

    moe.experts.extend(Expert(random(2 * inner, WIDTH), random(WIDTH, inner)) for _ in range(config.n_routed_experts))
    if moe.shared is not None:
        shared = inner * config.n_shared_experts
        moe.shared.gate_up, moe.shared.down = random(2 * shared, WIDTH), random(WIDTH, shared)
    return moe


def swiglu(gate_up: Any, down: Any, x: Tensor) -> Tensor:
    gate, up = (gate_up.weight.double() @ x.double()).chunk(2)
    return down.weight.double() @ (gate / (1 + (-gate).exp()) * up)


@torch.inference_mode()
@given(experts() | experts().map(lambda changes: changes | {"n_shared_experts": 0}), SEEDS)
def test_output_is_the_weighted_sum_of_experts_and_the_shared_one(changes: dict[str, Any], seed: int) -> None:
    config, x = config_of(changes), rows(7, seed)
    moe = random_moe(config, seed)
    got = moe(x)
    for t in range(7):
        chosen = routed(config, moe.router, x[t])
        wanted = torch.stack([w * swiglu(moe.experts[e].gate_up, moe.experts[e].down, x[t]) for e, w in chosen.items()])
        shared = 0.0 if moe.shared is None else swiglu(moe.shared.gate_up, moe.shared.down, x[t])
        torch.testing.assert_close(got[t].double(), wanted.sum(0) + shared, atol=1e-4, rtol=0)


@torch.inference_mode()
@given(experts(), splits(40), SEEDS)
def test_rows_keep_their_bits_in_any_batch(changes: dict[str, Any], sizes: list[int], seed: int) -> None:
    moe, x = random_moe(config_of(changes), seed), rows(40, seed)
    assert torch.equal(torch.cat([moe(part) for part in x.split(sizes)]), moe(x))


def test_a_dropped_group_stays_dropped_when_all_choices_are_negative() -> None:
    """The published mask is -inf: with 0 in its place, experts of a dropped group would beat negative choices."""
    config = config_of({"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2})
    router = random_router(config, 0)
    router.e_score_correction_bias.copy_(torch.tensor([-3.0, -3.0, -5.0, -5.0]))
    assert set(router(rows(20, 0))[0].flatten().tolist()) == {0, 1}


def int4_expert(seed: int) -> Expert:
    draw = torch.Generator().manual_seed(seed)
    codes, scale = quantize(torch.randn(96, 32, generator=draw).bfloat16(), 32)
    products = [Int4Linear(pack(q), s, torch.bfloat16) for q, s in zip(codes.split(64), scale.split(64), strict=True)]
    return Expert(*products)


def test_int4_experts_that_no_kernel_groups_are_packed_one_by_one() -> None:
    """As on a GPU without Triton."""
    moe, x = random_moe(config_of({}), 0), torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with as_on_a_gpu():
        moe.experts = torch.nn.ModuleList(int4_expert(e) for e in range(4))
        wanted = [moe._expert(e, x) for e in range(4)]
        moe.pack()
        assert moe.grouped is None
        assert all(product.native for pair in moe.products for product in pair)
        for e, expected in enumerate(wanted):
            torch.testing.assert_close(moe._expert(e, x), expected, rtol=2.0**-5, atol=2.0**-4)

"""The table of cuts: parts tile the whole, quantised parts are parts of the whole, and the sizes said to work are those
that do."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.survey import entries
from minieagle.dist.group import MAX_SIZE
from minieagle.dist.shard import (
    CUTS,
    Collectives,
    ShardError,
    Unit,
    check_divides,
    collectives,
    cut_of,
    module_of,
    part_of,
    rank_bytes,
    units,
)
from minieagle.models.int4 import dequantize, pack, quantize
from tests.strategies import SEEDS

LAYER = "language_model.model.layers.7"
K25 = units(
    vocab_size=163840,
    num_attention_heads=64,
    intermediate_size=18432,
    shared_intermediate_size=2048,
    moe_intermediate_size=2048,
    group_size=32,
)
DEEPSEEK_V3 = units(
    vocab_size=129280,
    num_attention_heads=128,
    intermediate_size=18432,
    shared_intermediate_size=2048,
    moe_intermediate_size=2048,
)

# What rank 0 of 8 holds of Kimi-K2.5, from the published shapes.
RANK_SHAPES = {
    "language_model.model.embed_tokens.weight": (20480, 7168),
    f"{LAYER}.self_attn.q_a_proj.weight": (1536, 7168),
    f"{LAYER}.self_attn.q_b_proj.weight": (1536, 1536),
    f"{LAYER}.self_attn.kv_b_proj.weight": (2048, 512),
    f"{LAYER}.self_attn.o_proj.weight": (7168, 1024),
    f"{LAYER}.mlp.shared_experts.gate_proj.weight": (256, 7168),
    f"{LAYER}.mlp.shared_experts.down_proj.weight": (7168, 256),
    f"{LAYER}.mlp.experts.0.gate_proj.weight_packed": (256, 896),
    f"{LAYER}.mlp.experts.0.gate_proj.weight_scale": (256, 224),
    f"{LAYER}.mlp.experts.0.down_proj.weight_packed": (7168, 32),
    f"{LAYER}.mlp.experts.0.down_proj.weight_scale": (7168, 8),
    f"{LAYER}.mlp.experts.0.down_proj.weight_shape": (2,),
    f"{LAYER}.mlp.gate.weight": (384, 7168),
    f"{LAYER}.mlp.gate.e_score_correction_bias": (384,),
    "language_model.lm_head.weight": (20480, 7168),
}


@cache
def some_entries() -> dict[str, tuple[int, ...]]:
    """Published names and shapes of Kimi-K2.5 without all but one of the experts."""
    return {
        name: shape
        for name, _, shape in entries()
        if not re.search(r"\.experts\.[1-9]|vision_tower|mm_projector", name)
    }


def test_every_tensor_of_kimi_has_its_cut_and_uses_the_whole_table() -> None:
    """All rows but q_proj's, which stands in for a low rank."""
    assert {module_of(name) for name in some_entries()} == CUTS.keys() - {"self_attn.q_proj"}
    assert all(cut_of(name) is not None for name in some_entries())


@pytest.mark.parametrize("name", RANK_SHAPES)
def test_a_rank_of_eight_holds_what_is_known_of_kimi(name: str) -> None:
    shape = list(some_entries()[name])
    part = part_of(name, tuple(shape), rank=0, size=8)
    if part is not None:
        shape[part[0]] = part[2]
    assert tuple(shape) == RANK_SHAPES[name]


@given(st.sampled_from(sorted(some_entries().items())), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_parts_follow_each_other_and_make_up_the_whole(named: tuple[str, tuple[int, ...]], size: int) -> None:
    name, shape = named
    parts = [part_of(name, shape, rank=rank, size=size) for rank in range(size)]
    cut = [part for part in parts if part is not None]
    assert len(cut) in (0, size)
    ends = [start + length for _, start, length in cut]
    assert [start for _, start, _ in cut] == [0, *ends][: len(cut)]
    assert not cut or ends[-1] == shape[cut[0][0]]


@given(SEEDS, st.sampled_from(["gate", "down"]), st.sampled_from([2, 4]), st.sampled_from([8, 32]))
def test_a_part_of_int4_is_int4_of_the_part(seed: int, which: str, size: int, group: int) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
    codes, scale = quantize(weight, group)
    whole = dequantize(pack(codes), scale, torch.float32)
    name = f"{LAYER}.mlp.experts.3.{which}_proj.weight"
    for rank in range(size):
        pieces = []
        for suffix, tensor in (("_packed", pack(codes)), ("_scale", scale), ("", whole)):
            part = part_of(name + suffix, tuple(tensor.shape), rank=rank, size=size)
            assert part is not None
            pieces.append(tensor.narrow(*part))
        assert torch.equal(dequantize(pieces[0], pieces[1], torch.float32), pieces[2])


def test_heads_stay_whole() -> None:
    """kv_b holds, head after head, the key rows and then the value rows of each."""
    heads = torch.arange(64).repeat_interleave(256)
    part = part_of(f"{LAYER}.self_attn.kv_b_proj.weight", (16384, 512), rank=3, size=8)
    assert part is not None and heads.narrow(*part).unique().tolist() == [*range(24, 32)]


@pytest.mark.parametrize("name", ["fc.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp", ""])
def test_a_name_that_no_target_has_is_refused(name: str) -> None:
    with pytest.raises(ShardError, match="is no tensor"):
        cut_of(name)


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(ShardError, match="axis 0 into 3 equal parts"):
        part_of("lm_head.weight", (100, 8), rank=0, size=3)


def test_bytes_of_a_rank() -> None:
    assert rank_bytes("lm_head.weight", 800, 8) == 100
    assert rank_bytes("model.norm.weight", 800, 8) == 800


# ---- sizes that divide


@pytest.mark.parametrize(
    ("dealt", "works"), [(K25, {1, 2, 4, 8, 16, 32, 64}), (DEEPSEEK_V3, {1, 2, 4, 8, 16, 32, 64, 128})]
)
def test_published_models_divide_by_powers_of_two(dealt: dict[str, Unit], works: set[int]) -> None:
    for size in range(1, 130):
        if size in works:
            check_divides(dealt, size)
        else:
            with pytest.raises(ShardError):
                check_divides(dealt, size)


def deals(unit: Unit, size: int) -> bool:
    return size == 1 or unit.count % (size * unit.grain) == 0


@given(
    st.lists(st.builds(Unit, st.just("things"), st.integers(0, 48), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 50),
)
def test_a_size_works_when_it_deals_everything_and_all_that_do_are_named(dealt: list[Unit], size: int) -> None:
    named = {str(index): unit for index, unit in enumerate(dealt)}
    works = [n for n in range(1, MAX_SIZE + 1) if all(deals(unit, n) for unit in dealt)]
    if all(deals(unit, size) for unit in dealt):
        return check_divides(named, size)
    with pytest.raises(ShardError) as refusal:
        check_divides(named, size)
    assert str(refusal.value).endswith(f"sizes that work: {', '.join(map(str, works))}")


@pytest.mark.parametrize(
    ("sizes", "works"),
    [
        ({"group_size": 32}, [1, 3]),  # 96 columns are 3 groups of 32
        ({"group_size": 4}, [1, 2, 3, 4, 6, 12]),  # whole words of 8 codes
        ({}, [1, 2, 3, 4, 6, 12]),
    ],
)
def test_quantised_widths_are_dealt_in_whole_groups(sizes: dict[str, Any], works: list[int]) -> None:
    dealt = units(
        vocab_size=96,
        num_attention_heads=12,
        intermediate_size=0,
        shared_intermediate_size=0,
        moe_intermediate_size=96,
        **sizes,
    )
    assert [n for n in range(1, 97) if all(unit.num_shares % n == 0 for unit in dealt.values())] == works


def test_a_refusal_names_the_numbers() -> None:
    with pytest.raises(ShardError, match=r"tp=6 doesn't divide.*64 attention heads.*2048 columns of a routed"):
        check_divides(K25, 6)
    with pytest.raises(ShardError, match="tp=0"):
        check_divides(K25, 0)


def test_collectives_of_kimi() -> None:
    assert collectives(61, 8) == Collectives(num_all_reduces=123, num_gathers=1)
    assert collectives(61, 1) == Collectives(0, 0)


def test_the_bench_leaves_out_vision_only() -> None:
    """The written headers are the text model's and 335 more."""
    names = [name for name, _, _ in entries()]
    assert len(names) == len(set(names)) == 208_550
    assert sum(name.startswith(("vision_tower", "mm_projector")) for name in names) == 335

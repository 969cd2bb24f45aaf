"""How each published tensor of a target is cut over the ranks of a tensor-parallel group: the one description of it.

The one idea: every cut is an equal run of one axis, so a table of module names says it all: output rows (axis 0, by
head, by vocabulary, by column of a feed-forward), input columns (axis 1), or nothing, where every rank holds the whole.
Packed INT4 words and both kinds of scales lie along the same axes as the weight, in fewer numbers, and are cut by the
same shares. What must divide is counted in units: heads, vocabulary, widths, and of INT4 widths whole groups.

A layer then needs two sums over the ranks (behind o_proj and behind the feed-forward, routed and shared experts added
first), the embedding one more, and the logits one gather. Source: Megatron-LM's column and row split (arXiv
1909.08053), applied to multi-head latent attention, whose latent is shared by all heads and hence not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm

from minieagle.dist.group import MAX_SIZE

WORD = 8  # INT4 codes in a packed word


class ShardError(ValueError):
    """A tensor that the table does not know, or a group size that a model's sizes can't be divided by."""


@dataclass(frozen=True)
class Cut:
    """The weight [out, in] of a module: cut along `axis` (0: out, 1: in) into equal runs of whole `unit`s. None: every
    rank holds all of it."""

    axis: int | None = None
    unit: str = ""


_WHOLE = Cut()

# By module name without the numbers of layer and expert. q_proj stands in for q_a and q_b where there is no low rank.
CUTS: Mapping[str, Cut] = {
    "embed_tokens": Cut(0, "vocabulary"),
    "input_layernorm": _WHOLE,
    "self_attn.q_proj": Cut(0, "heads"),
    "self_attn.q_a_proj": _WHOLE,
    "self_attn.q_a_layernorm": _WHOLE,
    "self_attn.q_b_proj": Cut(0, "heads"),
    "self_attn.kv_a_proj_with_mqa": _WHOLE,
    "self_attn.kv_a_layernorm": _WHOLE,
    "self_attn.kv_b_proj": Cut(0, "heads"),
    "self_attn.o_proj": Cut(1, "heads"),
    "post_attention_layernorm": _WHOLE,
    "mlp.gate_proj": Cut(0, "dense"),
    "mlp.up_proj": Cut(0, "dense"),
    "mlp.down_proj": Cut(1, "dense"),
    "mlp.gate": _WHOLE,
    "mlp.shared_experts.gate_proj": Cut(0, "shared"),
    "mlp.shared_experts.up_proj": Cut(0, "shared"),
    "mlp.shared_experts.down_proj": Cut(1, "shared"),
    "mlp.experts.gate_proj": Cut(0, "expert"),
    "mlp.experts.up_proj": Cut(0, "expert"),
    "mlp.experts.down_proj": Cut(1, "expert"),
    "norm": _WHOLE,
    "lm_head": Cut(0, "vocabulary"),
}

# How a module stores its weight; the stated shape is of the whole weight and never cut.
_CUT_PARAMETERS = ("weight", "weight_packed", "weight_scale", "weight_scale_inv")
_WHOLE_PARAMETERS = ("weight_shape", "e_score_correction_bias")


def module_of(name: str) -> str:
    """The key of CUTS for a published tensor's name: without the parameter, the numbers, and what wraps the layers."""
    parts = name.split(".")[:-1]
    return ".".join(part for part in parts if part not in ("language_model", "model", "layers") and not part.isdigit())


def cut_of(name: str) -> Cut:
    """How the published tensor of that name is cut. Raises ShardError for a name that no target has."""
    parameter = name.rpartition(".")[2]
    cut = CUTS.get(module_of(name))
    if cut is None or parameter not in _CUT_PARAMETERS + _WHOLE_PARAMETERS:
        raise ShardError(f"{name} is no tensor of a DeepSeek-V3-architecture target")
    return _WHOLE if parameter in _WHOLE_PARAMETERS else cut


def part_of(name: str, shape: tuple[int, ...], *, rank: int, size: int) -> tuple[int, int, int] | None:
    """What rank 0 <= rank < size holds of the stored tensor [shape]: (axis, start, length), None for all of it. Raises
    ShardError where the parts wouldn't be equal."""
    assert 0 <= rank < size, f"rank {rank} of {size}"
    axis = cut_of(name).axis
    if axis is None or size == 1:
        return None
    if axis >= len(shape) or shape[axis] % size:
        raise ShardError(f"{name} of shape {list(shape)} can't be cut along axis {axis} into {size} equal parts")
    length = shape[axis] // size
    return axis, rank * length, length


def rank_bytes(name: str, nbytes: int, size: int) -> int:
    """Bytes that one of `size` ranks holds of a stored tensor of nbytes."""
    return nbytes if cut_of(name).axis is None else nbytes // size


@dataclass(frozen=True)
class Unit:
    """What is dealt out to the ranks in equal numbers: `count` of `noun`, only in multiples of `grain`."""

    noun: str
    count: int
    grain: int = 1

    @property
    def num_shares(self) -> int:
        """The most ranks that can have equal shares; every divisor of it can, and no other number."""
        return self.count // self.grain if self.count % self.grain == 0 else 1

    def __str__(self) -> str:
        return f"{self.count} {self.noun}" + (f" in groups of {self.grain}" if self.grain > 1 else "")


def units(
    *,
    vocab_size: int,
    num_attention_heads: int,
    intermediate_size: int,
    shared_intermediate_size: int,
    moe_intermediate_size: int,
    group_size: int | None = None,
) -> dict[str, Unit]:
    """The units of CUTS from a config's numbers, 0 for what the model doesn't have.

    group_size: expert columns that share an INT4 scale, of which a rank holds whole groups. FP8 blocks need not be
    whole: a rank takes the scale of every block that it has a piece of.
    """
    expert = lcm(group_size, WORD) if group_size else 1
    return {
        "vocabulary": Unit("tokens in the vocabulary", vocab_size),
        "heads": Unit("attention heads", num_attention_heads),
        "dense": Unit("columns of a dense feed-forward", intermediate_size),
        "shared": Unit("columns of the shared expert", shared_intermediate_size),
        "expert": Unit("columns of a routed expert", moe_intermediate_size, expert),
    }


def check_divides(dealt: Mapping[str, Unit], size: int) -> None:
    """Raises ShardError, naming what can't be divided and the sizes that work, unless every unit can be dealt
    out to `size` ranks."""
    if size < 1:
        raise ShardError(f"tp={size} must be at least 1")
    odd = [str(unit) for unit in dealt.values() if unit.num_shares % size] if size > 1 else []
    if odd:
        raise ShardError(f"tp={size} doesn't divide {' and '.join(odd)}; sizes that work: {_working(dealt)}")


def _working(dealt: Mapping[str, Unit]) -> str:
    most = gcd(*(unit.num_shares for unit in dealt.values()))
    return ", ".join(str(size) for size in range(1, MAX_SIZE + 1) if most % size == 0)


@dataclass(frozen=True)
class Collectives:
    """What the ranks exchange in one forward: sums of [rows, hidden] and gathers of [rows, vocabulary]."""

    num_all_reduces: int
    num_gathers: int


def collectives(num_layers: int, size: int) -> Collectives:
    """Of a forward on `size` ranks: two sums a layer, one behind the embedding, one gather of the logits."""
    return Collectives(2 * num_layers + 1, 1) if size > 1 else Collectives(0, 0)

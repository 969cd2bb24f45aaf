"""Loading a drafter: the tensors of any published layout to modules, and whether a drafter belongs to a target.

A drafter's mistakes cost speed and never change the output, so nobody would notice them later: everything is checked
here. The config must say what the tensors say, every tensor is used exactly once, and every number is finite. A drafter
is always plain: it never takes the target's quantisation over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minieagle.models.checkpoint import Checkpoint, CheckpointError, Filler, check_filled
from minieagle.models.config import TargetConfig, read_json
from minieagle.models.deepseek import Target
from minieagle.models.draft_vocabulary import target_ids
from minieagle.models.drafter_config import DrafterConfig, drafter_config
from minieagle.models.drafter_names import (
    DrafterShapes,
    drafter_shapes,
    layer_prefix,
    official_names,
    official_shapes,
)
from minieagle.models.eagle3 import Drafter, DrafterLayer, FirstLayer
from minieagle.models.gqa import GroupedAttention
from minieagle.models.mla import LatentAttention
from minieagle.models.rope import RotaryTable
from minieagle.models.shards import WHOLE
from minieagle.models.target_weights import fill_latent_attention

__all__ = ["DrafterShapes", "check_fits", "drafter_shapes", "drafter_tensors", "load_drafter"]

_log = logging.getLogger(__name__)

_TABLES = ("d2t", "t2d")
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)


class DrafterCheckpoint(Checkpoint):
    """A drafter's tensors by their official names, whatever the files call them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.names = official_names(self.stored)
        read = frozenset(self.names.values())
        self.drop(lambda name: name not in read)
        self.shapes = {name: self.stored[stored].shape for name, stored in self.names.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def take(self, name: str) -> Tensor:
        """The tensor of that official name. Raises CheckpointError when it is missing, quantised or not finite."""
        tensor = super().take(self.names.get(name, name))
        if name not in _TABLES:
            _check_numbers(name, tensor)
        return tensor


def _check_numbers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _PLAIN:
        raise CheckpointError(
            f"{name} is stored as {tensor.dtype}: a quantised drafter isn't supported, fetch the plain one"
        )
    # The least and the greatest are NaN where any number is, and need no copy of an embedding's size.
    if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
        raise CheckpointError(
            f"{name} holds NaN or infinity: it was never trained or saved, or is damaged; fetch it again"
        )


# What the config and the tensors both say, and the tensor that says it.
_WITNESSES = {
    "latent": "midlayer.self_attn.kv_a_proj_with_mqa.weight",
    "fc_norm": "fc_norm.0.weight",
    "norm_before_fc": "input_norm.weight",
    "qk_norm": "midlayer.self_attn.q_norm.weight",
    "own_embeddings": "embed_tokens.weight",
    "own_head": "lm_head.weight",
}


def check_tensors(config: DrafterConfig, checkpoint: DrafterCheckpoint) -> None:
    """Raises CheckpointError unless the tensors are those of this config: no flag that they contradict, none missing,
    none without a place, each of its shape. Reads no tensor."""
    told = drafter_shapes(checkpoint.shapes)
    for flag, witness in _WITNESSES.items():
        mine, theirs = bool(getattr(config, flag)), getattr(told, flag)
        if mine != theirs:
            raise CheckpointError(
                f"the drafter's config says {flag}={str(mine).lower()}, but its weights "
                f"{'hold' if theirs else 'have no'} {witness}: one of them is of another drafter"
            )
    wanted, found = official_shapes(config), checkpoint.shapes
    wrong = [
        f"{name} has shape {list(found[name])}, the config asks for {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    missing = [f"{name} is missing" for name in sorted(wanted.keys() - found)]
    unused = [f"{checkpoint.names[name]} has no place" for name in sorted(found.keys() - wanted.keys() - {*_TABLES})]
    if faults := wrong + missing + unused:
        raise CheckpointError(f"{checkpoint.directory} doesn't hold the drafter of its config: {'; '.join(faults)}")


def load_drafter(
    directory: Path,
    target: Target,
    *,
    config: DrafterConfig | None = None,
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
    d2t: str = "offset",
) -> Drafter:
    """Load an EAGLE-3 drafter for `target`, sharing what it has no own of.

    config: its wiring, None for what a minieagle config.json says; dtype: None for the config's; max_positions sizes
    the rotary table, None for the target's limit; d2t: how the table of target ids is written, see draft_vocabulary.py.
    Raises ConfigError or CheckpointError naming what is wrong.
    """
    config = drafter_config(read_json(directory / "config.json")) if config is None else config
    check_fits(config, target.config)
    checkpoint = DrafterCheckpoint(directory)
    check_tensors(config, checkpoint)
    wanted = dtype or getattr(torch, config.dtype)
    fill, cutter = (Filler(checkpoint, wanted, target.device, shards=s) for s in (WHOLE, target.shards))
    with torch.device("meta"):
        drafter = Drafter(config, target.shards)
    _fill_drafter(fill, cutter, drafter)
    drafter.borrow(target)
    if config.own_embeddings:
        drafter.embed_tokens = cutter.take({"embed_tokens.weight": (config.vocab_size, config.hidden_size)}, cut=0)
    tables = [checkpoint.take(name) if name in checkpoint else None for name in _TABLES]
    sizes = {"draft_vocab_size": config.draft_vocab_size, "vocab_size": config.vocab_size}
    drafter.target_ids = target_ids(*tables, **sizes, kind=d2t).to(target.device)
    check_filled(drafter, directory)
    checkpoint.finish()
    positions = max_positions or target.config.max_position_embeddings
    if min(positions, target.config.max_position_embeddings) > config.max_position_embeddings:
        _log.warning(
            "%s was trained on up to %d positions; beyond them, up to %d, acceptance may fall",
            directory,
            config.max_position_embeddings,
            positions,
        )
    drafter.rotary = RotaryTable(config.rotary_dim, config.rope_theta, positions, config.yarn).to(target.device)
    return drafter.eval()


@dataclass(frozen=True)
class _Place:
    """A module whose weight is the named tensors, one below the other: `rows` of each. cut: each rank has its piece of
    the rows of each."""

    module: nn.Module
    names: tuple[str, ...]
    rows: tuple[int, ...]
    cut: bool = False


def _place(module: nn.Module, *names: str, rows: tuple[int, ...] | None = None, cut: bool = False) -> _Place:
    height = module.get_parameter("weight").shape[0]
    return _Place(module, names, rows or (height // len(names),) * len(names), cut)


def _grouped_places(attention: GroupedAttention, prefix: str) -> Iterator[_Place]:
    rows = tuple(heads * attention.head_dim for heads in attention.heads)
    yield _place(attention.qkv, *[f"{prefix}.{p}_proj.weight" for p in "qkv"], rows=rows)
    if attention.has_head_norms:
        yield _place(attention.q_norm, f"{prefix}.q_norm.weight")
        yield _place(attention.k_norm, f"{prefix}.k_norm.weight")
    yield _place(attention.o, f"{prefix}.o_proj.weight")


def _layer_places(layer: DrafterLayer) -> Iterator[_Place]:
    """All but its attention and what is summed over ranks."""
    prefix = layer_prefix(layer.index)
    yield _place(layer.input_layernorm, f"{prefix}.input_layernorm.weight")
    if isinstance(layer, FirstLayer):
        yield _place(layer.hidden_norm, f"{prefix}.hidden_norm.weight")
    yield _place(layer.post_attention_layernorm, f"{prefix}.post_attention_layernorm.weight")
    yield _place(layer.mlp.gate_up, f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight", cut=True)


def _places(drafter: Drafter) -> Iterator[_Place]:
    """Where the official tensors lie, all but those of latent attention and of the products that are summed."""
    config = drafter.config
    if config.fc_norm:
        for tap, norm in enumerate(drafter.fc_norms):
            yield _place(norm, f"fc_norm.{tap}.weight")
    if config.norm_before_fc:
        yield _place(drafter.input_norm, "input_norm.weight")
    yield _place(drafter.fc, "fc.weight")
    for layer in drafter.all_layers():
        yield from _layer_places(layer)
        if isinstance(layer.attention, GroupedAttention):
            yield from _grouped_places(layer.attention, f"{layer_prefix(layer.index)}.self_attn")
    yield _place(drafter.norm, "norm.weight")
    if config.own_head:
        yield _place(drafter.lm_head, "lm_head.weight", cut=True)


def _fill_drafter(fill: Filler, cutter: Filler, drafter: Drafter) -> None:
    """fill takes whole tensors, cutter this rank's pieces."""
    for place in _places(drafter):
        pieces = drafter.shards.ranks.size if place.cut else 1
        rows = [height * pieces for height in place.rows]
        (cutter if place.cut else fill).fill(place.module, *place.names, rows=rows, cut=place.cut)
    for layer in drafter.all_layers():
        cutter.fill_summed(layer.mlp.down, _down_name(layer))
        if isinstance(layer.attention, LatentAttention):
            fill_latent_attention(fill, layer.attention, f"{layer_prefix(layer.index)}.self_attn")


def _down_name(layer: DrafterLayer) -> str:
    return f"{layer_prefix(layer.index)}.mlp.down_proj.weight"


def _latent_tensors(attention: LatentAttention, prefix: str) -> dict[str, Tensor]:
    """The inverse of fill_latent_attention."""
    query = "q_proj" if attention.q_rank is None else "q_a_proj"
    q, kv_a = attention.qkv_a.weight.split((attention.qkv_a_q_width, attention.rank + attention.rope))
    kv_b = torch.cat((attention.w_uk, attention.w_uv.transpose(1, 2)), dim=1).flatten(0, 1)
    tensors = {query: q, "kv_a_proj_with_mqa": kv_a, "kv_a_layernorm": attention.kv_a_norm.weight, "kv_b_proj": kv_b}
    if attention.q_rank is not None:
        tensors |= {"q_a_layernorm": attention.q_a_norm.weight, "q_b_proj": attention.q_b.weight}
    tensors["o_proj"] = attention.o.weight
    return {f"{prefix}.{name}.weight": tensor for name, tensor in tensors.items()}


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's tensors under the official names, with d2t as offsets and t2d: what load_drafter reads. Views where
    that is possible; not for packed weights, nor for one rank's pieces."""
    tensors: dict[str, Tensor] = {}
    for place in _places(drafter):
        parts = place.module.get_parameter("weight").detach().split(place.rows)
        tensors |= dict(zip(place.names, parts, strict=True))
    for layer in drafter.all_layers():
        tensors[_down_name(layer)] = layer.mlp.down.get_parameter("weight")
        if isinstance(layer.attention, LatentAttention):
            tensors |= _latent_tensors(layer.attention, f"{layer_prefix(layer.index)}.self_attn")
    if drafter.config.own_embeddings:
        tensors["embed_tokens.weight"] = drafter.embed_tokens
    ids = drafter.target_ids
    tensors["d2t"] = ids - torch.arange(ids.shape[0], device=ids.device)
    marked = torch.zeros(drafter.config.vocab_size, dtype=torch.bool, device=ids.device)
    tensors["t2d"] = marked.index_fill_(0, ids, True)
    return tensors


def check_fits(drafter: DrafterConfig, target: TargetConfig) -> None:
    """Raises CheckpointError unless a drafter of this config can read this target: vocabulary, width, boundaries."""
    pairs = [
        ("vocab_size", drafter.vocab_size, target.vocab_size),
        ("target_hidden_size", drafter.target_hidden_size, target.hidden_size),
    ]
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise CheckpointError(
                f"the drafter's {name}={mine} is not the target's {theirs}: it belongs to another target"
            )
    last = target.num_hidden_layers
    outside = [b for b in drafter.boundaries if not 0 <= b <= last]
    if outside or len(set(drafter.boundaries)) != len(drafter.boundaries):
        raise CheckpointError(f"boundaries={list(drafter.boundaries)} must be distinct and in 0..{last} here")
    if drafter.last_state == "post-norm" and last not in drafter.boundaries:
        raise CheckpointError(
            f'last_state="post-norm" speaks of boundary {last}, which boundaries={list(drafter.boundaries)} leave out'
        )

"""Loading a target: published DeepSeek-V3 names to modules.

Files are released after each layer, so that loading peaks at the model's own size plus about one layer. Ranks walk the
layers in the same order and copy their own pieces out of the mapped files, so that the system's file cache serves all
ranks of a host. What is left in the files, and why, is logged; what is neither loaded nor known is an error (see
target_names.py).
"""

from __future__ import annotations

import ctypes
import logging
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

import torch
from torch import nn

from minieagle.models.checkpoint import Checkpoint, CheckpointError, Filler, Progress, check_filled
from minieagle.models.config import TargetConfig, read_json, target_config
from minieagle.models.deepseek import Block, Target
from minieagle.models.int4 import WORD, Int4Linear
from minieagle.models.layers import Linear, SlicedLinear, summed_linear
from minieagle.models.mla import FLOAT32_FOLD, LatentAttention
from minieagle.models.moe import Expert, MixtureOfExperts
from minieagle.models.rank_files import weight_directory
from minieagle.models.readahead import Prefetch
from minieagle.models.rope import RotaryTable
from minieagle.models.shards import WHOLE, Shards
from minieagle.models.target_names import (
    INDEXER,
    VISION,
    WRAPPER,
    by_layer,
    check_formats,
    dropped,
    of_other_experts,
)

_log = logging.getLogger(__name__)


def fill_latent_attention(fill: Filler, attention: LatentAttention, prefix: str) -> None:
    """Fill latent attention, a target's or a drafter's, from the published names under `prefix`."""
    query = "q_proj" if attention.q_rank is None else "q_a_proj"
    _fill_first_products(fill, attention, f"{prefix}.{query}.weight", f"{prefix}.kv_a_proj_with_mqa.weight")
    if attention.q_rank is not None:
        fill.fill(attention.q_a_norm, f"{prefix}.q_a_layernorm.weight")
        fill.fill(attention.q_b, f"{prefix}.q_b_proj.weight", cut=True)
    fill.fill(attention.kv_a_norm, f"{prefix}.kv_a_layernorm.weight")
    widths = (attention.nope, attention.value)
    rows = attention.num_heads * fill.shards.ranks.size * sum(widths)
    kv_b = fill.take({f"{prefix}.kv_b_proj.weight": (rows, attention.rank)}, cut=0)
    w_uk, w_uv = kv_b.unflatten(0, (attention.num_heads, -1)).split(widths, dim=1)
    small = fill.device.type == "cpu" and kv_b.numel() * fill.shards.ranks.size <= FLOAT32_FOLD  # see models/mla.py
    folded = torch.float32 if small else fill.dtype
    fill.put(attention, "w_uk", w_uk.to(folded).contiguous())
    fill.put(attention, "w_uv", w_uv.transpose(1, 2).to(folded).contiguous())
    fill.fill_summed(attention.o, f"{prefix}.o_proj.weight")


def _fill_first_products(fill: Filler, attention: LatentAttention, query: str, latent: str) -> None:
    """The fused product of query and latent. The latent is whole on every rank, and so is a low-rank query; a plain
    one is cut by heads."""
    size = 1 if attention.q_rank is not None else fill.shards.ranks.size
    q = fill.take({query: (attention.qkv_a_q_width * size, attention.qkv_a.in_features)}, cut=None if size == 1 else 0)
    kv = fill.take({latent: (attention.rank + attention.rope, attention.qkv_a.in_features)})
    fill.put(attention.qkv_a, "weight", torch.cat((q, kv)))
    attention.qkv_a.pack()


def _expert_linear(fill: Filler, names: list[str], rows: int, width: int) -> nn.Module:
    """One product [rows, width] of an expert from its published names, INT4 exactly when the checkpoint has
    `weight_packed`."""
    if f"{names[0]}.weight_packed" in fill.checkpoint:
        return _int4_linear(fill, names, rows // len(names), width)
    with torch.device("meta"):
        linear = Linear(width, rows // fill.shards.ranks.size)
    fill.fill(linear, *[f"{name}.weight" for name in names], cut=True)
    return linear


def _summed_expert_linear(fill: Filler, name: str, rows: int, width: int) -> nn.Module:
    """The product [rows, width] of an expert whose input columns are cut."""
    if f"{name}.weight_packed" in fill.checkpoint:
        return _summed_int4_linear(fill, name, rows, width)
    with torch.device("meta"):
        linear = summed_linear(width // fill.shards.ranks.size, rows, fill.shards.num_local)
    fill.fill_summed(linear, f"{name}.weight")
    return linear


def _group_size(fill: Filler, name: str, width: int) -> int:
    """Columns of `name` that share a scale: what config.json states, else what the scales' shape says."""
    stored = fill.checkpoint.stored.get(f"{name}.weight_scale")
    group = fill.group_size
    if group is None and stored is not None and len(stored.shape) == 2 and stored.shape[1] > 0:
        group = width // stored.shape[1]
    if not group or width % group or width % WORD:
        raise CheckpointError(
            f"{name}.weight_packed: groups of group_size={group} columns must divide its {width} columns, and so must "
            f"words of {WORD}; config.json states group_size={fill.group_size}"
        )
    return group


def _int4_linear(fill: Filler, names: list[str], height: int, width: int) -> Int4Linear:
    """The packed weights [height, width] of each name, one below the other."""
    group = _group_size(fill, names[0], width)
    for name in names:
        _check_plain_int4(fill.checkpoint, f"{name}.weight", [height, width])
    packed = fill.pieces({f"{name}.weight_packed": (height, width // WORD) for name in names}, dtype=torch.int32, cut=0)
    scale = fill.take({f"{name}.weight_scale": (height, width // group) for name in names}, cut=0)
    return Int4Linear(packed, scale, fill.dtype)


def _summed_int4_linear(fill: Filler, name: str, height: int, width: int) -> nn.Module:
    """The packed weights [height, width] whose columns are cut: words and scales by the same logical columns."""
    group = _group_size(fill, name, fill.stored_shape((height, width), cut=1)[1])
    fill.shards.local(width, f"columns of {name}", unit=group)
    _check_plain_int4(fill.checkpoint, f"{name}.weight", [height, width])
    (packed,) = fill.pieces({f"{name}.weight_packed": (height, width // WORD)}, dtype=torch.int32, cut=1)
    scale = fill.take({f"{name}.weight_scale": (height, width // group)}, cut=1)
    count = fill.shards.num_local
    pieces = zip(packed.chunk(count, dim=1), scale.chunk(count, dim=1), strict=True)
    parts = [Int4Linear(words, scales.contiguous(), fill.dtype) for words, scales in pieces]
    return parts[0] if count == 1 else SlicedLinear(parts)


def _check_plain_int4(checkpoint: Checkpoint, name: str, shape: list[int]) -> None:
    """Refuse what would change the weight: zero points, activation order, a stated shape that is not the config's."""
    for suffix in ("zero_point", "g_idx"):
        if f"{name}_{suffix}" in checkpoint:
            raise CheckpointError(f"{name}_{suffix}: only symmetric INT4 without activation order is supported")
    if f"{name}_shape" in checkpoint:
        stated = checkpoint.take(f"{name}_shape").tolist()
        if stated != shape:
            raise CheckpointError(f"{name}_shape says {stated}, the config asks for {shape}")


def _fill_experts(fill: Filler, moe: MixtureOfExperts, config: TargetConfig, prefix: str) -> None:
    fill.fill(moe.router, f"{prefix}.gate.weight", dtype=torch.float32)
    bias = f"{prefix}.gate.e_score_correction_bias"
    fill.put(moe.router, "e_score_correction_bias", fill.take({bias: (config.n_routed_experts,)}, dtype=torch.float32))
    width, inner = config.hidden_size, config.moe_intermediate_size
    cutter = fill.uncut() if fill.shards.expert_parallel else fill
    for e in fill.shards.experts(config.n_routed_experts):
        name = f"{prefix}.experts.{e}"
        gate_up = _expert_linear(cutter, [f"{name}.gate_proj", f"{name}.up_proj"], 2 * inner, width)
        moe.experts.append(Expert(gate_up, _summed_expert_linear(cutter, f"{name}.down_proj", width, inner)))
    moe.pack()
    if moe.shared is not None:
        fill.swiglu(moe.shared, f"{prefix}.shared_experts")


def fill_block(fill: Filler, block: Block, config: TargetConfig, prefix: str) -> None:
    fill.fill(block.input_norm, f"{prefix}.input_layernorm.weight")
    fill.fill(block.post_attention_norm, f"{prefix}.post_attention_layernorm.weight")
    fill_latent_attention(fill, block.attention, f"{prefix}.self_attn")
    if isinstance(block.feed_forward, MixtureOfExperts):
        _fill_experts(fill, block.feed_forward, config, f"{prefix}.mlp")
    else:
        fill.swiglu(block.feed_forward, f"{prefix}.mlp")


def give_back_memory() -> None:
    """Return freed memory to the system. Temporaries of loading leave holes between lasting tensors, which glibc keeps:
    for INT4 experts as much again as the model itself."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


# What a user loses with the tensors left out; with the others, nothing.
_LOSS = {
    VISION: ": the model takes text only",
    INDEXER: ": attention is dense, the same up to index_topk (2048) tokens and unlike training beyond",
}


@cache
def _note(level: int, message: str) -> None:
    """Log a message once: a streamed target opens its files several times."""
    _log.log(level, "%s", message)


def _leave_out(checkpoint: Checkpoint, config: TargetConfig) -> None:
    for reason, names in dropped(checkpoint.stored, config).items():
        checkpoint.drop(set(names).__contains__)
        size = sum(checkpoint.stored[name].nbytes for name in names)
        told = f"{checkpoint.directory}: {reason} left out ({len(names)} tensors, {size} bytes){_LOSS.get(reason, '')}"
        _note(logging.WARNING if reason in _LOSS else logging.INFO, told)


def open_target(
    directory: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    shards: Shards = WHOLE,
) -> tuple[TargetConfig, Filler]:
    """The config of a model directory and a filler over the tensors that the model uses, without a wrapper's prefix; no
    tensor is read yet. Raises ConfigError or CheckpointError naming what is wrong."""
    config = target_config(read_json(directory / "config.json"))
    weights, metadata = weight_directory(directory, shards)
    checkpoint = Checkpoint(weights, metadata)
    _leave_out(checkpoint, config)
    checkpoint.strip(WRAPPER)
    check_formats(checkpoint.left, config)
    if shards.expert_parallel:
        checkpoint.drop(of_other_experts(shards.experts(config.n_routed_experts), config.n_routed_experts))
    last = f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight"
    if last not in checkpoint:  # told before as many modules are built as config.json asks for
        raise CheckpointError(f"{directory} has no tensor {last}: the model needs it")
    wanted, place = dtype or getattr(torch, config.dtype), device or torch.device("cpu")
    return config, Filler(checkpoint, wanted, place, config.group_size, config.fp8_block, shards, metadata is not None)


def load_target(
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    max_positions: int | None = None,
    progress: Progress | None = None,
    shards: Shards = WHOLE,
) -> Target:
    """Load a DeepSeek-V3-architecture model. dtype: None keeps the checkpoint's; max_positions sizes the rotary table,
    None takes the config's limit; shards says which pieces this rank holds. Raises ConfigError, CheckpointError or
    ShardError naming what is wrong."""
    config, fill = open_target(directory, dtype, device, shards)
    with torch.device("meta"):
        target = Target(config, shards)
    _fill_target(fill, target, progress)
    check_filled(target, directory)
    fill.checkpoint.finish()
    positions = max_positions or config.max_position_embeddings
    target.rotary = RotaryTable(config.qk_rope_head_dim, config.rope_theta, positions, config.yarn).to(fill.device)
    fill.checkpoint.report(progress)
    return target.eval()


def _fill_target(fill: Filler, target: Target, progress: Progress | None) -> None:
    """All of it, layer by layer. The embedding, which is first, is read while the threads of `ahead` bring layers."""
    config, checkpoint = target.config, fill.checkpoint
    with closing(_prefetch(fill, config.num_hidden_layers)) as ahead:
        table = fill.take({"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}, cut=0)
        fill.put(target, "embed_tokens", table)
        for index, block in enumerate(target.layers):
            assert isinstance(block, Block)
            fill_block(fill, block, config, f"model.layers.{index}")
            checkpoint.release()
            give_back_memory()
            checkpoint.report(progress)
            ahead.advance()
    fill.fill(target.norm, "model.norm.weight")
    if config.tie_word_embeddings:
        fill.put(target.lm_head, "weight", target.embed_tokens.detach().clone())
        target.lm_head.pack()
    else:
        fill.fill(target.lm_head, "lm_head.weight", cut=True)


def _prefetch(fill: Filler, num_layers: int) -> Prefetch:
    """Layer after layer, then what belongs to none: this rank's share of files that all ranks read, all of its own."""
    layers, others = by_layer(fill.checkpoint.left, num_layers)
    ranks, stored = fill.shards.ranks, fill.checkpoint.stored
    share = (0, 1) if fill.are_cut else (ranks.rank, ranks.size)
    return Prefetch([[stored[name] for name in part] for part in (*layers, others)], share)

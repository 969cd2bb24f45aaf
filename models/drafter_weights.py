"""Loading a drafter: official EAGLE-3 names to modules, and whether a drafter belongs to a target."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minieagle.models.checkpoint import Checkpoint, CheckpointError, Filler, check_filled
from minieagle.models.config import TargetConfig, read_json
from minieagle.models.deepseek import Target
from minieagle.models.drafter_config import DrafterConfig, drafter_config
from minieagle.models.drafter_names import DrafterShapes as DrafterShapes
from minieagle.models.drafter_names import drafter_shapes as drafter_shapes
from minieagle.models.eagle3 import Drafter
from minieagle.models.rope import RotaryTable


def _target_ids(checkpoint: Checkpoint, config: DrafterConfig) -> Tensor:
    """[draft_vocab_size] int64: the target's id of each draft id, arange + d2t. A wrong table costs speed and nothing
    else, so nobody would notice it: absolute ids, an arange or zeros in place of offsets are told by t2d, which names
    the same tokens the other way round."""
    ids = torch.arange(config.draft_vocab_size)
    if config.draft_vocab_size == config.vocab_size and "d2t" not in checkpoint:
        return ids
    d2t, t2d = checkpoint.take("d2t").to(torch.int64), checkpoint.take("t2d").bool()
    if d2t.shape != ids.shape:
        raise CheckpointError(f"d2t has shape {list(d2t.shape)}, the config asks for {list(ids.shape)}")
    if t2d.shape != (config.vocab_size,) or not torch.equal(t2d.nonzero().flatten(), ids + d2t):
        raise CheckpointError(
            f"d2t and t2d disagree: arange + d2t must be the {int(t2d.sum())} tokens that t2d marks, in order, "
            f"but d2t starts {d2t[:3].tolist()} and t2d marks {t2d.nonzero().flatten()[:3].tolist()}"
        )
    return ids + d2t


def load_drafter(
    directory: Path, target: Target, *, dtype: torch.dtype | None = None, max_positions: int | None = None
) -> Drafter:
    """Load an EAGLE-3 drafter for `target`, sharing its embeddings unless the checkpoint brings its own."""
    config = drafter_config(read_json(directory / "config.json"))
    check_fits(config, target.config)
    checkpoint = Checkpoint(directory)
    fill = Filler(checkpoint, dtype or getattr(torch, config.dtype), target.device)
    with torch.device("meta"):
        drafter = Drafter(config)
    fill_drafter(fill, drafter)
    if config.own_embeddings:
        drafter.embed_tokens = fill.take({"embed_tokens.weight": (config.vocab_size, config.hidden_size)})
    else:
        drafter.embed_tokens = target.embed_tokens.detach()
    drafter.target_ids = _target_ids(checkpoint, config).to(target.device)
    check_filled(drafter, directory)
    checkpoint.finish()
    positions = max_positions or target.config.max_position_embeddings
    drafter.rotary = RotaryTable(config.head_dim, config.rope_theta, positions).to(target.device)
    return drafter.eval()


def fill_drafter(fill: Filler, drafter: Drafter) -> None:
    """Fill a drafter's own parameters from the official EAGLE-3 names."""
    config, layer = drafter.config, drafter.midlayer
    if config.fc_norm:
        for index, norm in enumerate(drafter.fc_norms):
            fill.fill(norm, f"fc_norm.{index}.weight")
    if config.norm_before_fc:
        fill.fill(drafter.input_norm, "input_norm.weight")
    fill.fill(drafter.fc, "fc.weight")
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        fill.fill(getattr(layer, name), f"midlayer.{name}.weight")
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    names = [f"midlayer.self_attn.{p}_proj.weight" for p in "qkv"]
    fill.fill(layer.qkv, *names, rows=[n * layer.head_dim for n in heads])
    fill.fill(layer.o, "midlayer.self_attn.o_proj.weight")
    fill.swiglu(layer.mlp, "midlayer.mlp")
    fill.fill(drafter.norm, "norm.weight")
    fill.fill(drafter.lm_head, "lm_head.weight")


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
    outside = [b for b in drafter.boundaries if not 0 <= b <= target.num_hidden_layers]
    if outside or len(set(drafter.boundaries)) != len(drafter.boundaries):
        raise CheckpointError(
            f"boundaries={list(drafter.boundaries)} must be distinct and in 0..{target.num_hidden_layers} here"
        )

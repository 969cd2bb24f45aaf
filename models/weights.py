"""From safetensors files to modules: every parameter filled exactly once, every tensor used or dropped by name.

Files are memory-mapped and released after each layer, so that loading peaks at the model's own size plus about one
layer. Published names are those of DeepSeek-V3 (target) and of the official EAGLE-3 checkpoints (drafter).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minieagle.models.config import DrafterConfig, TargetConfig, read_json, target_config
from minieagle.models.deepseek import Block, Target
from minieagle.models.eagle3 import Drafter
from minieagle.models.int4 import Int4Linear
from minieagle.models.layers import Linear, SwiGLU
from minieagle.models.mla import LatentAttention
from minieagle.models.moe import Expert, MixtureOfExperts
from minieagle.models.rope import RotaryTable

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each layer."""

# Buffers that some checkpoints store and that are computed here.
_COMPUTED = re.compile(r"\.(rotary_emb\.inv_freq|cos_cached|sin_cached)$")


class CheckpointError(ValueError):
    """A weight directory that is empty, damaged, or doesn't hold exactly the tensors that the model needs."""


class Checkpoint:
    """The tensors of a directory by name. `take` hands each out once; `finish` raises if any is left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[Path, Any] = {}
        self._files = self._index()
        self._left = set(self._files)
        self.taken_bytes = 0
        self.total_bytes = sum(path.stat().st_size for path in set(self._files.values()))

    def _index(self) -> dict[str, Path]:
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory} is not a directory: pass the folder that holds config.json and weights"
            )
        paths = sorted(self.directory.glob("*.safetensors"))
        listed = self.directory / "model.safetensors.index.json"
        if listed.exists():
            names = set(read_json(listed).get("weight_map", {}).values())
            missing = sorted(names - {path.name for path in paths})
            if missing:
                raise CheckpointError(f"{listed} lists {missing[0]} ({len(missing)} files missing): download the rest")
        if not paths:
            raise CheckpointError(f"{self.directory} holds no *.safetensors file: only safetensors weights are read")
        files: dict[str, Path] = {}
        for path in paths:
            for name in self._handle(path).keys():
                if name in files:
                    raise CheckpointError(f"tensor {name} is in both {files[name].name} and {path.name}")
                files[name] = path
        self.release()
        return files

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} can't be read ({error}): it is damaged or cut short, fetch it again"
                ) from error
        return self._open[path]

    def release(self) -> None:
        """Close the memory maps opened so far."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str) -> Tensor:
        """The tensor of that name, mapped; raises when it is missing or was taken before."""
        if name not in self._files:
            raise CheckpointError(f"{self.directory} has no tensor {name}: the model needs it")
        assert name in self._left, f"{name} is taken twice"
        self._left.discard(name)
        tensor: Tensor = self._handle(self._files[name]).get_tensor(name)
        self.taken_bytes += tensor.nbytes
        return tensor

    def drop(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Forget the tensors whose name is unwanted; returns them."""
        dropped = sorted(name for name in self._left if unwanted(name))
        self._left.difference_update(dropped)
        return dropped

    def finish(self) -> None:
        self.release()
        if self._left:
            some = sorted(self._left)[:5]
            raise CheckpointError(
                f"{self.directory} holds {len(self._left)} tensors that the model has no place for: {some}"
            )


class Filler:
    """Puts tensors into a module on the meta device, checking shapes, in one dtype and on one device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device

    def take(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """The named tensors, one below the other, copied out of the mapping."""
        parts = [self.checkpoint.take(name) for name in names]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole.to(self.device, dtype or self.dtype, copy=True)

    def put(self, module: nn.Module, parameter: str, tensor: Tensor, source: str) -> None:
        place = getattr(module, parameter)
        if place.shape != tensor.shape:
            raise CheckpointError(f"{source} has shape {list(tensor.shape)}, the config asks for {list(place.shape)}")
        assert place.is_meta, f"{source} is filled twice"
        setattr(module, parameter, nn.Parameter(tensor, requires_grad=False))

    def fill(self, module: nn.Module, *names: str, dtype: torch.dtype | None = None) -> None:
        """module.weight from the named tensors (stacked by rows); a Linear is packed at once."""
        self.put(module, "weight", self.take(*names, dtype=dtype), names[0])
        if isinstance(module, Linear):
            module.pack()

    def swiglu(self, module: SwiGLU, prefix: str) -> None:
        self.fill(module.gate_up, f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        self.fill(module.down, f"{prefix}.down_proj.weight")


def _fill_attention(fill: Filler, attention: LatentAttention, prefix: str) -> None:
    if attention.q_rank is None:
        fill.fill(attention.qkv_a, f"{prefix}.q_proj.weight", f"{prefix}.kv_a_proj_with_mqa.weight")
    else:
        fill.fill(attention.qkv_a, f"{prefix}.q_a_proj.weight", f"{prefix}.kv_a_proj_with_mqa.weight")
        fill.fill(attention.q_a_norm, f"{prefix}.q_a_layernorm.weight")
        fill.fill(attention.q_b, f"{prefix}.q_b_proj.weight")
    fill.fill(attention.kv_a_norm, f"{prefix}.kv_a_layernorm.weight")
    name = f"{prefix}.kv_b_proj.weight"
    kv_b = fill.take(name)
    expected = [attention.num_heads * (attention.nope + attention.value), attention.rank]
    if list(kv_b.shape) != expected:
        raise CheckpointError(f"{name} has shape {list(kv_b.shape)}, the config asks for {expected}")
    w_uk, w_uv = kv_b.unflatten(0, (attention.num_heads, -1)).split((attention.nope, attention.value), dim=1)
    fill.put(attention, "w_uk", w_uk.contiguous(), name)
    fill.put(attention, "w_uv", w_uv.transpose(1, 2).contiguous(), name)
    fill.fill(attention.o, f"{prefix}.o_proj.weight")


def _expert_linear(fill: Filler, names: list[str], shape: tuple[int, int]) -> nn.Module:
    """One product of an expert from its published names, INT4 exactly when the checkpoint has `weight_packed`."""
    if f"{names[0]}.weight_packed" not in fill.checkpoint:
        with torch.device("meta"):
            linear = Linear(shape[1], shape[0])
        fill.fill(linear, *[f"{name}.weight" for name in names])
        return linear
    fill.checkpoint.drop(lambda name: name in {f"{n}.weight_shape" for n in names})
    for name in names:
        for suffix in ("weight_zero_point", "weight_g_idx"):
            if f"{name}.{suffix}" in fill.checkpoint:
                raise CheckpointError(f"{name}.{suffix}: only symmetric INT4 without activation order is supported")
    packed = fill.take(*[f"{name}.weight_packed" for name in names], dtype=torch.int32)
    scale = fill.take(*[f"{name}.weight_scale" for name in names])
    if packed.shape[0] != shape[0] or packed.shape[1] * 8 != shape[1] or shape[1] % scale.shape[1]:
        raise CheckpointError(
            f"{names[0]}: packed {list(packed.shape)} and scale {list(scale.shape)} don't fit a weight of {list(shape)}"
        )
    return Int4Linear(packed, scale, fill.dtype)


def _fill_experts(fill: Filler, moe: MixtureOfExperts, config: TargetConfig, prefix: str) -> None:
    fill.fill(moe.router, f"{prefix}.gate.weight", dtype=torch.float32)
    bias = f"{prefix}.gate.e_score_correction_bias"
    fill.put(moe.router, "e_score_correction_bias", fill.take(bias, dtype=torch.float32), bias)
    width, inner = config.hidden_size, config.moe_intermediate_size
    for e in range(config.n_routed_experts):
        name = f"{prefix}.experts.{e}"
        gate_up = _expert_linear(fill, [f"{name}.gate_proj", f"{name}.up_proj"], (2 * inner, width))
        moe.experts.append(Expert(gate_up, _expert_linear(fill, [f"{name}.down_proj"], (width, inner))))
    if moe.shared is not None:
        fill.swiglu(moe.shared, f"{prefix}.shared_experts")


def _fill_block(fill: Filler, block: Block, config: TargetConfig, prefix: str) -> None:
    fill.fill(block.input_norm, f"{prefix}.input_layernorm.weight")
    fill.fill(block.post_attention_norm, f"{prefix}.post_attention_layernorm.weight")
    _fill_attention(fill, block.attention, f"{prefix}.self_attn")
    if isinstance(block.feed_forward, MixtureOfExperts):
        _fill_experts(fill, block.feed_forward, config, f"{prefix}.mlp")
    else:
        fill.swiglu(block.feed_forward, f"{prefix}.mlp")


def _check_filled(model: nn.Module, directory: Path) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise CheckpointError(f"{directory} left {len(empty)} parameters unfilled: {empty[:5]}")


def _beyond(config: TargetConfig) -> Callable[[str], bool]:
    """Names of multi-token-prediction layers (index num_hidden_layers and up) and of computed buffers."""

    def unwanted(name: str) -> bool:
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return bool(_COMPUTED.search(name)) or (found is not None and int(found[1]) >= config.num_hidden_layers)

    return unwanted


def load_target(
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    max_positions: int | None = None,
    progress: Progress | None = None,
) -> Target:
    """Load a DeepSeek-V3-architecture model. dtype: None keeps the checkpoint's; max_positions sizes the rotary table,
    None takes the config's limit. Raises ConfigError or CheckpointError naming what is wrong."""
    config = target_config(read_json(directory / "config.json"))
    checkpoint = Checkpoint(directory)
    fill = Filler(checkpoint, dtype or getattr(torch, config.dtype), device or torch.device("cpu"))
    report = progress or (lambda done, total: None)
    with torch.device("meta"):
        target = Target(config)
    checkpoint.drop(_beyond(config))
    fill.put(target, "embed_tokens", fill.take("model.embed_tokens.weight"), "model.embed_tokens.weight")
    for index, block in enumerate(target.layers):
        _fill_block(fill, block, config, f"model.layers.{index}")
        checkpoint.release()
        report(checkpoint.taken_bytes, checkpoint.total_bytes)
    fill.fill(target.norm, "model.norm.weight")
    if config.tie_word_embeddings:
        checkpoint.drop(lambda name: name == "lm_head.weight")
        fill.put(target.lm_head, "weight", target.embed_tokens.detach().clone(), "model.embed_tokens.weight")
        target.lm_head.pack()
    else:
        fill.fill(target.lm_head, "lm_head.weight")
    _check_filled(target, directory)
    checkpoint.finish()
    positions = max_positions or config.max_position_embeddings
    target.rotary = RotaryTable(config.qk_rope_head_dim, config.rope_theta, positions, config.yarn).to(fill.device)
    report(checkpoint.total_bytes, checkpoint.total_bytes)
    return target.eval()


def drafter_config(config: dict[str, Any]) -> DrafterConfig:
    """Parse the config.json of a drafter that states its boundaries. Raises ConfigError for missing fields."""
    known = {name: config[name] for name in DrafterConfig.__dataclass_fields__ if name in config}
    if "boundaries" not in known:
        raise CheckpointError("the drafter's config.json names no `boundaries`: state which target states it reads")
    known["boundaries"] = tuple(known["boundaries"])
    try:
        return DrafterConfig(**known)
    except TypeError as error:
        raise CheckpointError(f"the drafter's config.json is incomplete: {error}") from None


def _check_d2t(target_ids: Tensor, vocab_size: int) -> None:
    """arange + d2t must be strictly increasing and inside the target's vocabulary (facts of every trainer that writes
    offsets; absolute ids or arange fail here)."""
    if target_ids[0] < 0 or target_ids[-1] >= vocab_size or not bool((target_ids.diff() > 0).all()):
        raise CheckpointError(
            f"d2t is not a table of offsets: arange + d2t must rise strictly within 0..{vocab_size - 1}, "
            f"got {target_ids[:3].tolist()}..{target_ids[-3:].tolist()}"
        )


def _target_ids(checkpoint: Checkpoint, config: DrafterConfig) -> Tensor:
    ids = torch.arange(config.draft_vocab_size)
    if "d2t" not in checkpoint:
        if config.draft_vocab_size != config.vocab_size:
            raise CheckpointError(
                f"no tensor d2t, but draft_vocab_size={config.draft_vocab_size} is reduced: it is needed"
            )
        return ids
    d2t = checkpoint.take("d2t").to(torch.int64)
    if d2t.shape != ids.shape:
        raise CheckpointError(
            f"d2t has shape {list(d2t.shape)}, draft_vocab_size={config.draft_vocab_size} asks for it to match"
        )
    ids = ids + d2t
    _check_d2t(ids, config.vocab_size)
    if "t2d" in checkpoint:
        mask = checkpoint.take("t2d").bool()
        if mask.shape[0] != config.vocab_size or not torch.equal(mask.nonzero().flatten(), ids):
            raise CheckpointError("t2d and d2t name different tokens: one of them belongs to another drafter")
    return ids


def load_drafter(
    directory: Path, target: Target, *, dtype: torch.dtype | None = None, max_positions: int | None = None
) -> Drafter:
    """Load an EAGLE-3 drafter for `target`, sharing its embeddings unless the checkpoint brings its own."""
    config = drafter_config(read_json(directory / "config.json"))
    _check_fits(config, target.config)
    checkpoint = Checkpoint(directory)
    fill = Filler(checkpoint, dtype or getattr(torch, config.dtype), target.device)
    with torch.device("meta"):
        drafter = Drafter(config)
    fill_drafter(fill, drafter)
    if config.own_embeddings:
        drafter.embed_tokens = fill.take("embed_tokens.weight")
    else:
        drafter.embed_tokens = target.embed_tokens.detach()
    drafter.target_ids = _target_ids(checkpoint, config).to(target.device)
    _check_filled(drafter, directory)
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
    fill.fill(layer.qkv, *[f"midlayer.self_attn.{p}_proj.weight" for p in "qkv"])
    fill.fill(layer.o, "midlayer.self_attn.o_proj.weight")
    fill.swiglu(layer.mlp, "midlayer.mlp")
    fill.fill(drafter.norm, "norm.weight")
    fill.fill(drafter.lm_head, "lm_head.weight")


def _check_fits(drafter: DrafterConfig, target: TargetConfig) -> None:
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
            f"boundaries={list(drafter.boundaries)} must be distinct and in 0..{target.num_hidden_layers} for this target"
        )

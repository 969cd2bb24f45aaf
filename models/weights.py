"""From safetensors files to modules: every parameter filled exactly once, every tensor used or dropped by name.

Files are memory-mapped and released after each layer, so that loading peaks at the model's own size plus about one
layer. Published names are those of DeepSeek-V3 (target) and of the official EAGLE-3 checkpoints (drafter).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minieagle.models.config import DrafterConfig, TargetConfig, drafter_config, read_json, target_config
from minieagle.models.deepseek import Block, Target
from minieagle.models.eagle3 import Drafter
from minieagle.models.int4 import WORD, Int4Linear
from minieagle.models.layers import Linear, SwiGLU
from minieagle.models.mla import FLOAT32_FOLD, LatentAttention
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

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group_size: int | None = None
    ) -> None:
        self.checkpoint, self.dtype, self.device, self.group_size = checkpoint, dtype, device, group_size

    def take(self, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype | None = None) -> Tensor:
        """The named tensors, each of the shape given, one below the other, copied out of the mapping."""
        parts = [self._checked(name, shape) for name, shape in shapes.items()]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        return whole.to(self.device, dtype or self.dtype)

    def _checked(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self.checkpoint.take(name)
        if list(tensor.shape) != list(shape):
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        return tensor

    def put(self, module: nn.Module, parameter: str, tensor: Tensor) -> None:
        place = getattr(module, parameter)
        assert place.shape == tensor.shape, f"{parameter} of shape {list(tensor.shape)} into {list(place.shape)}"
        assert place.is_meta, f"{parameter} is filled twice"
        setattr(module, parameter, nn.Parameter(tensor, requires_grad=False))

    def fill(
        self, module: nn.Module, *names: str, rows: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """module.weight from the named tensors, one below the other: `rows` of each, None for equal shares. A Linear is
        packed at once."""
        shape = module.get_parameter("weight").shape
        heights = rows or [shape[0] // len(names)] * len(names)
        shapes = {name: (height, *shape[1:]) for name, height in zip(names, heights, strict=True)}
        self.put(module, "weight", self.take(shapes, dtype=dtype))
        if isinstance(module, Linear):
            module.pack()

    def swiglu(self, module: SwiGLU, prefix: str) -> None:
        self.fill(module.gate_up, f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        self.fill(module.down, f"{prefix}.down_proj.weight")


def _fill_attention(fill: Filler, attention: LatentAttention, prefix: str) -> None:
    query = "q_proj" if attention.q_rank is None else "q_a_proj"
    names = [f"{prefix}.{query}.weight", f"{prefix}.kv_a_proj_with_mqa.weight"]
    fill.fill(attention.qkv_a, *names, rows=[attention.qkv_a_q_width, attention.rank + attention.rope])
    if attention.q_rank is not None:
        fill.fill(attention.q_a_norm, f"{prefix}.q_a_layernorm.weight")
        fill.fill(attention.q_b, f"{prefix}.q_b_proj.weight")
    fill.fill(attention.kv_a_norm, f"{prefix}.kv_a_layernorm.weight")
    widths = (attention.nope, attention.value)
    kv_b = fill.take({f"{prefix}.kv_b_proj.weight": (attention.num_heads * sum(widths), attention.rank)})
    w_uk, w_uv = kv_b.unflatten(0, (attention.num_heads, -1)).split(widths, dim=1)
    small = fill.device.type == "cpu" and kv_b.numel() <= FLOAT32_FOLD  # see models/mla.py
    folded = torch.float32 if small else fill.dtype
    fill.put(attention, "w_uk", w_uk.to(folded).contiguous())
    fill.put(attention, "w_uv", w_uv.transpose(1, 2).to(folded).contiguous())
    fill.fill(attention.o, f"{prefix}.o_proj.weight")


def _expert_linear(fill: Filler, names: list[str], rows: int, width: int) -> nn.Module:
    """One product [rows, width] of an expert from its published names, INT4 exactly when the checkpoint has
    `weight_packed`."""
    if f"{names[0]}.weight_packed" in fill.checkpoint:
        return _int4_linear(fill, names, rows // len(names), width)
    with torch.device("meta"):
        linear = Linear(width, rows)
    fill.fill(linear, *[f"{name}.weight" for name in names])
    return linear


def _int4_linear(fill: Filler, names: list[str], height: int, width: int) -> Int4Linear:
    """The packed weights [height, width] of each name, one below the other."""
    group = fill.group_size
    if group is None or width % group or width % WORD:
        raise CheckpointError(
            f"{names[0]}.weight_packed: config.json states group_size={group}, which must divide the {width} columns"
        )
    for name in names:
        _check_plain_int4(fill.checkpoint, f"{name}.weight", [height, width])
    packed = fill.take({f"{name}.weight_packed": (height, width // WORD) for name in names}, dtype=torch.int32)
    scale = fill.take({f"{name}.weight_scale": (height, width // group) for name in names})
    return Int4Linear(packed, scale, fill.dtype)


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
    for e in range(config.n_routed_experts):
        name = f"{prefix}.experts.{e}"
        gate_up = _expert_linear(fill, [f"{name}.gate_proj", f"{name}.up_proj"], 2 * inner, width)
        moe.experts.append(Expert(gate_up, _expert_linear(fill, [f"{name}.down_proj"], width, inner)))
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


def _give_back_memory() -> None:
    """Return freed memory to the system. Temporaries of loading leave holes between lasting tensors, which glibc keeps:
    for INT4 experts as much again as the model itself."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


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
    fill = Filler(checkpoint, dtype or getattr(torch, config.dtype), device or torch.device("cpu"), config.quantization)
    report = progress or (lambda done, total: None)
    with torch.device("meta"):
        target = Target(config)
    checkpoint.drop(_beyond(config))
    fill.put(target, "embed_tokens", fill.take({"model.embed_tokens.weight": target.embed_tokens.shape}))
    for index, block in enumerate(target.layers):
        assert isinstance(block, Block)
        _fill_block(fill, block, config, f"model.layers.{index}")
        checkpoint.release()
        _give_back_memory()
        report(checkpoint.taken_bytes, checkpoint.total_bytes)
    fill.fill(target.norm, "model.norm.weight")
    if config.tie_word_embeddings:
        checkpoint.drop(lambda name: name == "lm_head.weight")
        fill.put(target.lm_head, "weight", target.embed_tokens.detach().clone())
        target.lm_head.pack()
    else:
        fill.fill(target.lm_head, "lm_head.weight")
    _check_filled(target, directory)
    checkpoint.finish()
    positions = max_positions or config.max_position_embeddings
    target.rotary = RotaryTable(config.qk_rope_head_dim, config.rope_theta, positions, config.yarn).to(fill.device)
    report(checkpoint.total_bytes, checkpoint.total_bytes)
    return target.eval()


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

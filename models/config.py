"""What a checkpoint's config.json says, as two frozen dataclasses.

Field names are the published ones (DeepSeek-V3, Kimi-K2). A field that changes the math and that this engine does not
implement is an error; fields that do nothing at inference are ignored. See the DeepSeek-V3 technical report
(arXiv 2412.19437), section 2, for the architecture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A config.json that is missing, unreadable, contradictory, or asks for math that is not implemented."""


_MAY_BE_ZERO = ("n_shared_experts", "first_k_dense_replace", "mscale", "mscale_all_dim")
_DTYPES = ("bfloat16", "float32")


def _fault(name: str, kind: str, value: Any) -> str | None:
    """What a field annotated `kind` must be, None when value is that."""
    least = 0 if name in _MAY_BE_ZERO else 1
    if kind == "bool":
        return None if isinstance(value, bool) else "true or false"
    if kind == "int":
        return None if type(value) is int and value >= least else f"an integer of at least {least}"
    if kind == "float":
        number = type(value) in (int, float) and math.isfinite(value)
        return None if number and (value > 0 or value == 0 and not least) else "a finite number above 0"
    if name == "dtype":
        return None if value in _DTYPES else f"one of {list(_DTYPES)}"
    return None


def _check_fields(config: Yarn | TargetConfig | DrafterConfig) -> None:
    """Refuse what json reads without complaint and no model can mean: NaN, negative sizes, text for a number, null."""
    for field in fields(config):
        value, kind = getattr(config, field.name), str(field.type)
        if value is None and kind.endswith("| None"):
            continue
        fault = _fault(field.name, kind.removesuffix(" | None"), value)
        if fault:
            raise ConfigError(f"config.json: {field.name}={value!r} must be {fault}")


def _refuse_unless(allowed: Mapping[str, tuple[Any, ...]], config: Mapping[str, Any], where: str) -> None:
    """Refuse fields that change the math and hold another value than those that are implemented."""
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ConfigError(f"{where}: {name}={config[name]!r} is not supported; known: {list(values)}")


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN context extension (arXiv 2309.00071), with DeepSeek's two mscale terms."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A DeepSeek-V3-architecture target. `lora_norm_eps` is the epsilon of the two low-rank norms: the published
    reference code uses 1e-6 there whatever `rms_norm_eps` says."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    first_k_dense_replace: int
    max_position_embeddings: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    lora_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    quantization: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"config.json: qk_rope_head_dim={self.qk_rope_head_dim} must be even: it rotates pairs")
        if self.n_routed_experts % self.n_group or self.n_group < self.topk_group:
            raise ConfigError(
                f"config.json: n_group={self.n_group} must divide n_routed_experts={self.n_routed_experts} "
                f"and be at least topk_group={self.topk_group}"
            )
        eligible = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > eligible:
            raise ConfigError(
                f"config.json: num_experts_per_tok={self.num_experts_per_tok} exceeds the {eligible} experts of "
                f"topk_group={self.topk_group} groups"
            )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Numbers cached per token and layer: rotated shared key, then normed latent (576 in the published models)."""
        return self.qk_rope_head_dim + self.kv_lora_rank


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """An EAGLE-3 drafter (arXiv 2503.01840): one layer over [normed embedding ; normed fused state].

    `boundaries` are the target's hidden states that it reads, in order (boundary b = the state entering layer b).
    The flags are those that published checkpoints carry: `norm_before_residual` takes the residual after hidden_norm,
    `norm_before_fc` is one norm over the concatenated states, `fc_norm` one norm per state, `norm_output` feeds the
    post-norm state back (EAGLE-3.1).
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embeddings: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.boundaries or any(type(b) is not int or b < 0 for b in self.boundaries):
            raise ConfigError(f"boundaries={list(self.boundaries)} must name at least one boundary, each 0 or more")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: it rotates pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError(
                "norm_before_fc=true and fc_norm=true exclude each other: keep the one it was trained with"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.hidden_size != self.target_hidden_size and not self.own_embeddings:
            raise ConfigError(
                f"hidden_size={self.hidden_size} differs from target_hidden_size={self.target_hidden_size}, so the "
                "target's embeddings can't be shared: the drafter needs embed_tokens of its own"
            )

    def to_json(self) -> dict[str, Any]:
        """The config.json of a minieagle drafter; boundaries are named as such, so no convention has to be guessed."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "boundaries"}
        return (
            {"architectures": ["Eagle3Drafter"], "model_type": "minieagle_eagle3"}
            | fields
            | {"boundaries": list(self.boundaries)}
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError naming the file when it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: pass a directory that holds a model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, not an object")
    return value


def _need(config: Mapping[str, Any], name: str) -> Any:
    if name not in config:
        raise ConfigError(f"config.json has no {name!r}; it is needed for a DeepSeek-V3-architecture model")
    return config[name]


# Fields that change the math, with the only values that are implemented.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "attention_bias": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "model_type": ("deepseek_v3", "kimi_k2"),
}


# The same of a rope description.
_FIXED_ROPE: dict[str, tuple[Any, ...]] = {
    "attention_factor": (None,),
    "truncate": (None, True),
    "partial_rotary_factor": (None, 1.0),
}


def _rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """RoPE base and YaRN from either spelling: `rope_theta` + `rope_scaling`, or one `rope_parameters`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"config.json: the rope description {scaling!r} is not an object")
    _refuse_unless(_FIXED_ROPE, scaling, "config.json: rope")
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; known: 'default', 'yarn'")
    known = {name: scaling[name] for name in Yarn.__dataclass_fields__ if scaling.get(name) is not None}
    for name in ("factor", "original_max_position_embeddings"):
        _need(known, name)
    return theta, Yarn(**known)


def _group_size(config: Mapping[str, Any]) -> int | None:
    """Group size of compressed-tensors `pack-quantized` INT4, None when the checkpoint is not quantised."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return None
    if quantization.get("format") != "pack-quantized":
        raise ConfigError(
            f"quantization format {quantization.get('format')!r} is not supported; known: 'pack-quantized'"
        )
    groups = list((quantization.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") if len(groups) == 1 else None) or {}
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for name, value in wanted.items():
        if weights.get(name) != value:
            raise ConfigError(f"quantization {name}={weights.get(name)!r} is not supported; only {value!r} is")
    _refuse_unless({"actorder": (None,)}, weights, "quantization")
    group_size: int = _need(weights, "group_size")
    return group_size


def target_config(config: Mapping[str, Any]) -> TargetConfig:
    """Parse the config.json of a target. Raises ConfigError for what is missing or not implemented."""
    _refuse_unless(_FIXED, config, "config.json")
    theta, yarn = _rope(config)
    names = [name for name in TargetConfig.__dataclass_fields__ if name in config]
    known = {name: config[name] for name in names if name not in ("rope_theta", "dtype", "yarn", "quantization")}
    for name, field in TargetConfig.__dataclass_fields__.items():
        if field.default is MISSING and name != "q_lora_rank":
            _need(config, name)
    known.setdefault("q_lora_rank", None)
    return TargetConfig(
        **known,
        rope_theta=theta,
        yarn=yarn,
        dtype=str(config.get("dtype", config.get("torch_dtype", "bfloat16"))),
        quantization=_group_size(config),
    )


# A drafter has one layer of the plainest kind.
_FIXED_DRAFTER: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "num_hidden_layers": (1,),
    "rope_scaling": (None,),
}


def drafter_config(config: Mapping[str, Any]) -> DrafterConfig:
    """Parse the config.json of a drafter that states its boundaries. Raises ConfigError for what is missing or not
    implemented."""
    _refuse_unless(_FIXED_DRAFTER, config, "the drafter's config.json")
    if not isinstance(config.get("boundaries"), list):
        raise ConfigError("the drafter's config.json lists no `boundaries`: state which target states it reads")
    known: dict[str, Any] = {name: config[name] for name in DrafterConfig.__dataclass_fields__ if name in config}
    known["boundaries"] = tuple(config["boundaries"])
    try:
        return DrafterConfig(**known)
    except TypeError as error:
        raise ConfigError(f"the drafter's config.json is incomplete: {error}") from None

"""What a target's config.json says, as a frozen dataclass, and the checks that every config shares.

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


_MAY_BE_ZERO = (
    "n_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
    "mscale",
    "mscale_all_dim",
)
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


def check_fields(config: Any) -> None:
    """Refuse in a dataclass what json reads without complaint and no model can mean: NaN, negative sizes, text for a
    number, null."""
    for field in fields(config):
        value, kind = getattr(config, field.name), str(field.type)
        if value is None and kind.endswith("| None"):
            continue
        fault = _fault(field.name, kind.removesuffix(" | None"), value)
        if fault:
            raise ConfigError(f"config.json: {field.name}={value!r} must be {fault}")


def refuse_unless(allowed: Mapping[str, tuple[Any, ...]], config: Mapping[str, Any], where: str) -> None:
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
        check_fields(self)


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
    num_nextn_predict_layers: int | None = None
    dtype: str = "bfloat16"
    group_size: int | None = None
    fp8_block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
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
    refuse_unless(_FIXED_ROPE, scaling, "config.json: rope")
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
    refuse_unless({"actorder": (None,)}, weights, "quantization")
    group_size: int = _need(weights, "group_size")
    return group_size


def target_config(config: Mapping[str, Any]) -> TargetConfig:
    """Parse the config.json of a target. Raises ConfigError for what is missing or not implemented."""
    refuse_unless(_FIXED, config, "config.json")
    theta, yarn = _rope(config)
    names = [name for name in TargetConfig.__dataclass_fields__ if name in config]
    known = {name: config[name] for name in names if name not in ("rope_theta", "dtype", "yarn", "group_size", "fp8_block")}
    for name, field in TargetConfig.__dataclass_fields__.items():
        if field.default is MISSING and name != "q_lora_rank":
            _need(config, name)
    known.setdefault("q_lora_rank", None)
    return TargetConfig(
        **known,
        rope_theta=theta,
        yarn=yarn,
        dtype=str(config.get("dtype", config.get("torch_dtype", "bfloat16"))),
        group_size=_group_size(config),
    )

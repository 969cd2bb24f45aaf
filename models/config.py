"""What a checkpoint's config.json says, as two frozen dataclasses.

Field names are the published ones (DeepSeek-V3, Kimi-K2). A field that changes the math and that this engine does not
implement is an error; fields that do nothing at inference are ignored. See the DeepSeek-V3 technical report
(arXiv 2412.19437), section 2, for the architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A config.json that is missing, unreadable, contradictory, or asks for math that is not implemented."""


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN context extension (arXiv 2309.00071), with DeepSeek's two mscale terms."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


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


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for name, allowed in _FIXED.items():
        if name in config and config[name] not in allowed:
            raise ConfigError(f"config.json: {name}={config[name]!r} is not supported; known: {list(allowed)}")


def _rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """RoPE base and YaRN from either spelling: `rope_theta` + `rope_scaling`, or one `rope_parameters`."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; known: 'default', 'yarn'")
    known = {name: scaling[name] for name in Yarn.__dataclass_fields__ if scaling.get(name) is not None}
    for name in ("attention_factor", "truncate"):
        if scaling.get(name) not in (None, True):
            raise ConfigError(f"config.json: rope {name}={scaling[name]!r} is not supported: remove it")
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
    weights = groups[0]["weights"] if len(groups) == 1 else {}
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for name, value in wanted.items():
        if weights.get(name) != value:
            raise ConfigError(f"quantization {name}={weights.get(name)!r} is not supported; only {value!r} is")
    if weights.get("actorder"):
        raise ConfigError(f"quantization actorder={weights['actorder']!r} is not supported; only null is")
    return int(weights["group_size"])


def target_config(config: Mapping[str, Any]) -> TargetConfig:
    """Parse the config.json of a target. Raises ConfigError for what is missing or not implemented."""
    _refuse_unsupported(config)
    theta, yarn = _rope(config)
    names = [name for name in TargetConfig.__dataclass_fields__ if name in config]
    known = {name: config[name] for name in names if name not in ("rope_theta", "dtype", "yarn", "quantization")}
    for name, field in TargetConfig.__dataclass_fields__.items():
        if field.default is MISSING and name != "q_lora_rank":
            _need(config, name)
    known.setdefault("q_lora_rank", None)
    parsed = TargetConfig(
        **known,
        rope_theta=theta,
        yarn=yarn,
        dtype=str(config.get("dtype", config.get("torch_dtype", "bfloat16"))),
        quantization=_group_size(config),
    )
    if parsed.n_routed_experts % parsed.n_group:
        raise ConfigError(f"n_routed_experts={parsed.n_routed_experts} is not a multiple of n_group={parsed.n_group}")
    return parsed

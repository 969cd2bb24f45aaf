"""What a target's config.json says, as a frozen dataclass, and the checks that every config shares.

Field names are the published ones (DeepSeek-V3, Kimi-K2). A field that changes the math and that this engine does not
implement is an error; fields that do nothing at inference are ignored; two places that say different things are an
error that shows both. See the DeepSeek-V3 technical report (arXiv 2412.19437), section 2, for the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from minieagle.models.files import FileError, parse_json, read_plain


class ConfigError(ValueError):
    """A config.json that is missing, unreadable, contradictory, or asks for math that is not implemented."""

    def __init__(self, message: str) -> None:
        """Cut in the middle where it quotes a value without end."""
        super().__init__(message if len(message) <= 2000 else f"{message[:1000]} ... {message[-800:]}")


_MAY_BE_ZERO = (
    "n_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
    "mscale",
    "mscale_all_dim",
)
_DTYPES = ("bfloat16", "float32")
_MOST, _MOST_POSITIONS = 2**20, 2**22  # far above any model; products of three sizes still fit 64 bits


def _fault(name: str, kind: str, value: Any) -> str | None:
    """What a field annotated `kind` must be, None when value is that."""
    least = 0 if name in _MAY_BE_ZERO else 1
    if kind == "bool":
        return None if isinstance(value, bool) else "true or false"
    if kind == "int":
        most = _MOST_POSITIONS if name == "max_position_embeddings" else _MOST
        return None if type(value) is int and least <= value <= most else f"an integer in {least}..{most}"
    if kind == "float":
        number = type(value) in (int, float)
        return None if number and (1e-12 <= value <= 1e12 or value == 0 and not least) else "a number in 1e-12..1e12"
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
            raise ConfigError(f"config.json: {field.name}={value!r:.200} must be {fault}")


def refuse_unless(allowed: Mapping[str, tuple[Any, ...]], config: Mapping[str, Any], where: str) -> None:
    """Refuse fields that change the math and hold another value than those that are implemented."""
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ConfigError(f"{where}: {name}={config[name]!r:.200} is not supported; known: {list(values)}")


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
    reference code uses 1e-6 there whatever `rms_norm_eps` says; vLLM and SGLang use rms_norm_eps, and whoever wants
    their numbers for a model where the two differ adds the field to config.json.

    `group_size` is the stated group of INT4 weights, `fp8_block` the (rows, columns) that share a scale of FP8 weights.
    Which tensors are quantised is for the files to say.
    """

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
        if self.rope_theta <= 1:
            raise ConfigError(f"config.json: rope_theta={self.rope_theta} must be above 1: it is a base")
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
        value = parse_json(read_plain(path), str(path))
    except FileNotFoundError:
        missing = path if path.parent.is_dir() else path.parent
        raise ConfigError(f"{missing} does not exist: pass a directory that holds a model") from None
    except FileError as error:
        raise ConfigError(str(error)) from None
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
    "mlp_bias": (None, False),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "partial_rotary_factor": (None, 1.0),
    "use_qk_norm": (None, False),
    "sliding_window": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "swiglu_limit": (None,),
}


# The same of a rope description.
_FIXED_ROPE: dict[str, tuple[Any, ...]] = {
    "attention_factor": (None,),
    "truncate": (None, True),
    "partial_rotary_factor": (None, 1.0),
    "mrope_section": (None,),
}

# model_type of what is implemented. The wrappers hold the language model's fields in `text_config`.
_TEXT_MODELS = ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite")
_WRAPPERS = ("kimi_k25", "kimi_vl")
_ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",  # transformers' own spelling
    "KimiVLForConditionalGeneration",
)

# Relatives whose fields look alike, and what they compute that is not implemented. Source: their published code.
_RELATIVES = {
    "deepseek_v2": "softmax routing",
    "deepseek_v4": "compressed sparse attention, hyper-connections and hash routing",
    "glm_moe_dsa": "sparse attention whose indexers are shared between layers",
    "kimi_k3": "linear attention, latent experts and attention residuals",
    "kimi_linear": "linear attention and attention without positions",
    "longcat_flash": "two attentions a layer and experts without weights",
}

# Both are dense attention here: an indexer chooses all tokens of a text of up to index_topk (see target_names.py).
_LAYER_TYPES = ("full_attention", "indexed_attention")


def agreed(*said: tuple[str, Any]) -> Any:
    """The one value of several (place, value), null ones left out; None when all are. Raises ConfigError showing both
    when two places differ."""
    known = [(place, value) for place, value in said if value is not None]
    for place, value in known[1:]:
        if value != known[0][1]:
            first, second = _difference(known[0][1], value)
            raise ConfigError(
                f"config.json contradicts itself: {known[0][0]} says {first!r:.500}, but {place} says {second!r:.500}; "
                "correct one of them"
            )
    return known[0][1] if known else None


def _difference(first: Any, second: Any) -> tuple[Any, Any]:
    """Two objects reduced to the fields in which they differ, the shortest first; anything else as it is."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first, second
    same = {name for name in first.keys() & second.keys() if first[name] == second[name]}
    return _shortest_first(first, same), _shortest_first(second, same)


def _shortest_first(fields: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    names = sorted(fields.keys() - left_out, key=lambda name: (len(repr(fields[name])), name))
    return {name: fields[name] for name in names}


def _check_kind(config: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _RELATIVES:
        raise ConfigError(f"{where}: model_type={kind!r} is not supported: it has {_RELATIVES[kind]}")
    refuse_unless({"model_type": (None, *known)}, config, where)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(f"{where}: architectures={architectures!r:.80} is not a list")
    for name in architectures:
        refuse_unless({"architectures": _ARCHITECTURES}, {"architectures": name}, where)


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model, wherever config.json keeps them: at the top, or in `text_config` with a few
    repeated at the top. Raises ConfigError for another model's config and for places that differ."""
    _check_kind(config, _TEXT_MODELS + _WRAPPERS, "config.json")
    inner = config.get("text_config")
    if inner is None and config.get("model_type") not in _WRAPPERS:
        return dict(config)
    if not isinstance(inner, dict) or config.get("model_type") not in _WRAPPERS:
        raise ConfigError(
            f"config.json: model_type={config.get('model_type')!r} with text_config of type {type(inner).__name__}: "
            f"{' and '.join(_WRAPPERS)} have a text_config object, nothing else has one"
        )
    _check_kind(inner, _TEXT_MODELS, "config.json: text_config")
    outer = {name: config[name] for name in _NESTED if name in config}
    return inner | {
        name: agreed((f"text_config.{name}", inner.get(name)), (name, value)) for name, value in outer.items()
    }


def _one_rope(described: Any, name: str) -> Yarn | str | None:
    """YaRN as one description has it, "no scaling" for plain RoPE, None when it says nothing but a base."""
    if not isinstance(described, dict):
        raise ConfigError(f"config.json: {name}={described!r:.80} is not an object")
    refuse_unless(_FIXED_ROPE, described, f"config.json: {name}")
    kind = agreed(*[(f"{name}.{key}", described.get(key)) for key in ("rope_type", "type")])
    if kind is None and not described.keys() - {"rope_theta"}:
        return None
    if kind == "default":
        return "no scaling"
    if kind != "yarn":
        raise ConfigError(f"config.json: {name} of type {kind!r:.80} is not supported; known: 'default', 'yarn'")
    known = {field: described[field] for field in Yarn.__dataclass_fields__ if described.get(field) is not None}
    for field in ("factor", "original_max_position_embeddings"):
        _need(known, field)
    return Yarn(**known)


def _rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """RoPE base and YaRN from either spelling: `rope_theta` + `rope_scaling`, or one `rope_parameters`."""
    spelled = {name: config.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    yarn = agreed(*[(name, _one_rope(described, name)) for name, described in spelled.items()])
    bases = [(f"{name}.rope_theta", described.get("rope_theta")) for name, described in spelled.items()]
    theta = agreed(("rope_theta", config.get("rope_theta")), *bases)
    if theta is None:
        theta = config.get("rope_theta", 10000.0)
    return theta, yarn if isinstance(yarn, Yarn) else None


def _first_dense(config: Mapping[str, Any]) -> int | None:
    """first_k_dense_replace, which GLM-4.7-Flash spells as a list of layer kinds."""
    stated, kinds = config.get("first_k_dense_replace"), config.get("mlp_layer_types")
    if kinds is None:
        return stated
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    layers = config.get("num_hidden_layers")
    if not isinstance(kinds, list) or kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise ConfigError(f"config.json: mlp_layer_types={kinds!r:.200} must be 'dense' layers, then 'sparse' ones")
    if len(kinds) != layers:
        raise ConfigError(f"config.json: mlp_layer_types has {len(kinds)} layers, but num_hidden_layers={layers!r:.80}")
    first: int = agreed(("first_k_dense_replace", stated), ("the dense layers of mlp_layer_types", dense))
    return first


# What other methods call themselves in quant_method, and are known as.
_METHODS = {"awq": "AWQ", "gptq": "GPTQ", "modelopt": "NVFP4 or another ModelOpt format", "quark": "MXFP4 by Quark"}

_FP8: dict[str, tuple[Any, ...]] = {"fmt": (None, "e4m3"), "scale_fmt": (None, "ue8m0")}
_INT4: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "actorder": (None,),
}


def _quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """TargetConfig's fields on quantised weights, none when nothing is quantised."""
    block = agreed(*[(name, config.get(name) or None) for name in ("quantization_config", "compression_config")])
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise ConfigError(f"config.json: quantization_config={block!r:.80} is not an object")
    method, form = block.get("quant_method"), block.get("format")
    if method == "fp8":
        return {"fp8_block": _fp8_block(block)}
    if method in (None, "compressed-tensors") and form == "pack-quantized":
        return {"group_size": _group_size(block)}
    said = {name: block[name] for name in ("quant_method", "quant_algo", "format", "bits") if name in block}
    known_as = f" ({_METHODS[method]})" if isinstance(method, str) and method in _METHODS else ""
    raise ConfigError(
        f"config.json: quantization {said}{known_as} is not supported; known: quant_method 'fp8' with "
        "weight_block_size, and INT4 of format 'pack-quantized'"
    )


def _fp8_block(block: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale (DeepSeek-V3: 128, 128)."""
    refuse_unless(_FP8, block, "config.json: quantization")
    size = block.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise ConfigError(
            f"config.json: quantization weight_block_size={size!r:.80} is not supported; FP8 needs two integers > 0"
        )
    return size[0], size[1]


def _group_size(block: Mapping[str, Any]) -> int:
    """Columns that share a scale in compressed-tensors `pack-quantized` INT4."""
    groups = block.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = groups[0].get("weights") if len(groups) == 1 and isinstance(groups[0], dict) else None
    if not isinstance(weights, dict):
        raise ConfigError("config.json: quantization config_groups must be one group with `weights`")
    for name, values in _INT4.items():
        refuse_unless({name: values}, {name: weights.get(name)}, "config.json: quantization")
    size = _need(weights, "group_size")
    if type(size) is not int or size < 1:
        raise ConfigError(f"config.json: quantization group_size={size!r:.80} must be a positive integer")
    return size


def _check_layers(config: Mapping[str, Any]) -> None:
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(kind in _LAYER_TYPES for kind in kinds):
        raise ConfigError(f"config.json: layer_types={kinds!r:.80} is not supported; known: {_LAYER_TYPES}")


# Computed from other fields, hence not read under their own name.
_DERIVED = ("rope_theta", "yarn", "dtype", "first_k_dense_replace", "group_size", "fp8_block")

# What a wrapper may repeat at its top.
_NESTED = (
    *(name for name in TargetConfig.__dataclass_fields__ if name not in ("yarn", "group_size", "fp8_block")),
    *_FIXED,
    *("torch_dtype", "quantization_config", "compression_config", "rope_scaling", "rope_parameters"),
    *("mlp_layer_types", "layer_types"),
)


def target_config(config: Mapping[str, Any]) -> TargetConfig:
    """Parse the config.json of a target. Raises ConfigError for what is missing or not implemented."""
    config = text_fields(config)
    refuse_unless(_FIXED, config, "config.json")
    _check_layers(config)
    theta, yarn = _rope(config)
    first = _first_dense(config)
    if first is not None:
        config = config | {"first_k_dense_replace": first}
    for name, field in TargetConfig.__dataclass_fields__.items():
        if field.default is MISSING and name != "q_lora_rank":
            _need(config, name)
    known = {
        name: config[name] for name in TargetConfig.__dataclass_fields__ if name in config and name not in _DERIVED
    }
    known.setdefault("q_lora_rank", None)
    dtype = agreed(("dtype", config.get("dtype")), ("torch_dtype", config.get("torch_dtype")))
    return TargetConfig(
        **known,
        first_k_dense_replace=config["first_k_dense_replace"],
        rope_theta=theta,
        yarn=yarn,
        dtype="bfloat16" if dtype is None else str(dtype),
        **_quantization(config),
    )

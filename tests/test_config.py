"""Configs: both spellings are read, unknown fields are ignored, and what would change the math unseen is refused."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minieagle.models.config import ConfigError, TargetConfig, Yarn, read_json, target_config
from minieagle.models.drafter_config import DrafterConfig, drafter_config
from minieagle.quantize import quantization_config
from tests.oracles import TINY
from tests.test_published_targets import FP8, GLM, INT4, K25_TEXT, V3, V32, wrapped

YARN = TINY["rope_scaling"]
K25 = wrapped(K25_TEXT, "kimi_k25", "KimiK25ForConditionalGeneration", INT4)

REQUIRED = sorted(
    {
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "kv_lora_rank",
        "v_head_dim",
        "n_routed_experts",
        "n_shared_experts",
    }
    | {"num_experts_per_tok", "routed_scaling_factor", "first_k_dense_replace", "max_position_embeddings"}
)
DRAFTER = DrafterConfig(
    hidden_size=8,
    target_hidden_size=8,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=20,
    draft_vocab_size=10,
    boundaries=(2, 0, 3),
    max_position_embeddings=64,
)


def test_published_fields_are_read() -> None:
    config = target_config(TINY)
    assert (config.qk_head_dim, config.latent_width, config.n_group, config.topk_group) == (32, 48, 4, 2)
    assert (config.rms_norm_eps, config.lora_norm_eps, config.dtype, config.group_size) == (
        1e-3,
        1e-6,
        "bfloat16",
        None,
    )
    assert config.yarn == Yarn(factor=8.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.0)


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_both_rope_spellings_mean_the_same(name: str) -> None:
    scaling = {k: v for k, v in TINY["rope_scaling"].items() if k != "type"} | {name: "yarn"}
    new = TINY | {"rope_parameters": scaling | {"rope_theta": 50000.0}, "rope_scaling": None, "rope_theta": None}
    assert target_config(new) == target_config(TINY | {"rope_theta": 50000.0})


@pytest.mark.parametrize(
    ("also", "shown"),
    [
        ({"rope_theta": 1e6}, ("10000.0", "1000000.0")),
        ({"rope_type": "default"}, ("no scaling", "Yarn")),
        (YARN | {"factor": 4.0}, ("factor=4.0", "factor=8.0")),
        (YARN | {"rope_type": "default"}, ("yarn", "default")),
    ],
)
def test_rope_spellings_that_differ_are_both_shown(also: dict[str, Any], shown: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        target_config(TINY | {"rope_parameters": also})
    assert all(value in str(raised.value) for value in ("rope_", *shown))


def test_rope_spellings_that_agree_pass() -> None:
    assert target_config(TINY | {"rope_parameters": YARN | {"rope_theta": 10000.0}}) == target_config(TINY)


@given(st.dictionaries(st.text(min_size=1).map(lambda name: f"x_{name}"), st.integers() | st.text() | st.none()))
def test_unknown_fields_change_nothing(extra: dict[str, Any]) -> None:
    assert target_config(TINY | extra) == target_config(TINY)


@pytest.mark.parametrize("dtype", [{"dtype": "float32"}, {"torch_dtype": "float32"}])
def test_both_dtype_spellings(dtype: dict[str, str]) -> None:
    assert target_config(TINY | dtype).dtype == "float32"


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        target_config({key: value for key, value in TINY.items() if key != name})


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_act": "gelu"},
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"attention_bias": True},
        {"moe_layer_freq": 2},
        {"rope_interleave": False},
        {"partial_rotary_factor": 0.5},
        {"use_qk_norm": True},
        {"sliding_window": 4096},
        {"swiglu_limit": 7.0},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"model_type": "deepseek_v4"},
        {"dtype": "float8_e4m3fn"},
        {"n_group": 3},
        {"topk_group": 5},
        {"num_experts_per_tok": 5},
        {"qk_rope_head_dim": 15},
    ],
    ids=lambda wrong: [*wrong][0],
)
def test_what_is_not_implemented_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=[*wrong][0]):
        target_config(TINY | wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [("type", "linear"), ("attention_factor", 1.0), ("truncate", False), ("partial_rotary_factor", 0.5)],
)
def test_rope_that_is_not_implemented_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=str(value)):
        target_config(TINY | {"rope_scaling": TINY["rope_scaling"] | {name: value}})


@pytest.mark.parametrize(
    ("kind", "reason"), [("deepseek_v4", "hyper-connections"), ("kimi_k3", "linear attention"), ("llama", "known")]
)
@pytest.mark.parametrize("nested", [False, True])
def test_relatives_are_refused_by_name(kind: str, reason: str, nested: bool) -> None:
    config = K25 | {"text_config": K25_TEXT | {"model_type": kind}} if nested else TINY | {"model_type": kind}
    with pytest.raises(ConfigError, match=f"model_type='{kind}' is not supported.*{reason}"):
        target_config(config)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLMEagle3"], "DeepseekV3ForCausalLM"])
def test_another_class_is_refused(architectures: Any) -> None:
    with pytest.raises(ConfigError, match=f"architectures='?{architectures[0]}"):
        target_config(TINY | {"architectures": architectures})


@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
def test_incomplete_yarn_is_refused(name: str) -> None:
    scaling = {key: value for key, value in TINY["rope_scaling"].items() if key != name}
    with pytest.raises(ConfigError, match=name):
        target_config(TINY | {"rope_scaling": scaling})


# ---- wrappers


def test_a_wrapper_is_its_text_config() -> None:
    assert target_config(K25) == target_config(K25_TEXT | INT4)


@pytest.mark.parametrize("place", ["text_config", "top"])
def test_one_quantization_block_is_enough(place: str) -> None:
    one = K25 | {"text_config": K25_TEXT} if place == "top" else {n: v for n, v in K25.items() if n not in INT4}
    assert target_config(one).group_size == 32


@pytest.mark.parametrize(
    ("outer", "shown"),
    [
        ({"quantization_config": FP8["quantization_config"]}, ("fp8", "pack-quantized")),
        ({"hidden_size": 65}, ("64", "65")),
        ({"tie_word_embeddings": True}, ("False", "True")),
        ({"dtype": "float32"}, ("bfloat16", "float32")),
        ({"rope_theta": 1e4}, ("50000.0", "10000.0")),
    ],
)
def test_places_that_differ_are_both_shown(outer: dict[str, Any], shown: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="contradicts itself") as raised:
        target_config(K25 | outer)
    assert all(value in str(raised.value) for value in (*outer, *shown))


def test_a_field_at_the_top_of_a_wrapper_counts() -> None:
    assert target_config(K25 | {"lora_norm_eps": 1e-5}).lora_norm_eps == 1e-5


@pytest.mark.parametrize(
    "config", [K25 | {"text_config": None}, K25 | {"text_config": [1]}, TINY | {"text_config": {}}]
)
def test_a_wrapper_needs_its_text_config_and_nothing_else_has_one(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="text_config"):
        target_config(config)


@pytest.mark.parametrize(
    ("kinds", "first", "named"),
    [
        (["dense", "sparse", "sparse"], 2, "dense layers of mlp_layer_types"),
        (["sparse", "dense", "sparse"], None, "'dense' layers, then"),
        (["dense", "sparse"], None, "2 layers, but num_hidden_layers=3"),
        ("dense", None, "mlp_layer_types='dense'"),
    ],
)
def test_layer_kinds_that_say_something_else_are_refused(kinds: Any, first: int | None, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        target_config(TINY | {"mlp_layer_types": kinds, "first_k_dense_replace": first})


def test_layer_kinds_state_the_dense_layers() -> None:
    config = {name: value for name, value in TINY.items() if name != "first_k_dense_replace"}
    assert target_config(config | {"mlp_layer_types": ["dense", "dense", "sparse"]}).first_k_dense_replace == 2


NUMBERS = [name for name in TargetConfig.__dataclass_fields__ if type(TINY.get(name)) in (int, float)]


@given(st.sampled_from(NUMBERS), st.sampled_from([math.nan, math.inf, -1, None, "64", [4], True]))
def test_no_number_can_be_nonsense(name: str, value: Any) -> None:
    # null is the published way to say: no low-rank query, no word on prediction layers
    assume(name not in ("q_lora_rank", "num_nextn_predict_layers") or value is not None)
    with pytest.raises(ConfigError, match=f"{name}="):
        target_config(json.loads(json.dumps(TINY | {name: value})))


@given(st.sampled_from(["factor", "beta_fast", "mscale", "mscale_all_dim"]), st.sampled_from([math.nan, math.inf, -1]))
def test_no_yarn_number_can_be_nonsense(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        target_config(TINY | {"rope_scaling": TINY["rope_scaling"] | {name: value}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.sampled_from(["yarn", "fp8", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "weights", "x"]), inner),
    max_leaves=6,
)
PLACES = {
    (name, *inner)
    for config in (K25, GLM, V32, V3 | FP8)
    for name, value in config.items()
    for inner in ((), *((key,) for key in (value if isinstance(value, dict) else ())))
}


@settings(max_examples=300)
@given(st.sampled_from([K25, TINY | FP8, TINY | INT4]), st.sampled_from(sorted(PLACES)), JSON)
def test_any_value_anywhere_gives_a_config_or_a_named_fault(base: Any, place: Any, value: Any) -> None:
    config = json.loads(json.dumps(base))
    inner = config.setdefault(place[0], {}) if len(place) > 1 else config
    assume(isinstance(inner, dict))
    inner[place[-1]] = value
    with suppress(ConfigError):
        target_config(config)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff"])
def test_unreadable_json_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="config.json"):
        read_json(tmp_path / "config.json")


# ---- quantization


def test_group_size_is_read() -> None:
    assert target_config(TINY | {"quantization_config": quantization_config(64)}).group_size == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_bits", 8),
        ("type", "float"),
        ("symmetric", False),
        ("strategy", "channel"),
        ("actorder", "group"),
        ("group_size", None),
    ],
)
def test_other_quantization_is_refused(name: str, value: Any) -> None:
    described = quantization_config(32)
    described["config_groups"]["group_0"]["weights"][name] = value
    if value is None:
        del described["config_groups"]["group_0"]["weights"][name]
    with pytest.raises(ConfigError, match=name):
        target_config(TINY | {"quantization_config": described})


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "fp8"},
        FP8["quantization_config"] | {"fmt": "e5m2"},
        FP8["quantization_config"] | {"scale_fmt": "e4m3"},
        FP8["quantization_config"] | {"weight_block_size": [128]},
        FP8["quantization_config"] | {"weight_block_size": [128, 0]},
        quantization_config(32) | {"config_groups": {}},
        quantization_config(32) | {"format": "dense"},
    ],
)
def test_other_formats_are_refused(described: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="quantization"):
        target_config(TINY | {"quantization_config": described})


@pytest.mark.parametrize(
    ("described", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "mxfp4"),
        ({"quant_method": "quark"}, "MXFP4"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ],
)
def test_other_methods_are_refused_by_name(described: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization .*{named}.* is not supported"):
        target_config(TINY | {"quantization_config": described})


@pytest.mark.parametrize("block", [[128, 128], [64, 32]])
def test_fp8_blocks_are_read(block: list[int]) -> None:
    described = FP8["quantization_config"] | {"weight_block_size": block, "scale_fmt": "ue8m0"}
    assert target_config(TINY | {"quantization_config": described}).fp8_block == tuple(block)


# ---- the drafter


def test_drafter_config_round_trip() -> None:
    assert drafter_config(json.loads(json.dumps(DRAFTER.to_json()))) == DRAFTER


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"target_hidden_size": 16}, "embed_tokens"),
        ({"draft_vocab_size": 21}, "draft_vocab_size"),
        ({"head_dim": 5}, "head_dim"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"norm_output": 1}, "norm_output"),
        ({"boundaries": []}, "boundaries"),
        ({"boundaries": [0, -1]}, "boundaries"),
        ({"boundaries": [0, 1.0]}, "boundaries"),
        ({"boundaries": None}, "boundaries"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_contradictory_drafter_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        drafter_config(DRAFTER.to_json() | wrong)


@pytest.mark.parametrize("name", ["boundaries", "hidden_size", "draft_vocab_size"])
def test_drafter_field_without_default_is_needed(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        drafter_config({key: value for key, value in DRAFTER.to_json().items() if key != name})

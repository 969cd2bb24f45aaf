"""Configs: both spellings are read, unknown fields are ignored, and what would change the math unseen is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minieagle.models.config import ConfigError, TargetConfig, Yarn, read_json, target_config
from minieagle.models.drafter_config import DrafterConfig, drafter_config
from minieagle.quantize import quantization_config
from tests.oracles import TINY

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
    new = TINY | {"rope_parameters": scaling | {"rope_theta": 50000.0}, "rope_scaling": None, "rope_theta": 1.0}
    assert target_config(new) == target_config(TINY | {"rope_theta": 50000.0})


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


@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
def test_incomplete_yarn_is_refused(name: str) -> None:
    scaling = {key: value for key, value in TINY["rope_scaling"].items() if key != name}
    with pytest.raises(ConfigError, match=name):
        target_config(TINY | {"rope_scaling": scaling})


NUMBERS = [name for name in TargetConfig.__dataclass_fields__ if type(TINY.get(name)) in (int, float)]


@given(st.sampled_from(NUMBERS), st.sampled_from([math.nan, math.inf, -1, None, "64", [4], True]))
def test_no_number_can_be_nonsense(name: str, value: Any) -> None:
    assume(name != "q_lora_rank" or value is not None)  # null there is the published way to say: no low-rank query
    with pytest.raises(ConfigError, match=f"{name}="):
        target_config(json.loads(json.dumps(TINY | {name: value})))


@given(st.sampled_from(["factor", "beta_fast", "mscale", "mscale_all_dim"]), st.sampled_from([math.nan, math.inf, -1]))
def test_no_yarn_number_can_be_nonsense(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        target_config(TINY | {"rope_scaling": TINY["rope_scaling"] | {name: value}})


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
        quantization_config(32) | {"config_groups": {}},
        quantization_config(32) | {"format": "dense"},
    ],
)
def test_other_formats_are_refused(described: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="quantization"):
        target_config(TINY | {"quantization_config": described})


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
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
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

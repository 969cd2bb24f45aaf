"""The wiring of every published format, what contradicts itself, what must be refused by name, and the contract file
that a change makes stale."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from minieagle.llm import embedded
from minieagle.models.config import ConfigError, TargetConfig, target_config
from minieagle.models.headers import CheckpointError
from minieagle.spec.boundary import BoundaryError
from minieagle.spec.fingerprint import tokenizer_fingerprint, weights_fingerprint
from minieagle.spec.golden import check_golden, golden_vectors
from minieagle.spec.wiring import (
    FILE,
    Wiring,
    check_tokenizer,
    make_wiring,
    open_drafter,
    read_wiring,
    write_wiring,
)
from tests import published
from tests.oracles import TINY
from tests.published import IDS, Config, Tensors
from tests.strategies import tiny_target

DEFAULT = {"out": [1, 29, 57], "in": [2, 30, 58]}
MIDDLE = (2, 30, 58)


@cache
def deep_target() -> TargetConfig:
    """A target of the published depth, for what needs no weights."""
    return target_config(TINY | {"num_hidden_layers": 61})


def wired(directory: Path, config: Config, named: Tensors | None = None, **options: Any) -> Wiring:
    published.write(directory, config, published.tensors() if named is None else named)
    return read_wiring(directory, deep_target(), **options)


# ---- formats

SPECULATORS = published.speculators(DEFAULT["in"])
FORMATS: dict[str, tuple[Config, Callable[[], Tensors], dict[str, Any]]] = {
    "official": (published.official(), published.tensors, {"boundaries": list(MIDDLE)}),
    "SpecForge": (published.specforge(DEFAULT["out"]), published.tensors, {}),
    "Model-Optimizer": (published.model_optimizer(DEFAULT["out"]), published.tensors, {}),
    "vLLM": (published.vllm(DEFAULT["in"]), published.tensors, {}),
    "speculators": (SPECULATORS, lambda: published.as_speculators(published.tensors(embeddings=True)), {}),
    "TorchSpec": (
        published.torchspec_mla(DEFAULT["out"]),
        lambda: published.tensors(latent=True, reduced=False, embeddings=True),
        {},
    ),
    "TorchSpec for vLLM": (
        published.torchspec_mla(DEFAULT["in"], architectures=["Eagle3DeepseekV3ForCausalLM"]),
        lambda: published.tensors(latent=True, reduced=False),
        {},
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_wiring(name: str, tmp_path: Path) -> None:
    config, named, options = FORMATS[name]
    read = wired(tmp_path, config, named(), **options).config
    latent = "TorchSpec" in name
    assert read.boundaries == MIDDLE
    assert (read.hidden_size, read.intermediate_size, read.num_attention_heads) == (64, 40, 4)
    assert (read.vocab_size, read.draft_vocab_size) == (96, 96 if latent else 40)
    assert (read.rms_norm_eps, read.rope_theta) == (1e-5, 50000.0)
    assert read.rope_style == ("interleaved" if latent else "half")
    assert (read.latent is not None, read.yarn is not None) == (latent, latent)
    assert (read.norm_before_residual, read.norm_output, read.norm_before_head) == (False, False, True)


def test_latent_sizes_and_yarn_are_those_of_the_config(tmp_path: Path) -> None:
    config, named, options = FORMATS["TorchSpec"]
    read = wired(tmp_path, config, named(), **options).config
    assert read.latent is not None and read.yarn is not None
    assert asdict(read.latent) == published.LATENT
    assert asdict(read.yarn) == {name: value for name, value in published.YARN.items() if name != "type"}


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (published.vllm(DEFAULT["in"], norm_output=True), "norm_output", True),
        (published.speculators(DEFAULT["in"], norm_output=True), "norm_output", True),
        (published.vllm(DEFAULT["in"], norm_output=False), "norm_before_head", True),
        (published.vllm(DEFAULT["in"], norm_before_residual=True), "norm_before_residual", True),
        (published.speculators(DEFAULT["in"]) | {"norm_before_residual": None}, "norm_before_residual", False),
        (published.specforge(DEFAULT["out"], torch_dtype="float16"), "dtype", "bfloat16"),
        (published.specforge(DEFAULT["out"], max_position_embeddings=None), "max_position_embeddings", 2048),
    ],
)
def test_fields_mean_what_their_format_says(config: Config, field: str, value: Any, tmp_path: Path) -> None:
    assert getattr(wired(tmp_path, config).config, field) == value


@pytest.mark.parametrize("flag", ["fc_norm", "norm_before_fc", "qk_norm", "own_embeddings"])
def test_what_the_config_leaves_out_is_read_from_the_tensors(flag: str, tmp_path: Path) -> None:
    named = published.tensors(**{flag.replace("own_", ""): True})
    read = wired(tmp_path, published.specforge(DEFAULT["out"]), named)
    assert getattr(read.config, flag) is True
    assert read.sources[flag] == "the tensors"


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
def test_the_number_of_states_is_read_from_fc(taps: int, tmp_path: Path) -> None:
    ids = [2, 20, 30, 46, 58][:taps]
    read = wired(tmp_path, published.vllm(ids), published.tensors(taps=taps))
    assert read.config.boundaries == tuple(ids)


def test_speculators_define_their_ids_as_inputs(tmp_path: Path) -> None:
    """The four taps of a user-trained qwen3-235b drafter, which no rule would read."""
    config = published.speculators([2, 46, 91, 93], norm_before_fc=True, norm_output=True, norm_before_residual=True)
    published.write(tmp_path, config, published.as_speculators(published.tensors(taps=4, norm_before_fc=True)))
    read = read_wiring(tmp_path, target_config(TINY | {"num_hidden_layers": 94})).config
    assert read.boundaries == (2, 46, 91, 93)
    assert read.norm_output and read.norm_before_fc and read.norm_before_residual


def test_speculators_of_several_layers_and_qwen_norms(tmp_path: Path) -> None:
    layer = {"num_hidden_layers": 2, "model_type": "qwen3"}
    config = published.speculators(DEFAULT["in"], layer=layer)
    read = wired(tmp_path, config, published.as_speculators(published.tensors(layers=2, qk_norm=True)))
    assert (read.config.num_hidden_layers, read.config.qk_norm, read.position_base) == (2, True, 1)


def test_every_field_has_a_source(tmp_path: Path) -> None:
    read = wired(tmp_path, published.specforge(DEFAULT["out"]))
    assert read.sources["boundaries"].startswith(f"eagle_config.{IDS} [1, 29, 57] as outputs: it is the default of")
    assert read.sources["hidden_size"] == "hidden_size and the tensors"
    assert read.sources["rms_norm_eps"] == "rms_norm_eps"
    assert set(read.sources) >= set(read.config.__dataclass_fields__)


# ---- undecidable, contradicting, refused


def refused(directory: Path, config: Config, named: Tensors | None = None, **options: Any) -> str:
    with pytest.raises((ConfigError, BoundaryError, CheckpointError)) as caught:
        wired(directory, config, named, **options)
    return str(caught.value)


@pytest.mark.parametrize("config", [published.specforge([1, 30, 58]), published.torchspec_mla([2, 29, 58])])
def test_undecidable_ids_say_what_to_pass(config: Config, tmp_path: Path) -> None:
    latent = "q_lora_rank" in config
    named = published.tensors(latent=latent, reduced=not latent)
    message = refused(tmp_path, config, named)
    assert "--capture-convention in or out, or --boundaries" in message and "doctor" in message
    assert wired(tmp_path, config, named, convention="in").config.boundaries == tuple(config["eagle_config"][IDS])


def test_no_ids_are_an_error_that_names_the_default(tmp_path: Path) -> None:
    assert "--boundaries 2 30 58 is EAGLE's default" in refused(tmp_path, published.specforge())


CONTRADICTIONS: dict[str, tuple[Config, dict[str, Any], str]] = {
    "ids twice": (published.specforge([1, 29, 57], **{IDS: [2, 30, 58]}), {}, r"\[1, 29, 57\].*\[2, 30, 58\]"),
    "ids and fc": (published.specforge([1, 29, 57, 58]), {}, "names 4 states.*reads 3"),
    "aux count and fc": (published.vllm([2, 30, 58], num_aux_hidden_states=4), {}, "num_aux_hidden_states 4, the te"),
    "hidden size": (published.specforge(DEFAULT["out"], hidden_size=128), {}, "hidden_size 128, the tensors 64"),
    "fc and the target": (published.specforge(DEFAULT["out"], target_hidden_size=32), {}, "target_hidden_size 32, t"),
    "draft vocabulary": (published.specforge(DEFAULT["out"], draft_vocab_size=41), {}, "41, the tensors 40"),
    "vocabulary": (published.specforge(DEFAULT["out"], vocab_size=97), {}, "vocab_size 97, the tensors 96"),
    "fc_norm without tensors": (published.specforge(DEFAULT["out"], fc_norm=True), {}, "fc_norm True, the tensors F"),
    "fc_norm denied": (published.specforge(DEFAULT["out"], fc_norm=False), {"fc_norm": True}, "False, the tensors T"),
    "fc_norm by two names": (published.vllm([2, 30, 58], fc_norm=False, use_aux_norm=True), {}, "use_aux_norm True"),
    "norm before fc": (published.vllm([2, 30, 58], norm_before_fc=True), {}, "norm_before_fc True, the tensors False"),
    "a flag twice": (
        published.speculators([2, 30, 58], layer={"norm_before_residual": True}),
        {},
        "norm_before_residual False, transformer_layer_config.norm_before_residual True",
    ),
    "layers": (published.specforge(DEFAULT["out"], num_hidden_layers=2), {}, "num_hidden_layers 2, the tensors 1"),
    "heads": (published.specforge(DEFAULT["out"], num_attention_heads=8), {}, "head_dim 16, the tensors 8"),
    "key heads": (published.specforge(DEFAULT["out"], num_key_value_heads=4), {}, "4, the tensors 2"),
    "no share": (published.official(num_attention_heads=5), {}, "q_proj has 64 rows, no multiple of 5"),
    "rope twice": (
        published.specforge(DEFAULT["out"], rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        {},
        r"rope_theta 50000.0, rope_parameters.rope_theta 10000.0",
    ),
    "rope scaling twice": (
        published.specforge(DEFAULT["out"], rope_scaling=published.YARN, rope_parameters={"rope_type": "default"}),
        {},
        "contradicts itself on rope scaling",
    ),
    "latent sizes": (
        published.torchspec_mla(DEFAULT["out"], kv_lora_rank=48),
        {"latent": True, "reduced": False},
        "kv_lora_rank 48, the tensors 32",
    ),
    "embeddings": (
        published.specforge(DEFAULT["out"], own_embeddings=True),
        {},
        "own_embeddings True, the tensors False",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_sources_that_disagree_are_shown(name: str, tmp_path: Path) -> None:
    config, kinds, named = CONTRADICTIONS[name]
    with pytest.raises((ConfigError, BoundaryError), match=named):
        wired(tmp_path, config, published.tensors(**kinds))


REFUSED: dict[str, tuple[Config, str]] = {
    "activation": (published.specforge(DEFAULT["out"], hidden_act="gelu"), "hidden_act='gelu'"),
    "bias": (published.specforge(DEFAULT["out"], attention_bias=True), "attention_bias=True"),
    "tied": (published.specforge(DEFAULT["out"], tie_word_embeddings=True), "tie_word_embeddings=True"),
    "partial rope": (published.specforge(DEFAULT["out"], partial_rotary_factor=0.25), "partial_rotary_factor=0.25"),
    "window": (
        published.speculators([2, 30, 58], layer={"layer_types": ["sliding_attention"]}),
        "layer_types=.*sliding_attention",
    ),
    "llama3 rope": (published.specforge(DEFAULT["out"], rope_scaling={"rope_type": "llama3"}), "llama3.*known"),
    "yarn without numbers": (published.specforge(DEFAULT["out"], rope_scaling={"type": "yarn"}), "needs factor"),
    "mrope": (published.specforge(DEFAULT["out"], rope_scaling={"mrope_section": [1]}), "mrope_section"),
    "EAGLE-1 head": (
        published.specforge(None, eagle_config={IDS: [1, 29, 57], "use_aux_hidden_state": False}),
        "use_aux_hidden_state=False",
    ),
    "unknown architecture": (published.official(architectures=["GPT2"]), "GPT2.*known.*LlamaForCausalLMEagle3"),
    "norm_output of nobody": (
        published.official(norm_output=True),
        "before the head in SpecForge",
    ),
    "norm_output of two": (published.specforge(DEFAULT["out"], norm_output=False), "nothing says which"),
    "DFlash": (published.official(architectures=["DFlashDraftModel"]), "a DFlash drafter"),
    "speculators of another kind": (published.speculators(None, speculators_model_type="eagle"), "of type 'eagle'"),
    "MTP": (published.official(model_type="deepseek_mtp"), "a multi-token-prediction layer"),
    "not an object": (published.specforge(None, eagle_config=[1]), "eagle_config is"),
    "heads in words": (published.official(num_attention_heads="4"), "no multiple of '4'"),
    "flag in words": (published.vllm([2, 30, 58], norm_before_residual="yes"), "'yes' must be true or false"),
    "no heads": (published.official(num_attention_heads=None), "say num_attention_heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_named(name: str, tmp_path: Path) -> None:
    config, named = REFUSED[name]
    with pytest.raises((ConfigError, BoundaryError), match=named):
        wired(tmp_path, config)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"fc.weight": (64, 128), "layers.0.self_attn.q_proj.weight": (64, 64)}, "EAGLE-1 or EAGLE-2 drafter"),
        ({"0.0.linear.weight": (64, 64), "0.1.weight": (96, 64)}, "a Medusa drafter"),
        ({"model.layers.61.eh_proj.weight": (64, 128)}, "multi-token-prediction layer"),
        ({"model.layers.0.self_attn.q_proj.weight": (64, 64)}, "no fc.weight"),
    ],
)
def test_drafters_of_other_kinds_are_told_by_their_tensors(
    tensors: dict[str, tuple[int, ...]], named: str, tmp_path: Path
) -> None:
    named_tensors = {name: torch.zeros(shape) for name, shape in tensors.items()}
    assert named in refused(tmp_path, published.official(), named_tensors)


HARMLESS = st.dictionaries(
    st.sampled_from(["initializer_range", "use_cache", "bos_token_id", "pretraining_tp", "sliding_window", "zzz"]),
    st.none() | st.integers() | st.text(max_size=3),
)


@settings(max_examples=10)
@given(HARMLESS)
def test_harmless_fields_change_nothing(tmp_path_factory: pytest.TempPathFactory, extra: Config) -> None:
    config = published.specforge(DEFAULT["out"])
    read = [wired(tmp_path_factory.mktemp("d"), made).config for made in (config, config | extra)]
    assert read[0] == read[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60)
@given(st.sampled_from([config for config, _, _ in FORMATS.values()]), st.data())
def test_any_value_of_any_field_is_read_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, config: Config, data: st.DataObject
) -> None:
    field, value = data.draw(st.sampled_from(sorted(config))), data.draw(JSON)
    directory = tmp_path_factory.mktemp("d")
    latent = "q_lora_rank" in config
    published.write(directory, config | {field: value}, published.tensors(latent=latent, reduced=not latent))
    try:
        read_wiring(directory, deep_target())
    except (ConfigError, BoundaryError, CheckpointError) as error:
        assert str(error)


# ---- the contract


@cache
def tiny_wiring() -> tuple[Config, Tensors]:
    return published.vllm([0, 2, 3], dtype="float32"), published.tensors(seed=3)


def contract(directory: Path) -> Wiring:
    """A drafter of the tiny target with its wiring.json."""
    config, named = tiny_wiring()
    drafter, read = open_drafter(published.write(directory, config, named), tiny_target())
    golden = golden_vectors(tiny_target(), drafter)
    made = make_wiring(directory, read.config, tiny_target().config, golden=golden, tokenizer="sha256:0", source="test")
    write_wiring(directory, made)
    return made


def test_the_contract_is_read_back(tmp_path: Path) -> None:
    assert read_wiring(contract_directory(tmp_path), tiny_target().config) == contract(tmp_path)


def contract_directory(directory: Path) -> Path:
    contract(directory)
    return directory


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_contract_wins_over_the_config(tmp_path: Path) -> None:
    made = contract(tmp_path)
    edit(tmp_path / "config.json", norm_before_residual=True)
    assert read_wiring(tmp_path, tiny_target().config) == made
    (tmp_path / FILE).unlink()
    assert read_wiring(tmp_path, tiny_target().config).config == replace(made.config, norm_before_residual=True)


def test_another_target_is_named_by_what_changed(tmp_path: Path) -> None:
    contract(tmp_path)
    other = replace(tiny_target().config, routed_scaling_factor=1.0, rope_theta=5e4)
    with pytest.raises(ConfigError, match=r"routed_scaling_factor was 2.5 and is 1.0; rope_theta was 10000.0"):
        read_wiring(tmp_path, other)


@pytest.mark.parametrize("place", [0, -1])
def test_changed_weights_make_it_stale(place: int, tmp_path: Path) -> None:
    contract(tmp_path)
    named = load_file(tmp_path / "model.safetensors")
    named["fc.weight"].view(-1)[place] += 1e-3
    published.write(tmp_path, tiny_wiring()[0], named)
    with pytest.raises(ConfigError, match="stale: the drafter's weights changed"):
        read_wiring(tmp_path, tiny_target().config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_before_residual": True}, "norm_before_residual=True, wiring.json False; wiring.json is used"),
        ({IDS: [0, 1, 3], "eagle_config": None}, r"boundaries=\(0, 1, 3\), wiring.json \(0, 2, 3\)"),
        ({"architectures": ["LlamaForCausalLMEagle3"], IDS: [0, 1, 2], "eagle_config": None}, "neither reading of"),
        ({"hidden_size": 65}, "config.json can't be read: .*hidden_size: hidden_size 65, the tensors 64"),
    ],
)
def test_a_config_that_says_else_is_told_of(
    changes: Config, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = contract(tmp_path)
    read_wiring(tmp_path, tiny_target().config)
    assert not caplog.records
    edit(tmp_path / "config.json", **changes)
    assert read_wiring(tmp_path, tiny_target().config) == made
    assert len(caplog.records) == 1
    assert re.search(words, caplog.text)


def test_a_contract_without_its_config_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    contract(tmp_path)
    (tmp_path / "config.json").unlink()
    read_wiring(tmp_path, tiny_target().config)
    assert "wiring.json states the wiring and is used; config.json can't be read" in caplog.text


def test_a_missing_tensor_is_named_before_staleness(tmp_path: Path) -> None:
    contract(tmp_path)
    named = load_file(tmp_path / "model.safetensors")
    del named["norm.weight"]
    published.write(tmp_path, tiny_wiring()[0], named)
    with pytest.raises(ConfigError, match="wiring.json doesn't go with the weights: .*norm.weight is missing"):
        read_wiring(tmp_path, tiny_target().config)


def test_a_size_that_the_weights_contradict_is_named(tmp_path: Path) -> None:
    made = contract(tmp_path)
    edit(tmp_path / FILE, config=made.config.to_json() | {"hidden_size": 128})
    with pytest.raises(ConfigError, match="hidden_size: .*wiring.json says 128, the rows of fc.weight 64"):
        read_wiring(tmp_path, tiny_target().config)
    (tmp_path / FILE).unlink()
    (tmp_path / "config.json").write_text(json.dumps(made.config.to_json() | {"hidden_size": 128}))
    with pytest.raises(ConfigError, match="hidden_size: config.json says 128, the rows of fc.weight 64"):
        read_wiring(tmp_path, tiny_target().config)


@pytest.mark.parametrize("options", [{"convention": "in"}, {"boundaries": [0, 1, 3]}])
def test_what_the_user_says_against_it_is_an_error(options: dict[str, Any], tmp_path: Path) -> None:
    contract(tmp_path)
    with pytest.raises(BoundaryError, match=r"states boundaries \[0, 2, 3\]: drop"):
        read_wiring(tmp_path, tiny_target().config, **options)
    assert read_wiring(tmp_path, tiny_target().config, boundaries=[0, 2, 3]).config.boundaries == (0, 2, 3)


@settings(max_examples=40)
@given(st.data())
def test_a_damaged_contract_is_refused_in_words(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.getbasetemp() / "damaged"
    if not directory.exists():
        contract(directory)
        (directory / "whole").write_text((directory / FILE).read_text())
    content = json.loads((directory / "whole").read_text())
    field = data.draw(st.sampled_from(sorted(content)))
    (directory / FILE).write_text(json.dumps(content | {field: data.draw(JSON)}))
    try:
        read_wiring(directory, tiny_target().config)
    except (ConfigError, BoundaryError, CheckpointError) as error:
        assert str(error)


def test_an_unknown_field_or_version_is_refused(tmp_path: Path) -> None:
    contract(tmp_path)
    edit(tmp_path / FILE, convention="out")
    with pytest.raises(ConfigError, match="'convention' that is not known"):
        read_wiring(tmp_path, tiny_target().config)
    edit(tmp_path / FILE, version=2)
    with pytest.raises(ConfigError, match="version 2; this minieagle reads version 1"):
        read_wiring(tmp_path, tiny_target().config)


# ---- golden vectors


def test_golden_vectors_prove_the_wiring(tmp_path: Path) -> None:
    golden = contract(tmp_path).golden
    assert golden is not None
    drafter, _ = open_drafter(tmp_path, tiny_target())
    assert check_golden(tiny_target(), drafter, golden) == ()


FAULTS: dict[str, Config] = {
    "boundary": {"boundaries": (0, 1, 3)},
    "residual": {"norm_before_residual": True},
    "feedback": {"norm_output": True},
    "head": {"norm_before_head": False},
    "rope style": {"rope_style": "interleaved"},
    "rope base": {"rope_theta": 100.0},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_wiring_fails_them(name: str, tmp_path: Path) -> None:
    made = contract(tmp_path)
    assert made.golden is not None
    write_wiring(tmp_path, replace(made, config=replace(made.config, **FAULTS[name])))
    found = check_golden(tiny_target(), open_drafter(tmp_path, tiny_target())[0], made.golden)
    assert found and ("boundary 1" in found[0] if name == "boundary" else "draft step" in found[0])
    assert name != "feedback" or "draft step 2" in found[0]  # the first step has no feedback yet


def test_open_drafter_takes_the_target_s_type_unless_told(tmp_path: Path) -> None:
    config, named = tiny_wiring()
    published.write(tmp_path, config | {"dtype": "bfloat16"}, named)
    assert open_drafter(tmp_path, tiny_target())[0].norm.weight.dtype == torch.float32
    assert open_drafter(tmp_path, tiny_target(), dtype=torch.bfloat16)[0].norm.weight.dtype == torch.bfloat16


# ---- fingerprints


def test_the_weights_fingerprint_does_not_see_how_files_are_cut(tmp_path: Path) -> None:
    named = published.tensors()
    whole = published.write(tmp_path / "whole", {}, named)
    parts = published.write(tmp_path / "parts", {}, dict(list(named.items())[:5]))
    (parts / "model.safetensors").rename(parts / "a.safetensors")
    published.write(parts, {}, dict(list(named.items())[5:]))
    assert weights_fingerprint(whole) == weights_fingerprint(parts)


def test_the_tokenizer_fingerprint_sees_the_vocabulary_only(tmp_path: Path) -> None:
    content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<s>", "id": 2}]}
    seen = []
    for change in ({}, {"version": "2"}, {"added_tokens": []}, {"model": {"vocab": {"a": 1, "b": 0}}}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
        seen.append(tokenizer_fingerprint(tmp_path))
    assert seen[0] == seen[1] and len(set(seen)) == 3


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(["model", "added_tokens"]), JSON | st.just({"vocab": {"a": 0}})))
def test_a_damaged_tokenizer_is_refused_in_words(tmp_path_factory: pytest.TempPathFactory, content: Config) -> None:
    directory = tmp_path_factory.mktemp("t")
    (directory / "tokenizer.json").write_text(json.dumps(content))
    try:
        tokenizer_fingerprint(directory)
    except ConfigError as error:
        assert "fetch it again" in str(error)


def test_a_drafter_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    made = contract(tmp_path)
    check_tokenizer(made, "sha256:0")
    check_tokenizer(made, None)
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_tokenizer(made, "sha256:1")


def test_the_embedded_drafter_comes_with_its_contract() -> None:
    read = read_wiring(embedded("drafter"), target_config(json.loads((embedded("target") / "config.json").read_text())))
    assert read.golden is not None and read.config.boundaries == (2, 5, 8)
    check_tokenizer(read, tokenizer_fingerprint(embedded("target")))

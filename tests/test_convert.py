"""Conversions lose nothing: whatever a reader can express reads back as the same wiring and drafts the same bits, in
names and ids that were written down here independently; the rest is refused, with its reason."""

import argparse
import json
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from minieagle import conversion
from minieagle.models.config import TargetConfig, Yarn, target_config
from minieagle.models.drafter_config import DrafterConfig, LatentSizes
from minieagle.spec.boundary import BoundaryError
from minieagle.spec.convert import READERS, READS, ConversionError, Reader, Verifier, convert_drafter
from minieagle.spec.formats import UndecidedError
from minieagle.spec.golden import check_golden, golden_vectors
from minieagle.spec.wiring import FILE, derive_wiring, make_wiring, open_drafter, read_wiring, write_wiring
from tests import published
from tests.oracles import TINY
from tests.published import IDS, LATENT, Tensors
from tests.strategies import tiny_target

TARGET: TargetConfig = target_config(TINY | {"num_hidden_layers": 61})
VERIFIER = Verifier("a/target", ("DeepseekV3ForCausalLM",))
FIRST = {"minieagle": "midlayer", "sglang": "midlayer", "vllm": "layers.0", "speculators": "layers.0"}


def drafter(**changes: Any) -> tuple[DrafterConfig, Tensors]:
    """The config and the tensors of a drafter of TARGET."""
    full = changes.pop("full", False) or not changes.get("own_head", True)
    latent = changes.get("latent") is not None
    fields: dict[str, Any] = published.SIZES | {"target_hidden_size": 64, "dtype": "float32", "boundaries": (2, 30, 58)}
    fields |= {"draft_vocab_size": 96 if full else 40, "head_dim": 24 if latent else 16}
    fields |= {"rope_style": "interleaved", "num_key_value_heads": 4} if latent else {}
    config = DrafterConfig(**fields | changes)
    named = published.tensors(
        taps=len(config.boundaries),
        latent=latent,
        reduced=not full,
        layers=config.num_hidden_layers,
        fc_norm=config.fc_norm,
        norm_before_fc=config.norm_before_fc,
        qk_norm=config.qk_norm,
        embeddings=config.own_embeddings,
        head=config.own_head,
    )
    return config, named


def source(directory: Path, **changes: Any) -> Path:
    config, named = drafter(**changes)
    return published.write(directory, json.loads(json.dumps(config.to_json())), named)


def convert(src: Path, to: Reader, **options: Any) -> Path:
    destination = src.with_name(f"{src.name}-{to}")
    convert_drafter(src, destination, to, TARGET, verifier=VERIFIER, **options)
    return destination


def config_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


# ---- any drafter


@st.composite
def drafters(draw: st.DrawFn) -> dict[str, Any]:
    latent = draw(st.booleans())
    norms = draw(st.sampled_from([{}, {"fc_norm": True}, {"norm_before_fc": True}]))
    kinds = {"latent": LatentSizes(**LATENT)} if latent else {"qk_norm": draw(st.booleans())}
    depth = {} if latent else {"num_hidden_layers": draw(st.sampled_from([1, 1, 2]))}
    yarn = Yarn(**{name: value for name, value in published.YARN.items() if name != "type"})
    taps = draw(st.sampled_from([(2, 30, 58), (2, 31, 40), (0, 30, 58), (2, 30, 61), (1, 2, 3, 60), (2,)]))
    flags = {name: draw(st.booleans()) for name in ("norm_before_residual", "norm_output", "own_embeddings", "full")}
    shared = {"own_head": draw(st.sampled_from([True, True, False]))}
    return norms | kinds | depth | flags | shared | {"boundaries": taps, "yarn": draw(st.sampled_from([None, yarn]))}


@settings(max_examples=60)
@given(drafters(), st.sampled_from(READERS))
def test_what_a_reader_can_express_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], to: Reader
) -> None:
    src = source(tmp_path_factory.mktemp("d"), **changes)
    try:
        written = convert(src, to)
    except ConversionError as error:
        assert to != "minieagle" and f"{to} can't express this drafter: " in str(error)
        return
    assert read_wiring(written, TARGET).config == read_wiring(src, TARGET).config
    renamed = {
        name.replace("midlayer", FIRST[to]): tensor for name, tensor in load_file(src / "model.safetensors").items()
    }
    now = load_file(written / "model.safetensors")
    assert now.keys() == renamed.keys() and all(torch.equal(now[name], renamed[name]) for name in now)


# What each reader has words for, written down independently of LIMITS.
SPEAKS: dict[str, dict[str, list[Any]]] = {
    "sglang llama": {"boundaries": [(2, 30, 58), (2, 31, 40)], "norm_before_fc": [True, False]},
    "sglang latent": {"boundaries": [(2, 30, 58), (2, 31, 40, 60), (2,)], "norm_output": [True, False]},
    "vllm llama": {
        "boundaries": [(2, 30, 58), (0, 30, 61), (1, 2, 3, 4, 5)],
        "norm_before_residual": [True, False],
        "norm_output": [True, False],
        "norm_before_fc": [True, False],
        "own_embeddings": [True, False],
        "num_hidden_layers": [1, 3],
    },
    "vllm latent": {
        "boundaries": [(2, 30, 58), (0, 61)],
        "norm_before_residual": [True, False],
        "norm_output": [True, False],
        "fc_norm": [True, False],
        "own_embeddings": [True, False],
    },
    "speculators llama": {
        "boundaries": [(2, 30, 58), (0, 30, 60), (1, 2, 3, 4, 5)],
        "norm_before_residual": [True, False],
        "norm_output": [True, False],
        "fc_norm": [True, False],
        "qk_norm": [True, False],
        "own_embeddings": [True, False],
        "num_hidden_layers": [1, 2],
    },
}


@settings(max_examples=40)
@given(st.sampled_from(sorted(SPEAKS)), st.booleans(), st.data())
def test_there_and_back_the_config_alone_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, spoken: str, full: bool, data: st.DataObject
) -> None:
    changes = {name: data.draw(st.sampled_from(values)) for name, values in SPEAKS[spoken].items()}
    latent = {"latent": LatentSizes(**LATENT)} if spoken.endswith("latent") else {}
    src = source(tmp_path_factory.mktemp("d"), full=full, **changes, **latent)
    to: Any = spoken.split()[0]
    written = convert(src, to)
    (written / FILE).unlink()
    means = READS[to] if to == "sglang" or latent else None
    assert derive_wiring(written, TARGET, convention=means).config == read_wiring(src, TARGET).config
    back = written.with_name(f"{written.name}-back")
    convert_drafter(written, back, "minieagle", TARGET, verifier=VERIFIER, convention=means)
    assert config_of(back) == config_of(src)


def test_the_feedback_of_a_llama_drafter_for_sglang_is_told_by_the_contract(tmp_path: Path) -> None:
    """SpecForge gives the field another meaning than SGLang, under one name of the architecture."""
    written = convert(source(tmp_path / "d", norm_output=True), "sglang")
    assert config_of(written)["norm_output"] is True and read_wiring(written, TARGET).config.norm_output
    (written / FILE).unlink()
    with pytest.raises(UndecidedError, match="norm_output=True"):
        read_wiring(written, TARGET)
    assert read_wiring(written, TARGET, norm_output="feedback").config.norm_output


# ---- what each reader assumes


def test_sglang_lists_outputs_that_begin_with_1_nested(tmp_path: Path) -> None:
    written = config_of(convert(source(tmp_path / "d"), "sglang"))
    assert written["eagle_config"] == {IDS: [1, 29, 57], "use_aux_hidden_state": True} and IDS not in written
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]


def test_vllm_lists_inputs_at_both_places(tmp_path: Path) -> None:
    written = config_of(convert(source(tmp_path / "d", boundaries=(0, 30, 61)), "vllm"))
    assert written[IDS] == written["eagle_config"][IDS] == [0, 30, 61]
    assert written["architectures"] == ["Eagle3LlamaForCausalLM"]


def test_speculators_lists_inputs_and_nests_the_layer(tmp_path: Path) -> None:
    written = config_of(convert(source(tmp_path / "d", qk_norm=True, num_hidden_layers=2), "speculators"))
    assert written[IDS] == [2, 30, 58] and written["speculators_model_type"] == "eagle3"
    assert written["transformer_layer_config"]["model_type"] == "qwen3"
    assert written["transformer_layer_config"]["num_hidden_layers"] == 2
    assert written["speculators_config"]["verifier"] == {
        "name_or_path": "a/target",
        "architectures": ["DeepseekV3ForCausalLM"],
    }


@pytest.mark.parametrize("to", ["sglang", "vllm"])
def test_latent_drafters_keep_their_sizes_and_yarn(to: Reader, tmp_path: Path) -> None:
    yarn = Yarn(factor=4.0, original_max_position_embeddings=128, beta_fast=1.0)
    src = source(tmp_path / "d", latent=LatentSizes(**LATENT), full=True, norm_output=True, fc_norm=True, yarn=yarn)
    written = config_of(convert(src, to))
    assert written | LATENT == written and written["norm_output"] is True
    assert written["rope_scaling"] | asdict(yarn) == written["rope_scaling"]


def test_a_foreign_drafter_is_converted_by_its_own_convention(tmp_path: Path) -> None:
    src = published.write(tmp_path / "d", published.specforge([1, 20, 40]), published.tensors())
    with pytest.raises(BoundaryError, match="--capture-convention"):
        convert(src, "vllm")
    assert config_of(convert(src, "vllm", convention="out"))[IDS] == [2, 21, 41]


def test_absolute_ids_are_written_as_offsets(tmp_path: Path) -> None:
    src = source(tmp_path / "d")
    named = load_file(src / "model.safetensors")
    offsets, ids = named["d2t"], named["d2t"] + torch.arange(40)
    published.write(src, config_of(src), named | {"d2t": ids})
    made = make_wiring(src, drafter()[0], TARGET, d2t="absolute")
    write_wiring(src, made)
    assert torch.equal(load_file(convert(src, "sglang") / "model.safetensors")["d2t"], offsets)


def test_golden_vectors_hold_after_the_round_trip(tmp_path: Path) -> None:
    changes = {"boundaries": (0, 2), "norm_before_residual": True, "fc_norm": True}
    src, target = source(tmp_path / "d", **changes), tiny_target()
    first, read = open_drafter(src, target)
    golden = golden_vectors(target, first)
    write_wiring(src, make_wiring(src, read.config, target.config, golden=golden))
    out, back = tmp_path / "out", tmp_path / "back"
    convert_drafter(src, out, "vllm", target.config, verifier=VERIFIER)
    convert_drafter(out, back, "minieagle", target.config, verifier=VERIFIER)
    again, wiring = open_drafter(back, target)
    assert wiring.golden == golden == golden_vectors(target, again)
    assert check_golden(target, again, golden) == ()


def test_what_is_written_follows_the_umask(tmp_path: Path) -> None:
    out = convert(source(tmp_path / "d"), "vllm")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


# ---- refusals

UNSPEAKABLE: dict[str, tuple[Reader, dict[str, Any], str]] = {
    "first id": ("sglang", {"boundaries": (3, 30, 58)}, "only a list that begins with boundary 2"),
    "last layer": ("sglang", {"boundaries": (2, 30, 61)}, "before the last layer.*train a drafter whose last"),
    "residual": ("sglang", {"norm_before_residual": True}, "norm_before_residual=true"),
    "embeddings": ("sglang", {"own_embeddings": True}, "own_embeddings=true"),
    "four states": ("sglang", {"boundaries": (2, 30, 46, 58)}, "read three states"),
    "two layers": ("sglang", {"num_hidden_layers": 2}, "num_hidden_layers"),
    "query norms": ("vllm", {"qk_norm": True}, "qk_norm=true"),
    "target's head": ("vllm", {"own_head": False}, "own_head=false"),
    "latent": ("speculators", {"latent": LatentSizes(**LATENT)}, "llama attention only"),
    "last layer stripped": ("speculators", {"boundaries": (2, 30, 61)}, "strips"),
    "head norm": ("vllm", {"norm_before_head": False}, "norm_before_head=false"),
    "rotation": ("vllm", {"rope_style": "interleaved"}, "rotate halves"),
    "order": ("vllm", {"boundaries": (30, 2, 58)}, "theirs ascend"),
    "post-norm": ("vllm", {"boundaries": (2, 30, 61), "last_state": "post-norm"}, "last_state=post-norm"),
}


@pytest.mark.parametrize("name", UNSPEAKABLE)
def test_what_a_reader_has_no_words_for_is_refused(name: str, tmp_path: Path) -> None:
    to, changes, reason = UNSPEAKABLE[name]
    src = source(tmp_path / "d", **changes)
    with pytest.raises(ConversionError, match=reason):
        convert(src, to)
    assert list(tmp_path.iterdir()) == [src]


@pytest.mark.parametrize(
    ("place", "named"), [("d/inside", "lies inside"), ("d", "exists already"), ("taken", "exists already")]
)
def test_places_that_can_t_be_written_are_refused(place: str, named: str, tmp_path: Path) -> None:
    src = source(tmp_path / "d")
    (tmp_path / "taken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConversionError, match=named):
        convert_drafter(src, tmp_path / place, "vllm", TARGET, verifier=VERIFIER)
    assert not (src / "inside").exists()


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = source(tmp_path / "d")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minieagle.spec.convert.write_wiring", full)
    with pytest.raises(ConversionError, match="can't be written.*No space left"):
        convert(src, "vllm")
    assert list(tmp_path.iterdir()) == [src]


def test_a_wrong_word_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READS, "sglang", "in")
    with pytest.raises(ConversionError, match=r"sglang would read boundaries=\(1, 29, 57\) for \(2, 30, 58\)"):
        convert(source(tmp_path / "d"), "sglang")


def test_wrong_bits_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inexact(path: Path, named: Tensors) -> None:
        published.save_file(named | {"norm.weight": named["norm.weight"] * 1.01}, path)

    monkeypatch.setattr("minieagle.spec.convert.write_tensors", inexact)
    with pytest.raises(ConversionError, match="drafts other logits"):
        convert(source(tmp_path / "d"), "vllm")


# ---- the command


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = published.write(tmp_path / "d", published.specforge([1, 20, 40]), published.tensors())
    (tmp_path / "target").mkdir()
    model = TINY | {"num_hidden_layers": 61, "architectures": ["DeepseekV3ForCausalLM"]}
    (tmp_path / "target" / "config.json").write_text(json.dumps(model))
    parser = argparse.ArgumentParser()
    conversion.add_options(parser)
    arguments = [str(src), str(tmp_path / "out"), "--to", "vllm", "--model", str(tmp_path / "target")]
    assert conversion.run(parser.parse_args([*arguments, "--capture-convention", "out"])) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "boundaries [2, 21, 41], listed as [2, 21, 41]" in said and "same logits bit for bit" in said

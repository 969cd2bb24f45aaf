"""`minieagle inspect`: figures from headers alone, against those of Kimi-K2.5 and of models that are really loaded."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench.survey import figures, write_headers
from minieagle import survey as inspection
from minieagle.dist.shard import ShardError
from minieagle.errors import ModelError
from minieagle.llm import embedded
from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import ConfigError, target_config
from minieagle.models.headers import INDEX, read_headers
from minieagle.models.target_weights import load_target
from minieagle.models.weight_groups import Group, group, loaded, weight_faults
from minieagle.quantize import quantize_directory
from tests.oracles import save_target


def run(directory: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    inspection.add_options(parser)
    return inspection.run(parser.parse_args([str(directory), *options]))


def said(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> dict[str, Any]:
    run(directory, "--json", *options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def model(directory: Path, **changes: Any) -> Path:
    """A tiny plain target with the embedded tokenizer."""
    save_target(directory, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(embedded("target") / name, directory / name)
    return directory


def test_figures_of_kimi_k25_are_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_headers(tmp_path) == 208_550
    found = said(capsys, tmp_path, "--tp", "8")
    for what, known, value in figures(found):
        assert abs(value / known - 1) < 0.01, what
    assert [out["num_tensors"] for out in found["left_out"]] == [335]
    stated_shapes = 69_120 * 8  # on disk, and not in memory
    assert sum(row[-1] for row in found["cuts"]) == found["plans"][3]["rank_bytes"] + stated_shapes
    assert all("tokenizer" in fault for fault in found["faults"]), "nothing but the tokenizer is missing"


def test_the_embedded_target_has_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(embedded("target")) == 0
    shown = capsys.readouterr().out
    for words in ("INT4 routed experts in groups of 32", "DeepseekV3ForCausalLM", "4089", "all-reduces"):
        assert words in shown


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 0}])
def test_parameters_and_bytes_are_those_of_the_files(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(model(tmp_path / "plain", **changes) / "model.safetensors")
    quantize_directory(tmp_path / "plain", tmp_path / "int4")
    plain, int4 = (said(capsys, tmp_path / name) for name in ("plain", "int4"))
    count = sum(tensor.numel() for tensor in tensors.values())
    assert plain["num_parameters"] == int4["num_parameters"] == count
    assert plain["nbytes"] == 4 * count and int4["nbytes"] < plain["nbytes"]
    assert plain["faults"] == int4["faults"] == [] and "INT4" in int4["quantization"]


def test_active_parameters_are_those_of_one_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 of 8 experts, and no row of the embedding takes part in a product."""
    tensors = load_file(model(tmp_path) / "model.safetensors")
    idle = {name: t.numel() for name, t in tensors.items() if "embed_tokens" in name}
    idle |= {name: t.numel() for name, t in tensors.items() if ".experts." in name and int(name.split(".")[5]) >= 3}
    total = sum(tensor.numel() for tensor in tensors.values())
    assert said(capsys, tmp_path)["num_active_parameters"] == total - sum(idle.values())


def test_a_tied_head_is_counted_and_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, model(tmp_path, tie_word_embeddings=True))
    parts = {part["name"]: part for part in found["parts"]}
    assert "output head" not in parts and parts["embedding"]["read_bytes"] == 4 * 96 * 64
    assert found["num_parameters"] - found["num_active_parameters"] == 2 * 5 * 3 * 64 * 64


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_hold_the_cut_in_parts_and_the_rest_whole(
    tp: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """tp ranks together hold each cut tensor once and each whole one tp times."""
    found = said(capsys, model(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    whole = [t.nbytes for n, t in tensors.items() if any(k in n for k in ("norm", "_a_proj", "mlp.gate."))]
    plan = next(plan for plan in found["plans"] if plan["tp"] == tp)
    assert tp * plan["rank_bytes"] == found["nbytes"] + (tp - 1) * sum(whole)


def test_sizes_that_do_not_divide_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, model(tmp_path))
    assert "4 attention heads" in found["plans"][3]["fault"], "TINY has 4 heads"
    run(tmp_path)
    assert f"8 ranks: {found['plans'][3]['fault']}" in capsys.readouterr().out, "whole, whatever the width"
    with pytest.raises(ShardError, match="sizes that work: 1, 2, 4$"):
        run(tmp_path, "--tp", "8")


# ---- faults are what loading would refuse


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("tiny") / "model")


def refused_by_loading(directory: Path) -> bool:
    try:
        load_target(directory)
    except CheckpointError:
        return True
    return False


def faults(directory: Path) -> list[str]:
    config = target_config(json.loads((directory / "config.json").read_text()))
    return weight_faults(loaded(group(read_headers(directory)[0]), config)[0], config)


@given(st.sampled_from(["drop", "add", "reshape", "retype", "nothing"]), st.data())
def test_faults_are_what_loading_refuses(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, how: str, data: st.DataObject
) -> None:
    tensors = load_file(tiny / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    if how == "reshape":
        tensors[name] = torch.zeros(*tensors[name].shape, 1)
    elif how == "retype":
        tensors[name] = tensors[name].to(torch.int8)
    elif how == "add":
        tensors[f"{name}x"] = torch.zeros(1)
    elif how == "drop":
        del tensors[name]
    directory = tmp_path_factory.mktemp("changed")
    save_file(tensors, directory / "model.safetensors")
    shutil.copyfile(tiny / "config.json", directory / "config.json")
    assert bool(faults(directory)) == refused_by_loading(directory)


def test_a_config_that_asks_for_a_million_layers_costs_nothing(tiny: Path) -> None:
    config = target_config(json.loads((tiny / "config.json").read_text()) | {"num_hidden_layers": 2**20})
    groups = group(read_headers(tiny)[0])
    assert "num_hidden_layers=1048576" in weight_faults(groups, config)[0]


def test_an_unusable_tokenizer_is_a_fault(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny) == 1
    assert "can't be loaded:" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", '{"model_type": "llama"}', None])
def test_a_config_that_says_nothing_is_an_error(text: str | None, tiny: Path, tmp_path: Path) -> None:
    shutil.copyfile(tiny / "model.safetensors", tmp_path / "model.safetensors")
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json"):
        run(tmp_path)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no \\*.safetensors"):
        run(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        run(tmp_path / "none")


def test_text_of_a_file_is_shown_harmlessly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No escape sequence reaches the terminal, and what looks like rich's markup is text."""
    hostile = "\x1b]0;title\x07\ud800"
    assert inspection.shown(hostile).isprintable() and inspection.shown("[red]a") == "[red]a"
    assert len(inspection.shown("x" * 10**6)) == 100
    directory = model(tmp_path / "[red]m")
    run(directory)
    assert "[red]m" in capsys.readouterr().out


def test_files_beside_the_index_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = model(tmp_path)
    names = load_file(directory / "model.safetensors").keys()
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    (directory / "consolidated.safetensors").write_bytes(b"")
    assert said(capsys, directory)["unlisted_files"] == ["consolidated.safetensors"]
    assert run(directory) == 0 and "consolidated.safetensors" in capsys.readouterr().out


# ---- drafters


def test_the_embedded_drafter_shows_its_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, embedded("drafter"))
    assert found["format"] == "minieagle" and "wiring" not in found
    assert (found["shapes"]["hidden_size"], found["shapes"]["fc_width"]) == (256, 3 * 256)


def test_with_its_target_it_shows_its_wiring(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, embedded("drafter"), "--model", str(embedded("target")))
    assert found["wiring"]["boundaries"] == [2, 5, 8] and found["sources"]["boundaries"]
    assert run(embedded("drafter"), "--model", str(embedded("target"))) == 0
    assert "boundaries" in capsys.readouterr().out


def test_options_of_the_other_kind_of_model_are_refused() -> None:
    with pytest.raises(ModelError, match="--tp 2 shows the cuts of a target"):
        run(embedded("drafter"), "--tp", "2")
    with pytest.raises(ModelError, match="--model .* goes with a drafter"):
        run(embedded("target"), "--model", str(embedded("target")))


def test_a_drafter_of_another_kind_is_named(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match="EAGLE"):
        run(tmp_path)


def test_fp8_is_counted_as_it_is_loaded() -> None:
    weight = Group("model.layers.0.mlp.up_proj.weight", torch.float8_e4m3fn, (4, 6), num=3)
    scale = Group("model.layers.0.mlp.up_proj.weight_scale_inv", torch.float32, (1, 1), num=3)
    assert (weight.nbytes, weight.num_parameters, weight.loaded_bytes(torch.bfloat16)) == (72, 72, 144)
    assert (scale.num_parameters, scale.loaded_bytes(torch.bfloat16), scale.weight) == (0, 0, weight.name)


def test_a_piece_of_fp8_has_the_scale_of_every_block_that_it_touches() -> None:
    """As the loader takes them: blocks need not be whole."""
    name = "self_attn.q_b_proj.weight_scale_inv"
    scale = Group(f"model.layers.0.{name}", torch.float32, (3, 5), num=1)
    assert inspection._cut_row(name, (3, 5), [scale], 2)[3] == "[2, 5]"


def test_bytes_in_words() -> None:
    assert math.isclose(float(inspection._gb(594_205_904_896).split()[0]), 594.21)
    assert inspection._gb(1_000) == "0.00 MB" and inspection._count(31_687_095_808) == "31.7 B"

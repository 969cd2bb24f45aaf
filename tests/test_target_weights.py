"""Strict loading: one tensor dropped, renamed, added, doubled or reshaped is an error that names it; peak memory."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import ConfigError
from minieagle.models.int4 import Int4Linear
from minieagle.models.layers import Linear
from minieagle.models.target_weights import load_target
from minieagle.quantize import quantize_directory
from tests.oracles import Tensors, save_target
from tests.strategies import Run, an_expert, tokens

Change = Callable[[Tensors, str], None]
KINDS = st.sampled_from(["plain", "int4"])


@cache
def saved(kind: str) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors of the TINY model, plain or with INT4 experts."""
    with tempfile.TemporaryDirectory() as directory:
        plain, int4 = save_target(Path(directory) / "plain", q_lora_rank=24), Path(directory) / "int4"
        quantize_directory(plain, int4)
        source = plain if kind == "plain" else int4
        return json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")


def write(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def load_changed(kind: str, change: Callable[[Tensors], object], **fields: Any) -> Any:
    config, tensors = saved(kind)[0] | fields, dict(saved(kind)[1])
    change(tensors)
    with tempfile.TemporaryDirectory() as directory:
        return load_target(write(Path(directory), tensors, config))


def names(kind: str) -> list[str]:
    return sorted(saved(kind)[1])


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_what_transformers_saves_loads(kind: str) -> None:
    target = load_changed(kind, lambda tensors: None)
    assert isinstance(an_expert(target).down, Linear if kind == "plain" else Int4Linear)
    assert not any(parameter.is_meta for parameter in target.parameters())


# ---- one tensor is wrong


@settings(max_examples=40)
@given(KINDS, st.data())
def test_a_dropped_tensor_is_named(kind: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([n for n in names(kind) if not n.endswith("weight_shape")]))
    stem = name.removesuffix("_packed")  # an expert without weight_packed is looked for as a plain weight
    with pytest.raises(CheckpointError, match=f"no tensor {stem}"):
        load_changed(kind, lambda tensors: tensors.pop(name))


@settings(max_examples=40)
@given(KINDS, st.data())
def test_a_renamed_tensor_is_named(kind: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names(kind)))
    with pytest.raises(CheckpointError, match=name.removesuffix("_packed").removesuffix("_shape")):
        load_changed(kind, lambda tensors: tensors.update({f"{name}_": tensors.pop(name)}))


@given(
    KINDS,
    st.sampled_from(["extra", "model.layers.0.extra.weight", "model.layers.0.mlp.gate_proj.bias", "model.norm.bias"]),
)
def test_an_added_tensor_is_named(kind: str, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        load_changed(kind, lambda tensors: tensors.update({name: torch.zeros(1)}))


def reshaped(tensor: Tensor, how: int) -> Tensor:
    """Another shape: one row more, one row less, half the columns, or a dimension more."""
    if how == 0:
        return torch.cat((tensor, tensor[:1]))
    if how == 1:
        return tensor[1:].clone()
    if how == 2:
        return tensor[..., : tensor.shape[-1] // 2].clone()
    return tensor.unsqueeze(0).clone()


@settings(max_examples=60)
@given(KINDS, st.integers(0, 3), st.data())
def test_a_reshaped_tensor_is_named(kind: str, how: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names(kind)))
    with pytest.raises(CheckpointError, match=name):
        load_changed(kind, lambda tensors: tensors.update({name: reshaped(tensors[name], how)}))


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_two_halves_that_make_up_for_each_other_are_noticed(kind: str) -> None:
    """gate one row longer and up one row shorter stack to the right height, and every row of up would be off by one."""
    suffix = "weight" if kind == "plain" else "weight_packed"
    gate, up = (f"model.layers.1.mlp.experts.0.{part}_proj.{suffix}" for part in ("gate", "up"))

    def change(tensors: Tensors) -> None:
        tensors[gate], tensors[up] = reshaped(tensors[gate], 0), reshaped(tensors[up], 1)

    with pytest.raises(CheckpointError, match=gate):
        load_changed(kind, change)


@settings(max_examples=10)
@given(KINDS, st.data())
def test_a_doubled_tensor_is_named(kind: str, data: st.DataObject) -> None:
    name, (config, tensors) = data.draw(st.sampled_from(names(kind))), saved(kind)
    with tempfile.TemporaryDirectory() as directory:
        save_file({name: tensors[name]}, Path(directory) / "other.safetensors")
        with pytest.raises(CheckpointError, match=f"{name} is in both model.safetensors and other.safetensors"):
            load_target(write(Path(directory), tensors, config))


@pytest.mark.parametrize("suffix", ["zero_point", "g_idx"])
def test_other_int4_is_refused_by_name(suffix: str) -> None:
    name = f"model.layers.1.mlp.experts.0.down_proj.weight_{suffix}"
    with pytest.raises(CheckpointError, match=name):
        load_changed("int4", lambda tensors: tensors.update({name: torch.zeros(1)}))


@pytest.mark.parametrize("described", [16, 48, 64])
def test_packed_weights_of_another_group_size_are_refused(described: int) -> None:
    block = json.loads(json.dumps(saved("int4")[0]["quantization_config"]))
    block["config_groups"]["group_0"]["weights"]["group_size"] = described
    with pytest.raises(CheckpointError, match="experts.0.gate_proj.weight"):
        load_changed("int4", lambda tensors: None, quantization_config=block)


def test_without_a_group_size_the_scales_must_divide_the_columns() -> None:
    name = "model.layers.1.mlp.experts.0.gate_proj.weight_scale"
    with pytest.raises(CheckpointError, match="experts.0.gate_proj.weight_packed: groups of group_size=21"):
        load_changed("int4", lambda tensors: tensors.update({name: torch.ones(64, 3)}), quantization_config=None)


def test_int4_experts_may_come_without_a_stated_shape() -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("weight_shape")]:
            del tensors[name]

    assert isinstance(an_expert(load_changed("int4", change)).down, Int4Linear)


# ---- what may be there and is left out

MTP = ["eh_proj.weight", "enorm.weight", "hnorm.weight"]
BESIDE = ["embed_tokens.weight", "mlp.experts.0.down_proj.weight", "shared_head.head.weight"]
COMPUTED = [
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
    "model.layers.2.rotary_emb.cos_cached",
]


@given(st.lists(st.sampled_from(BESIDE)), st.integers(1, 3), st.lists(st.sampled_from(COMPUTED)), st.booleans())
def test_prediction_layers_and_computed_buffers_are_skipped(
    beside: list[str], num: int, computed: list[str], declared: bool
) -> None:
    predicting = [f"model.layers.{3 + i}.{name}" for i in range(num) for name in MTP + beside]
    extra = {name: torch.zeros(2) for name in computed + predicting}
    fields = {"num_nextn_predict_layers": num if declared else 0}
    target = load_changed("plain", lambda tensors: tensors.update(extra), **fields)
    same = load_changed("plain", lambda tensors: None)
    assert torch.equal(*[Run(t, 8).forward(tokens(5, 0)).logits for t in (target, same)])


@pytest.mark.parametrize("present", [True, False])
def test_tied_embeddings_may_be_stored_twice(present: bool) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()} if present else {}

    target = load_changed("plain", change, tie_word_embeddings=True)
    assert torch.equal(target.lm_head.dense_weight(), target.embed_tokens)


# ---- files


def test_shards_are_joined_whatever_tensor_lies_where(tmp_path: Path) -> None:
    config, tensors = saved("plain")
    parts = [dict(list(tensors.items())[i::3]) for i in range(3)]
    for i, part in enumerate(parts):
        save_file(part, tmp_path / f"part{i}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = load_changed("plain", lambda tensors: None)
    assert torch.equal(*[Run(t, 8).forward(tokens(5, 0)).logits for t in (load_target(tmp_path), whole)])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    config, tensors = saved("plain")
    write(tmp_path, tensors, config)
    listed = dict.fromkeys(tensors, "model.safetensors") | {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors"):
        load_target(tmp_path)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(keep: float, tmp_path: Path) -> None:
    config, tensors = saved("plain")
    file = write(tmp_path, tensors, config) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    with pytest.raises(CheckpointError, match="model.safetensors.*cut short"):
        load_target(tmp_path)


@pytest.mark.parametrize("make", [lambda d: d / "none", lambda d: d])
def test_a_directory_without_a_model_is_named(make: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: pass a directory that holds a model"):
        load_target(make(tmp_path))


@pytest.mark.parametrize("file", [None, "pytorch_model.bin"])
def test_other_weight_files_are_not_read(file: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(saved("plain")[0]))
    if file:
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file"):
        load_target(tmp_path)


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_target(
        write(tmp_path, saved("int4")[1], saved("int4")[0]), progress=lambda done, total: calls.append((done, total))
    )
    done, size = [done for done, _ in calls], sum(tensor.nbytes for tensor in saved("int4")[1].values())
    assert done == sorted(done) and calls[-1] == (size, size) and {total for _, total in calls} == {size}


# ---- memory

MEASURE = """
import sys
from pathlib import Path
from minieagle.models.target_weights import load_target

def peak(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

load_target(Path(sys.argv[1]))  # a small model first: library buffers are no part of the weights
open("/proc/self/clear_refs", "w").write("5")
before = peak("VmRSS")
target = load_target(Path(sys.argv[2]))
print(peak("VmHWM") - before)
"""
BIG = {
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "n_routed_experts": 12,
    "num_hidden_layers": 16,
    "vocab_size": 512,
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_loading_peaks_below_1_3_times_the_model(kind: str, tmp_path: Path) -> None:
    for name, sizes in (("small", {}), ("big", BIG)):
        plain = save_target(tmp_path / f"{name}-plain", dtype=torch.bfloat16, **sizes)
        quantize_directory(plain, tmp_path / f"{name}-int4")
    small, big = tmp_path / f"small-{kind}", tmp_path / f"big-{kind}"
    size = (big / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", MEASURE, str(small), str(big)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 1.3 * size, f"loading {size / 1e6:.0f} MB took {grown / 1e6:.0f} MB at its peak"

"""`minieagle quantize`: other engines read the same weights out of it, bit for bit, and ours computes with them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

from minieagle.errors import ModelError
from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import ConfigError
from minieagle.models.int4 import Int4Linear
from minieagle.models.target_weights import load_target
from minieagle.quantize import quantize_directory
from tests.oracles import TINY, Oracle, Tensors, dequantised, save_dequantised, save_target
from tests.strategies import Run, an_expert, tokens

NUM_TOKENS = 24
SHAPES: list[dict[str, Any]] = [
    {},
    {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0},
    {"hidden_size": 32, "moe_intermediate_size": 96, "rope_scaling": None},
]


@pytest.fixture(params=["bfloat16", "float32"])
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_target(tmp_path / "plain", dtype=getattr(torch, request.param))
    quantize_directory(tmp_path / "plain", tmp_path / "int4")
    return tmp_path / "int4"


def experts_of(directory: Path) -> Tensors:
    """The dequantised routed experts by their published names."""
    tensors = load_file(directory / "model.safetensors")
    names = [name.removesuffix("_packed") for name in tensors if name.endswith("weight_packed")]
    return {name: dequantised(tensors[f"{name}_packed"], tensors[f"{name}_scale"]) for name in names}


def test_routed_experts_are_packed_and_nothing_else(quantised: Path) -> None:
    plain, int4 = (load_file(quantised.parent / d / "model.safetensors") for d in ("plain", "int4"))
    for name, tensor in plain.items():
        routed = ".mlp.experts." in name
        assert (f"{name}_packed" in int4) == routed and (name in int4) != routed
        if routed:
            assert int4[f"{name}_shape"].tolist() == list(tensor.shape)
            assert int4[f"{name}_scale"].dtype == tensor.dtype
        else:
            assert torch.equal(int4[name], tensor)


def test_weights_are_near_the_originals(quantised: Path) -> None:
    plain = load_file(quantised.parent / "plain" / "model.safetensors")
    for name, weight in experts_of(quantised).items():
        assert (weight - plain[name].float()).pow(2).mean() < 0.02 * plain[name].float().pow(2).mean()


def fused(weights: Tensors, layer: int) -> tuple[Tensor, Tensor]:
    """transformers' two fused expert tensors of a layer, from the published names."""

    def stacked(part: str) -> Tensor:
        prefix = f"model.layers.{layer}.mlp.experts"
        return torch.stack([weights[f"{prefix}.{e}.{part}_proj.weight"] for e in range(TINY["n_routed_experts"])])

    return torch.cat((stacked("gate"), stacked("up")), dim=1), stacked("down")


@pytest.mark.parametrize("quantised", ["bfloat16"], indirect=True)
def test_transformers_reads_the_same_weights_bit_for_bit(quantised: Path) -> None:
    model, wanted = DeepseekV3ForCausalLM.from_pretrained(quantised, dtype=torch.bfloat16), experts_of(quantised)
    for layer in (1, 2):
        gate_up, down = fused(wanted, layer)
        experts = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        assert torch.equal(experts.get_parameter("gate_up_proj"), gate_up.bfloat16())
        assert torch.equal(experts.get_parameter("down_proj"), down.bfloat16())


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_equal_transformers_on_a_dequantised_copy(
    changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    save_target(tmp_path / "plain", dtype=dtype, **changes)
    quantize_directory(tmp_path / "plain", tmp_path / "int4")
    oracle, token_ids = Oracle(save_dequantised(tmp_path / "int4", tmp_path / "copy")), tokens(NUM_TOKENS, 0)
    assert oracle.is_decided(token_ids.tolist()), "another seed is needed: two experts tie"
    target = load_target(tmp_path / "int4", dtype=torch.float32)
    assert isinstance(an_expert(target).down, Int4Linear)
    got = Run(target, NUM_TOKENS).forward(token_ids).logits
    torch.testing.assert_close(got, oracle.run(token_ids.tolist()).logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("quantised", ["bfloat16"], indirect=True)
def test_bfloat16_logits_are_as_near_as_transformers_own(quantised: Path, tmp_path: Path) -> None:
    """Against exact float32 arithmetic, the engine's bf16 INT4 model errs no more than twice what transformers errs."""
    token_ids = tokens(NUM_TOKENS, 0)
    exact = Oracle(save_dequantised(quantised, tmp_path / "copy")).run(token_ids.tolist()).logits
    theirs = DeepseekV3ForCausalLM.from_pretrained(quantised, dtype=torch.bfloat16)(token_ids[None]).logits[0].float()
    ours = Run(load_target(quantised), NUM_TOKENS).forward(token_ids).logits
    assert (ours - exact).pow(2).mean() < 4 * (theirs - exact).pow(2).mean()


@pytest.mark.parametrize("size", [8, 16, 64])
def test_other_group_sizes_load(size: int, tmp_path: Path) -> None:
    save_target(tmp_path / "plain")
    quantize_directory(tmp_path / "plain", tmp_path / "int4", group_size=size)
    assert an_expert(load_target(tmp_path / "int4")).down.group_size == size


def test_shards_are_converted_one_by_one_and_indexed(tmp_path: Path) -> None:
    plain, whole = save_target(tmp_path / "plain"), tmp_path / "whole"
    quantize_directory(plain, whole)
    tensors = load_file(plain / "model.safetensors")
    (plain / "model.safetensors").unlink()
    for i in range(2):
        save_file(dict([*tensors.items()][i::2]), plain / f"model-{i}.safetensors")
    seen: list[tuple[int, int]] = []
    quantize_directory(plain, tmp_path / "parts", progress=lambda done, total: seen.append((done, total)))
    weight_map = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())["weight_map"]
    assert seen == [(1, 2), (2, 2)] and set(weight_map) == set(load_file(whole / "model.safetensors"))
    logits = [Run(load_target(tmp_path / d), 8).forward(tokens(5, 0)).logits for d in ("parts", "whole")]
    assert torch.equal(*logits)


@pytest.mark.parametrize("size", [0, -32, 12, 4])
def test_group_sizes_that_split_a_word_are_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"group_size={size}"):
        quantize_directory(save_target(tmp_path / "plain"), tmp_path / "int4", group_size=size)


def test_columns_that_are_no_whole_groups_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="experts.0.down_proj.weight.*64 input columns"):
        quantize_directory(save_target(tmp_path / "plain", hidden_size=128), tmp_path / "int4", group_size=128)
    assert not (tmp_path / "int4" / "config.json").exists(), "a half-written directory must not look like a model"


def test_a_quantised_source_is_refused(tmp_path: Path) -> None:
    quantize_directory(save_target(tmp_path / "plain"), tmp_path / "int4")
    with pytest.raises(ModelError, match="quantised already"):
        quantize_directory(tmp_path / "int4", tmp_path / "again")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    plain = save_target(tmp_path / "plain")
    with pytest.raises(ModelError, match="not empty"):
        quantize_directory(plain, plain)


def test_a_source_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config.json does not exist"):
        quantize_directory(tmp_path, tmp_path / "int4")


def test_a_source_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        quantize_directory(tmp_path, tmp_path / "int4")


def test_a_source_that_lacks_a_shard_is_refused(tmp_path: Path) -> None:
    plain = save_target(tmp_path / "plain")
    weight_map = {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (plain / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors"):
        quantize_directory(plain, tmp_path / "int4")


def test_the_rest_of_the_directory_comes_along(tmp_path: Path) -> None:
    plain = save_target(tmp_path / "plain")
    for name in ("tokenizer.json", "chat_template.jinja", "MODEL_CARD.md"):
        (plain / name).write_text(name)
    quantize_directory(plain, tmp_path / "int4")
    assert all((tmp_path / "int4" / name).read_text() == name for name in ("tokenizer.json", "chat_template.jinja"))
    ours, theirs = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("int4", "plain"))
    assert ours["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {key: value for key, value in ours.items() if key != "quantization_config"} == theirs


# ---- sources that can't be quantised, and runs that end early


def spoil(directory: Path, change: Callable[[Tensors], object]) -> Path:
    """A plain model with changed tensors."""
    save_target(directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


EXPERT, NORM = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors[EXPERT].view(-1)[7].fill_(math.nan), f"{EXPERT} holds NaN"),
        (lambda tensors: tensors[NORM][0].fill_(math.inf), f"{NORM} holds NaN or infinity"),
        (lambda tensors: tensors.pop(EXPERT), "missing: model.layers.1.mlp.experts.up_proj.weight .7 of 8"),
        (lambda tensors: tensors.pop(NORM), f"missing: {NORM}"),
        (
            lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int8)}),
            "weight of torch.int8",
        ),
        (
            lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.float8_e4m3fn)}),
            "weight of torch.float8",
        ),
        (lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:-1].clone()}), "experts.up_proj.weight"),
        (lambda tensors: tensors.update({"other": torch.zeros(1)}), "without a place in the model: other"),
    ],
)
def test_a_spoiled_source_is_refused_by_name(change: Callable[[Tensors], object], words: str, tmp_path: Path) -> None:
    with pytest.raises((ModelError, CheckpointError), match=words):
        quantize_directory(spoil(tmp_path / "plain", change), tmp_path / "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"], "nothing is left behind"


def test_a_target_inside_the_source_is_refused(tmp_path: Path) -> None:
    plain = save_target(tmp_path / "plain")
    (tmp_path / "link").symlink_to(plain)
    for target in (plain / "int4", tmp_path / "link" / "int4"):
        with pytest.raises(ModelError, match="lies inside"):
            quantize_directory(plain, target)


def test_an_empty_target_is_filled_and_a_file_is_not_replaced(tmp_path: Path) -> None:
    plain = save_target(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    quantize_directory(plain, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match="is a file"):
        quantize_directory(plain, tmp_path / "file")


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    plain = save_target(tmp_path / "plain")
    monkeypatch.setattr("minieagle.models.tensor_file.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_directory(plain, tmp_path / "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize("last", ["minieagle.directory.shutil.copyfile", "minieagle.directory.os.replace"])
def test_a_killed_run_leaves_no_target(last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process cleans nothing up: what lies there then is under another name."""

    def killed(*arguments: Any, **options: Any) -> None:
        raise SystemExit

    plain = save_target(tmp_path / "plain")
    (plain / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(last, killed)
    monkeypatch.setattr("minieagle.directory.shutil.rmtree", lambda *arguments, **options: None)
    with pytest.raises(SystemExit):
        quantize_directory(plain, tmp_path / "int4")
    (left,) = {path.name for path in tmp_path.iterdir()} - {"plain"}
    assert left.startswith("int4.partial-")
    assert last.endswith("replace") or not (tmp_path / left / "config.json").exists()


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise SafetensorError("No space left on device")

    plain = save_target(tmp_path / "plain")
    monkeypatch.setattr("minieagle.models.tensor_file.save_file", full)
    with pytest.raises(ModelError, match="model.safetensors can't be written: No space left"):
        quantize_directory(plain, tmp_path / "int4")

"""Whatever bytes a model directory holds, reading it ends in success or in one clear error of ours.

Valid files are cut, flipped and spliced, and JSON values replaced by others, since random bytes hardly get past the
first check. An audit hook sees every path that the interpreter opens: none may lie in the directory beside the model's,
which the hostile names point to.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from minieagle import survey
from minieagle.models.checkpoint import Checkpoint
from minieagle.models.config import read_json, target_config
from minieagle.models.drafter_config import drafter_config
from minieagle.models.headers import INDEX, read_headers
from minieagle.tokenizer import Tokenizer
from tests.oracles import TINY

SPECIAL = ["", "..", "../outside", "/", "\0", "\ud800", "x" * 10**4, "NaN", "model.safetensors", "\x1b[0m"]
NUMBERS = [0, -1, 1, 3, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, float("inf"), float("nan")]
PIECES = [b"[" * 10**5, b'{"a":' * 10**4, b"9" * 5000, b"\xff", b"-", b""]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(NUMBERS) | st.sampled_from(SPECIAL)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)

opened: list[str] | None = None


def _note_open(event: str, arguments: tuple[Any, ...]) -> None:
    if opened is not None and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | bytes):
        opened.append(os.path.realpath(os.fsdecode(arguments[0])))


sys.addaudithook(_note_open)  # stays for good, and does nothing outside of `watched`


@contextmanager
def watched() -> Iterator[list[str]]:
    """The real paths that are opened meanwhile."""
    global opened
    opened = []
    try:
        yield opened
    finally:
        opened = None


def ends_well(action: Callable[[], object], outside: Path) -> None:
    """Runs it; a refusal must be an error of ours, short and printable. Nothing outside may be opened."""
    with watched() as paths:
        try:
            action()
        except ValueError as error:
            assert type(error).__module__.startswith("minieagle."), f"{type(error).__name__}: {error}"
            assert 10 < len(str(error)) < 3000
    assert paths, "the hook sees what is opened"
    assert not [path for path in paths if path.startswith(str(outside.resolve()))]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model's directory, and one beside it with the same files."""
    root = tmp_path_factory.mktemp("fuzz")
    for name in ("model", "outside"):
        (root / name).mkdir()
        save_file({"a": torch.ones(2)}, root / name / "model.safetensors")
    return root / "model", root / "outside"


# ---- ways to spoil a file


@st.composite
def spoiled(draw: st.DrawFn, valid: bytes) -> bytes:
    """A valid file with a piece cut out, replaced or repeated, or bytes that never were one."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    start = draw(st.integers(0, len(valid)))
    stop = draw(st.integers(start, min(len(valid), start + 20)))
    new = draw(st.binary(max_size=9) | st.sampled_from(PIECES))
    return valid[:start] + new + valid[draw(st.sampled_from([stop, start])) :]


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in children:
        yield from paths_in(inner, (*path, key))


@st.composite
def altered(draw: st.DrawFn, valid: dict[str, Any]) -> dict[str, Any]:
    """A JSON object in which a few values are others, or gone, or new."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(paths_in(value)) or [("x",)]))
        place = value
        for key in path[:-1]:
            place = place[key]
        if draw(st.integers(0, 4)) == 0 and isinstance(place, dict):
            place.pop(path[-1], None)
        else:
            place[path[-1]] = draw(VALUES)
    return value


def framed(header: Any) -> bytes:
    """A safetensors file of 48 bytes of data with this header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(48)


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [12], "data_offsets": [24, 48]},
}
LISTED = {"metadata": {"total_size": 48}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
EMBEDDED = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
            }
        },
    }
}
WRAPPED = {"model_type": "kimi_k25", "text_config": TINY | {"model_type": "kimi_k2"}} | EMBEDDED
FP8 = TINY | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
DRAFTER = {
    "model_type": "minieagle_eagle3",
    "hidden_size": 8,
    "target_hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 20,
    "draft_vocab_size": 10,
    "boundaries": [2, 0, 3],
    "max_position_embeddings": 64,
}


def take_all(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    for name in checkpoint.stored:
        tensor = checkpoint.take(name)
        assert tensor.nbytes == checkpoint.stored[name].nbytes and tensor.clone().shape == tensor.shape
    checkpoint.finish()


def put(directory: Path, **files: bytes | None) -> None:
    """Exactly these files, by names in which __ stands for the dot."""
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)


# ---- headers and indexes


@settings(max_examples=150)
@given(spoiled(framed(HEADER)) | altered(HEADER).map(framed))
def test_any_weight_file(places: tuple[Path, Path], content: bytes) -> None:
    put(places[0], model__safetensors=content, **{INDEX.replace(".", "__"): None})
    ends_well(lambda: take_all(places[0]), places[1])


@settings(max_examples=150)
@given(spoiled(json.dumps(LISTED).encode()) | altered(LISTED).map(lambda value: json.dumps(value).encode()))
def test_any_index(places: tuple[Path, Path], content: bytes) -> None:
    put(places[0], model__safetensors=framed(HEADER), **{INDEX.replace(".", "__"): content})
    ends_well(lambda: take_all(places[0]), places[1])


@pytest.mark.parametrize("name", ["../outside/model.safetensors", "{outside}/model.safetensors"])
def test_a_name_that_leads_outside_opens_nothing_there(name: str, places: tuple[Path, Path]) -> None:
    listed = {"weight_map": {"a": name.format(outside=places[1])}}
    put(places[0], model__safetensors=framed(HEADER), **{INDEX.replace(".", "__"): json.dumps(listed).encode()})
    ends_well(lambda: take_all(places[0]), places[1])


def test_the_hook_would_see_a_file_outside(places: tuple[Path, Path]) -> None:
    with pytest.raises(AssertionError):
        ends_well(lambda: read_headers(places[1]), places[1])


# ---- configs


@settings(max_examples=200)
@given(st.sampled_from([TINY, WRAPPED, FP8]).flatmap(altered))
def test_any_config(places: tuple[Path, Path], value: dict[str, Any]) -> None:
    put(places[0], config__json=json.dumps(value).encode())
    ends_well(lambda: target_config(read_json(places[0] / "config.json")), places[1])


@given(spoiled(json.dumps(TINY).encode()))
def test_any_bytes_of_a_config(places: tuple[Path, Path], content: bytes) -> None:
    put(places[0], config__json=content)
    ends_well(lambda: target_config(read_json(places[0] / "config.json")), places[1])


@given(altered(DRAFTER))
def test_any_config_of_a_drafter(places: tuple[Path, Path], value: dict[str, Any]) -> None:
    put(places[0], config__json=json.dumps(value).encode())
    ends_well(lambda: drafter_config(read_json(places[0] / "config.json")), places[1])


GENERATION = {"eos_token_id": [1, 2], "bos_token_id": 0, "temperature": 0.7, "top_p": 0.95, "top_k": 20}
ALPHABET = {chr(0x100 + index): index for index in range(8)} | {"a": 8}
SPEC = {
    "added_tokens": [{"id": 9, "content": "[EOS]", "special": True}],
    "model": {"type": "BPE", "vocab": ALPHABET, "merges": []},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    "decoder": {"type": "ByteLevel"},
}


@settings(max_examples=100)
@given(altered(GENERATION) | st.just(GENERATION), st.none() | spoiled(json.dumps(GENERATION).encode()))
def test_any_generation_config(places: tuple[Path, Path], value: dict[str, Any], content: bytes | None) -> None:
    text = json.dumps(value).encode() if content is None else content
    files = {"tokenizer__json": json.dumps(SPEC).encode(), "generation_config__json": text, "config__json": b"{}"}
    put(places[0], **files)
    ends_well(lambda: Tokenizer(places[0]), places[1])
    put(places[0], **dict.fromkeys(files))


# ---- the whole command


@settings(max_examples=100)
@given(st.sampled_from([TINY, WRAPPED, FP8]).flatmap(altered), altered(HEADER), st.booleans())
def test_any_directory_can_be_inspected(
    places: tuple[Path, Path], config: dict[str, Any], header: dict[str, Any], as_json: bool
) -> None:
    put(
        places[0],
        config__json=json.dumps(config).encode(),
        model__safetensors=framed(header),
        **{INDEX.replace(".", "__"): None},
    )
    options = argparse.Namespace(directory=places[0], json=as_json, tp=None, model=None)
    ends_well(lambda: survey.run(options), places[1])


def drafter_header() -> dict[str, Any]:
    """The header of a tiny drafter of the plain kind: hidden width 8, three states of a target as wide."""
    shapes = {
        "fc.weight": (8, 24),
        "midlayer.input_layernorm.weight": (8,),
        "midlayer.hidden_norm.weight": (8,),
        "midlayer.post_attention_layernorm.weight": (8,),
        "midlayer.self_attn.q_proj.weight": (8, 16),
        "midlayer.self_attn.k_proj.weight": (4, 16),
        "midlayer.self_attn.v_proj.weight": (4, 16),
        "midlayer.self_attn.o_proj.weight": (8, 8),
        "midlayer.mlp.gate_proj.weight": (16, 8),
        "midlayer.mlp.up_proj.weight": (16, 8),
        "midlayer.mlp.down_proj.weight": (8, 16),
        "norm.weight": (8,),
        "lm_head.weight": (10, 8),
        "d2t": (10,),
        "t2d": (20,),
    }
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape)
        header[name] = {"dtype": "U8", "shape": list(shape), "data_offsets": [start, end]}
    return header


FOREIGN = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "draft_vocab_size": 10,
    "vocab_size": 20,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 64,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
}
SMALL_TARGET = TINY | {"hidden_size": 8, "vocab_size": 20}


@settings(max_examples=150)
@given(st.sampled_from([DRAFTER, FOREIGN]).flatmap(altered), altered(drafter_header()) | st.just(drafter_header()))
def test_any_drafter_can_be_inspected(
    places: tuple[Path, Path], config: dict[str, Any], header: dict[str, Any]
) -> None:
    """Alone, and beside a target."""
    target = places[0] / "target"
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(SMALL_TARGET))
    content = framed(header)[:-48] + bytes(sum(math.prod(entry["shape"]) for entry in drafter_header().values()))
    put(
        places[0],
        config__json=json.dumps(config).encode(),
        model__safetensors=content,
        **{INDEX.replace(".", "__"): None},
    )
    for model in (None, target):
        options = argparse.Namespace(directory=places[0], json=True, tp=None, model=model)
        ends_well(lambda options=options: survey.run(options), places[1])


def test_the_drafter_of_these_tests_is_one(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    content = framed(drafter_header())[:-48] + bytes(sum(math.prod(e["shape"]) for e in drafter_header().values()))
    for config in (DRAFTER, FOREIGN):
        put(places[0], config__json=json.dumps(config).encode(), model__safetensors=content)
        assert survey.run(argparse.Namespace(directory=places[0], json=True, tp=None, model=None)) == 0

"""The bf16 twin of an INT4 checkpoint: the same weights, dequantised, for engines that don't read packed INT4.

Each routed expert's weight becomes code * scale, rounded once to bf16; every other tensor is copied. Works file by
file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from minieagle.errors import ModelError
from minieagle.models.config import read_json
from minieagle.models.int4 import dequantize

_DROPPED = (".weight_scale", ".weight_shape")


def _plain(name: str, handles: dict[str, Any]) -> tuple[str, Tensor]:
    tensor = handles[name].get_tensor(name)
    if not name.endswith(".weight_packed"):
        return name, tensor
    scale = name.removesuffix("_packed") + "_scale"
    return name.removesuffix("_packed"), dequantize(tensor, handles[scale].get_tensor(scale), torch.bfloat16)


def plain_config(source: Path) -> dict[str, Any]:
    """The model's config.json without its quantisation."""
    config = read_json(source / "config.json")
    return {name: value for name, value in config.items() if name != "quantization_config"}


def check_twin(source: Path, target: Path) -> None:
    """Raise ModelError when `target` describes another model than `source`."""
    if read_json(target / "config.json") != plain_config(source):
        raise ModelError(f"{target} is not the twin of {source}: name a new directory, and it is written there")


def write_twin(source: Path, target: Path) -> None:
    """Write `source` without its quantisation to the new directory `target`; a source in bf16 is copied as it is."""
    paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{source} holds no *.safetensors file: pass a model directory")
    target.mkdir(parents=True)
    opened = {path.name: safe_open(path, framework="pt") for path in paths}
    handles = {name: handle for handle in opened.values() for name in handle.keys()}
    weight_map: dict[str, str] = {}
    for file, handle in opened.items():
        tensors = dict(_plain(name, handles) for name in handle.keys() if not name.endswith(_DROPPED))
        if tensors:
            save_file(tensors, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (target / "config.json").write_text(json.dumps(plain_config(source), indent=1))
    for path in [*source.glob("*token*.json"), *source.glob("*.jinja")]:
        shutil.copyfile(path, target / path.name)

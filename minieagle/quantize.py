"""`minieagle quantize SRC DST`: routed experts to INT4, everything else as it is, in the layout other engines read.

Writes compressed-tensors `pack-quantized` as Kimi-K2.5 ships it (see models/int4.py): per expert product
`weight_packed`, `weight_scale`, `weight_shape`, and the `quantization_config` that names what was left alone. Works
file by file, so memory peaks at one output file.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from minieagle.errors import ModelError
from minieagle.models.checkpoint import Checkpoint
from minieagle.models.config import read_json, target_config
from minieagle.models.int4 import pack, quantize

_ROUTED = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "MODEL_CARD.md")


def quantization_config(group_size: int) -> dict[str, Any]:
    """The published description of what is quantised and how."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            r"re:.*mlp\.gate$",
        ],
    }


def quantized(name: str, weight: Tensor, group_size: int) -> dict[str, Tensor]:
    """The three tensors that stand for `name` (which ends in `.weight`). Raises ModelError when a row of the weight
    isn't a whole number of groups."""
    if weight.shape[1] % group_size:
        raise ModelError(
            f"{name}: {weight.shape[1]} input columns are no multiple of group_size={group_size}: "
            "pass one that divides them"
        )
    codes, scale = quantize(weight, group_size)
    shape = torch.tensor(weight.shape, dtype=torch.int32)
    return {f"{name}_packed": pack(codes), f"{name}_scale": scale, f"{name}_shape": shape}


def _convert_file(source: Path, target: Path, group_size: int) -> dict[str, str]:
    tensors: dict[str, Tensor] = {}
    with safe_open(source, framework="pt") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            tensors |= quantized(name, tensor, group_size) if _ROUTED.search(name) else {name: tensor}
    save_file(tensors, target, metadata={"format": "pt"})
    return dict.fromkeys(tensors, target.name)


def _described(config: dict[str, Any], group_size: int) -> dict[str, Any]:
    """config.json with what was done: at the top, and in a wrapper's text_config too, as Kimi-K2.5 has it."""
    block = {"quantization_config": quantization_config(group_size)}
    inner = config.get("text_config")
    return config | block | ({"text_config": inner | block} if isinstance(inner, dict) else {})


def quantize_directory(
    source: Path, target: Path, *, group_size: int = 32, progress: Callable[[int, int], None] | None = None
) -> None:
    """Quantise a bf16 or fp32 model directory. Refuses an already quantised source, and a target that exists and is
    not empty."""
    config = read_json(source / "config.json")
    parsed = target_config(config)
    if parsed.group_size is not None or parsed.fp8_block is not None:
        raise ModelError(f"{source} is quantised already: pass the unquantised model")
    stored = Checkpoint(source).stored  # refuses missing and damaged files before anything is written
    paths = sorted({tensor.path for tensor in stored.values()})
    if group_size < 8 or group_size % 8:
        raise ModelError(f"group_size={group_size} must be a positive multiple of 8 (one packed word); 32 is usual")
    if target.exists() and any(target.iterdir()):
        raise ModelError(f"{target} is not empty: pass a new directory")
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for done, path in enumerate(paths, start=1):
        weight_map |= _convert_file(path, target / path.name, group_size)
        if progress is not None:
            progress(done, len(paths))
    if len(paths) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (target / "config.json").write_text(json.dumps(_described(config, group_size), indent=1))
    for name in _COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)

"""`minieagle quantize SRC DST`: routed experts to INT4, everything else as it is, in the layout other engines read.

Writes compressed-tensors `pack-quantized` as Kimi-K2.5 ships it (see models/int4.py): per expert product
`weight_packed`, `weight_scale`, `weight_shape`, and the `quantization_config` that names what was left alone. Works
file by file, so memory peaks at one output file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minieagle.directory import new_directory, write_companions
from minieagle.errors import ModelError
from minieagle.models.checkpoint import Checkpoint, CheckpointError
from minieagle.models.config import read_json, target_config
from minieagle.models.headers import INDEX
from minieagle.models.int4 import WORD, pack, quantize
from minieagle.models.tensor_file import write_tensors
from minieagle.models.weight_groups import group, loaded, weight_faults

_ROUTED = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


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
    """The three tensors that stand for `name` (which ends in `.weight`). Raises ModelError when the weight is no plain
    float, or a row of it isn't a whole number of groups."""
    if weight.dtype not in _FLOATS:
        raise ModelError(f"{name} is stored as {weight.dtype}: only plain floats can be quantised, pass such a model")
    if weight.shape[1] % group_size:
        raise ModelError(
            f"{name}: {weight.shape[1]} input columns are no multiple of group_size={group_size}: "
            "pass one that divides them"
        )
    codes, scale = quantize(weight, group_size)
    shape = torch.tensor(weight.shape, dtype=torch.int32)
    return {f"{name}_packed": pack(codes), f"{name}_scale": scale, f"{name}_shape": shape}


def _convert_file(checkpoint: Checkpoint, names: Iterable[str], target: Path, group_size: int) -> dict[str, str]:
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensor = checkpoint.take(name)
        if tensor.dtype in _FLOATS and not tensor.isfinite().all():
            raise ModelError(f"{name} holds NaN or infinity: the source is damaged, fetch it again")
        tensors |= quantized(name, tensor, group_size) if _ROUTED.search(name) else {name: tensor}
    write_tensors(target, tensors)
    checkpoint.release()
    return dict.fromkeys(tensors, target.name)


def _described(config: dict[str, Any], group_size: int) -> dict[str, Any]:
    """config.json with what was done: at the top, and in a wrapper's text_config too, as Kimi-K2.5 has it."""
    block = {"quantization_config": quantization_config(group_size)}
    inner = config.get("text_config")
    return config | block | ({"text_config": inner | block} if isinstance(inner, dict) else {})


def quantize_directory(
    source: Path, target: Path, *, group_size: int = 32, progress: Callable[[int, int], None] | None = None
) -> None:
    """Quantise a bf16 or fp32 model directory. Refuses an already quantised or incomplete source, and a target that is
    not empty or lies in the source. The target appears when it is whole."""
    config = read_json(source / "config.json")
    parsed = target_config(config)
    if parsed.group_size is not None or parsed.fp8_block is not None:
        raise ModelError(f"{source} is quantised already: pass the unquantised model")
    if group_size < WORD or group_size % WORD:
        raise ModelError(f"group_size={group_size} must be a positive multiple of 8 (one packed word); 32 is usual")
    checkpoint = Checkpoint(source)  # refuses missing and damaged files before anything is written
    faults = weight_faults(loaded(group(checkpoint.stored), parsed)[0], parsed)
    if faults:
        raise CheckpointError(f"{source}: {faults[0]}")
    with new_directory(source, target) as partial:
        weight_map = _convert(checkpoint, partial, group_size, progress or (lambda done, total: None))
        if len(set(weight_map.values())) > 1:
            (partial / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
        write_companions(source, partial, _described(config, group_size))


def _convert(
    checkpoint: Checkpoint, target: Path, group_size: int, progress: Callable[[int, int], None]
) -> dict[str, str]:
    """Every file's tensors; returns the index."""
    members: dict[Path, list[str]] = {}
    for name, stored in checkpoint.stored.items():
        members.setdefault(stored.path, []).append(name)
    weight_map: dict[str, str] = {}
    for done, path in enumerate(sorted(members), start=1):
        weight_map |= _convert_file(checkpoint, members[path], target / path.name, group_size)
        progress(done, len(members))
    return weight_map

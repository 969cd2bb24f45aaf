"""What the options of the Python API may be: a wrong type or name is told before anything is read.

The one idea: options come from a user's own code, with nothing between them and PyTorch's errors. One table says what
each may be; whether a value also fits the model is checked where it is used.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from minieagle.dist.ranks import Ranks
from minieagle.engine import EngineConfig
from minieagle.errors import ModelError
from minieagle.spec.tree import StaticTree, TreeShape

DTYPES: Final[Mapping[str, torch.dtype]] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Kind:
    """What an option may be: whether a value is, and how to say so."""

    holds: Callable[[Any], bool]
    words: str


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_PLACE: Final = Kind(lambda value: isinstance(value, str | os.PathLike), "a path, as text or as a Path")
_FLAG: Final = Kind(lambda value: isinstance(value, bool), "True or False")
_COUNT: Final = Kind(_is_int, "an integer")
_DTYPE: Final = Kind(
    lambda value: isinstance(value, torch.dtype | str) and str(value).removeprefix("torch.") in DTYPES,
    f"{' or '.join(map(repr, DTYPES))}, as text or of torch",
)
_TREE: Final = Kind(
    lambda value: isinstance(value, str | TreeShape | StaticTree), "text such as 'chain:5', a TreeShape or a StaticTree"
)
_IDS: Final = Kind(
    lambda value: isinstance(value, list | tuple) and all(map(_is_int, value)), "a list of integers such as [2, 5, 7]"
)
_OPTIONS: Final[Mapping[str, Kind]] = {
    "model": _PLACE,
    "drafter": _PLACE,
    "spec": _FLAG,
    "tree": _TREE,
    "num_steps": _COUNT,
    "topk": _COUNT,
    "num_draft_tokens": _COUNT,
    "dtype": _DTYPE,
    "device": Kind(lambda value: isinstance(value, str | torch.device), "'cpu', 'cuda' or 'cuda:N'"),
    "progress": Kind(callable, "a function of (bytes done, bytes in all)"),
    "capture_convention": Kind(lambda value: value in ("in", "out"), "'in' or 'out'"),
    "boundaries": _IDS,
    "ranks": Kind(lambda value: isinstance(value, Ranks), "the ranks of a job (dist/job.py)"),
    "reduction_slices": _COUNT,
    "expert_parallel": _FLAG,
    "trace": _PLACE,
    "trace_steps": Kind(lambda value: isinstance(value, str), "text such as '0-3,10'"),
    "trace_layers": _FLAG,
    "exact": _FLAG,
    "cuda_graph": _FLAG,
} | {field.name: _COUNT for field in fields(EngineConfig) if field.name != "shape"}


def checked_options(**options: Any) -> dict[str, Any]:
    """The options of load_engine with dtype and device as PyTorch's own; None is everywhere the default. Raises
    ModelError naming the option, its value and what it may be."""
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ModelError(f"{name!r:.80} is no option: known are {', '.join(sorted(_OPTIONS))}")
        if value is not None and not _OPTIONS[name].holds(value):
            raise ModelError(f"{name}={value!r:.80} must be {_OPTIONS[name].words}")
    given = {name: value for name, value in options.items() if value is not None}
    if "dtype" in given:
        given["dtype"] = DTYPES[str(given["dtype"]).removeprefix("torch.")]
    if "device" in given:
        given["device"] = _device(given["device"])
    return given


def _device(asked: str | torch.device) -> torch.device:
    """A device that this machine has."""
    there = torch.cuda.device_count()
    wrong = f"device={str(asked)!r:.80} must be 'cpu', or one of this machine's {there} GPUs as 'cuda' or 'cuda:N'"
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise ModelError(wrong) from None
    if device.type != "cpu" and (device.type != "cuda" or (device.index or 0) >= there):
        raise ModelError(wrong)
    return device

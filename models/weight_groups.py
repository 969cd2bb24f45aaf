"""The tensors of a target as its headers show them, like ones in one group, and what is wrong with them.

The one idea: a checkpoint of 200,000 tensors has a thousand kinds, one for each name once the routed experts' numbers
are left out. What the engine leaves in the files, what it misses and what it has no place for is told from the groups,
before a weight is read; load_target would refuse the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from minieagle.models.config import TargetConfig
from minieagle.models.headers import CheckpointError, Stored
from minieagle.models.int4 import WORD
from minieagle.models.target_names import WRAPPER, check_formats, dropped
from minieagle.models.target_shapes import published_shapes

_CODED = ("_packed", "_scale", "_scale_inv", "_shape")  # what a quantised weight's names end in, behind ".weight"


@dataclass(frozen=True)
class Group:
    """`num` tensors alike: one tensor, or the same one of every routed expert of a layer, whose name then leaves the
    expert's number out."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num: int

    @property
    def nbytes(self) -> int:
        return self.num * math.prod(self.shape) * self.dtype.itemsize

    @property
    def weight(self) -> str:
        """The name of the weight that this is, or that it is a piece of."""
        return next((self.name.removesuffix(end) for end in _CODED if self.name.endswith(f".weight{end}")), self.name)

    @property
    def weight_shape(self) -> tuple[int, ...] | None:
        """The shape of the weight, None when this only scales or describes it."""
        if self.name == self.weight:
            return self.shape
        packed = self.name.endswith("_packed") and self.shape
        return (*self.shape[:-1], self.shape[-1] * WORD) if packed else None

    @property
    def num_parameters(self) -> int:
        return 0 if self.weight_shape is None else self.num * math.prod(self.weight_shape)

    def loaded_bytes(self, dtype: torch.dtype) -> int:
        """Bytes once loaded: FP8 weights as dtype, their scales gone."""
        if self.name.endswith(("_scale_inv", "_shape")):
            return 0
        return self.num_parameters * dtype.itemsize if self.dtype == torch.float8_e4m3fn else self.nbytes


def group(stored: Mapping[str, Stored]) -> list[Group]:
    """The tensors of a target in groups, in the order of their first members, without a wrapper's prefix."""
    counts: Counter[tuple[str, torch.dtype, tuple[int, ...]]] = Counter()
    for name, tensor in stored.items():
        head, experts, tail = name.partition(".mlp.experts.")
        alike = head + experts + tail.partition(".")[2] if experts else name
        counts[alike, tensor.dtype, tensor.shape] += 1
    return [Group(name.removeprefix(WRAPPER), dtype, shape, num) for (name, dtype, shape), num in counts.items()]


def loaded(groups: Sequence[Group], config: TargetConfig) -> tuple[list[Group], dict[str, list[Group]]]:
    """The groups that the engine loads, and by reason those that it leaves out. Raises CheckpointError for layers
    beyond the config's."""
    reasons = {name: reason for reason, names in dropped([g.name for g in groups], config).items() for name in names}
    out: dict[str, list[Group]] = {}
    for found in groups:
        if found.name in reasons:
            out.setdefault(reasons[found.name], []).append(found)
    return [found for found in groups if found.name not in reasons], out


def weight_faults(groups: Sequence[Group], config: TargetConfig) -> list[str]:
    """What load_target would refuse, one line a kind with its first example."""
    if config.num_hidden_layers > len(groups):  # before a list is made that is as long as a hostile config.json asks
        return [f"config.json says num_hidden_layers={config.num_hidden_layers}, the files don't hold so many tensors"]
    try:
        check_formats({found.name for found in groups}, config)
    except CheckpointError as error:
        return [str(error)]
    wanted = published_shapes(config)
    present = {found.weight: found for found in groups if found.weight_shape is not None}
    misshapen = [
        f"{name} has shape {list(present[name].weight_shape or ())}, the config asks for {list(shape)}"
        for name, shape in wanted.items()
        if name in present and present[name].weight_shape != shape
    ]
    incomplete = [name for name in wanted if name in present and present[name].num != _num_wanted(name, config)]
    lines = [
        ("missing", [name for name in wanted if name not in present] + incomplete),
        ("of another shape", misshapen),
        ("without a place in the model", sorted({g.name for g in groups if g.weight not in wanted})),
    ]
    return [f"{len(names)} weights {what}: {names[0]}" for what, names in lines if names]


def _num_wanted(name: str, config: TargetConfig) -> int:
    return config.n_routed_experts if ".mlp.experts." in name else 1

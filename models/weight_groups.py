"""The tensors of a target as its headers show them, like ones in one group, and what is wrong with them.

The one idea: a checkpoint of 200,000 tensors has a thousand kinds, one for each name once the routed experts' numbers
are left out. What the engine leaves in the files, what it misses and what it has no place for is told from the groups,
before a weight is read; load_target would refuse the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
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
    present: dict[str, list[Group]] = {}
    for found in groups:
        if found.weight_shape is not None:
            present.setdefault(found.weight, []).append(found)
    names = {found.name for found in groups}
    lines = [
        ("missing", [name for name in wanted if name not in present]),
        ("missing", list(_incomplete(present, config))),
        ("of another shape", list(_misshapen(present, wanted))),
        ("of a type that isn't read", [f"{g.name} of {g.dtype}" for g in groups if not _is_readable(g, names)]),
        ("without a place in the model", sorted({g.name for g in groups if g.weight not in wanted})),
    ]
    return [f"{what}: {faulty[0]}{_more(len(faulty) - 1)}" for what, faulty in lines if faulty]


def _more(count: int) -> str:
    return f" and {count} more" if count else ""


def _incomplete(present: Mapping[str, Sequence[Group]], config: TargetConfig) -> Iterator[str]:
    for name, found in present.items():
        count, wanted = sum(g.num for g in found), config.n_routed_experts
        if ".mlp.experts." in name and count != wanted:
            yield f"{name} ({count} of {wanted} experts)"


def _misshapen(present: Mapping[str, Sequence[Group]], wanted: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in wanted.items():
        for found in present.get(name, ()):
            if found.weight_shape != shape:
                yield f"{name} has shape {list(found.weight_shape or ())}, the config asks for {list(shape)}"


def _is_readable(found: Group, names: Container[str]) -> bool:
    """Whether the engine reads a weight of this type: floats, FP8 with its scales, words of INT4."""
    if found.weight_shape is None:
        return True
    if found.name.endswith("_packed"):
        return found.dtype == torch.int32
    scaled = found.dtype == torch.float8_e4m3fn and f"{found.name}_scale_inv" in names
    return scaled or (found.dtype.is_floating_point and found.dtype.itemsize > 1)

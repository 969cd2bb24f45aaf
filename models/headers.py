"""What the weight files of a directory say of themselves: the safetensors headers and the index, read with suspicion.

A safetensors file is the header's length (8 bytes, little endian), the header (JSON: tensor name -> dtype, shape, and
where its bytes begin and end behind the header), and the bytes, without gaps. Nothing is believed: offsets must lie in
the file, sizes must follow from the shapes, and index and headers must tell the same. No path is ever made from more
than the directory and a bare file name; the entries of the directory may be links, as a hub's cache has them.

Which files are read: those that model.safetensors.index.json lists, else every *.safetensors. Files that an index
doesn't list are left alone: repositories keep second copies in another layout there (consolidated.safetensors).
Source: the format's description in the safetensors repository.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minieagle.models.files import JSON_LIMIT_BYTES, FileError, open_plain, parse_json, read_plain

INDEX = "model.safetensors.index.json"
MOST_DIMENSIONS = 8
MOST_NAME_CHARACTERS = 500
MOST_STRIDE = 1 << 59  # numbers, of 16 bytes at most: a tensor without any still has strides

# The format's names. Types narrower than a byte (F4, F6_*) are left out: PyTorch has no shape for them.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class CheckpointError(ValueError):
    """A weight directory that is empty, damaged, or doesn't hold exactly the tensors that the model needs."""


class Stored(NamedTuple):
    """A tensor as it lies in its file: bytes start..stop, counted from the beginning of the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@contextmanager
def _without_collection() -> Iterator[None]:
    """What is read here makes no cycles, but the collector would walk all of it over and over: two thirds of the time
    for the 208,550 tensors of Kimi-K2.5."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collection()
def read_headers(
    directory: Path, metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """The tensors of a directory by name, and the names of its weight files that the index doesn't list. metadata: what
    every file must say of itself, None for whatever it says. Raises CheckpointError naming the file, and the tensor
    where one is at fault."""
    present = _weight_files(directory)
    index = read_index(directory / INDEX)
    used = present if index is None else sorted(set(index.values()))
    missing = sorted(set(used) - set(present))
    if missing:
        raise CheckpointError(
            f"{directory / INDEX} lists {missing[0]} ({len(missing)} files missing): download the rest"
        )
    if not used:
        raise CheckpointError(f"{directory} holds no *.safetensors file: only safetensors weights are read")
    found: dict[str, Stored] = {}
    for name in used:
        _add(found, read_header(directory / name, metadata))
    if index is not None:
        _check_agreement(found, index, directory)
    return found, tuple(sorted(set(present) - set(used)))


def _weight_files(directory: Path) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a directory that can be read ({error.strerror}): pass the folder that holds "
            "config.json and weights"
        ) from None
    return [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]


def _add(found: dict[str, Stored], header: Mapping[str, Stored]) -> None:
    for name in found.keys() & header.keys():
        raise CheckpointError(f"tensor {name} is in both {found[name].path.name} and {header[name].path.name}")
    found.update(header)


def _check_agreement(found: Mapping[str, Stored], index: Mapping[str, str], directory: Path) -> None:
    """Raises unless every tensor lies in the file that the index says, and none beside."""
    for name, file in index.items():
        if name not in found or found[name].path.name != file:
            real = f"it is in {found[name].path.name}" if name in found else "no file has it"
            raise CheckpointError(f"{directory / INDEX} lists {name:.500} in {file}, but {real}: fetch both again")
    for name in found.keys() - index.keys():
        raise CheckpointError(f"{directory / INDEX} doesn't list {name}, which {found[name].path.name} holds")


def read_index(path: Path) -> dict[str, str] | None:
    """Tensor name -> file name in the same directory, as an index says; None where there is no index."""
    try:
        content = parse_json(read_plain(path), str(path))
    except FileNotFoundError:
        return None
    except FileError as error:
        raise CheckpointError(f"{error}; fetch the index again") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map (tensor name -> file name): fetch the index again")
    for file in {str(file): file for file in weight_map.values()}.values():
        if not _is_bare_name(file):
            raise CheckpointError(
                f"{path}: {file!r:.200} must be the bare name of a .safetensors file in the same directory"
            )
    return weight_map


def _is_bare_name(name: Any) -> bool:
    """Whether a name can only mean a weight file directly in the directory."""
    if type(name) is not str or not name.isprintable() or len(name) > MOST_NAME_CHARACTERS:
        return False
    return name.endswith(".safetensors") and not name.startswith(".") and not set(name) & {"/", "\\"}


def read_header(path: Path, metadata: Mapping[str, str] | None = None) -> dict[str, Stored]:
    """The tensors of one file by name. metadata: as in read_headers."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise FileError(f"{path} can't be read: of its {size} bytes the header should take {length}")
            if length > JSON_LIMIT_BYTES:
                raise FileError(f"{path} can't be read: its header of {length} bytes exceeds {JSON_LIMIT_BYTES}")
            content = parse_json(file.read(length), f"the header of {path}")
    except (FileError, OSError) as error:
        raise CheckpointError(f"{error}; it is damaged or cut short, fetch it again") from None
    if not isinstance(content, dict):
        raise _damaged(path, f"its header is {type(content).__name__}, not an object")
    said = content.pop("__metadata__", None)
    if metadata is not None and said != metadata:
        raise CheckpointError(f"{path} is of {said}, not of {metadata}: put the right file there, or cut it anew")
    header = {name: _stored(path, name, entry, 8 + length) for name, entry in content.items()}
    _check_gapless(path, header, 8 + length, size)
    return header


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} can't be read: {what}; it is damaged or cut short, fetch it again")


def _stored(path: Path, name: str, entry: Any, base: int) -> Stored:
    """One entry of a header whose bytes begin at `base`."""
    if not name.isprintable() or len(name) > MOST_NAME_CHARACTERS:
        raise _damaged(path, f"{name!r:.100} can't be the name of a tensor")
    try:
        kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = DTYPES.get(kind)
    except (TypeError, KeyError, ValueError):
        raise _damaged(path, f"tensor {name} has no dtype, shape and data_offsets") from None
    if dtype is None:
        raise CheckpointError(f"{path}: tensor {name} has dtype {kind!r:.50}, which is not supported")
    if type(shape) is not list or len(shape) > MOST_DIMENSIONS or not _are_sizes((*shape, start, stop)):
        raise _damaged(path, f"tensor {name} has shape {shape!r:.100} at {entry['data_offsets']!r:.100}")
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise _damaged(path, f"tensor {name} of shape {shape!r:.100} can't take the {stop - start} bytes it states")
    if start == stop and math.prod(size or 1 for size in shape) > MOST_STRIDE:
        raise _damaged(path, f"tensor {name} of shape {shape!r:.100} has strides beyond 64 bits")
    return Stored(path, dtype, tuple(shape), base + start, base + stop)


def _are_sizes(numbers: tuple[Any, ...]) -> bool:
    """Whether these are integers that a size or an offset can be; a loop, since it runs for every tensor."""
    for number in numbers:
        if type(number) is not int or not 0 <= number <= MOST_STRIDE:
            return False
    return True


def _check_gapless(path: Path, header: Mapping[str, Stored], base: int, size: int) -> None:
    """Raises unless the tensors follow each other from `base` to the end of the file: none reaches beyond it, and no
    two overlap."""
    end = base
    for stored in sorted(header.values(), key=attrgetter("start", "stop")):
        if stored.start != end:
            raise _damaged(path, f"a tensor starts at byte {stored.start}, where the one before ends at {end}")
        end = stored.stop
    if end != size:
        raise _damaged(path, f"its tensors end at byte {end}, the file at {size}")

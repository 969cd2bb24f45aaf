"""The tensors of a model directory: every one handed out exactly once, every parameter filled exactly once.

Files are memory-mapped, and the maps let go by `release`, so that a reader that releases after each layer holds one
layer's pages. What the headers may say is for headers.py; what the tensors are called and mean is for
target_weights.py and drafter_weights.py.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from minieagle.models.files import FileError, open_plain
from minieagle.models.fp8 import SCALE, check_scaled, dequantize, touched
from minieagle.models.headers import CheckpointError, Stored, read_headers
from minieagle.models.layers import Linear, SlicedLinear, SwiGLU
from minieagle.models.shards import WHOLE, Shards

__all__ = ["Checkpoint", "CheckpointError", "Filler", "Progress", "check_filled"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each layer."""

_log = logging.getLogger(__name__)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Checkpoint:
    """The tensors of a directory by name. `take` hands each out once; `finish` raises if any is left.

    `stored` says of each tensor where it lies, without reading it. Raises CheckpointError for files that are missing,
    damaged, or unlike their index; metadata: as in read_headers.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.stored, unlisted = read_headers(directory, metadata)
        if unlisted:
            _log.warning("%s: %s not listed in the index, hence not read", directory, ", ".join(unlisted))
        self._maps: dict[Path, mmap.mmap] = {}
        self._left = set(self.stored)
        self.fetch: Callable[[Stored], Tensor] = self._mapped  # stream.py puts a reader of its own in its place
        self.taken_bytes = self.dropped_bytes = 0
        self.total_bytes = sum(stored.nbytes for stored in self.stored.values())

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with open_plain(path) as file:
                    # Copy on write: PyTorch warns of buffers that can't be written. The file never changes.
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (FileError, OSError, ValueError) as error:
                raise CheckpointError(
                    f"{path} can't be mapped ({error}): it changed since its header was read"
                ) from None
        return self._maps[path]

    def release(self) -> None:
        """Let go of the memory maps; each is closed with the last tensor that lies in it."""
        self._maps.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def take(self, name: str) -> Tensor:
        """The tensor of that name, mapped; raises when it is missing or was taken before."""
        if name not in self.stored:
            raise CheckpointError(f"{self.directory} has no tensor {name}: the model needs it")
        assert name in self._left, f"{name} is taken twice"
        self._left.discard(name)
        stored = self.stored[name]
        self.taken_bytes += stored.nbytes
        return self.fetch(stored)

    def _mapped(self, stored: Stored) -> Tensor:
        return tensor_in(self._map(stored.path), stored, stored.start)

    @property
    def left(self) -> frozenset[str]:
        """The names neither taken nor dropped yet."""
        return frozenset(self._left)

    def strip(self, prefix: str) -> None:
        """Know every tensor by its name without `prefix`. Raises CheckpointError when that gives one name to two."""
        names = {name.removeprefix(prefix): name for name in self.stored}
        if len(names) < len(self.stored):
            double = next(iter(self.stored.keys() - set(names.values())))
            raise CheckpointError(f"{self.directory} holds {double} both with and without {prefix!r} in front")
        self.stored = {short: self.stored[name] for short, name in names.items()}
        self._left = {name.removeprefix(prefix) for name in self._left}

    def drop(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Forget the tensors whose name is unwanted; returns them."""
        dropped = sorted(name for name in self._left if unwanted(name))
        self._left.difference_update(dropped)
        self.dropped_bytes += sum(self.stored[name].nbytes for name in dropped)
        return dropped

    def report(self, progress: Progress | None) -> None:
        """Tell how many of the bytes that are wanted have been taken."""
        if progress is not None:
            progress(self.taken_bytes, self.total_bytes - self.dropped_bytes)

    def finish(self) -> None:
        """Raises CheckpointError when a tensor was neither taken nor dropped. Then every byte behind the headers was,
        since the files hold nothing between the tensors."""
        self.release()
        if self._left:
            some = sorted(self._left)[:5]
            raise CheckpointError(
                f"{self.directory} holds {len(self._left)} tensors that the model has no place for: {some}"
            )
        counted = self.taken_bytes + self.dropped_bytes
        assert counted == self.total_bytes, f"{counted} bytes taken or dropped of {self.total_bytes}"


def tensor_in(memory: mmap.mmap, stored: Stored, offset: int) -> Tensor:
    """A tensor over its bytes in memory, which begin at `offset`. Bytes that don't lie on a multiple of the item's
    size, as some writers leave them, are copied: vector loads want them there."""
    if len(memory) < offset + stored.nbytes:
        raise CheckpointError(f"{stored.path} became shorter since its header was read: fetch it again")
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=stored.dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=stored.nbytes, offset=offset)
    aligned = flat if offset % stored.dtype.itemsize == 0 else flat.clone()
    return aligned.view(stored.dtype).view(stored.shape)


class Filler:
    """Puts tensors into a module on the meta device, checking shapes, in one dtype and on one device.

    shards: which piece of what is cut this rank takes; only that is copied or dequantised. are_cut: the files hold this
    rank's pieces already (rank_files.py). Shapes in arguments are always those of the whole model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        group_size: int | None = None,
        fp8_block: tuple[int, int] | None = None,
        shards: Shards = WHOLE,
        are_cut: bool = False,
    ) -> None:
        self.checkpoint, self.dtype, self.device, self.shards = checkpoint, dtype, device, shards
        self.group_size, self.fp8_block, self.are_cut = group_size, fp8_block, are_cut

    def uncut(self) -> Filler:
        """One that takes whole tensors from the same files."""
        return Filler(self.checkpoint, self.dtype, self.device, self.group_size, self.fp8_block)

    def stored_shape(self, shape: Sequence[int], cut: int | None) -> tuple[int, ...]:
        """What a tensor of that shape is in the files, when dimension `cut` is cut over ranks."""
        size = self.shards.ranks.size if self.are_cut else 1
        return tuple(length // size if dim == cut else length for dim, length in enumerate(shape))

    def take(
        self, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype | None = None, cut: int | None = None
    ) -> Tensor:
        """The named tensors, each of the shape given, one below the other, copied out of the mapping. FP8 weights come
        multiplied by their scales. cut: the dimension of which each rank takes its piece, None for the whole."""
        wanted = dtype or self.dtype
        parts = [self._piece(name, shape, wanted, cut) for name, shape in shapes.items()]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        return whole.to(self.device, wanted)

    def pieces(
        self, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype | None = None, cut: int | None = None
    ) -> list[Tensor]:
        """The same by themselves, and in the mapping where nothing has to be computed or moved: to be copied from."""
        wanted = dtype or self.dtype
        return [self._piece(name, shape, wanted, cut).to(self.device, wanted) for name, shape in shapes.items()]

    def _piece(self, name: str, shape: Sequence[int], dtype: torch.dtype, cut: int | None) -> Tensor:
        """This rank's piece, in the mapping where nothing has to be computed."""
        if name + SCALE in self.checkpoint:
            return self._scaled_piece(name, shape, dtype, cut)
        stored = self.view(name, self.stored_shape(shape, cut), dtype)
        return stored if cut is None or self.are_cut else self.shards.mine(stored, cut)

    def _scaled_piece(self, name: str, shape: Sequence[int], dtype: torch.dtype, cut: int | None) -> Tensor:
        weight, scale = self._shaped(name, self.stored_shape(shape, cut)), self.checkpoint.take(name + SCALE)
        first = self._first(shape, cut)
        block = check_scaled(name, weight, scale, self.fp8_block, first=first if self.are_cut else (0, 0))
        if cut is not None and not self.are_cut:
            weight = self.shards.mine(weight, cut)
            scale = touched(scale, block, cut, first[cut], weight.shape[cut])
        return dequantize(weight, scale, block, dtype, first=first)

    def _first(self, shape: Sequence[int], cut: int | None) -> tuple[int, int]:
        """Row and column of the whole weight at which this rank's piece begins."""
        ranks = self.shards.ranks
        row, column = (ranks.rank * (shape[dim] // ranks.size) if dim == cut else 0 for dim in (0, 1))
        return row, column

    def view(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The named tensor of the shape given, where it lies and in the file's dtype: any float where a float dtype
        is wanted, else the wanted one. Codes that need a scale are no floats."""
        tensor, wanted = self._shaped(name, shape), dtype or self.dtype
        if tensor.dtype not in (_FLOATS if wanted.is_floating_point else (wanted,)):
            raise CheckpointError(f"{name} is stored as {tensor.dtype} without a scale; {wanted} is needed")
        return tensor

    def _shaped(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self.checkpoint.take(name)
        if list(tensor.shape) != list(shape):
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        return tensor

    def put(self, module: nn.Module, parameter: str, tensor: Tensor) -> None:
        place = getattr(module, parameter)
        assert place.shape == tensor.shape, f"{parameter} of shape {list(tensor.shape)} into {list(place.shape)}"
        assert place.is_meta, f"{parameter} is filled twice"
        setattr(module, parameter, nn.Parameter(tensor, requires_grad=False))

    def fill(
        self,
        module: nn.Module,
        *names: str,
        rows: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        cut: bool = False,
    ) -> None:
        """module.weight from the named tensors, one below the other: `rows` of each in the files, None for equal
        shares. cut: each rank takes its piece of the rows of each. A Linear is packed at once."""
        shape = module.get_parameter("weight").shape
        pieces = self.shards.ranks.size if cut else 1
        heights = rows or [pieces * shape[0] // len(names)] * len(names)
        shapes = {name: (height, *shape[1:]) for name, height in zip(names, heights, strict=True)}
        self.put(module, "weight", self.take(shapes, dtype=dtype, cut=0 if cut else None))
        if isinstance(module, Linear):
            module.pack()

    def fill_summed(self, module: Linear | SlicedLinear, name: str) -> None:
        """The weight [out, in] of a product that is summed over ranks: this rank's columns, cut into its slices."""
        parts = [module] if isinstance(module, Linear) else [cast(Linear, part) for part in module.parts]
        height, width = parts[0].weight.shape
        mine = self.take({name: (height, width * self.shards.slices)}, cut=1)
        for part, piece in zip(parts, mine.split(width, dim=1), strict=True):
            self.put(part, "weight", piece.contiguous())
            part.pack()

    def swiglu(self, module: SwiGLU, prefix: str) -> None:
        self.fill(module.gate_up, f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight", cut=True)
        self.fill_summed(module.down, f"{prefix}.down_proj.weight")


def check_filled(model: nn.Module, directory: Path) -> None:
    """Raises CheckpointError naming the parameters that are still on the meta device."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise CheckpointError(f"{directory} left {len(empty)} parameters unfilled: {empty[:5]}")

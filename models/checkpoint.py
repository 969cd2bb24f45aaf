"""The tensors of a model directory: every one handed out exactly once, every parameter filled exactly once.

Files are memory-mapped and closed by `release`, so that a reader that releases after each layer holds one layer's
pages. What the tensors are called and mean is for target_weights.py and drafter_weights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minieagle.models.config import read_json
from minieagle.models.layers import Linear, SwiGLU

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each layer."""


class CheckpointError(ValueError):
    """A weight directory that is empty, damaged, or doesn't hold exactly the tensors that the model needs."""


class Checkpoint:
    """The tensors of a directory by name. `take` hands each out once; `finish` raises if any is left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[Path, Any] = {}
        self._files = self._index()
        self._left = set(self._files)
        self.taken_bytes = 0
        self.total_bytes = sum(path.stat().st_size for path in set(self._files.values()))

    def _index(self) -> dict[str, Path]:
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory} is not a directory: pass the folder that holds config.json and weights"
            )
        paths = sorted(self.directory.glob("*.safetensors"))
        listed = self.directory / "model.safetensors.index.json"
        if listed.exists():
            names = set(read_json(listed).get("weight_map", {}).values())
            missing = sorted(names - {path.name for path in paths})
            if missing:
                raise CheckpointError(f"{listed} lists {missing[0]} ({len(missing)} files missing): download the rest")
        if not paths:
            raise CheckpointError(f"{self.directory} holds no *.safetensors file: only safetensors weights are read")
        files: dict[str, Path] = {}
        for path in paths:
            for name in self._handle(path).keys():
                if name in files:
                    raise CheckpointError(f"tensor {name} is in both {files[name].name} and {path.name}")
                files[name] = path
        self.release()
        return files

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} can't be read ({error}): it is damaged or cut short, fetch it again"
                ) from error
        return self._open[path]

    def release(self) -> None:
        """Close the memory maps opened so far."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str) -> Tensor:
        """The tensor of that name, mapped; raises when it is missing or was taken before."""
        if name not in self._files:
            raise CheckpointError(f"{self.directory} has no tensor {name}: the model needs it")
        assert name in self._left, f"{name} is taken twice"
        self._left.discard(name)
        tensor: Tensor = self._handle(self._files[name]).get_tensor(name)
        self.taken_bytes += tensor.nbytes
        return tensor

    def drop(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Forget the tensors whose name is unwanted; returns them."""
        dropped = sorted(name for name in self._left if unwanted(name))
        self._left.difference_update(dropped)
        return dropped

    def finish(self) -> None:
        self.release()
        if self._left:
            some = sorted(self._left)[:5]
            raise CheckpointError(
                f"{self.directory} holds {len(self._left)} tensors that the model has no place for: {some}"
            )


class Filler:
    """Puts tensors into a module on the meta device, checking shapes, in one dtype and on one device."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, group_size: int | None = None
    ) -> None:
        self.checkpoint, self.dtype, self.device, self.group_size = checkpoint, dtype, device, group_size

    def take(self, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype | None = None) -> Tensor:
        """The named tensors, each of the shape given, one below the other, copied out of the mapping."""
        parts = [self._checked(name, shape) for name, shape in shapes.items()]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        return whole.to(self.device, dtype or self.dtype)

    def _checked(self, name: str, shape: Sequence[int]) -> Tensor:
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
        self, module: nn.Module, *names: str, rows: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """module.weight from the named tensors, one below the other: `rows` of each, None for equal shares. A Linear is
        packed at once."""
        shape = module.get_parameter("weight").shape
        heights = rows or [shape[0] // len(names)] * len(names)
        shapes = {name: (height, *shape[1:]) for name, height in zip(names, heights, strict=True)}
        self.put(module, "weight", self.take(shapes, dtype=dtype))
        if isinstance(module, Linear):
            module.pack()

    def swiglu(self, module: SwiGLU, prefix: str) -> None:
        self.fill(module.gate_up, f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        self.fill(module.down, f"{prefix}.down_proj.weight")


def check_filled(model: nn.Module, directory: Path) -> None:
    """Raises CheckpointError naming the parameters that are still on the meta device."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise CheckpointError(f"{directory} left {len(empty)} parameters unfilled: {empty[:5]}")

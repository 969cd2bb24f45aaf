"""Writing a safetensors file: who may read its directory's other files may read it, and a full disk is an OSError.

The library (0.8) writes beside the file and renames, and what it makes is for its owner alone (mode 0600), which
surprises whoever shares a model; so the mode is that of a file made the usual way, which the umask decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous tensors, which share no memory; metadata: {"format": "pt"} unless given, as transformers asks
    for. Raises OSError for what can't be written."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=dict(metadata or {"format": "pt"}))
    except SafetensorError as error:
        raise OSError(f"{path} can't be written: {error}") from None
    path.chmod(mode)

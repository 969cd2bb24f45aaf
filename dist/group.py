"""Who this process is among the ranks that were started together, and which device it owns.

The one idea: the environment that `torchrun` writes is read once, here, into a frozen value that is handed on; no other
module looks at `RANK`, and no other module asks whether there is a GPU. One process is a group of size 1.

Source: the environment variables that torchrun documents for its workers.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

MAX_SIZE = 8
"""Ranks of one model at most: attention heads of published models divide no further without loss."""

MAX_PORT = 65535
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class GroupError(ValueError):
    """The environment names a group that cannot be formed."""


@dataclass(frozen=True)
class Group:
    """The ranks that hold one model: this one's index `rank` in 0..size-1, their number `size`, this one's `device`."""

    rank: int
    size: int
    device: torch.device


def from_environment(environment: Mapping[str, str] = os.environ) -> Group:
    """The group that torchrun describes in `environment`, or a group of one where none of its variables is set.

    Raises GroupError when only some of the variables are set, when one is not an integer within its bounds, or when
    there are more ranks than MAX_SIZE or than GPUs on a host that has any.
    """
    if not any(name in environment for name in _VARIABLES):
        return alone()
    _check_complete(environment)
    if not 1 <= (port := _integer(environment, "MASTER_PORT")) <= MAX_PORT:
        raise GroupError(f"MASTER_PORT={port} must be in 1..{MAX_PORT}; let torchrun set it")
    size = _size(environment)
    rank = _index(environment, "RANK", size)
    return Group(rank=rank, size=size, device=_device(_index(environment, "LOCAL_RANK", size)))


def alone() -> Group:
    """One process: on the first GPU where there is one."""
    return Group(rank=0, size=1, device=_device(0))


def _device(local_rank: int) -> torch.device:
    """A GPU of its own for every rank of a host, or the CPU for all of them."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise GroupError(
            f"LOCAL_RANK={local_rank} is beyond this host's {count} GPUs: start torchrun with --nproc-per-node "
            f"{count}, or set CUDA_VISIBLE_DEVICES to nothing to run on the CPU"
        )
    return torch.device("cuda", local_rank)


def _check_complete(environment: Mapping[str, str]) -> None:
    missing = [name for name in _VARIABLES if not environment.get(name)]
    if missing:
        present = [name for name in _VARIABLES if name not in missing]
        raise GroupError(
            f"{', '.join(present) or 'nothing'} is set but {', '.join(missing)} is not; a group needs all of "
            f"{', '.join(_VARIABLES)}: start with torchrun, or unset them to run one process"
        )


def _size(environment: Mapping[str, str]) -> int:
    size = _integer(environment, "WORLD_SIZE")
    if size < 1:
        raise GroupError(f"WORLD_SIZE={size} must be at least 1; unset it to run one process")
    if size > MAX_SIZE:
        raise GroupError(
            f"WORLD_SIZE={size} is more than {MAX_SIZE}, the most ranks of one model; "
            f"start torchrun with --nproc-per-node {MAX_SIZE}"
        )
    return size


def _index(environment: Mapping[str, str], name: str, size: int) -> int:
    index = _integer(environment, name)
    if not 0 <= index < size:
        raise GroupError(f"{name}={index} must be in 0..{size - 1} where WORLD_SIZE={size}; let torchrun set it")
    return index


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise GroupError(f"{name}={environment[name]!r} must be an integer; let torchrun set it") from None

"""Weights that are cut already: a folder for each rank, which it reads from beginning to end, and nothing else.

    MODEL/shards.json                            for how many ranks, and which run wrote it
    MODEL/config.json, tokenizer.json, ...       as in the source
    MODEL/rank-03-of-08/shards.json              the same as above, and which rank's; so do the files' metadata
    MODEL/rank-03-of-08/model-00012.safetensors  the pieces of layer 12; the last file holds what belongs to no layer

The one idea: names and formats stay the published ones, only the shapes are a rank's, so that one loader reads both
kinds. FP8 codes stay codes: a piece comes with the scales of every block that it touches. What can differ between
numbers of slices (see shards.py) is not in the files: a rank's slices lie side by side in its piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from minieagle.dist.shard import part_of
from minieagle.models.config import TargetConfig, check_fields, read_json
from minieagle.models.fp8 import SCALE, touched
from minieagle.models.headers import CheckpointError, Stored
from minieagle.models.shards import Shards, dealt_experts
from minieagle.models.target_names import is_expert, of_other_experts

FILE = "shards.json"


@dataclass(frozen=True)
class Made:
    """What shards.json says. run: a random text, so that folders of two runs can't be mixed."""

    num_ranks: int
    expert_parallel: bool
    run: str


def folder(rank: int, num_ranks: int) -> str:
    return f"rank-{rank:02d}-of-{num_ranks:02d}"


def weight_directory(directory: Path, shards: Shards) -> tuple[Path, dict[str, str] | None]:
    """Where this rank's tensors lie and, where they are cut already, what their files must say of themselves. Raises
    CheckpointError when they were cut for other ranks or in another way, or by another run than the rest."""
    if not (directory / FILE).exists():
        return directory, None
    made, ranks = _made(read_json(directory / FILE)), shards.ranks
    if (made.num_ranks, made.expert_parallel) != (ranks.size, shards.expert_parallel):
        raise CheckpointError(
            f"{directory} is cut for {_said(made.num_ranks, made.expert_parallel)}, this is "
            f"{_said(ranks.size, shards.expert_parallel)}: start it that way, or pass the model it was cut from"
        )
    mine = directory / folder(ranks.rank, ranks.size)
    if not (mine / FILE).is_file():
        raise CheckpointError(f"{mine / FILE} is missing: copy that rank's folder to this host, or cut the model anew")
    content = dict(read_json(mine / FILE))
    rank = content.pop("rank", None)
    if _made(content) != made:
        raise CheckpointError(f"{mine} and {directory} were written by two runs: cut the model anew")
    if rank != ranks.rank:
        raise CheckpointError(f"{mine} holds the pieces of rank {rank}: put rank {ranks.rank}'s there, or cut it anew")
    return mine, metadata_of(made, ranks.rank)


def metadata_of(made: Made, rank: int) -> dict[str, str]:
    """What every file of a rank says of itself."""
    return {"format": "pt", "rank": str(rank), "run": made.run}


def _said(num_ranks: int, expert_parallel: bool) -> str:
    return f"{num_ranks} rank{'s' * (num_ranks > 1)}" + (" with expert_parallel" if expert_parallel else "")


def _made(content: Mapping[str, Any]) -> Made:
    """Raises ConfigError or CheckpointError for what `minieagle shard` doesn't write."""
    try:
        made = Made(**content)
    except TypeError:
        raise CheckpointError(f"{FILE} has {sorted(content)}, not {sorted(Made.__annotations__)}") from None
    check_fields(made)
    return made


def names_of(made: Made, rank: int, names: Iterable[str], config: TargetConfig) -> list[str]:
    """Those of the names that a rank holds all or a piece of."""
    count, size = config.n_routed_experts, made.num_ranks
    held = dealt_experts(count, rank, size) if made.expert_parallel else range(count)
    foreign = of_other_experts(held, count)
    return [name for name in names if not foreign(name)]


def piece_of(made: Made, rank: int, name: str, tensor: Tensor, stored: Mapping[str, Stored], block: Any) -> Tensor:
    """What a rank that holds any of a published tensor holds of it, a view. block: rows and columns that share an FP8
    scale. Raises ShardError where the parts wouldn't be equal."""
    if made.expert_parallel and is_expert(name):
        return tensor
    weight = name.removesuffix(SCALE)
    part = part_of(weight, stored[weight].shape, rank=rank, size=made.num_ranks)
    if part is None:
        return tensor
    return tensor.narrow(*part) if weight == name else touched(tensor, block, *part)

"""`minieagle shard SRC DST --tp N`: a target's weights cut for N ranks, a folder each (see models/rank_files.py).

Worth it where a model is loaded more than once: a rank then reads its own bytes only, in order, instead of a piece of
every row of all files. The source is read once, layer by layer, and memory holds one layer's pages. What the engine
leaves in the files (vision, prediction layers, an indexer) is left out; packed and FP8 weights stay as they are, so
that the same bits are loaded.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from minieagle.directory import new_directory, write_companions
from minieagle.dist.group import MAX_SIZE
from minieagle.dist.shard import ShardError, Unit, check_divides, rank_bytes
from minieagle.errors import ModelError
from minieagle.models.checkpoint import Checkpoint, CheckpointError, Progress
from minieagle.models.config import TargetConfig, read_json
from minieagle.models.rank_files import FILE, Made, folder, metadata_of, names_of, piece_of
from minieagle.models.target_names import by_layer, is_expert
from minieagle.models.target_weights import give_back_memory, open_target
from minieagle.models.tensor_file import write_tensors
from minieagle.models.weight_groups import group, weight_faults
from minieagle.source import reading
from minieagle.survey import target_units

SPARE_BYTES = 100_000_000
"""For headers, tokenizer, and what else writes to the disk meanwhile."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `shard`."""
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="a target's directory, in any published format")
    add("destination", type=Path, metavar="DST", help="a new directory")
    add("--tp", type=int, required=True, metavar="N", help=f"ranks that will load it, 1 to {MAX_SIZE}")
    add("--expert-parallel", action="store_true", help="whole experts for each rank, for --expert-parallel engines")


def run(options: argparse.Namespace) -> int:
    """Cut, and say how to load; raises ValueError subclasses for what can't be done."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with reading("cutting", console) as progress:
        shard_directory(
            options.source,
            options.destination,
            options.tp,
            expert_parallel=options.expert_parallel,
            progress=progress,
        )
    flag = " --expert-parallel" if options.expert_parallel else ""
    console.print(f"{options.destination} is for {options.tp} ranks: torchrun --nproc-per-node {options.tp} ...{flag}")
    return 0


def shard_directory(
    source: Path, target: Path, num_ranks: int, *, expert_parallel: bool = False, progress: Progress | None = None
) -> None:
    """Cut a target for num_ranks. The result appears when it is whole. Refuses a source that load_target would refuse,
    is cut already, or doesn't divide; a target that isn't new, lies in the source, or for which there is no room."""
    if not 1 <= num_ranks <= MAX_SIZE:
        raise ShardError(f"tp={num_ranks} must be in 1..{MAX_SIZE}, the number of ranks of one model")
    if (source / FILE).exists():
        raise CheckpointError(f"{source} is cut already ({FILE}): pass the model that it was cut from")
    config, fill = open_target(source)
    made = Made(num_ranks, expert_parallel, secrets.token_hex(8))
    _check(fill.checkpoint, config, made)
    with new_directory(source, target) as partial:
        _check_room(fill.checkpoint, made, partial)
        (partial / FILE).write_text(json.dumps(asdict(made)))
        for rank in range(num_ranks):
            (place := partial / folder(rank, num_ranks)).mkdir()
            (place / FILE).write_text(json.dumps(asdict(made) | {"rank": rank}))
        _cut(fill.checkpoint, config, made, partial, progress)
        write_companions(source, partial, read_json(source / "config.json"))


def _check(checkpoint: Checkpoint, config: TargetConfig, made: Made) -> None:
    groups = group({name: checkpoint.stored[name] for name in checkpoint.left})
    if faults := weight_faults(groups, config):
        raise CheckpointError(f"{checkpoint.directory}: {faults[0]}")
    dealt = target_units(groups, config)
    if made.expert_parallel:
        dealt = dealt | {"expert": Unit("routed experts", config.n_routed_experts)}
    check_divides(dealt, made.num_ranks)


def _check_room(checkpoint: Checkpoint, made: Made, place: Path) -> None:
    """Refuses before hours of writing what the disk can't hold."""
    size, needed = made.num_ranks, SPARE_BYTES
    for name in checkpoint.left:
        nbytes = checkpoint.stored[name].nbytes
        needed += nbytes if made.expert_parallel and is_expert(name) else size * rank_bytes(name, nbytes, size)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ModelError(
            f"{place.parent} has {free / 1e9:.1f} GB free, the ranks' files take {needed / 1e9:.1f} GB: make room, or "
            "write to another disk"
        )


def _cut(checkpoint: Checkpoint, config: TargetConfig, made: Made, target: Path, progress: Progress | None) -> None:
    """One file a layer and rank, the last one for what belongs to no layer. A layer is read once for all ranks."""
    layers, others = by_layer(checkpoint.left, config.num_hidden_layers)
    for index, names in enumerate((*layers, others)):
        _cut_layer(checkpoint, sorted(names), config, made, target, f"model-{index:05d}.safetensors")
        checkpoint.release()
        checkpoint.report(progress)
    checkpoint.finish()


def _cut_layer(
    checkpoint: Checkpoint, names: Sequence[str], config: TargetConfig, made: Made, target: Path, file: str
) -> None:
    tensors, stored, block = {name: checkpoint.take(name) for name in names}, checkpoint.stored, config.fp8_block
    for rank in range(made.num_ranks):
        held = names_of(made, rank, names, config)
        pieces = {name: piece_of(made, rank, name, tensors[name], stored, block).contiguous() for name in held}
        write_tensors(target / folder(rank, made.num_ranks) / file, pieces, metadata_of(made, rank))
        del pieces
        give_back_memory()

"""`minieagle inspect DIR`: what a model directory holds and what running it takes, without loading a weight.

The one idea: headers and config.json say it all. Tensors are grouped by name, the routed experts of a layer in one
group, and every figure is a sum over groups: parameters, bytes, what one token reads, what a rank of a tensor-parallel
group holds. What would keep the model from loading is listed as a fault, and the exit status is 1.

Bytes are those of the files, as Kimi-K2.5's figures are usually given, with one exception: FP8 weights are dequantised
when they are loaded, so a rank holds them in the config's dtype.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minieagle.dist.shard import (
    Collectives,
    ShardError,
    Unit,
    check_divides,
    collectives,
    cut_of,
    module_of,
    part_of,
    rank_bytes,
    units,
)
from minieagle.errors import ModelError
from minieagle.models.config import TargetConfig, read_json, target_config
from minieagle.models.drafter_names import drafter_shapes
from minieagle.models.fp8 import SCALE
from minieagle.models.headers import Stored, read_headers
from minieagle.models.rank_files import FILE
from minieagle.models.weight_groups import Group, group, loaded, weight_faults
from minieagle.spec.formats import OWN, recognise, refuse_strangers
from minieagle.spec.wiring import read_wiring
from minieagle.tokenizer import Tokenizer

TP_SIZES = (1, 2, 4, 8)

# Part of the model by the module's name; the first prefix that fits counts.
_PARTS = (
    ("embed_tokens", "embedding"),
    ("self_attn.", "attention"),
    ("mlp.experts.", "routed experts"),
    ("mlp.shared_experts.", "shared experts"),
    ("mlp.gate_proj", "dense feed-forward"),
    ("mlp.up_proj", "dense feed-forward"),
    ("mlp.down_proj", "dense feed-forward"),
    ("mlp.gate", "router"),
    ("lm_head", "output head"),
    ("", "norms"),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the model: parameters, bytes in the files, and bytes that one token reads (batch 1)."""

    name: str
    num_parameters: int
    nbytes: int
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Tensors that are not loaded, and why."""

    reason: str
    num_tensors: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The model on tp ranks: bytes of weights that each holds, bytes that each reads for a token (batch 1), and what
    they exchange per forward. fault: why it can't be cut so, then the figures are 0."""

    tp: int
    rank_bytes: int = 0
    rank_read_bytes: int = 0
    collectives: Collectives = field(default_factory=lambda: Collectives(0, 0))
    fault: str | None = None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What inspect says of a target. kv_bytes_per_token: latent cache of all layers, the same on every rank."""

    directory: str
    architecture: str
    num_layers: int
    num_parameters: int
    num_active_parameters: int
    nbytes: int
    read_bytes_per_token: int
    kv_bytes_per_token: int
    quantization: str
    context: str
    tokenizer: str
    chat_template: str
    stop_tokens: tuple[str, ...]
    parts: tuple[Part, ...]
    left_out: tuple[LeftOut, ...]
    plans: tuple[Plan, ...]
    faults: tuple[str, ...]


def survey(directory: Path, stored: Mapping[str, Stored], *, tp_sizes: Sequence[int] = TP_SIZES) -> Survey:
    """Look at a target's directory, which holds the tensors `stored`. Raises ConfigError where config.json can't be
    used, and CheckpointError where the weights are another model's; what they lack is among the faults."""
    raw = read_json(directory / "config.json")
    config = target_config(raw)
    groups, left_out = loaded(group(stored), config)
    parts = tuple(_parts(groups, config))
    tokens, token_faults = _tokens(directory)
    return Survey(
        directory=str(directory),
        architecture=_architecture(raw),
        num_layers=config.num_hidden_layers,
        num_parameters=sum(part.num_parameters for part in parts),
        num_active_parameters=_active(groups, config),
        nbytes=sum(part.nbytes for part in parts),
        read_bytes_per_token=sum(part.read_bytes for part in parts),
        kv_bytes_per_token=config.latent_width * config.num_hidden_layers * _dtype(config).itemsize,
        quantization=_quantization(groups, config),
        context=_context(config),
        parts=parts,
        left_out=tuple(
            LeftOut(reason=reason, num_tensors=sum(g.num for g in gs), nbytes=sum(g.nbytes for g in gs))
            for reason, gs in left_out.items()
        ),
        plans=tuple(_plan(groups, config, tp) for tp in tp_sizes),
        faults=(*weight_faults(groups, config), *token_faults),
        **tokens,
    )


def _dtype(config: TargetConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _part(found: Group) -> str:
    module = module_of(found.name)
    return next(part for prefix, part in _PARTS if module.startswith(prefix))


def _share_read(found: Group, config: TargetConfig) -> float:
    """The share of a group's numbers that one token reads: the experts that it is routed to, one row of the embedding,
    all of everything else."""
    if _part(found) == "routed experts":
        return config.num_experts_per_tok / config.n_routed_experts
    if _part(found) == "embedding" and not config.tie_word_embeddings:
        return 1 / config.vocab_size
    return 1.0


def _active(groups: Iterable[Group], config: TargetConfig) -> int:
    """Parameters that take part in one token's products."""
    looked_up = "" if config.tie_word_embeddings else "embedding"
    return round(sum(g.num_parameters * _share_read(g, config) for g in groups if _part(g) != looked_up))


def _parts(groups: Iterable[Group], config: TargetConfig) -> Iterable[Part]:
    members: dict[str, list[Group]] = {part: [] for _, part in _PARTS}
    for found in groups:
        members[_part(found)].append(found)
    for name, inside in members.items():
        if inside:
            yield Part(
                name=name,
                num_parameters=sum(g.num_parameters for g in inside),
                nbytes=sum(g.nbytes for g in inside),
                read_bytes=round(sum(g.nbytes * _share_read(g, config) for g in inside)),
            )


# ---- what is said in words


def shown(value: Any) -> str:
    """A value out of a file, harmless on a terminal and not endless."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or ["(unnamed)"]
    return f"{shown(named[0])} ({shown(raw.get('model_type', 'no model_type'))})"


def _quantization(groups: Iterable[Group], config: TargetConfig) -> str:
    if any(found.name.endswith("_packed") for found in groups):
        return f"INT4 routed experts in groups of {_group_size(groups, config)}, the rest {config.dtype}"
    if any(found.dtype == torch.float8_e4m3fn for found in groups):
        return f"FP8 in blocks of {config.fp8_block}, dequantised to {config.dtype} when loaded"
    return f"none ({config.dtype})"


def _group_size(groups: Iterable[Group], config: TargetConfig) -> int | None:
    """Columns that share an INT4 scale: as stated, else as the shapes of the scales say; None without INT4."""
    scaled = [g.shape[-1] for g in groups if g.name.endswith("experts.gate_proj.weight_scale") and g.shape]
    return config.group_size or (config.hidden_size // scaled[0] if scaled and scaled[0] else None)


def _context(config: TargetConfig) -> str:
    if config.yarn is None:
        return f"{config.max_position_embeddings} tokens"
    trained = config.yarn.original_max_position_embeddings
    return f"{config.max_position_embeddings} tokens (YaRN, {config.yarn.factor:g} times {trained})"


def _tokens(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """What a survey says of the tokenizer, and its faults."""
    try:
        tokenizer = Tokenizer(directory)
    except ValueError as error:
        return {"tokenizer": "unusable", "chat_template": "unknown", "stop_tokens": ()}, [str(error)]
    family = f", family {tokenizer.family}" if tokenizer.family else ""
    said = {
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size} ids{family}",
        "chat_template": _template(directory, tokenizer),
        "stop_tokens": tuple(f"{token} {shown(tokenizer.token_name(token))}" for token in tokenizer.stop_ids),
    }
    return said, []


def _template(directory: Path, tokenizer: Tokenizer) -> str:
    if (directory / "chat_template.jinja").exists():
        return "chat_template.jinja"
    settings = directory / "tokenizer_config.json"
    if settings.exists() and read_json(settings).get("chat_template"):
        return "tokenizer_config.json"
    return f"none of its own: {tokenizer.family}'s" if tokenizer.family else "none: plain prompts only"


# ---- tensor parallelism


def target_units(groups: Iterable[Group], config: TargetConfig) -> dict[str, Unit]:
    """What is dealt out to ranks (see dist/shard.py)."""
    moe = config.moe_intermediate_size
    return units(
        vocab_size=config.vocab_size,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size if config.first_k_dense_replace else 0,
        shared_intermediate_size=config.n_shared_experts * moe,
        moe_intermediate_size=moe,
        group_size=_group_size(groups, config),
    )


def _plan(groups: Sequence[Group], config: TargetConfig, tp: int) -> Plan:
    try:
        check_divides(target_units(groups, config), tp)
        held = [rank_bytes(g.name, g.loaded_bytes(_dtype(config)), tp) for g in groups]
    except ShardError as error:
        return Plan(tp=tp, fault=str(error))
    return Plan(
        tp=tp,
        rank_bytes=sum(held),
        rank_read_bytes=round(sum(size * _share_read(g, config) for g, size in zip(groups, held, strict=True))),
        collectives=collectives(config.num_hidden_layers, tp),
    )


CutRow = tuple[str, str, str, str, int]


def cut_table(directory: Path, stored: Mapping[str, Stored], tp: int) -> list[CutRow]:
    """Each kind of stored tensor on one of tp ranks: name without numbers, how it is cut, its shape in the file and on
    a rank, and the bytes of all such tensors on a rank. Raises ShardError where tp doesn't divide the model."""
    config = target_config(read_json(directory / "config.json"))
    groups, _ = loaded(group(stored), config)
    check_divides(target_units(groups, config), tp)
    rows: dict[tuple[str, tuple[int, ...]], list[Group]] = {}
    for found in groups:
        name = f"{module_of(found.name)}.{found.name.rpartition('.')[2]}"
        rows.setdefault((name, found.shape), []).append(found)
    return [_cut_row(name, shape, inside, tp) for (name, shape), inside in rows.items()]


def _cut_row(name: str, shape: tuple[int, ...], inside: Sequence[Group], tp: int) -> CutRow:
    cut, mine = cut_of(name), list(shape)
    if cut.axis is not None and name.endswith(SCALE):
        mine[cut.axis] = -(-shape[cut.axis] // tp)  # of every block that the rank has a piece of
    elif (part := part_of(name, shape, rank=0, size=tp)) is not None:
        mine[part[0]] = part[2]
    how = "whole" if cut.axis is None else f"{('rows', 'columns')[cut.axis]} by {cut.unit}"
    return name, how, str(list(shape)), str(mine), sum(rank_bytes(g.name, g.nbytes, tp) for g in inside)


# ---- drafters


def is_drafter(stored: Iterable[str]) -> bool:
    """Whether tensors of these names are a drafter's: no target has an `fc`, which fuses the target's states."""
    return any(name == "fc.weight" or name.endswith(".fc.weight") for name in stored)


def survey_drafter(directory: Path, stored: Mapping[str, Stored], target: Path | None = None) -> dict[str, Any]:
    """What a drafter's directory says: its format and shapes, and with its target's directory the whole wiring. Raises
    ConfigError or CheckpointError for what is no EAGLE-3 drafter, and what read_wiring raises."""
    raw = read_json(directory / "config.json")
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    refuse_strangers(raw, shapes)
    found: dict[str, Any] = {
        "directory": str(directory),
        "format": "minieagle" if raw.get("model_type") == OWN else recognise(raw).name,
        "nbytes": sum(tensor.nbytes for tensor in stored.values()),
        "shapes": asdict(drafter_shapes(shapes)),
    }
    if target is not None:
        wiring = read_wiring(directory, target_config(read_json(target / "config.json")))
        found |= {"wiring": wiring.config.to_json(), "sources": dict(wiring.sources), "notes": list(wiring.notes)}
    return found


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of a target or a drafter")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--tp", type=int, metavar="N", help="show how each tensor is cut over N ranks")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of a drafter: its target, to read the whole wiring")


def run(options: argparse.Namespace) -> int:
    """Print what a directory holds; returns 1 where the model couldn't be loaded."""
    console = Console() if sys.stdout.isatty() else Console(width=140, no_color=True, highlight=False)
    if (options.directory / FILE).exists():
        raise ModelError(f"{options.directory} is cut for ranks ({FILE}): inspect the model that it was cut from")
    stored, unlisted = read_headers(options.directory)
    if is_drafter(stored):
        if options.tp is not None:
            raise ModelError(f"--tp {options.tp} shows the cuts of a target, and {options.directory} holds a drafter")
        found = survey_drafter(options.directory, stored, options.model)
        _print(options.json, found, lambda: _drafter_tables(console, found))
        return 0
    if options.model is not None:
        raise ModelError(f"--model {options.model} goes with a drafter, and {options.directory} holds a target")
    tp: int | None = options.tp
    cuts = [] if tp is None else cut_table(options.directory, stored, tp)
    sizes = sorted({*TP_SIZES, tp or 1})
    seen = survey(options.directory, stored, tp_sizes=sizes)
    content = asdict(seen) | {"unlisted_files": list(unlisted), "cuts": cuts}
    _print(options.json, content, lambda: _target_tables(console, seen, unlisted, cuts))
    return 1 if seen.faults else 0


def _print(as_json: bool, content: Mapping[str, Any], tables: Callable[[], None]) -> None:
    if as_json:
        print(json.dumps(content, indent=1))
    else:
        tables()


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:.2f} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 10**9 else f"{number / 1e6:.1f} M"


_WORDS = ("", "value", "from", "cut")  # columns that hold no figures


def _table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=escape(title), title_justify="left", show_edge=False)
    for index, column in enumerate(columns):
        left = index == 0 or column in _WORDS
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    console.print()


def _target_tables(console: Console, seen: Survey, unlisted: Sequence[str], cuts: Sequence[CutRow]) -> None:
    facts = [
        ("architecture", f"{seen.architecture}, {seen.num_layers} layers"),
        ("parameters", f"{_count(seen.num_parameters)}, {_count(seen.num_active_parameters)} active per token"),
        ("weights", _gb(seen.nbytes)),
        ("read per token (batch 1)", _gb(seen.read_bytes_per_token)),
        ("cache per token and rank", f"{seen.kv_bytes_per_token} bytes"),
        ("quantisation", seen.quantization),
        ("context", seen.context),
        ("tokenizer", seen.tokenizer),
        ("chat template", seen.chat_template),
        ("stop tokens", ", ".join(seen.stop_tokens) or "none"),
    ]
    _table(console, seen.directory, ("", "value"), facts)
    _table(console, "Parts", ("part", "parameters", "bytes", "read per token"), map(_part_row, seen.parts))
    _table(
        console,
        "Tensor parallel",
        ("ranks", "weights per rank", "read per token and rank", "all-reduces", "gathers"),
        map(_plan_row, seen.plans),
    )
    for plan in seen.plans:
        if plan.fault is not None:
            console.print(f"{plan.tp} ranks: {plan.fault}", markup=False, soft_wrap=True)
    if cuts:
        rows = [(*row[:4], _gb(row[4])) for row in cuts]
        _table(console, "Cuts", ("tensor", "cut", "shape", "per rank", "all of them, per rank"), rows)
    left_out = [(found.reason, str(found.num_tensors), _gb(found.nbytes)) for found in seen.left_out]
    left_out += [(f"file not listed in the index: {shown(name)}", "", "") for name in unlisted]
    if left_out:
        _table(console, "Left out", ("what", "tensors", "bytes"), left_out)
    for fault in seen.faults:
        console.print(f"can't be loaded: {fault}", markup=False, soft_wrap=True)


def _part_row(part: Part) -> tuple[str, ...]:
    return part.name, _count(part.num_parameters), _gb(part.nbytes), _gb(part.read_bytes)


def _plan_row(plan: Plan) -> tuple[str, ...]:
    if plan.fault is not None:
        return str(plan.tp), "-", "-", "-", "-"
    exchanged = plan.collectives
    return (
        str(plan.tp),
        _gb(plan.rank_bytes),
        _gb(plan.rank_read_bytes),
        str(exchanged.num_all_reduces),
        str(exchanged.num_gathers),
    )


def _drafter_tables(console: Console, found: Mapping[str, Any]) -> None:
    facts = [("format", found["format"]), ("weights", _gb(found["nbytes"]))]
    shapes = [(name, shown(value)) for name, value in found["shapes"].items() if value is not None]
    _table(console, found["directory"], ("", "value"), facts + shapes)
    if "wiring" not in found:
        console.print("which target states it reads: pass --model DIR, its target", markup=False)
        return
    rows = [(name, shown(value), found["sources"].get(name, "")) for name, value in found["wiring"].items()]
    _table(console, "Wiring", ("field", "value", "from"), rows)
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)

"""The wiring contract: one frozen description of how a drafter is connected to its target, and how it is known.

The one idea: a wrong wiring never fails, it only makes speculation slow, so the wiring is an object that is read once,
checked, and says of every field where it comes from. `wiring.json` beside the weights states it, with fingerprints of
what it is true for and golden vectors that prove it (golden.py). Where there is none, it is derived from the published
config and the tensors by the tables of formats.py and boundary.py, or refused.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from minieagle.models.config import ConfigError, TargetConfig, read_json
from minieagle.models.deepseek import Target
from minieagle.models.drafter_config import DrafterConfig, drafter_config
from minieagle.models.drafter_names import DrafterShapes, drafter_shapes
from minieagle.models.drafter_weights import DrafterCheckpoint, check_fits, check_tensors, load_drafter
from minieagle.models.eagle3 import Drafter
from minieagle.models.headers import CheckpointError, read_headers
from minieagle.spec.boundary import BoundaryError, Capture, Convention, parse_capture
from minieagle.spec.fingerprint import changes, target_fingerprint, weights_fingerprint
from minieagle.spec.formats import OWN, Description, Format, NormOutput, agreed, describe, recognise, refuse_strangers
from minieagle.spec.golden import Golden

FILE = "wiring.json"
VERSION = 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How a drafter is wired, and for what that is true.

    config: its sizes, boundaries and flags. d2t: what that table holds, "offset" from the draft id or "absolute"
    target ids. position_base: the position that training gave the first row (rotations see differences only). target,
    tokenizer, weights: fingerprints (fingerprint.py), the tokenizer's None where unknown. golden: its proof. format:
    whose config it was read from. sources: where each field comes from. notes: what a user should know of it.
    """

    config: DrafterConfig
    target: Mapping[str, Any]
    weights: str
    tokenizer: str | None = None
    d2t: str = "offset"
    position_base: int = 0
    golden: Golden | None = None
    format: str = "minieagle"
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


def read_wiring(
    directory: Path,
    target: TargetConfig,
    *,
    convention: Convention | None = None,
    boundaries: Sequence[int] | None = None,
    norm_output: NormOutput | None = None,
) -> Wiring:
    """The wiring of the drafter in a directory, for a target of this config; no weights are loaded.

    convention, boundaries, norm_output: what the user says of it, where the files don't. A present wiring.json is
    the contract and wins over config.json. Raises ConfigError, BoundaryError or CheckpointError for files that are
    damaged, contradict themselves or each other, are stale, belong to another target, or hold no EAGLE-3 drafter, and
    for a capture that can't be established.
    """
    if (directory / FILE).exists():
        wiring = _stated(directory, target, convention, boundaries)
        _compare(directory, target, wiring)
    else:
        wiring = derive_wiring(directory, target, convention=convention, boundaries=boundaries, norm_output=norm_output)
    check_fits(wiring.config, target)
    for note in wiring.notes:
        _log.warning("%s: %s", directory, note)
    return wiring


def open_drafter(
    directory: Path,
    target: Target,
    *,
    convention: Convention | None = None,
    boundaries: Sequence[int] | None = None,
    norm_output: NormOutput | None = None,
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
) -> tuple[Drafter, Wiring]:
    """Read the wiring of a drafter directory and load the drafter by it, in the target's type unless dtype says else.
    Raises what read_wiring and load_drafter raise."""
    wiring = read_wiring(
        directory, target.config, convention=convention, boundaries=boundaries, norm_output=norm_output
    )
    return load_wired(directory, target, wiring, dtype=dtype, max_positions=max_positions), wiring


def load_wired(
    directory: Path,
    target: Target,
    wiring: Wiring,
    *,
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
) -> Drafter:
    """Load the drafter of a directory by the wiring that was read of it. As open_drafter, for who reads the wiring
    before the target is loaded."""
    return load_drafter(
        directory,
        target,
        config=wiring.config,
        dtype=dtype or target.dtype,
        max_positions=max_positions,
        d2t=wiring.d2t,
    )


def make_wiring(
    directory: Path,
    config: DrafterConfig,
    target: TargetConfig,
    *,
    golden: Golden | None = None,
    tokenizer: str | None = None,
    d2t: str = "offset",
    position_base: int = 0,
    source: str = "training",
) -> Wiring:
    """The wiring of the drafter whose weights lie in a directory, as `source` knows it."""
    return Wiring(
        config=config,
        target=target_fingerprint(target),
        weights=weights_fingerprint(directory),
        tokenizer=tokenizer,
        d2t=d2t,
        position_base=position_base,
        golden=golden,
        sources=dict.fromkeys(config.__dataclass_fields__, source),
    )


def write_wiring(directory: Path, wiring: Wiring) -> None:
    """State the wiring beside the weights, replaced atomically."""
    content = {
        "version": VERSION,
        "config": wiring.config.to_json(),
        "d2t": wiring.d2t,
        "position_base": wiring.position_base,
        "target": dict(wiring.target),
        "tokenizer": wiring.tokenizer,
        "weights": wiring.weights,
        "golden": wiring.golden.to_json() if wiring.golden else None,
        "format": wiring.format,
        "sources": dict(wiring.sources),
    }
    new = directory / f".{FILE}.new"
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(new, directory / FILE)


def check_tokenizer(wiring: Wiring, tokenizer: str | None) -> None:
    """Raises ConfigError when the drafter was wired for another vocabulary than the target's (tokenizer_fingerprint);
    nothing when either is unknown."""
    if wiring.tokenizer and tokenizer and wiring.tokenizer != tokenizer:
        raise ConfigError(
            "the drafter was trained with another tokenizer than the target has: their vocabularies differ, so its "
            "tokens mean other texts; take the target it was trained for"
        )


def _stated(
    directory: Path, target: TargetConfig, convention: Convention | None, boundaries: Sequence[int] | None
) -> Wiring:
    content = read_json(directory / FILE)
    _check_sizes(content.get("config"), directory, f"{directory / FILE} says")
    wiring = _parse(content, directory / FILE)
    stated = list(wiring.config.boundaries)
    if convention is not None or (boundaries is not None and list(boundaries) != stated):
        said = f"convention={convention!r}" if convention is not None else f"boundaries={list(boundaries or ())}"
        raise BoundaryError(f"{directory / FILE} states boundaries {stated}: drop {said}, or remove that file")
    stale = changes(wiring.target, target_fingerprint(target))
    if stale:
        raise ConfigError(
            f"{directory / FILE} was written for another target: {'; '.join(stale)}; take the target it was written "
            "for, or remove that file to derive the wiring anew"
        )
    try:
        check_tensors(wiring.config, DrafterCheckpoint(directory))
    except CheckpointError as error:  # which says more than that they changed
        raise ConfigError(f"{directory / FILE} doesn't go with the weights: {error}") from None
    if weights_fingerprint(directory) != wiring.weights:
        raise ConfigError(
            f"{directory / FILE} is stale: the drafter's weights changed since it was written; restore them, or "
            "remove that file, or let `minieagle doctor --fix` write it anew"
        )
    return wiring


def _compare(directory: Path, target: TargetConfig, wiring: Wiring) -> None:
    """Warn where config.json, which users edit and other engines read, says something else than the contract."""
    try:
        found = _by_config(directory, target, wiring)
    except ValueError as error:
        _log.warning("%s: %s states the wiring and is used; config.json can't be read: %s", directory, FILE, error)
        return
    ours, theirs = asdict(wiring.config), asdict(found.config)
    differ = [f"{name}={theirs[name]!r}, {FILE} {ours[name]!r}" for name in ours if ours[name] != theirs[name]]
    if found.sources["boundaries"] == "the user":
        differ += found.notes  # neither meaning of the ids is what is stated
    if differ:
        remedy = f"mend config.json, or remove {FILE} to go by it"
        _log.warning("%s: config.json says %s; %s is used: %s", directory, "; ".join(differ), FILE, remedy)


def _by_config(directory: Path, target: TargetConfig, wiring: Wiring) -> Wiring:
    """What config.json says; what it leaves open is as stated."""
    norm_output: NormOutput = "feedback" if wiring.config.norm_output else "head"
    try:
        return derive_wiring(directory, target, norm_output=norm_output)
    except BoundaryError:
        return derive_wiring(directory, target, norm_output=norm_output, boundaries=wiring.config.boundaries)


# Sizes of DrafterConfig that are the rows of one tensor.
_ROWS = {"hidden_size": "fc.weight", "intermediate_size": "midlayer.mlp.gate_proj.weight"}


def _check_sizes(said: Any, directory: Path, who: str) -> DrafterShapes:
    """What the tensors' shapes say. Raises ConfigError where a config says other sizes, before one is judged by
    them."""
    stored, _ = read_headers(directory)
    shapes = drafter_shapes({name: tensor.shape for name, tensor in stored.items()})
    for name, witness in _ROWS.items():
        if isinstance(said, Mapping) and name in said:
            agreed(name, {who: cast(Any, said)[name], f"the rows of {witness}": getattr(shapes, name)})
    return shapes


def _parse(content: Mapping[str, Any], path: Path) -> Wiring:
    if content.get("version") != VERSION:
        raise ConfigError(f"{path} has version {content.get('version')!r}; this minieagle reads version {VERSION}")
    unknown = sorted(set(content) - {*Wiring.__dataclass_fields__, "version"})
    if unknown:
        raise ConfigError(f"{path} has a field {unknown[0]!r} that is not known: write it anew, or remove the field")
    try:
        return Wiring(
            config=drafter_config(content["config"]),
            target=dict(content["target"]),
            weights=str(content["weights"]),
            tokenizer=None if content["tokenizer"] is None else str(content["tokenizer"]),
            d2t=str(content["d2t"]),
            position_base=int(content["position_base"]),
            golden=Golden.from_json(content["golden"]) if content["golden"] is not None else None,
            format=str(content["format"]),
            sources={str(name): str(source) for name, source in dict(content["sources"]).items()},
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}): write it anew or remove it") from None


def derive_wiring(
    directory: Path,
    target: TargetConfig,
    *,
    convention: Convention | None = None,
    boundaries: Sequence[int] | None = None,
    norm_output: NormOutput | None = None,
    kind: Format | None = None,
) -> Wiring:
    """What config.json and the tensors say, whatever wiring.json does. norm_output: what that field means where the
    format doesn't say. kind: whose meanings the fields have, None for those of the format that the config is recognised
    as. Raises as read_wiring does."""
    raw = read_json(directory / "config.json")
    stored, _ = read_headers(directory)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    own = raw.get("model_type") == OWN
    if not own:
        refuse_strangers(raw, shapes)
    read = _check_sizes(raw if own else None, directory, "config.json says")
    kind = kind if own or kind is not None else recognise(raw)
    if kind is not None and kind.norm_output is None:
        kind = replace(kind, norm_output=norm_output)
    described = None if kind is None else describe(raw, read, target, kind)
    capture = parse_capture(
        raw,
        target.num_hidden_layers,
        read.taps(target.hidden_size),
        convention=convention,
        boundaries=boundaries,
        stated=_ids_meaning(described),
    )
    wiring = _own(raw, capture) if described is None else _foreign(described, capture)
    return replace(wiring, target=target_fingerprint(target), weights=weights_fingerprint(directory))


def _ids_meaning(described: Description | None) -> tuple[Convention, str] | None:
    if described is None or described.format.ids is None:
        return None
    return described.format.ids, f"so {described.format.name} defines them"


def _own(raw: Mapping[str, Any], capture: Capture) -> Wiring:
    config = drafter_config(raw)
    sources = dict.fromkeys(config.__dataclass_fields__, "config.json") | {"boundaries": capture.source}
    return Wiring(config=config, target={}, weights="", sources=sources)


def _foreign(described: Description, capture: Capture) -> Wiring:
    fields = cast("dict[str, Any]", described.fields | {"boundaries": capture.boundaries})
    sources = dict.fromkeys(DrafterConfig.__dataclass_fields__, "default") | described.sources
    return Wiring(
        config=DrafterConfig(**fields),
        target={},
        weights="",
        position_base=described.format.position_base,
        format=described.format.name,
        sources=sources | {"boundaries": capture.source},
        notes=described.notes if capture.note is None else (*described.notes, capture.note),
    )

"""Boundaries: which hidden states a drafter reads, and what other projects mean by a layer id.

The one idea: inside the engine a hidden state has one name, its boundary b in 0..L: the residual stream entering layer
b (b = 0 the embedding's output, b = L the last layer's output before the final norm). Checkpoints name layers by
integers that mean either "output of layer i" (boundary i + 1, -1 for the embedding) or "input of layer i" (boundary
i), and no field says which: SpecForge, TorchSpec and TensorRT-LLM write outputs, vLLM, speculators and llama.cpp
inputs. Both readings of one list usually load and run, one layer apart, and only acceptance suffers. So a list is read
as the user says, as its format defines, or by a rule of RULES, in this order, or it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

Convention = Literal["in", "out"]
Boundaries = tuple[int, ...]

IDS = "eagle_aux_hidden_state_layer_ids"
ASK = "pass --capture-convention in or out, or --boundaries, or let `minieagle doctor` measure it"


class BoundaryError(ValueError):
    """A capture declaration that cannot be honoured: names the field, the value, the bound and the remedy."""


@dataclass(frozen=True)
class Capture:
    """The boundaries of a drafter, and in `source` how they are known. `note` warns of a reading that the list itself
    speaks against."""

    boundaries: Boundaries
    source: str
    note: str | None = None


@dataclass(frozen=True)
class Rule:
    """A list of ids that `holds` is true of is read by `convention`, `because` of what it says. A rule that is no proof
    is a resemblance."""

    convention: Convention
    holds: Callable[[Sequence[int], int], bool]
    because: str
    proof: bool = False


def default_outputs(num_layers: int) -> list[int]:
    """The ids that trainers which mean outputs take when told nothing; the same boundaries as default_inputs."""
    return [i - 1 for i in default_inputs(num_layers)]


def default_inputs(num_layers: int) -> list[int]:
    """The ids that projects which mean inputs take when told nothing: low, middle, high."""
    return [2, num_layers // 2, num_layers - 3]


# How a list that comes with no convention is read. The first two are proofs. The last two are resemblances, and noted:
# no project is known to write the other convention's default on purpose. Anything else is undecidable.
RULES: tuple[Rule, ...] = (
    Rule(
        "in",
        lambda ids, n: min(ids) >= 0 and max(ids) == n,
        "the number of layers is legal as an input only",
        proof=True,
    ),
    Rule("out", lambda ids, n: min(ids) == -1 and max(ids) < n, "-1 is legal as an output only", proof=True),
    Rule(
        "out",
        lambda ids, n: list(ids) == default_outputs(n),  # SpecForge resolve_eagle_capture_layers, TorchSpec
        "it is the default of SpecForge, TorchSpec, Model-Optimizer and TensorRT-LLM, which mean outputs",
    ),
    Rule(
        "in",
        lambda ids, n: list(ids) == default_inputs(n),  # EAGLE modeling_llama_kv.py, vLLM, speculators, llama.cpp
        "it is the default of EAGLE, vLLM, speculators and llama.cpp, which mean inputs",
    ),
)


def from_inputs(ids: Sequence[int], num_layers: int, *, field: str = "input layer ids") -> Boundaries:
    """Boundaries of "input of layer i", i in 0..L, L after the last. BoundaryError unless ascending and in range."""
    return _checked(ids, 0, num_layers, field)


def from_outputs(ids: Sequence[int], num_layers: int, *, field: str = "output layer ids") -> Boundaries:
    """Boundaries of "output of layer i", i in -1..L-1, -1 the embedding. BoundaryError unless ascending, in range."""
    return tuple(i + 1 for i in _checked(ids, -1, num_layers - 1, field))


_READERS = {"in": from_inputs, "out": from_outputs}


def parse_capture(
    config: Mapping[str, object],
    num_layers: int,
    num_taps: int,
    *,
    convention: Convention | None = None,
    boundaries: Sequence[int] | None = None,
    stated: tuple[Convention, str] | None = None,
) -> Capture:
    """The boundaries that a drafter's config.json declares, or that the user names.

    config: the parsed file. num_layers: the target's L. num_taps: how many states the fusion layer reads, its input
    width over H. convention, boundaries: what the user said, one of them or neither. stated: the meaning of ids that
    the file's format defines, and the format's name. A minieagle config states `boundaries` itself; others list ids
    nested in `eagle_config` or at the top level (both are read). Raises BoundaryError when nothing is declared, when
    declarations differ, when the count is not num_taps, when ids are out of range or not ascending, and when only the
    missing convention could tell what the ids mean.
    """
    if convention not in (None, "in", "out"):
        raise BoundaryError(
            f"convention is {convention!r:.40}: say 'in' (input of layer i) or 'out' (output of layer i)"
        )
    if convention is not None and boundaries is not None:
        raise BoundaryError(f"boundaries={list(boundaries)} and convention={convention!r}: pass one of them")
    found = _declared(config)
    if boundaries is not None:
        return _given(boundaries, num_layers, num_taps, found)
    field, ids = _only(found, num_layers)
    _check_count(field, ids, num_taps)
    if field == "boundaries":
        return _own(ids, num_layers, convention)
    means, source, note = _meaning(field, ids, num_layers, convention, stated)
    return Capture(_READERS[means](ids, num_layers, field=field), f"{field} {ids} as {means}puts: {source}", note)


def _given(boundaries: Sequence[int], num_layers: int, num_taps: int, found: Mapping[str, list[int]]) -> Capture:
    """What the user names, unless a minieagle config names others."""
    read = _checked(boundaries, 0, num_layers, "boundaries")
    _check_count("boundaries", read, num_taps)
    own = found.get("boundaries")
    if own is not None and tuple(own) != read:
        raise BoundaryError(
            f"the config states boundaries {own} itself, and {list(read)} were passed: drop one of them"
        )
    known = {tuple(ids) for ids in found.values()} | {tuple(i + 1 for i in ids) for ids in found.values()}
    note = f"the config lists {dict(found)}, which is neither reading of {list(read)}" if found else None
    return Capture(read, "the user", None if read in known else note)


def _own(ids: Sequence[int], num_layers: int, convention: Convention | None) -> Capture:
    if convention is not None:
        raise BoundaryError(f"the config states boundaries {list(ids)} itself: drop convention={convention!r}")
    return Capture(_checked(ids, 0, num_layers, "boundaries", ordered=False), "boundaries in config.json")


def _meaning(
    field: str,
    ids: Sequence[int],
    num_layers: int,
    convention: Convention | None,
    stated: tuple[Convention, str] | None,
) -> tuple[Convention, str, str | None]:
    """What the ids mean, who says so, and a warning when a rule says otherwise."""
    rule = next((rule for rule in RULES if rule.holds(ids, num_layers)), None)
    explicit: tuple[Convention, str] | None = (convention, "the user") if convention is not None else stated
    if explicit is not None:
        against = rule is not None and rule.convention != explicit[0]
        note = f"{field} {list(ids)} is read as {explicit[0]}puts, but {rule.because}" if rule and against else None
        return explicit[0], explicit[1], note
    if rule is not None:
        note = (
            f"{field} {list(ids)} is read as {rule.convention}puts: {rule.because}; --capture-convention overrides it"
        )
        return rule.convention, rule.because, None if rule.proof else note
    if min(ids) < -1 or max(ids) > num_layers or (min(ids) < 0 and max(ids) >= num_layers):
        return "in", "legal as neither", None  # the reader says which id is out of range
    raise BoundaryError(
        f"{field} {list(ids)} of {num_layers} layers can mean outputs of these layers (SpecForge, TorchSpec, "
        f"TensorRT-LLM) or inputs (vLLM, speculators), one layer apart: {ASK}"
    )


def _check_count(field: str, ids: Sequence[int], num_taps: int) -> None:
    if len(ids) != num_taps:
        raise BoundaryError(
            f"{field} {list(ids)} names {len(ids)} states but the drafter's fusion layer reads {num_taps}: "
            "config and weights are of different drafters, or the list is incomplete"
        )


def _declared(config: Mapping[str, object]) -> dict[str, list[int]]:
    """The fields that declare the capture, and their ids."""
    nested = config.get("eagle_config")
    if not isinstance(nested, Mapping | None):
        raise BoundaryError(f"eagle_config is {nested!r:.200}: it must be an object with {IDS} in it, or be absent")
    inner = cast("Mapping[str, object]", nested or {})
    fields = {
        "boundaries": config.get("boundaries"),
        f"eagle_config.{IDS}": inner.get(IDS),
        IDS: config.get(IDS),
    }
    return {field: _integers(value, field) for field, value in fields.items() if value is not None}


def _only(found: Mapping[str, list[int]], num_layers: int) -> tuple[str, list[int]]:
    """The one declaration; equal duplicates are one."""
    if not found:
        usual = default_inputs(num_layers)
        hint = f"; --boundaries {' '.join(map(str, usual))} is EAGLE's default here" if _ascending(usual) else ""
        raise BoundaryError(
            f"the drafter's config names no states to read: pass --boundaries, or let `minieagle doctor` "
            f"measure it{hint}"
        )
    own = "boundaries" in found and len(found) > 1  # ids and boundaries cannot be compared without a convention
    if own or len({tuple(ids) for ids in found.values()}) > 1:
        listed = ", ".join(f"{field} {ids}" for field, ids in found.items())
        raise BoundaryError(f"the drafter's config declares its states twice: {listed}; keep one of them")
    return next(iter(found.items()))


def _integers(value: object, field: str) -> list[int]:
    items = cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()
    ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    if not ids or len(ids) != len(items):
        raise BoundaryError(f"{field} is {value!r:.200}: it must be a non-empty list of integers")
    return ids


def _ascending(ids: Sequence[int]) -> bool:
    return all(a < b for a, b in zip(ids, ids[1:], strict=False))


def _checked(ids: Sequence[int], low: int, high: int, field: str, *, ordered: bool = True) -> Boundaries:
    """ids, refused unless non-empty, in low..high, and strictly ascending. What minieagle wrote itself need not be
    ordered: fusion concatenates in the order that it states."""
    checked = tuple(_integers(ids, field))
    for i in checked:
        if not low <= i <= high:
            raise BoundaryError(f"{field} {list(checked)}: {i} is outside {low}..{high}; is the convention right?")
    if not _ascending(checked if ordered else sorted(checked)):
        raise BoundaryError(f"{field} {list(checked)} must be strictly ascending, each state once: sort them")
    return checked

"""Boundaries: which hidden states a drafter reads, and what other projects mean by a layer id.

The one idea: inside the engine a hidden state has one name, its boundary b in 0..L: the residual stream entering layer
b (b = 0 the embedding's output, b = L the last layer's output before the final norm). Checkpoints name layers by
integers that mean either "output of layer i" (boundary i + 1, -1 for the embedding) or "input of layer i" (boundary
i), and no field says which: SpecForge, TorchSpec and TensorRT-LLM write outputs, vLLM, speculators and llama.cpp
inputs. Both readings of one list usually load and run, one layer apart, and only acceptance suffers. So a list is read
by a stated convention, or by proof, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

Convention = Literal["in", "out"]
Boundaries = tuple[int, ...]

_IDS = "eagle_aux_hidden_state_layer_ids"


class BoundaryError(ValueError):
    """A capture declaration that cannot be honoured: names the field, the value, the bound and the remedy."""


def from_inputs(ids: Sequence[int], num_layers: int, *, field: str = "input layer ids") -> Boundaries:
    """Boundaries of "input of layer i", i in 0..L, L after the last. BoundaryError unless ascending and in range."""
    return _checked(ids, 0, num_layers, field)


def from_outputs(ids: Sequence[int], num_layers: int, *, field: str = "output layer ids") -> Boundaries:
    """Boundaries of "output of layer i", i in -1..L-1, -1 the embedding. BoundaryError unless ascending, in range."""
    return tuple(i + 1 for i in _checked(ids, -1, num_layers - 1, field))


def parse_capture(
    config: Mapping[str, object], num_layers: int, num_taps: int, convention: Convention | None = None
) -> Boundaries:
    """The boundaries that a drafter's config.json declares.

    config: the parsed file. num_layers: the target's L. num_taps: how many states the fusion layer reads, its input
    width over H. convention: what the listed ids mean; None if the user did not say. A minieagle config states
    `boundaries` itself. Others list ids nested in `eagle_config` or at the top level (read both). Raises BoundaryError
    when nothing is declared, when declarations differ, when the count is not num_taps, when ids are out of range or
    not ascending, and when only the missing convention could tell what the ids mean.
    """
    if convention not in (None, "in", "out"):
        raise BoundaryError(f"convention is {convention!r}: say 'in' (input of layer i) or 'out' (output of layer i)")
    field, ids = _declared(config)
    if len(ids) != num_taps:
        raise BoundaryError(
            f"{field} {list(ids)} names {len(ids)} states but the drafter's fusion layer reads {num_taps}: "
            "config and weights are of different drafters, or the list is incomplete"
        )
    if field == "boundaries":
        return _own(ids, num_layers, convention)
    read = from_outputs if (convention or _proved(ids, num_layers, field)) == "out" else from_inputs
    return read(ids, num_layers, field=field)


def _own(ids: Sequence[int], num_layers: int, convention: Convention | None) -> Boundaries:
    if convention is not None:
        raise BoundaryError(f"the config states boundaries {list(ids)} itself: drop convention={convention!r}")
    return _checked(ids, 0, num_layers, "boundaries")


def _proved(ids: Sequence[int], num_layers: int, field: str) -> Convention:
    """The only reading under which every id is legal, if there is one. Resemblance to a default is no proof."""
    outputs = min(ids) >= -1 and max(ids) < num_layers
    inputs = min(ids) >= 0 and max(ids) <= num_layers
    if outputs and inputs:
        raise BoundaryError(
            f"{field} {list(ids)} of {num_layers} layers can mean outputs of these layers or inputs, one "
            "layer apart: pass convention='out' (SpecForge, TorchSpec, TensorRT-LLM) or 'in' (vLLM, speculators)"
        )
    return "out" if outputs else "in"  # legal as neither: the reader says which id is out of range


def _declared(config: Mapping[str, object]) -> tuple[str, list[int]]:
    """The one field that declares the capture and its ids; equal duplicates are one declaration."""
    nested = config.get("eagle_config")
    if not isinstance(nested, Mapping | None):
        raise BoundaryError(f"eagle_config is {nested!r}: it must be an object with {_IDS} in it, or be absent")
    inner = cast("Mapping[str, object]", nested or {})
    fields = {
        "boundaries": config.get("boundaries"),
        f"eagle_config.{_IDS}": inner.get(_IDS),
        _IDS: config.get(_IDS),
    }
    found = {field: _integers(value, field) for field, value in fields.items() if value is not None}
    return _only(found)


def _only(found: Mapping[str, list[int]]) -> tuple[str, list[int]]:
    if not found:
        raise BoundaryError(
            f"the drafter's config names no states to read: add boundaries (0..L) or {_IDS} to config.json"
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
        raise BoundaryError(f"{field} is {value!r}: it must be a non-empty list of integers")
    return ids


def _checked(ids: Sequence[int], low: int, high: int, field: str) -> Boundaries:
    """ids, refused unless non-empty, strictly ascending (fusion concatenates in this order) and in low..high."""
    checked = tuple(_integers(ids, field))
    for i in checked:
        if not low <= i <= high:
            raise BoundaryError(f"{field} {list(checked)}: {i} is outside {low}..{high}; is the convention right?")
    if any(a >= b for a, b in zip(checked, checked[1:], strict=False)):
        raise BoundaryError(f"{field} {list(checked)} must be strictly ascending, each state once: sort them")
    return checked

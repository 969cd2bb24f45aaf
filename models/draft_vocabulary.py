"""Which token each draft id stands for: the d2t and t2d tables of a drafter with a reduced vocabulary.

d2t holds offsets, target id = draft id + d2t[draft id], in every published safetensors drafter (EAGLE, SpecForge,
speculators, TorchSpec, Model-Optimizer); a few tools write absolute ids. A table read the wrong way only makes
speculation useless, which no output test sees, so it must satisfy what a right one does: target ids ascend, lie in the
vocabulary, and are those that t2d, the same table the other way round, marks.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from minieagle.models.headers import CheckpointError

KINDS = ("offset", "absolute", "identity")

STATE = 'state "d2t": "{}" in its wiring.json (minieagle.spec.wiring: make_wiring, write_wiring)'
"""The remedy for a table of another kind."""

_log = logging.getLogger(__name__)


def _fault(ids: Tensor, t2d: Tensor | None, vocab_size: int) -> str | None:
    """Why ids [W] can't be the target ids of the draft vocabulary, None when they can."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return f"it names token {int(ids.max() if ids.min() >= 0 else ids.min())}, outside 0..{vocab_size - 1}"
    if bool((ids.diff() <= 0).any()):
        at = int((ids.diff() <= 0).nonzero()[0])
        return f"its tokens don't ascend: {int(ids[at])}, then {int(ids[at + 1])}"
    marked = ids if t2d is None else t2d.nonzero().flatten()
    if not torch.equal(marked, ids):
        return f"it names {len(ids)} tokens from {int(ids[0])}, t2d marks {len(marked)} from {marked[:1].tolist()}"
    return None


def _readings(d2t: Tensor) -> dict[str, Tensor]:
    """Target ids under each kind that the table may be written in."""
    first = torch.arange(d2t.shape[0])
    readings = {"offset": first + d2t, "absolute": d2t}
    if not d2t.any() or torch.equal(d2t, first):
        readings["identity"] = first
    return readings


def _check_table(name: str, table: Tensor, size: int) -> None:
    if table.is_floating_point() or table.shape != (size,):
        raise CheckpointError(
            f"{name} has dtype {table.dtype} and shape {list(table.shape)}; {size} integers or booleans are expected"
        )


def target_ids(
    d2t: Tensor | None, t2d: Tensor | None, *, draft_vocab_size: int, vocab_size: int, kind: str = "offset"
) -> Tensor:
    """[draft_vocab_size] int64: the target's id of each draft id.

    d2t [draft_vocab_size] and t2d [vocab_size] as stored, None when absent; kind: how d2t is written, one of KINDS.
    Raises CheckpointError when the table is missing, is none of that kind, or may be one that was never filled; the
    message names the kind that it would be.
    """
    if kind not in KINDS:
        raise CheckpointError(f"d2t={kind!r} must be one of {list(KINDS)}")
    if t2d is not None:
        _check_table("t2d", t2d, vocab_size)
    if d2t is not None:
        _check_table("d2t", d2t, draft_vocab_size)
    elif draft_vocab_size < vocab_size and kind != "identity":
        raise CheckpointError(
            f"the drafter has {draft_vocab_size} of {vocab_size} tokens but no d2t table that says which: fetch it, or "
            f"{STATE.format('identity')} if they are the first {draft_vocab_size}"
        )
    else:
        d2t = torch.zeros(draft_vocab_size, dtype=torch.int64)
    return _read(d2t.to(torch.int64), t2d, vocab_size, kind)


def _read(d2t: Tensor, t2d: Tensor | None, vocab_size: int, kind: str) -> Tensor:
    faults = {name: _fault(ids, t2d, vocab_size) for name, ids in _readings(d2t).items()}
    possible = [name for name in KINDS if name in faults and faults[name] is None]
    if kind not in possible:
        why = faults.get(kind, "it is neither zeros nor 0, 1, 2, ...")
        remedy = "nor does any other reading"
        if possible:
            remedy = f"read as {possible[0]} it fits: {STATE.format(possible[0])}"
        raise CheckpointError(f"d2t does not hold {kind} ids, {why}; {remedy}")
    if kind == "offset" and t2d is None and len(d2t) < vocab_size:
        _check_undecided(d2t, possible)
    return _readings(d2t)[kind]


def _check_undecided(d2t: Tensor, possible: list[str]) -> None:
    """Offsets that could be something else, where no t2d decides."""
    if "identity" in possible:
        what = "all zeros, as a table that was never filled" if not d2t.any() else "0, 1, 2, ..., ids and no offsets"
        raise CheckpointError(
            f"d2t is {what}: {STATE.format('identity')} if the drafter reads the first {len(d2t)} tokens, else fetch "
            "the table"
        )
    if "absolute" in possible:
        _log.warning("d2t ascends at every step, so it could hold absolute ids too; it is read as offsets")

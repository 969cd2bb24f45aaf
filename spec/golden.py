"""Golden vectors: a short text, what the target's states over it were, and what the drafter then drafted.

The one idea: a wiring that is only described can be described wrongly; one that comes with its own small proof can be
checked in a second. Several draft steps are kept, since a wrong feedback shows from the second on only. Numbers carry a
tolerance: other processors add in another order. The hash of the states tells whether these bits are the same too.
"""

# torch annotates some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from minieagle.models.deepseek import Target
from minieagle.models.eagle3 import Drafter
from minieagle.models.rows import Rows, Span

NUM_STEPS = 3
NUM_TOKENS = 24
TOP = 5

# Share of a number's scale by which two machines may differ.
TOLERANCE = {"torch.float32": 1e-3, "torch.bfloat16": 0.05}


@dataclass(frozen=True, kw_only=True)
class Golden:
    """tokens: the text, its last NUM_STEPS - 1 being fed as drafted. dtype: the target's. states_hash: SHA-256 of the
    captured states' bytes; state_norms: mean norm of a row, a boundary each. logits: per draft step, the TOP best draft
    ids with their logits."""

    tokens: tuple[int, ...]
    dtype: str
    states_hash: str
    state_norms: tuple[float, ...]
    logits: tuple[tuple[tuple[int, float], ...], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Golden:
        """Raises TypeError, KeyError or ValueError for anything that to_json has not written."""
        return Golden(
            tokens=tuple(int(token) for token in content["tokens"]),
            dtype=str(content["dtype"]),
            states_hash=str(content["states_hash"]),
            state_norms=tuple(float(norm) for norm in content["state_norms"]),
            logits=tuple(tuple((int(i), float(value)) for i, value in step) for step in content["logits"]),
        )


def golden_tokens(vocab_size: int) -> tuple[int, ...]:
    """A text that every vocabulary has: ids spread over it, always the same."""
    return tuple((7919 * i * i + 104729 * i + 11) % vocab_size for i in range(NUM_TOKENS))


def capture(target: Target, tokens: Sequence[int], boundaries: Sequence[int]) -> Tensor:
    """The states [T, taps, hidden] of a text, by the forward that serves."""
    ids = torch.tensor(tokens, device=target.device)
    slots = torch.arange(1, 1 + len(tokens), device=target.device)
    rows = Rows.of(ids, [Span(slots, 0, len(tokens))])
    return target(rows, target.new_cache(1 + len(tokens)), boundaries=boundaries).captured


def draft_logits(drafter: Drafter, tokens: Sequence[int], captured: Tensor) -> Tensor:
    """[steps, draft vocabulary] float32: logits behind the committed rows, then behind each further token, which is
    fed as drafted. captured: [T, taps, hidden] of the first T tokens."""
    num_rows = captured.shape[0] - 1
    ids = torch.tensor(tokens, device=captured.device)
    slots = torch.arange(1, 1 + len(tokens), device=captured.device)
    cache = drafter.new_cache(1 + len(tokens))
    rows = Rows.of(ids[1 : 1 + num_rows], [Span(slots, 0, num_rows)])
    out = drafter(rows, drafter.fuse(captured[:-1]), cache)
    logits = [out.logits[-1]]
    for position in range(1 + num_rows, len(tokens)):
        rows = Rows.of(ids[position : position + 1], [Span(slots, position - 1, 1)])
        out = drafter(rows, out.states[-1:], cache)
        logits.append(out.logits[-1])
    return torch.stack(logits)


def golden_vectors(target: Target, drafter: Drafter, tokens: Sequence[int] | None = None) -> Golden:
    """Run both over `tokens`, at least NUM_STEPS + 1 of them, and keep what proves the wiring."""
    text = tuple(tokens or golden_tokens(target.config.vocab_size))
    assert len(text) > NUM_STEPS, f"{len(text)} tokens leave no row to draft from"
    captured = capture(target, text[: 1 - NUM_STEPS], drafter.config.boundaries)
    best = draft_logits(drafter, text, captured).topk(min(TOP, drafter.config.draft_vocab_size))
    steps = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Golden(
        tokens=text,
        dtype=str(target.dtype),
        states_hash=_hash(captured),
        state_norms=tuple(captured.float().norm(dim=-1).mean(0).tolist()),
        logits=tuple(tuple(zip(ids, values, strict=True)) for ids, values in steps),
    )


def check_golden(target: Target, drafter: Drafter, golden: Golden) -> tuple[str, ...]:
    """What differs from the golden vectors beyond the tolerance, in words; nothing when the wiring is proved."""
    if max(golden.tokens) >= target.config.vocab_size:
        return (f"token {max(golden.tokens)} of the golden text is outside the target's {target.config.vocab_size}",)
    if len(golden.state_norms) != len(drafter.config.boundaries):
        return (f"{len(golden.state_norms)} states were recorded, the drafter reads {drafter.config.boundaries}",)
    captured = capture(target, golden.tokens[: 1 - NUM_STEPS], drafter.config.boundaries)
    share = max(TOLERANCE.get(golden.dtype, 0.05), TOLERANCE.get(str(target.dtype), 0.05))
    found = [] if golden.states_hash == _hash(captured) else _norm_differences(drafter, captured, golden, share)
    logits = draft_logits(drafter, golden.tokens, captured)
    return (*found, *_logit_differences(logits, golden, share))


def _norm_differences(drafter: Drafter, captured: Tensor, golden: Golden, share: float) -> list[str]:
    norms = captured.float().norm(dim=-1).mean(0).tolist()
    pairs = zip(drafter.config.boundaries, golden.state_norms, norms, strict=True)
    return [
        f"the states at boundary {b} have a mean norm of {now:.4g}, recorded was {before:.4g}: another target or layer"
        for b, before, now in pairs
        if abs(now - before) > share * before
    ]


def _logit_differences(logits: Tensor, golden: Golden, share: float) -> list[str]:
    found: list[str] = []
    for step, recorded in enumerate(golden.logits):
        scale = max(abs(value) for _, value in recorded)
        for i, value in recorded:
            now = float(logits[step, i]) if i < logits.shape[1] else float("nan")
            if not abs(now - value) <= share * scale:
                found.append(f"draft step {step + 1} gives draft id {i} a logit of {now:.4g}, recorded was {value:.4g}")
                break
    return found


def _hash(states: Tensor) -> str:
    return hashlib.sha256(states.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

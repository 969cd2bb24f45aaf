"""Sampling: what a request asks for, and the token that a row of logits emits.

The one idea: the token at absolute position p is a function of (its logits, its parameters, its seed, p) and of
nothing else. Greedy is argmax. Sampling is argmax of the filtered log-probabilities plus Gumbel noise keyed by (seed,
p) (spec/noise.py). The filters come in the order temperature, top_k, top_p, min_p. Every step works on a row alone, so
a row gets the same bits in a batch of one and of a hundred, which is what makes speculation invisible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minieagle.models.staging import moved
from minieagle.spec.noise import gumbel

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
_CANDIDATES = 512  # how many of the best tokens top_k and top_p look at before they sort the whole vocabulary


class SamplingError(ValueError):
    """A sampling parameter that cannot be honoured: names the value, the bound and the remedy."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Raises SamplingError on a value out of bounds or of the wrong type.

    temperature: 0 is greedy. top_k: keep the k best, 0 all. top_p: keep the fewest best that hold this mass. min_p:
    keep what is at least this share of the best. seed: None lets the engine draw one. max_tokens: new tokens at most.
    stop: strings that end the text, left out of it; stop_token_ids: ids that end it. ignore_eos: go on past the end
    token. logprobs: None none, 0 the chosen token's, n also n alternatives'.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, low, high, remedy in _REAL_BOUNDS:
            object.__setattr__(self, name, _real(name, getattr(self, name), low, high, remedy))
        for name, low, high, remedy in _INTEGER_BOUNDS:
            _check_integer(name, getattr(self, name), low, high, remedy)
        for name, low, high, remedy in _OPTIONAL_BOUNDS:
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), low, high, remedy)
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError(f"ignore_eos is {self.ignore_eos!r:.80}: it must be true or false")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


_Bound = tuple[str, float, float, str]
_LEAST = 2.0**-53  # below it float64 holds 1 - p and 1 for one number
_REAL_BOUNDS: tuple[_Bound, ...] = (
    ("temperature", 0, 100, "0 is greedy, 1 the model's own distribution"),
    ("top_p", _LEAST, 1, "1 keeps every token; for greedy set temperature to 0"),
    ("min_p", 0, 1, "0 keeps every token"),
)
_INTEGER_BOUNDS: tuple[_Bound, ...] = (
    ("top_k", 0, 2**31 - 1, "0 keeps every token"),
    ("max_tokens", 1, 2**31 - 1, "ask for at least one token"),
)
_OPTIONAL_BOUNDS: tuple[_Bound, ...] = (
    ("seed", -(2**63), 2**63 - 1, "a signed 64-bit integer, or None to have one drawn"),
    ("logprobs", 0, MAX_LOGPROBS, "None for none, 0 for the chosen token's only"),
)


def _real(name: str, value: object, low: float, high: float, remedy: str) -> float:
    # a NaN fails every comparison
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise SamplingError(f"{name} is {value!r:.80}: it must be a number in {low:.3g}..{high:g} ({remedy})")
    if name == "temperature" and 0 < value < 1e-6:
        raise SamplingError(f"temperature is {value!r:.80}: below 1e-6 it is greedy in all but name; use 0")
    return float(value)


def _check_integer(name: str, value: object, low: float, high: float, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SamplingError(f"{name} is {value!r:.80}: it must be an integer in {low}..{high} ({remedy})")


def _strings(value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise SamplingError(f"stop is {value!r:.80}: it must be a non-empty string or a list of such")
    # every token of a request looks for all of them, between everybody's steps
    if len(items) > MAX_STOP_STRINGS or sum(map(len, items)) > MAX_STOP_CHARACTERS:
        raise SamplingError(
            f"stop holds {len(items)} strings of {sum(map(len, items))} characters: at most {MAX_STOP_STRINGS} strings "
            f"of {MAX_STOP_CHARACTERS} characters together"
        )
    return tuple(items)


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise SamplingError(f"stop_token_ids is {value!r:.80}: it must be a list of token ids")
    for item in value:
        _check_integer("a stop token id", item, 0, 2**31 - 1, "ids of the vocabulary")
    return tuple(value)


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of T rows as tensors [T]: float32, top_k and seeds int64. The flags spare a look at the device."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seeds: Tensor
    any_sampled: bool  # some row has a temperature above 0
    any_cut: bool  # some sampled row uses top_k or top_p

    @staticmethod
    def of(rows: Sequence[tuple[SamplingParams, int]], device: torch.device | str = "cpu") -> SamplingBatch:
        """One (parameters, seed) per row. The seed is the request's, drawn by the engine if params.seed is None."""
        params = [p for p, _ in rows]
        reals = moved(torch.tensor([(p.temperature, p.top_p, p.min_p) for p in params]), torch.device(device))
        whole = moved(torch.tensor([(p.top_k, seed) for p, seed in rows], dtype=torch.long), torch.device(device))
        reals, whole = reals.reshape(-1, 3), whole.reshape(-1, 2)
        sampled = [p for p in params if not p.is_greedy]
        any_cut = any(p.top_k > 0 or p.top_p < 1 for p in sampled)
        return SamplingBatch(*reals.unbind(1), *whole.unbind(1), any_sampled=bool(sampled), any_cut=any_cut)


def emit(logits: Tensor, params: SamplingBatch, positions: Tensor) -> Tensor:
    """The token that each row emits: int64 [T].

    logits: [T, V]. positions: int64 [T], the absolute position of the token being emitted, that is the row's own plus
    1. Of equal maxima the lowest id wins. A batch without sampled rows costs one argmax.
    """
    if not params.any_sampled:
        return logits.argmax(-1)
    filters = params.temperature, params.top_k, params.top_p, params.min_p
    scores = processed_logprobs(logits, *filters, cut=params.any_cut)
    return (scores + gumbel(params.seeds, positions, logits.shape[-1])).argmax(-1)


def processed_logprobs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, cut: bool = True
) -> Tensor:
    """float32 [T, V]: log-probabilities after temperature, top_k, top_p, min_p, renormalised; -inf outside.

    logits [T, V]; the others [T]. Each filter sees the distribution that the one before left. At the cut of top_k and
    top_p the lower id wins a tie. A row of temperature 0 has all its mass on its argmax. cut=False: the caller knows
    that no row uses top_k or top_p, which spares the ranking; the bits are the same.
    """
    logits = logits.float()
    greedy = (temperature == 0)[:, None]
    # the maximum comes off first, so that dividing by a small temperature cannot overflow
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, temperature[:, None])
    keep = scaled >= min_p.log()[:, None]  # p >= min_p * max p, and the maximum is 0
    if cut:
        keep &= _within_cuts(scaled, top_k, top_p)
    top = torch.zeros_like(keep).scatter_(1, logits.argmax(-1, keepdim=True), True)
    return scaled.masked_fill(~torch.where(greedy, top, keep), -math.inf).log_softmax(-1)


def _within_cuts(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """bool [T, V]: kept by top_k, then by top_p.

    Ranks the best few, and the whole vocabulary only if a row reaches past them. Both ways give the same mask: a
    running sum does not depend on what follows. (On CUDA its grouping does; and sorting is cheap there while looking
    at the outcome is not, so there the whole vocabulary is ranked at once.)
    """
    size = scaled.shape[-1]
    few = size if scaled.is_cuda else min(_CANDIDATES, size)
    limited = (top_k > 0) & (top_k < size)
    limit = torch.where(limited, top_k, size)[:, None]
    kept, ids = _ranked_cut(scaled, limit, top_p, few)
    cut = limited | (top_p < 1)
    if few < size and bool(((kept[:, -1] | (limited & (top_k > few))) & cut).any()):
        kept, ids = _ranked_cut(scaled, limit, top_p, size)
    return torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, ids, kept) | ~cut[:, None]


def _ranked_cut(scaled: Tensor, limit: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best `width` ids of each row [T, width] and whether the cuts keep them: a prefix of the ranking."""
    ids = ranked(scaled, width)
    mass = scaled.softmax(-1).gather(1, ids).cumsum(-1, dtype=torch.float64)
    whole = mass.gather(1, limit.clamp(max=width) - 1)  # the mass that top_k left
    whole = torch.where(limit < scaled.shape[-1], whole, 1.0)
    before = torch.nn.functional.pad(mass, (1, -1))
    inside = (before < top_p[:, None] * whole) | (top_p >= 1)[:, None]
    return inside & (torch.arange(width, device=scaled.device) < limit), ids


def ranked(values: Tensor, count: int) -> Tensor:
    """int64 [T, count]: the ids of the largest values of float32 [T, V], best first, equals by lower id.

    torch.topk leaves the order of equals open, so it runs on unique integer keys: the float's bits, made monotone,
    above the complement of the id.
    """
    if count == values.shape[-1]:
        return values.sort(dim=-1, descending=True, stable=True).indices
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    ids = torch.arange(values.shape[-1], device=values.device)
    return (order | (0xFFFFFFFF - ids)).topk(count, dim=-1).indices


class Logprobs(NamedTuple):
    """chosen float32 [T]; top_ids int64 and top float32 [T, n], best first."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Log-probabilities of `tokens` [T] and of the `top` best ids of each row, by the model's own distribution.

    Log-softmax of the raw logits [T, V] in float32, before temperature and filters.
    """
    raw = logits.float().log_softmax(-1)
    top_ids = ranked(raw, min(top, raw.shape[-1]))
    return Logprobs(raw.gather(1, tokens[:, None])[:, 0], top_ids, raw.gather(1, top_ids))

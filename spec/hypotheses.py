"""Ways to read one and the same drafter: the hypotheses that the doctor scores.

The one idea: a wiring fault is a difference between how a drafter is read and how it was trained, so each hypothesis is
one small change of a `Reading`: a flag, a list of boundaries, a shift, a table. The grid is what tables and a few
functions yield around a reading; combinations come from taking the grid again around a changed one. Every change
carries its cause and its remedy in the user's words. Sources: the public bug reports behind each row (EAGLE,
SpecForge, SGLang, vLLM, TorchSpec, speculators, TensorRT-LLM).
"""

# torch annotates some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor

from minieagle.models.config import TargetConfig, Yarn
from minieagle.models.deepseek import Target
from minieagle.models.draft_vocabulary import KINDS
from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.eagle3 import Drafter
from minieagle.models.rope import RotaryTable
from minieagle.spec.boundary import default_inputs
from minieagle.spec.formats import FIELDS
from minieagle.spec.observe import Source


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a drafter is read and what it is fed.

    d2t: what that table is taken for (D2T). token_shift: row t is fed the token at t + 1 + token_shift. state_shift: it
    is fed the states of position t + state_shift. num_ranks: captured states hold the last layer's share of one of so
    many ranks (a deferred all-reduce). scale: captured states are multiplied by it. swaps: which of SWAPS is made.
    target_head: the target's rows in place of lm_head.
    """

    config: DrafterConfig
    d2t: str = "offset"
    token_shift: int = 0
    state_shift: int = 0
    num_ranks: int = 1
    scale: float = 1.0
    swaps: frozenset[str] = frozenset()
    target_head: bool = False

    @property
    def sees_ahead(self) -> bool:
        """Whether it is fed what serving doesn't have yet: the state that the target's choice comes from, or the choice
        itself, which helps any drafter a little."""
        return self.token_shift > 0 or self.state_shift > 0


@dataclass(frozen=True)
class Change:
    """One step from a reading to another. aspect: what is changed; name: to what; cause and remedy: a sentence each.
    expressible: whether the wiring contract can state the new reading."""

    aspect: str
    name: str
    reading: Reading
    cause: str
    remedy: str
    expressible: bool = True


@dataclass(frozen=True)
class Setting:
    """What the grid may draw on: the target's config and the boundaries whose states were recorded; and where a remedy
    must go to be read: own_format, a minieagle config states every field, others a few, and layer ids for boundaries;
    stated, there is a wiring.json, which is read instead of config.json."""

    target: TargetConfig
    recorded: tuple[int, ...]
    own_format: bool = True
    stated: bool = False

    def remedy(self, field: str, value: str) -> str:
        """How to say a field of DrafterConfig where it is read. value: as JSON."""
        if self.stated:
            return (
                f'pass --fix, which puts "{field}": {value} into its wiring.json; config.json is not read beside that'
            )
        if self.own_format or field in FOREIGN:
            return f'"{field}": {value} in its config.json, {FIX}'
        return "pass --fix: only a wiring.json can state that"


# What the table d2t may hold, and the target's ids that it then means; raw: [W] int64 as stored.
D2T: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "offset": lambda raw, ids: ids + raw,  # EAGLE and all trainers
    "absolute": lambda raw, ids: raw,  # llama.cpp's GGUF
    "identity": lambda raw, ids: ids,  # the table was lost (NeMo)
    "offset, one too low": lambda raw, ids: ids + raw + 1,  # tokenizers that differ by one inserted token
    "offset, one too high": lambda raw, ids: ids + raw - 1,
}

# Flags of DrafterConfig: the cause when it should be on, when it should be off. None: the weights say it.
FLAGS: tuple[tuple[str, str | None, str], ...] = (
    (
        "norm_output",
        "the drafter's own state is fed back pre-norm, but it was trained on the post-norm one",
        "the drafter's own state is fed back post-norm, but it was trained on the pre-norm one",
    ),
    (
        "norm_before_residual",
        "the residual is taken before hidden_norm, but was trained after it",
        "the residual is taken after hidden_norm, but was trained before it",
    ),
    (
        "norm_before_head",
        "the head is given the un-normed state, but was trained on the normed one",
        "the head is given the normed state, but was trained on the un-normed one",
    ),
    ("norm_before_fc", None, "the states are normed together before fc, but were trained without that norm"),
    ("fc_norm", None, "each state is normed before fc, but was trained without these norms"),
    ("qk_norm", None, "queries and keys are normed, but were trained without these norms"),
)

# Parts of equal shape, which no check of shapes tells apart: what they look like exchanged, and the remedy.
SWAPS: dict[str, tuple[str, str]] = {
    "input halves": (
        "the first layer's input is read as [embedding ; state], but was trained the other way round",
        "exchange the two halves of the columns of q, k and v",
    ),
    "input norms": (
        "input_layernorm and hidden_norm are exchanged: the first norms the embedding, the second the state",
        "exchange these two tensors in the checkpoint",
    ),
    "gate and up": (
        "gate_proj and up_proj are exchanged: the first goes through the activation",
        "exchange these two tensors in the checkpoint",
    ),
    "keys and values": (
        "k_proj and v_proj are exchanged: the first makes what queries are compared with",
        "exchange these two tensors in the checkpoint",
    ),
}

# RoPE bases that published drafters and targets have: llama 2, Kimi, llama 3, qwen.
THETAS = (10_000.0, 50_000.0, 500_000.0, 1_000_000.0)
NUM_RANKS = (1, 2, 8)
FIX = "or pass --fix"
FOREIGN = {field.name for field in FIELDS} | {"rope_theta"}
"""Fields that are read from other projects' config.json by these names."""


def boundaries_needed(config: DrafterConfig, num_layers: int) -> tuple[int, ...]:
    """Which states to record for the grid: all of a shallow target, else those around the taps, the two ends and the
    defaults of other projects, so that memory stays bounded."""
    if num_layers <= 16:
        return tuple(range(num_layers + 1))
    near = {b + shift for b in config.boundaries for shift in (-2, -1, 0, 1)}
    wanted = near | {0, 1, num_layers - 1, num_layers, *default_inputs(num_layers)}
    return tuple(sorted(b for b in wanted if 0 <= b <= num_layers))


def grid(reading: Reading, setting: Setting) -> Iterator[Change]:
    """Every single change of a reading."""
    for part in (_boundaries, _flags, _rope, _shifts, _d2t, _weights, _capture):
        yield from part(reading, setting)


def _with(reading: Reading, **fields: Any) -> Reading:
    return replace(reading, config=replace(reading.config, **fields))


def _listed(boundaries: tuple[int, ...]) -> str:
    return " ".join(map(str, boundaries))


def _boundaries(reading: Reading, setting: Setting) -> Iterator[Change]:
    """Shifts of the whole list, each tap a layer off or at an end, other orders, the usual default, the last state's
    kind."""
    now, seen = reading.config.boundaries, {reading.config.boundaries}
    for new, cause, convention in _lists(now, setting):
        if new in seen or not set(new) <= set(setting.recorded) or len(set(new)) < len(new):
            continue
        seen.add(new)
        said = f"--capture-convention {convention}" if convention else f"--boundaries {_listed(new)}"
        plain = setting.own_format or setting.stated
        remedy = setting.remedy("boundaries", str(list(new))) if plain else f"pass {said}, {FIX}"
        changed = _with(reading, boundaries=new, last_state=_last_state(reading, new, setting))
        yield Change("boundaries", _listed(new), changed, cause, remedy)
    if setting.target.num_hidden_layers in now:
        yield _other_last_state(reading, setting)


def _last_state(reading: Reading, boundaries: tuple[int, ...], setting: Setting) -> str:
    return reading.config.last_state if setting.target.num_hidden_layers in boundaries else "pre-norm"


def _lists(now: tuple[int, ...], setting: Setting) -> Iterator[tuple[tuple[int, ...], str, str]]:
    """(boundaries, cause, the convention that gives them if it is one)."""
    later, earlier = tuple(b + 1 for b in now), tuple(b - 1 for b in now)
    yield later, "boundaries are read as inputs but were trained as outputs, one layer later", "out"
    yield earlier, "boundaries are read as outputs but were trained as inputs, one layer earlier", "in"
    for order in permutations(now) if len(now) <= 3 else [tuple(reversed(now))]:
        yield order, f"the fused states are read in the order {_listed(now)} but were trained as {_listed(order)}", ""
    usual = tuple(default_inputs(setting.target.num_hidden_layers))
    if len(usual) == len(now):
        yield usual, f"boundaries {_listed(now)} are read but it was trained on the default {_listed(usual)}", ""
    ends = {0, setting.target.num_hidden_layers}
    for tap, old in enumerate(now):
        for b in sorted({old - 1, old + 1, *ends}):
            cause = f"state {tap + 1} of {len(now)} is read at boundary {old} but was trained at {b}"
            yield (*now[:tap], b, *now[tap + 1 :]), cause, ""


def _other_last_state(reading: Reading, setting: Setting) -> Change:
    now = reading.config.last_state
    new = "post-norm" if now == "pre-norm" else "pre-norm"
    cause = f"the last layer's output is read {now} but was trained {new}, as transformers' output_hidden_states has it"
    remedy = setting.remedy("last_state", f'"{new}"')
    return Change("last state", new, _with(reading, last_state=new), cause, remedy)


def _flags(reading: Reading, setting: Setting) -> Iterator[Change]:
    for name, on, off in FLAGS:
        now = bool(getattr(reading.config, name))
        cause = off if now else on
        if cause is not None:
            remedy = setting.remedy(name, str(not now).lower())
            yield Change(name, str(not now).lower(), _with(reading, **{name: not now}), cause, remedy)


def _rope(reading: Reading, setting: Setting) -> Iterator[Change]:
    config, target = reading.config, setting.target
    style = "interleaved" if config.rope_style == "half" else "half"
    cause = f"RoPE rotates {config.rope_style} pairs, but it was trained with {style} ones"
    remedy = setting.remedy("rope_style", f'"{style}"')
    yield Change("rope_style", style, _with(reading, rope_style=style), cause, remedy)
    for theta in sorted({*THETAS, float(target.rope_theta)} - {float(config.rope_theta)}):
        cause = f"RoPE's base is read as {config.rope_theta:g}, but it was trained with {theta:g}"
        remedy = setting.remedy("rope_theta", f"{theta:.1f}")
        yield Change("rope_theta", f"{theta:g}", _with(reading, rope_theta=theta), cause, remedy)
    if config.yarn is not None:
        cause = "RoPE is scaled by YaRN, but it was trained without"
        yield Change("yarn", "off", _with(reading, yarn=None), cause, _yarn_remedy(setting, None))
    if target.yarn not in (None, config.yarn):
        cause = "RoPE is not scaled as the target's, but it was trained with the target's YaRN"
        remedy = _yarn_remedy(setting, target.yarn)
        yield Change("yarn", "the target's", _with(reading, yarn=target.yarn), cause, remedy)


def _yarn_remedy(setting: Setting, yarn: Yarn | None) -> str:
    if setting.own_format or setting.stated:
        return setting.remedy("yarn", json.dumps(yarn and asdict(yarn)))
    kind = "no" if yarn is None else "the target's"
    return f"{kind} rope_scaling in its config.json, {FIX}"


def _shifts(reading: Reading, _: Setting) -> Iterator[Change]:
    for field, what in (("token_shift", "tokens"), ("state_shift", "states")):
        now: int = getattr(reading, field)
        for new in {-1, 0, 1} - {now}:
            cause = f"its {what} were {abs(new - now)} position {'later' if new > now else 'earlier'} in training"
            remedy = f"train it again with the {what} where serving has them: row t holds state t and token t + 1"
            changed = replace(reading, **cast("dict[str, Any]", {field: new}))
            yield Change(what, f"{new - now:+d}", changed, cause, remedy, expressible=False)


def _d2t(reading: Reading, _: Setting) -> Iterator[Change]:
    config = reading.config
    if config.draft_vocab_size == config.vocab_size:
        return
    for kind in D2T:
        if kind != reading.d2t:
            cause = f"d2t is read as {reading.d2t}, but holds {kind}"
            expressible = kind in KINDS
            remedy = f"store offsets (target id - draft id) in d2t{', ' + FIX if expressible else ''}"
            yield Change("d2t", kind, replace(reading, d2t=kind), cause, remedy, expressible)


def _weights(reading: Reading, _: Setting) -> Iterator[Change]:
    config = reading.config
    if config.own_embeddings and config.hidden_size == config.target_hidden_size:
        cause = "the drafter's own embed_tokens are not those it was trained with: the target's are"
        remedy = "remove embed_tokens.weight from the checkpoint"
        yield Change("embeddings", "the target's", _with(reading, own_embeddings=False), cause, remedy, False)
    if config.own_head and config.hidden_size == config.target_hidden_size and not reading.target_head:
        cause = "lm_head's rows are not those of the tokens that d2t names: the target's own rows fit better"
        remedy = "export lm_head again, row i for the token i + d2t[i]"
        yield Change("lm_head", "the target's", replace(reading, target_head=True), cause, remedy, False)
    for name, (cause, remedy) in SWAPS.items():
        swapped = replace(reading, swaps=reading.swaps ^ {name})
        yield Change(name, "swapped" if name in swapped.swaps else "as stored", swapped, cause, remedy, False)


def _capture(reading: Reading, setting: Setting) -> Iterator[Change]:
    """What other engines may have captured. A rank's share is simulated from the neighbouring boundaries: of the last
    layer's contribution 1/N, which is exact in the mean only."""
    for ranks in NUM_RANKS:
        if ranks != reading.num_ranks:
            words = ["full sums" if n == 1 else f"partial sums of {n} ranks" for n in (reading.num_ranks, ranks)]
            cause = f"the states are {words[0]} here, but were captured as {words[1]} in training"
            late = "capture the states behind the all-reduce that the next layer's norm is fused with"
            remedy = late if ranks == 1 else f"train it again on full sums: {late}"
            yield Change("capture", words[1], replace(reading, num_ranks=ranks), cause, remedy, False)
    factor = setting.target.routed_scaling_factor
    for scale in {1.0, 1 / factor} - {reading.scale}:
        times = f"{scale / reading.scale:.3g}"
        cause = f"the states were {times} times as large in training, as vLLM's fp16 rescale of V2 and V3 makes them"
        remedy = f"multiply fc.weight by {times}, or train again on bf16 states"
        name = f"times {times}"
        yield Change("scale", name, replace(reading, scale=scale), cause, remedy, False)


class Unreadable(ValueError):
    """A reading that the weights or the vocabulary at hand rule out."""


def reread(drafter: Drafter, target: Source, original: Reading, reading: Reading) -> Drafter:
    """The drafter, loaded as `original` says, under another reading. Weights are shared, not copied, unless swapped.
    Raises Unreadable when the reading needs weights that are not there or ids that the target doesn't have."""
    with torch.device("meta"):
        variant = Drafter(reading.config)
    weights = dict(drafter.state_dict())
    for name in reading.swaps ^ original.swaps:
        _exchange(weights, name, reading.config)
    variant.target_ids = _target_ids(drafter.target_ids, original.d2t, reading)
    if reading.target_head:
        rows = target.lm_head.dense_weight()[variant.target_ids]
        weights["lm_head.weight"] = rows.to(drafter.norm.weight.dtype)
    missing = [name for name in variant.state_dict() if name not in weights]
    if missing:
        raise Unreadable(f"the drafter has no {missing[0]}")
    variant.load_state_dict({name: weights[name] for name in variant.state_dict()}, assign=True)
    variant.rotary = _rotary(drafter, reading.config)
    variant.embed_tokens = drafter.embed_tokens
    variant.borrow(cast(Target, target))  # a streamed target has all that is borrowed
    return variant.eval()


def _exchange(weights: dict[str, Tensor], what: str, config: DrafterConfig) -> None:
    """Make one of SWAPS, in every layer that has the parts. The swaps commute."""
    norms = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")
    if what == "input norms":
        weights.update(zip(norms, [weights[name] for name in reversed(norms)], strict=True))
    elif what == "input halves":
        name = next(n for n in weights if n in ("midlayer.attention.qkv.weight", "midlayer.attention.qkv_a.weight"))
        weights[name] = weights[name].roll(config.hidden_size, dims=1)
    elif what == "gate and up":
        for name in [name for name in weights if name.endswith("mlp.gate_up.weight")]:
            weights[name] = torch.cat(weights[name].chunk(2)[::-1])
    elif config.latent is None:
        heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        for name in [name for name in weights if name.endswith("attention.qkv.weight")]:
            q, k, v = weights[name].split([count * config.head_dim for count in heads])
            weights[name] = torch.cat((q, v, k))
    else:
        raise Unreadable("latent attention has no keys and values of equal shape")


def _target_ids(now: Tensor, kind: str, reading: Reading) -> Tensor:
    ids = torch.arange(now.shape[0], device=now.device)
    # each kind adds to what the table holds a term that does not depend on it, so reading nothing shows the term
    new = now if reading.d2t == kind else D2T[reading.d2t](now - D2T[kind](torch.zeros_like(now), ids), ids)
    if bool((new < 0).any()) or bool((new >= reading.config.vocab_size).any()):
        raise Unreadable(f"d2t read as {reading.d2t} names tokens outside the target's {reading.config.vocab_size}")
    return new


def _rotary(drafter: Drafter, config: DrafterConfig) -> RotaryTable:
    table = RotaryTable(config.rotary_dim, config.rope_theta, drafter.rotary.cos.shape[0], config.yarn)
    return table.to(drafter.rotary.cos.device)

"""A drafter rewritten for another engine: its tensors bit for bit under that engine's names, its wiring in that
engine's words, and a proof.

The one idea: a conversion is right when the reader it is for reads the same wiring. So what is written is read back
with that reader's meanings and compared field by field, and the drafter is loaded again and must draft the same bits.
What a reader has no words for, or reads in two ways by its version, is refused: LIMITS is the table.
"""

# torch and safetensors annotate some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minieagle.models.checkpoint import Checkpoint
from minieagle.models.config import TargetConfig, read_json
from minieagle.models.deepseek import Target
from minieagle.models.draft_vocabulary import target_ids
from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.drafter_names import official_names
from minieagle.models.drafter_weights import load_drafter
from minieagle.models.tensor_file import write_tensors
from minieagle.spec.boundary import IDS, Convention
from minieagle.spec.formats import recognise
from minieagle.spec.golden import NUM_STEPS, draft_logits, golden_tokens
from minieagle.spec.wiring import Wiring, derive_wiring, make_wiring, read_wiring, write_wiring

Reader = Literal["minieagle", "sglang", "vllm", "speculators"]
READERS: tuple[Reader, ...] = ("minieagle", "sglang", "vllm", "speculators")

# What the ids mean to whoever reads the lists that are written here (see spec/boundary.py for the sources).
READS: dict[Reader, Convention] = {"sglang": "out", "vllm": "in", "speculators": "in"}

COMPANIONS = ("LICENSE", "NOTICE", "README.md", "MODEL_CARD.md", "tokenizer.json", "tokenizer_config.json")


class ConversionError(ValueError):
    """A drafter that a reader has no words for, or a place that can't be written; names the field and the reason."""


@dataclass(frozen=True)
class Limit:
    """`readers` can't express a drafter that `breaks` is true of (given the target's number of layers)."""

    readers: tuple[Reader, ...]
    breaks: Callable[[DrafterConfig, int], bool]
    reason: str


_TRAIN = "train a drafter whose last boundary is below the number of layers"

_OTHERS: tuple[Reader, ...] = ("sglang", "vllm", "speculators")

LIMITS: tuple[Limit, ...] = (
    # No engine has a field for it; SpecForge's norm_output=false means something else to each of them.
    Limit(_OTHERS, lambda c, n: not c.norm_before_head, "norm_before_head=false: their heads read the normed state"),
    Limit(_OTHERS, lambda c, n: c.last_state != "pre-norm", "last_state=post-norm: they capture before the final norm"),
    Limit(_OTHERS, lambda c, n: c.boundaries != tuple(sorted(c.boundaries)), "boundaries: theirs ascend"),
    Limit(
        _OTHERS,
        lambda c, n: (c.rope_style == "interleaved") != (c.latent is not None),
        "rope_style: they rotate halves in llama attention and pairs in latent attention",
    ),
    # SGLang model runner; PR #25454 (May 2026)
    Limit(
        ("sglang",),
        lambda c, n: c.boundaries[0] != 2,
        "boundaries: SGLang read lists as outputs before #25454 and since then as inputs unless the first id is 1, so "
        "only a list that begins with boundary 2 means one thing to every version",
    ),
    Limit(
        ("sglang",),
        lambda c, n: n in c.boundaries,
        f"boundaries: its loop ends before the last layer's output; {_TRAIN}",
    ),
    # speculators data generation appends n for the loss and strips it
    Limit(("speculators",), lambda c, n: n in c.boundaries, f"boundaries: it strips the last layer's output; {_TRAIN}"),
    # sglang models/llama_eagle3.py
    Limit(
        ("sglang",), lambda c, n: c.norm_before_residual, "norm_before_residual=true: it adds to the un-normed state"
    ),
    Limit(("sglang",), lambda c, n: c.num_hidden_layers > 1, "num_hidden_layers: its later layers are other layers"),
    Limit(
        ("sglang",),
        lambda c, n: c.latent is None and len(c.boundaries) != 3,
        "boundaries: versions of its llama drafter read three states, whatever the list says",
    ),
    Limit(
        ("sglang",),
        lambda c, n: c.own_embeddings and c.hidden_size == c.target_hidden_size,
        "own_embeddings=true: it puts the target's embeddings in their place where the widths agree",
    ),
    Limit(("sglang", "vllm"), lambda c, n: c.qk_norm, "qk_norm=true: their drafters don't norm query and key heads"),
    Limit(("vllm", "speculators"), lambda c, n: not c.own_head, "own_head=false: they read a head from the checkpoint"),
    Limit(("speculators",), lambda c, n: c.latent is not None, "latent: it has llama attention only"),
    # sglang models/kimi_k25_eagle3.py, vllm models/deepseek_eagle3.py
    Limit(
        ("sglang", "vllm"),
        lambda c, n: c.latent is not None and c.latent.q_lora_rank is None,
        "q_lora_rank=null: their latent drafters need one",
    ),
    Limit(
        ("sglang", "vllm"),
        lambda c, n: c.latent is not None and c.num_hidden_layers > 1,
        "num_hidden_layers: their latent drafters have one layer",
    ),
    Limit(
        ("sglang", "vllm"),
        lambda c, n: c.latent is not None and c.norm_before_fc,
        "norm_before_fc=true: their latent drafters have no input_norm",
    ),
)


@dataclass(frozen=True)
class Verifier:
    """The target's name and architectures, which speculators' format states."""

    name: str
    architectures: tuple[str, ...]


def convert_drafter(
    source: Path,
    destination: Path,
    to: Reader,
    target: TargetConfig,
    *,
    verifier: Verifier,
    convention: Convention | None = None,
    boundaries: Sequence[int] | None = None,
) -> Wiring:
    """Write the drafter in `source`, of a target of this config, into the new directory `destination` as the reader
    `to` expects it; returns the wiring, which is also written there.

    convention, boundaries: as for read_wiring. The directory appears whole or not at all. Raises ConversionError for
    what the reader can't express and for places that can't be used, and what read_wiring and load_drafter raise.
    """
    if to not in READERS:
        raise ConversionError(f"--to {to}: known are {list(READERS)}")
    _check_place(source, destination)
    wiring = read_wiring(source, target, convention=convention, boundaries=boundaries)
    _check_limits(wiring.config, to, target.num_hidden_layers)
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        written = _write(source, partial, to, wiring, target, verifier)
        _prove(source, partial, to, wiring, written, target)
        os.rename(partial, destination)
    except OSError as error:
        raise ConversionError(f"{destination} can't be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _check_place(source: Path, destination: Path) -> None:
    if destination.exists() or destination.is_symlink():
        raise ConversionError(f"{destination} exists already: pass a new directory")
    if destination.resolve().is_relative_to(source.resolve()):
        raise ConversionError(f"{destination} lies inside {source}: pass a directory elsewhere")


def _check_limits(config: DrafterConfig, to: Reader, num_layers: int) -> None:
    broken = [limit.reason for limit in LIMITS if to in limit.readers and limit.breaks(config, num_layers)]
    if broken:
        raise ConversionError(f"{to} can't express this drafter: {'; '.join(broken)}")


def _write(
    source: Path, directory: Path, to: Reader, wiring: Wiring, target: TargetConfig, verifier: Verifier
) -> Wiring:
    """Weights, config, companions and the contract; returns it."""
    write_tensors(directory / "model.safetensors", _tensors(source, to, wiring))
    config = _WRITERS[to](wiring.config, verifier)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    made = make_wiring(
        directory,
        wiring.config,
        target,
        golden=wiring.golden,
        tokenizer=wiring.tokenizer,
        position_base=wiring.position_base,
    )
    written = replace(made, sources=wiring.sources, format=wiring.format)
    write_wiring(directory, written)
    return written


def _tensors(source: Path, to: Reader, wiring: Wiring) -> dict[str, Tensor]:
    """The tensors under the reader's names, as they are; the tables of target ids as offsets and mask."""
    checkpoint, config = Checkpoint(source), wiring.config
    named = {official: checkpoint.take(stored) for official, stored in official_names(checkpoint.stored).items()}
    if "d2t" in named or config.draft_vocab_size < config.vocab_size:
        sizes = {"draft_vocab_size": config.draft_vocab_size, "vocab_size": config.vocab_size}
        ids = target_ids(named.get("d2t"), named.get("t2d"), **sizes, kind=wiring.d2t)
        named["d2t"] = ids - torch.arange(len(ids))
        named["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    first = "layers.0." if to in ("vllm", "speculators") else "midlayer."
    return {name.replace("midlayer.", first): tensor.contiguous() for name, tensor in named.items()}


def _prove(source: Path, directory: Path, to: Reader, before: Wiring, after: Wiring, target: TargetConfig) -> None:
    """Raises ConversionError unless what was written reads back as the same wiring, by its reader's meanings, and
    drafts the same bits."""
    kind = None
    if to != "minieagle":  # the others all mean the feedback by norm_output
        kind = replace(recognise(read_json(directory / "config.json")), norm_output="feedback", ids=READS[to])
    read, meant = asdict(derive_wiring(directory, target, kind=kind).config), asdict(before.config)
    wrong = [f"{name}={read[name]!r} for {meant[name]!r}" for name in meant if read[name] != meant[name]]
    if wrong:
        raise ConversionError(f"{to} would read {'; '.join(wrong)}: this drafter can't be expressed for it")
    lender = _stand_in(before.config, target)
    if not torch.equal(_drafted(source, before, lender), _drafted(directory, after, lender)):
        raise ConversionError(f"the drafter written for {to} drafts other logits than the one that was read")


def _stand_in(config: DrafterConfig, target: TargetConfig) -> Target:
    """A target without layers that lends a drafter random embeddings, head and norm: two drafters that are the same
    draft the same from any. The target's own weights, which may be 600 GB, are not needed."""
    with torch.device("meta"):
        lender = Target(replace(target, num_hidden_layers=1, first_k_dense_replace=1))
    lender.config = target
    draw, dtype = torch.Generator().manual_seed(0), getattr(torch, config.dtype)

    def random(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype).normal_(generator=draw), requires_grad=False)

    lender.embed_tokens = random(target.vocab_size, target.hidden_size)
    lender.norm.weight = random(target.hidden_size)
    if not config.own_head:
        lender.lm_head.weight = random(target.vocab_size, target.hidden_size)
    return lender


def _drafted(directory: Path, wiring: Wiring, lender: Target) -> Tensor:
    """Logits [steps, draft vocabulary] over a fixed text and random states."""
    config, dtype = wiring.config, getattr(torch, wiring.config.dtype)
    tokens = golden_tokens(config.vocab_size)
    drafter = load_drafter(directory, lender, config=config, dtype=dtype, max_positions=len(tokens), d2t=wiring.d2t)
    shape = (len(tokens) + 1 - NUM_STEPS, len(config.boundaries), config.target_hidden_size)
    states = torch.empty(shape, dtype=dtype).normal_(generator=torch.Generator().manual_seed(1))
    return draft_logits(drafter, tokens, states)


# ---- configs in the readers' words


def _minieagle(config: DrafterConfig, verifier: Verifier) -> dict[str, Any]:
    return config.to_json()


def _sglang(config: DrafterConfig, verifier: Verifier) -> dict[str, Any]:
    """Ids are nested, as outputs (see LIMITS); a missing draft_vocab_size means the target's head. A flag that is off
    is left out: norm_output=false means something else to SpecForge, which writes the same format."""
    name = "LlamaForCausalLMEagle3" if config.latent is None else "Eagle3DeepseekV2ForCausalLM"
    ids = [b - 1 for b in config.boundaries]
    sizes = {"draft_vocab_size": config.draft_vocab_size} if config.own_head else {}
    flags = {flag: True for flag in ("fc_norm", "norm_before_fc", "norm_output") if getattr(config, flag)}
    return _hf(config, name) | sizes | flags | {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}


def _vllm(config: DrafterConfig, verifier: Verifier) -> dict[str, Any]:
    """Ids are inputs, at the top level and nested: versions differ in where they look, not in what they mean."""
    name = "Eagle3LlamaForCausalLM" if config.latent is None else "Eagle3DeepseekV3ForCausalLM"
    ids = list(config.boundaries)
    named = {"draft_vocab_size": config.draft_vocab_size, "num_aux_hidden_states": len(ids), IDS: ids}
    flags = {flag: getattr(config, flag) for flag in _FLAGS}
    return _hf(config, name) | named | flags | {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}


def _speculators(config: DrafterConfig, verifier: Verifier) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    layer = _hf(config, "LlamaForCausalLM") | {"model_type": "qwen3" if config.qk_norm else "llama"}
    other = config.target_hidden_size if config.target_hidden_size != config.hidden_size else None
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],  # verifier_accept_k=1 and no tolerance are lossless
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": {name: value for name, value in layer.items() if name not in _NOT_IN_LAYER},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": other,
        IDS: list(config.boundaries),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": config.dtype,
    } | {flag: getattr(config, flag) for flag in _FLAGS}


_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_NOT_IN_LAYER = ("architectures", "target_hidden_size", "torch_dtype", "tie_word_embeddings")
_WRITERS: dict[Reader, Callable[[DrafterConfig, Verifier], dict[str, Any]]] = {
    "minieagle": _minieagle,
    "sglang": _sglang,
    "vllm": _vllm,
    "speculators": _speculators,
}

# Spelled alike in every config that follows transformers.
_SAME = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


def _hf(config: DrafterConfig, architecture: str) -> dict[str, Any]:
    """The fields that configs which follow transformers share."""
    fields = {"architectures": [architecture]} | {name: getattr(config, name) for name in _SAME}
    if config.latent is None:
        fields |= {"model_type": "llama", "head_dim": config.head_dim}
    else:
        fields |= {"model_type": "deepseek_v3"} | asdict(config.latent)
    yarn = {"rope_type": "yarn", "type": "yarn"} | asdict(config.yarn) if config.yarn else None
    return fields | {
        "rope_scaling": yarn,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": config.dtype,
    }

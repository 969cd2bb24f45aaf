"""The fault matrix: wiring faults put into the embedded drafter one at a time, and what becomes of each.

The one idea: a fault is a difference between what the files say, or an engine does, and what the weights were trained
with; so it is made by rewriting config or tensors of a trained drafter, or by having the engine read it wrongly. Each
must be refused at load by a message that names it, or be among the doctor's first two causes. Sources of the faults:
the public bug reports behind the doctor's hypotheses.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.report import Report, new_parser
from minieagle.diagnosis import NEW_TOKENS, judge, open_undecided, ranked_causes, record
from minieagle.llm import embedded, set_threads
from minieagle.models.deepseek import Target
from minieagle.models.target_weights import load_target
from minieagle.passages import written
from minieagle.spec.doctor import MAX_CHANGES, Recording
from minieagle.spec.hypotheses import Reading
from minieagle.spec.wiring import open_drafter, read_wiring, write_wiring
from minieagle.tokenizer import Tokenizer

Tensors = dict[str, Tensor]
Q, K, V = (f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")
GATE, UP = (f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up"))
EMBED_NORM, STATE_NORM = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
YARN = {"factor": 64.0, "original_max_position_embeddings": 256}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """expect: words in the refusal, or in the name or sentence of a cause. config: fields of config.json that are
    replaced, None removes one. tensors: edits them in place. engine: fields of Reading that the engine gets wrong.
    convention: what the user says of layer ids. foreign: the config is in SpecForge's format. stated: fields of a
    wiring.json that are replaced, None where there is no such file. refused: at load. num_changes: how many single
    changes of the grid away from health. is_weak: costs half a token per step or less, which takes a longer text to
    see; what costs less than the errors is a note."""

    name: str
    expect: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Callable[[Tensors, Target], None] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    convention: str | None = None
    foreign: bool = False
    stated: Mapping[str, Any] | None = None
    refused: bool = False
    num_changes: int = 1
    is_weak: bool = False


def _swap(first: str, second: str) -> Callable[[Tensors, Target], None]:
    def edit(tensors: Tensors, _: Target) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return edit


def _swap_halves(tensors: Tensors, _: Target) -> None:
    for name in (Q, K, V):
        tensors[name] = tensors[name].roll(tensors[name].shape[1] // 2, dims=1)


def _permute_taps(tensors: Tensors, _: Target) -> None:
    low, middle, high = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat((middle, high, low), dim=1)


def _absolute_d2t(tensors: Tensors, _: Target) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def _zero_d2t(tensors: Tensors, _: Target) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def _shift_vocabulary(tensors: Tensors, _: Target) -> None:
    """As from a tokenizer with one token more in front: d2t and t2d agree with each other."""
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) + 1
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill_(0, ids, True)


def _prune_head_by_offsets(tensors: Tensors, target: Target) -> None:
    """lm_head[d2t] where lm_head[arange + d2t] was meant (TorchSpec's export)."""
    tensors["lm_head.weight"] = target.lm_head.dense_weight()[tensors["d2t"]].to(torch.bfloat16)


def _permute_head(tensors: Tensors, _: Target) -> None:
    order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]


def _other_embeddings(tensors: Tensors, target: Target) -> None:
    table = target.embed_tokens.detach().float()
    tensors["embed_tokens.weight"] = table.roll(1, dims=0).to(torch.bfloat16).clone()


def _random_embeddings(tensors: Tensors, target: Target) -> None:
    shape = target.embed_tokens.shape
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * float(target.embed_tokens.float().std())
    tensors["embed_tokens.weight"] = drawn.to(torch.bfloat16)


def _rescale(tensors: Tensors, target: Target) -> None:
    """As trained on states that were divided by the routed scaling factor."""
    tensors["fc.weight"] = tensors["fc.weight"] * target.config.routed_scaling_factor


def _rotate(tensors: Tensors, target: Target) -> None:
    """As trained on a target whose stream is rotated: the same for every tap."""
    width, generator = target.config.hidden_size, torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    taps = tensors["fc.weight"].float().unflatten(1, (-1, width))
    tensors["fc.weight"] = (taps @ rotation.T).flatten(1).to(torch.bfloat16)


def _redraw_layer(tensors: Tensors, _: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.startswith("midlayer.") and tensor.dim() == 2:
            tensors[name] = (torch.randn(tensor.shape, generator=generator) * 0.02).to(torch.bfloat16)


def _rename_layer(tensors: Tensors, _: Target) -> None:
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "decoder.")] = tensors.pop(name)


def _lose(name: str) -> Callable[[Tensors, Target], None]:
    def edit(tensors: Tensors, _: Target) -> None:
        del tensors[name]

    return edit


def _add_norm(tensors: Tensors, target: Target) -> None:
    tensors["input_norm.weight"] = torch.ones(3 * target.config.hidden_size, dtype=torch.bfloat16)


def _damage(tensors: Tensors, _: Target) -> None:
    tensors["fc.weight"][0, 0] = torch.nan


def _two_taps(tensors: Tensors, _: Target) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].chunk(3, dim=1)[0].contiguous()


IDS = "eagle_aux_hidden_state_layer_ids"

FAULTS: tuple[Fault, ...] = (
    # What it reads of the target
    Fault(name="boundaries one layer early", expect="boundaries: 2 5 8", config={"boundaries": [1, 4, 7]}),
    Fault(
        name="boundaries beyond the last layer", expect="outside 0..8", config={"boundaries": [3, 6, 9]}, refused=True
    ),
    Fault(name="first tap a layer late", expect="boundaries: 2 5 8", config={"boundaries": [3, 5, 8]}, is_weak=True),
    Fault(
        name="ids lost, the default read",
        expect="boundaries: 2 5 8",
        config={"boundaries": [2, 4, 5]},
        num_changes=2,
        is_weak=True,
    ),
    Fault(name="taps in descending order", expect="boundaries: 2 5 8", config={"boundaries": [8, 5, 2]}),
    Fault(name="fc's inputs in another order", expect="the order 2 5 8", tensors=_permute_taps),
    Fault(name="fc of one tap", expect="fusion layer reads 1", tensors=_two_taps, refused=True),
    Fault(name="no ids at all", expect="names no states", config={"boundaries": None}, foreign=True, refused=True),
    Fault(
        name="layer ids without convention",
        expect="can mean outputs",
        config={"eagle_config": {IDS: [1, 4, 7]}},
        foreign=True,
        refused=True,
    ),
    Fault(
        name="outputs read as inputs",
        expect="--capture-convention out",
        config={"eagle_config": {IDS: [1, 4, 7]}},
        foreign=True,
        convention="in",
    ),
    Fault(
        name="two lists that differ",
        expect="declares its states twice",
        config={"eagle_config": {IDS: [1, 4, 7]}, IDS: [2, 5, 8]},
        foreign=True,
        refused=True,
    ),
    Fault(name="last state normed", expect="last state: pre-norm", config={"last_state": "post-norm"}),
    Fault(name="partial sums of 8 ranks captured", expect="full sums", engine={"num_ranks": 8}),
    Fault(name="states shrunk in training", expect="scale: times 0.4", tensors=_rescale),
    Fault(name="states rotated in training", expect="rotated", tensors=_rotate),
    Fault(name="states a position late", expect="states: +1", engine={"state_shift": -1}),
    Fault(name="tokens a position late", expect="tokens: +1", engine={"token_shift": -1}),
    # Its own math
    Fault(name="post-norm state fed back", expect="norm_output: false", config={"norm_output": True}),
    Fault(name="residual behind the norm", expect="norm_before_residual: false", config={"norm_before_residual": True}),
    Fault(name="RoPE interleaved", expect="rope_style: half", config={"rope_style": "interleaved"}),
    Fault(name="RoPE base 1e6", expect="rope_theta: 10000", config={"rope_theta": 1e6}, is_weak=True),
    Fault(name="YaRN that it was not trained with", expect="yarn: off", config={"yarn": YARN}, is_weak=True),
    Fault(
        name="norms of the first layer exchanged", expect="input norms: swapped", tensors=_swap(EMBED_NORM, STATE_NORM)
    ),
    Fault(name="gate and up exchanged", expect="gate and up: swapped", tensors=_swap(GATE, UP)),
    Fault(name="keys and values exchanged", expect="keys and values: swapped", tensors=_swap(K, V)),
    Fault(name="[state ; embedding]", expect="input halves: swapped", tensors=_swap_halves),
    Fault(name="norm before fc that isn't there", expect="input_norm", config={"norm_before_fc": True}, refused=True),
    Fault(name="norm before fc that nobody reads", expect="input_norm", tensors=_add_norm, refused=True),
    # Its vocabulary
    Fault(name="d2t holds absolute ids", expect="absolute", tensors=_absolute_d2t, refused=True),
    Fault(name="d2t was lost: zeros", expect="d2t", tensors=_zero_d2t, refused=True),
    Fault(name="d2t and t2d of a shifted tokenizer", expect="d2t: offset, one too high", tensors=_shift_vocabulary),
    Fault(name="lm_head pruned by offsets", expect="lm_head: the target's", tensors=_prune_head_by_offsets),
    Fault(name="lm_head's rows permuted", expect="lm_head: the target's", tensors=_permute_head),
    Fault(name="another vocabulary", expect="vocab_size", config={"vocab_size": 8192}, refused=True),
    Fault(
        name="another model's embeddings",
        expect="embeddings: the target's",
        config={"own_embeddings": True},
        tensors=_other_embeddings,
    ),
    Fault(
        name="embeddings never trained",
        expect="embeddings: the target's",
        config={"own_embeddings": True},
        tensors=_random_embeddings,
        is_weak=True,
    ),
    # Its weights
    Fault(name="layer under another name", expect="midlayer.", tensors=_rename_layer, refused=True),
    Fault(name="a tensor missing", expect=Q, tensors=_lose(Q), refused=True),
    Fault(name="a number that is none", expect="fc.weight holds NaN", tensors=_damage, refused=True),
    Fault(name="layer never trained", expect="looks untrained", tensors=_redraw_layer),
    Fault(name="weights changed under a contract", expect="stale", tensors=_rescale, stated={}, refused=True),
    Fault(
        name="a contract for another target",
        expect="written for another target",
        stated={"target": {"num_hidden_layers": 61}},
        refused=True,
    ),
    # Two at once
    Fault(
        name="boundaries early, post-norm state fed back",
        expect="norm_output: false",
        config={"boundaries": [1, 4, 7], "norm_output": True},
        num_changes=2,
    ),
)


NOTES = (
    "partial sums and late positions are put into what the drafter is fed, by the doctor's own simulation of them",
    "not in the matrix, since no text of this length tells them apart: the un-normed state at the head "
    "(norm_before_head), the target's mild YaRN (factor 4), position base 0 or 1",
)


def write_faulty(fault: Fault, target: Target, directory: Path) -> Path:
    """The embedded drafter with the fault in it, in a folder of `directory`."""
    folder = directory / fault.name.replace(" ", "-")
    folder.mkdir()
    config = json.loads((embedded("drafter") / "config.json").read_text())
    if fault.foreign:
        config = _foreign(config)
    config = {name: value for name, value in (config | dict(fault.config)).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(embedded("drafter") / "model.safetensors")
    if fault.stated is not None:
        save_file(tensors, folder / "model.safetensors")
        wiring = read_wiring(folder, target.config)
        write_wiring(folder, replace(wiring, **fault.stated))
    if fault.tensors is not None:
        fault.tensors(tensors, target)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _foreign(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same drafter's config as SpecForge writes it."""
    own = ("model_type", "boundaries", "norm_output", "target_hidden_size")
    return {name: value for name, value in config.items() if name not in own} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: "refused at load", "cause 1", "cause 2", "note" or "MISSED", and the words."""

    how: str
    words: str

    @property
    def is_found(self) -> bool:
        return self.how != "MISSED"


def outcome(
    fault: Fault, target: Target, recording: Recording, directory: Path, *, max_changes: int = MAX_CHANGES
) -> Outcome:
    """Put the fault in and see. recording: the target's states at all boundaries."""
    folder = write_faulty(fault, target, directory)
    try:
        drafter, wiring = open_drafter(
            folder,
            target,
            convention=fault.convention,  # type: ignore[arg-type]
            dtype=torch.float32,
            max_positions=recording.longest + 16,
        )
    except ValueError as error:
        named = fault.refused and fault.expect in str(error)
        return Outcome("refused at load" if named else "MISSED", str(error))
    wired = replace(Reading(config=drafter.config, d2t=wiring.d2t), **fault.engine)
    found, findings = judge(target, drafter, wiring, recording, folder, wired=wired, max_changes=max_changes)
    said = [
        f"{cause.result.name if cause.result else ''} | {cause.sentence}: {cause.remedy}"
        for cause in ranked_causes(found, findings)[:2]
    ]
    for number, words in enumerate(said, start=1):
        if fault.expect in words and not fault.refused:
            return Outcome(f"cause {number}", words.split(" | ", 1)[1])
    if fault.is_weak and found.suspect and fault.expect in found.suspect.name:
        return Outcome("note", f"{found.suspect.name}, by log-probability only")
    return Outcome("MISSED", "; ".join(said) or "reported healthy")


def bench(options: argparse.Namespace, report: Report) -> None:
    set_threads(options.threads, None)
    target, tokenizer = load_target(embedded("target")), Tokenizer(embedded("target"))
    drafter, _, _ = open_undecided(embedded("drafter"), target)
    recording = record(target, drafter, written(target, tokenizer, NEW_TOKENS, ignore_eos=True), Console(stderr=True))
    chosen = [fault for fault in FAULTS if options.only is None or options.only in fault.name]
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
        for fault in progress.track(chosen, description="faults"):
            found.append(outcome(fault, target, recording, Path(folder)))
    rows = [[fault.name, one.how, one.words[:110]] for fault, one in zip(chosen, found, strict=True)]
    report.table(f"{len(rows)} faults, {recording.num_roots} positions", ("fault", "found as", "words"), rows)
    missed = sum(not one.is_found for one in found)
    report.notes(
        [
            f"{len(rows) - missed} of {len(rows)} are refused by name, among the doctor's first two causes, or a note",
            *NOTES,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = new_parser("faults", __doc__ or "")
    parser.add_argument("--only", metavar="WORDS", help="only faults whose name holds these words")
    parser.add_argument("--threads", type=int, metavar="N", help="threads torch uses (default: torch's own choice)")
    bench(parser.parse_args(arguments), Report.begin("faults", arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())

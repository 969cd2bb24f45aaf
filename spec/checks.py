"""What can be seen of a drafter without drafting: its numbers, its config, its vocabulary, and whether fc fits.

The one idea: a weight that was never loaded or never trained has the statistics of the draw that made it, so a random
matrix can be told by its spectrum, and a fusion layer that was trained for these states by its columns. Each check is a
function to findings; a finding that is no fault is a note.
"""

# torch annotates some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.eagle3 import Drafter
from minieagle.spec.doctor import Recording, Z

POWER_STEPS = 30
RANDOM_EDGE = 1.1
"""Largest singular value over that of a random matrix of this shape and spread (Marchenko and Pastur): within 3 % of 1
for a draw of at least 64 rows; a trained matrix has directions that stand out."""
NEAR_ONE = 0.02
"""How far a norm's weights are from where they begin after a few updates; training moves some by 0.1 and more."""
LOW_COVERAGE = 0.7
"""Published reduced vocabularies of 32,000 cover 95 % and more of a chat's tokens."""


@dataclass(frozen=True)
class Finding:
    """What was seen, in a sentence, and what to do about it; a note's remedy may be empty. is_decisive: it explains low
    agreement by itself, whatever was measured."""

    is_fault: bool
    sentence: str
    remedy: str = ""
    is_decisive: bool = False


def check_weights(weights: Mapping[str, Tensor]) -> Iterator[Finding]:
    """NaN, zeros, and what looks as it was drawn. weights: by name, of any float type."""
    again = "this was not loaded or not exported by what wrote the checkpoint: export it again, or train"
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            yield Finding(True, f"{name} holds NaN or infinity", again, True)
        elif not bool(tensor.any()):
            yield Finding(True, f"{name} is all zeros", again, True)
    matrices = [name for name, tensor in weights.items() if tensor.dim() == 2]
    drawn = [name for name in matrices if looks_random(weights[name])]
    if drawn:
        most = 2 * len(drawn) >= len(matrices)  # one alone may be a layer that training hardly needed
        sentence = f"{', '.join(drawn)} looks untrained: the spectrum is that of random numbers"
        yield Finding(most, sentence, again, most)
    norms = _norms(weights)
    if looks_unmoved(weights) and not all(bool((weights[name] == 1).all()) for name in norms):
        sentence = f"all norms are within {NEAR_ONE} of 1, where training begins: it has hardly been trained"
        yield Finding(False, sentence)
    ones = [name for name in norms if bool((weights[name] == 1).all())]
    if ones:
        whole = len(ones) == len(norms)
        yield Finding(whole, f"{', '.join(ones)}: all ones, as before training", again, whole)


def _norms(weights: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in weights.items() if tensor.dim() == 1]


def looks_unmoved(weights: Mapping[str, Tensor]) -> bool:
    """Whether all norms are about where training begins."""
    norms = _norms(weights)
    return bool(norms) and all(bool(((weights[name] - 1).abs() <= NEAR_ONE).all()) for name in norms)


def looks_untrained(weights: Mapping[str, Tensor]) -> bool:
    """Whether the fusion layer or all norms are as they were drawn: what such a drafter doesn't know of its target was
    never taught, and says nothing about which target it is."""
    fused = [tensor for name, tensor in weights.items() if name.startswith("fc.") and tensor.dim() == 2]
    return looks_unmoved(weights) or any(map(looks_random, fused))


def looks_random(matrix: Tensor) -> bool:
    """Whether a matrix [m, n] has no direction that stands out of what independent random numbers give."""
    rows, columns = matrix.shape
    if min(rows, columns) < 64:
        return False  # too small to tell
    weights = matrix.float()
    edge = float(weights.std()) * (math.sqrt(rows) + math.sqrt(columns))
    return 0 < largest_singular_value(weights) < RANDOM_EDGE * edge


def largest_singular_value(matrix: Tensor) -> float:
    """By power iteration: a lower bound, a few per cent off at worst."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(matrix.shape[1], generator=generator).to(matrix.device)
    for _ in range(POWER_STEPS):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / vector.norm()
    return float((matrix @ vector).norm())


def check_vocabulary(drafter: Drafter, recording: Recording) -> Iterator[Finding]:
    """Whether the draft vocabulary holds what the target says."""
    ids = drafter.target_ids
    if len(ids.unique()) < len(ids):
        yield Finding(True, f"d2t names {len(ids) - len(ids.unique())} tokens twice", "export d2t and t2d again")
    said = torch.cat([text.best[first:] for text, first in zip(recording.texts, recording.first, strict=True)])
    share = float(torch.isin(said, ids).float().mean())
    sentence = f"{100 * share:.1f} % of the target's choices are in the draft vocabulary of {len(ids)}"
    remedy = "the vocabulary was counted on other text, or d2t is wrong: export d2t again"
    yield Finding(True, sentence, remedy) if share < LOW_COVERAGE else Finding(False, sentence)


def check_config(config: DrafterConfig, raw: Mapping[str, object], max_positions: int) -> Iterator[Finding]:
    """Notes on what a config leaves open. raw: the config.json as published."""
    if config.max_position_embeddings < max_positions:
        yield Finding(
            False,
            f"trained for {config.max_position_embeddings} positions, the target allows {max_positions}: acceptance "
            "may fall beyond",
        )
    said = str(raw.get("dtype", raw.get("torch_dtype", "")))
    if "float16" in said and "bfloat16" not in said:
        yield Finding(False, "stored in float16: states above 65504 would overflow there, so compute in bfloat16")
    if "norm_output" in raw and raw.get("model_type") != "minieagle_eagle3":
        meaning = f"read as norm_output={config.norm_output}, norm_before_head={config.norm_before_head}"
        yield Finding(
            False,
            "norm_output has two meanings: SGLang, vLLM and speculators feed the normed state back, SpecForge norms "
            f"before the head; {meaning}",
        )
    yield Finding(False, "position base 0 or 1 can't be told apart: rotary scores see differences of positions only")


def check_fusion(drafter: Drafter, recording: Recording) -> Iterator[Finding]:
    """Whether fc's columns know the states' channels, as far as that can be seen. For a drafter that agrees badly."""
    num_channels = drafter.fc.dense_weight().shape[1]
    correlation = fusion_correlation(drafter, recording)
    if abs(correlation) < Z / math.sqrt(num_channels):
        yield Finding(
            True,
            f"fc's columns don't go with the states' channels (rank correlation {correlation:+.2f}): the states are "
            "rotated, as QuaRot and SpinQuant do, or are another target's",
            "take the target's weights that the drafter was trained on, or multiply fc by the rotation, tap by tap",
        )


def fusion_correlation(drafter: Drafter, recording: Recording) -> float:
    """How the size of fc's columns goes with the size of the states' channels, as a rank correlation in -1..1.

    A stream has channels of very different size, and a layer trained on them has columns to match; after a rotation of
    the stream, or on another target, the two know nothing of each other.
    """
    weight = drafter.fc.dense_weight().float().unflatten(1, (len(drafter.config.boundaries), -1))
    columns = weight.square().mean(0).sqrt()
    where = [recording.boundaries.index(b) for b in drafter.config.boundaries]
    states = torch.cat([text.captured[:, where].float() for text in recording.texts])
    channels = states.std(0)
    pairs = [_ranks(columns[i]) @ _ranks(channels[i]) for i in range(len(where))]
    return float(torch.stack(pairs).mean())


def _ranks(values: Tensor) -> Tensor:
    """Ranks, centred and of unit length."""
    ranks = values.argsort().argsort().float()
    ranks = ranks - ranks.mean()
    return ranks / ranks.norm()

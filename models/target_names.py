"""What the tensors of a published target are called, and which of them a text-only engine leaves in the file.

One idea: names are classified by a pure function, so that loading and a look at the headers alone agree about what is
left out, and why. Everything else must find its place in the model. Sources: the published checkpoints of DeepSeek-V3,
V3.2, Kimi-K2, K2.5, Kimi-VL and GLM-4.7-Flash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from minieagle.models.config import TargetConfig
from minieagle.models.fp8 import SCALE
from minieagle.models.headers import CheckpointError

WRAPPER = "language_model."  # Kimi-K2.5 and Kimi-VL keep the language model under this prefix

VISION = "vision tower and projector"
PREDICTION = "multi-token-prediction layers"
INDEXER = "sparse-attention indexer"
COMPUTED = "rotary tables"
TIED = "output head that is the embedding"

_RULES = (
    (VISION, re.compile(r"(vision_tower|mm_projector|multi_modal_projector)\.")),
    (INDEXER, re.compile(r"model\.layers\.\d+\.self_attn\.indexer\.")),
    (COMPUTED, re.compile(r"(.*\.)?(rotary_emb\.inv_freq|cos_cached|sin_cached)$")),
)

# Suffixes of quantised weights in other layouts. Sources: AutoAWQ, AutoGPTQ, ModelOpt, bitsandbytes.
_FOREIGN = (
    (".qweight", "AWQ or GPTQ"),
    (".weight_scale_2", "NVFP4"),
    (".weight_blocks", "MXFP4"),
    (".weight.absmax", "bitsandbytes"),
)
_READ = "weights may be plain, FP8 with weight_scale_inv, or INT4 with weight_packed and weight_scale"

_LAYER = re.compile(r"model\.layers\.(\d+)\.([^.]+)")
_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.")
_PREDICTION_MODULES = {"enorm", "hnorm", "eh_proj"}  # what a prediction layer has and no other (arXiv 2412.19437, 2.2)


def _reason(name: str, config: TargetConfig) -> str | None:
    layer = _LAYER.match(name)
    if layer is not None and int(layer[1]) >= config.num_hidden_layers:
        return PREDICTION
    if config.tie_word_embeddings and name == "lm_head.weight":
        return TIED
    return next((reason for reason, pattern in _RULES if pattern.match(name)), None)


def dropped(names: Iterable[str], config: TargetConfig) -> dict[str, list[str]]:
    """Reason -> the names, as the file spells them, of the tensors that the engine does not load.

    Raises CheckpointError when the file has layers beyond the config's that are no prediction layers: leaving those
    out would cut the model short.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        reason = _reason(name.removeprefix(WRAPPER), config)
        if reason is not None:
            found.setdefault(reason, []).append(name)
    _check_prediction(found.get(PREDICTION, []), config)
    return found


def by_layer(names: Iterable[str], num_layers: int) -> tuple[list[list[str]], list[str]]:
    """The names of each layer's tensors, and of those that belong to none; without the wrapper's prefix."""
    layers: list[list[str]] = [[] for _ in range(num_layers)]
    others: list[str] = []
    for name in names:
        layer = _LAYER.match(name)
        (layers[int(layer[1])] if layer else others).append(name)
    return layers, others


def is_expert(name: str) -> bool:
    """Whether a tensor is a routed expert's."""
    return _EXPERT.match(name) is not None


def of_other_experts(held: Collection[int], count: int) -> Callable[[str], bool]:
    """Whether a tensor belongs to a routed expert that is none of those held, but one of `count` in all."""
    others = set(range(count)).difference(held)

    def foreign(name: str) -> bool:
        expert = _EXPERT.match(name)
        return expert is not None and int(expert[1]) in others

    return foreign


def check_formats(names: Collection[str], config: TargetConfig) -> None:
    """Raises CheckpointError when the names tell a kind of quantised weights that is not read, or none where
    config.json states one. `names` without the wrapper's prefix."""
    for name in names:
        for suffix, kind in _FOREIGN:
            if name.endswith(suffix):
                raise CheckpointError(f"{name}: {kind} is not read; {_READ}")
        if name.endswith("weight_packed") and ".mlp.experts." not in name:
            raise CheckpointError(f"{name}: INT4 is read in routed experts only; {_READ}")
    for stated, suffix, kind in ((config.group_size, ".weight_packed", "INT4"), (config.fp8_block, SCALE, "FP8")):
        if stated is not None and not any(name.endswith(suffix) for name in names):
            raise CheckpointError(
                f"config.json states {kind} weights, but no tensor's name ends in {suffix}: if the weights are "
                "plain, remove quantization_config from config.json"
            )


def _check_prediction(names: Iterable[str], config: TargetConfig) -> None:
    modules: dict[int, set[str]] = {}
    for name in names:
        layer = _LAYER.match(name.removeprefix(WRAPPER))
        assert layer is not None, f"{name} is no layer's"
        modules.setdefault(int(layer[1]), set()).add(layer[2])
    declared = config.num_nextn_predict_layers or len(modules)
    for layer, found in sorted(modules.items()):
        missing = sorted(_PREDICTION_MODULES - found)
        if missing or layer >= config.num_hidden_layers + declared:
            raise CheckpointError(
                f"the weights hold layer {layer}, config.json says num_hidden_layers={config.num_hidden_layers} and "
                f"num_nextn_predict_layers={config.num_nextn_predict_layers}"
                + (f", and it is no prediction layer (no {missing[0]})" if missing else "")
                + ": config.json belongs to another model"
            )

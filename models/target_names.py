"""What the tensors of a published target are called, and which of them a text-only engine leaves in the file.

One idea: names are classified by a pure function, so that loading and a look at the headers alone agree about what is
left out, and why. Everything else must find its place in the model. Sources: the published checkpoints of DeepSeek-V3,
V3.2, Kimi-K2, K2.5, Kimi-VL and GLM-4.7-Flash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import TargetConfig

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
_LAYER = re.compile(r"model\.layers\.(\d+)\.([^.]+)")
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

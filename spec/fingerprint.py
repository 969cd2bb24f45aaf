"""Fingerprints: what a drafter's wiring was true for, so that a change is noticed and named.

The one idea: a fingerprint is cheap and says what changed. The target's is the fields of its config that change its
states, kept as they are; the weights' is a hash over names, types, shapes and a sample of every tensor's bytes, the
same however the tensors are spread over files; the tokenizer's is a hash of its vocabulary, not of its file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from minieagle.models.config import ConfigError, TargetConfig, read_json
from minieagle.models.files import FileError, open_plain, read_plain
from minieagle.models.headers import Stored, read_headers

SAMPLE_BYTES = 4096
"""Read at the beginning, the middle and the end of a tensor: training changes all of them."""

# Every field that changes what a boundary holds. The type and the packing of weights are left out: a drafter goes with
# its target in any precision. So is the context limit.
TARGET_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "rms_norm_eps",
    "rope_theta",
    "yarn",
)


def target_fingerprint(config: TargetConfig) -> dict[str, Any]:
    """The fields of TARGET_FIELDS, as JSON holds them."""
    fields = asdict(config)
    return {name: fields[name] for name in TARGET_FIELDS}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words; a field that `before` does not have was not recorded and is not compared."""
    names = [name for name in now if name in before and before[name] != now[name]]
    return [f"{name} was {before[name]!r} and is {now[name]!r}" for name in names]


def weights_fingerprint(directory: Path) -> str:
    """A hash of the tensors of a directory. Raises CheckpointError when they can't be read."""
    stored, _ = read_headers(directory)
    digest = hashlib.sha256()
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(json.dumps([name, str(tensor.dtype), tensor.shape]).encode())
        for part in _samples(tensor):
            digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _samples(tensor: Stored) -> Iterable[bytes]:
    last = max(tensor.start, tensor.stop - SAMPLE_BYTES)
    with open_plain(tensor.path) as file:
        for start in (tensor.start, (tensor.start + last) // 2, last):
            file.seek(start)
            yield file.read(min(SAMPLE_BYTES, tensor.stop - start))


def tokenizer_fingerprint(directory: Path) -> str | None:
    """A hash of the vocabulary in a model directory: which text each id stands for. None where there is no tokenizer
    of a known kind (tokenizer.json, tiktoken.model). Raises ConfigError for a damaged one."""
    try:
        if (directory / "tokenizer.json").exists():
            entries = _tokenizer_json(read_json(directory / "tokenizer.json"))
        elif (directory / "tiktoken.model").exists():
            ranks = hashlib.sha256(read_plain(directory / "tiktoken.model")).hexdigest()
            entries = {"tiktoken.model": ranks} | _specials(directory)
        else:
            return None
    except (TypeError, LookupError, AttributeError, FileError) as error:
        raise ConfigError(f"the tokenizer in {directory} is damaged: {error!r}; fetch it again") from None
    return f"sha256:{hashlib.sha256(json.dumps(sorted(entries.items())).encode()).hexdigest()}"


def _tokenizer_json(content: Mapping[str, Any]) -> dict[str, str]:
    """Text -> id of a tokenizers file; the vocabulary of a unigram model is a list, its ids the indices."""
    vocabulary: Any = content["model"]["vocab"]
    if isinstance(vocabulary, list):
        pairs = cast("list[Any]", vocabulary)
        vocabulary = {str(pair[0]): index for index, pair in enumerate(pairs)}
    added: list[Any] = content.get("added_tokens") or []
    ids: dict[Any, Any] = vocabulary | {token["content"]: token["id"] for token in added}
    return {str(text): str(i) for text, i in ids.items()}


def _specials(directory: Path) -> dict[str, str]:
    if not (directory / "tokenizer_config.json").exists():
        return {}
    decoder: dict[str, Any] = read_json(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return {str(token["content"]): i for i, token in decoder.items()}

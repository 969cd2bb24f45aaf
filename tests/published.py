"""Tiny drafters as each project publishes them: the same tensors under its names, the same facts under its fields.

Written from descriptions of the formats, without the readers' tables, so that the two can disagree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]

IDS = "eagle_aux_hidden_state_layer_ids"
SIZES: Config = {
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
}
HEAD_DIM, DRAFT_VOCAB, TAPS = 16, 40, 3
LATENT: Config = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN: Config = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": torch.rand(shape, generator=draw) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=draw) * 1.5 * shape[1] ** -0.5
        for name, shape in shapes.items()
    }


def _norms_and_mlp(prefix: str) -> dict[str, tuple[int, ...]]:
    d, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    return {
        f"{prefix}.input_layernorm": (d,),
        f"{prefix}.post_attention_layernorm": (d,),
        f"{prefix}.mlp.gate_proj": (inner, d),
        f"{prefix}.mlp.up_proj": (inner, d),
        f"{prefix}.mlp.down_proj": (d, inner),
    }


def _grouped(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    q, kv = 4 * HEAD_DIM, 2 * HEAD_DIM
    shapes = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (SIZES["hidden_size"], q)}
    return {f"{prefix}.self_attn.{name}": shape for name, shape in shapes.items()}


def _latent(prefix: str) -> dict[str, tuple[int, ...]]:
    d, heads = SIZES["hidden_size"], SIZES["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (24, 2 * d),
        "q_a_layernorm": (24,),
        "q_b_proj": (heads * 24, 24),
        "kv_a_proj_with_mqa": (40, 2 * d),
        "kv_a_layernorm": (32,),
        "kv_b_proj": (heads * 28, 32),
        "o_proj": (d, heads * 12),
    }
    return {f"{prefix}.self_attn.{name}": shape for name, shape in shapes.items()}


def tensors(
    *,
    taps: int = TAPS,
    latent: bool = False,
    reduced: bool = True,
    layers: int = 1,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    qk_norm: bool = False,
    embeddings: bool = False,
    head: bool = True,
    seed: int = 0,
) -> Tensors:
    """A drafter's tensors under the official names; later layers as `layers.N`."""
    d, vocab, drafted = SIZES["hidden_size"], SIZES["vocab_size"], DRAFT_VOCAB if reduced else SIZES["vocab_size"]
    first = "midlayer"
    shapes: dict[str, tuple[int, ...]] = {"fc": (d, taps * d), "norm": (d,), f"{first}.hidden_norm": (d,)}
    shapes |= _norms_and_mlp(first) | (_latent(first) if latent else _grouped(first, 2 * d))
    for index in range(1, layers):
        shapes |= _norms_and_mlp(f"layers.{index}") | _grouped(f"layers.{index}", d)
    shapes |= {"lm_head": (drafted, d)} if head else {}
    shapes |= {"embed_tokens": (vocab, d)} if embeddings else {}
    shapes |= {f"fc_norm.{tap}": (d,) for tap in range(taps)} if fc_norm else {}
    shapes |= {"input_norm": (taps * d,)} if norm_before_fc else {}
    prefixes = [first, *[f"layers.{index}" for index in range(1, layers)]]
    shapes |= {f"{prefix}.self_attn.{p}_norm": (HEAD_DIM,) for prefix in prefixes for p in "qk"} if qk_norm else {}
    made = _random(shapes, seed)
    if reduced:
        kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:drafted].sort().values
        made["d2t"] = kept - torch.arange(drafted)
        made["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    return made


def official(**changes: Any) -> Config:
    """As the EAGLE authors ship it: no ids."""
    return (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCAB}
        | SIZES
        | changes
    )


def specforge(ids: list[int] | None = None, **changes: Any) -> Config:
    nested = {} if ids is None else {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
    return official(architectures=["LlamaForCausalLMEagle3"], head_dim=HEAD_DIM, **nested) | changes


def model_optimizer(ids: list[int], **changes: Any) -> Config:
    eagle = {
        IDS: ids,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    return official(eagle_config=eagle, rope_scaling={"rope_type": "default", "rope_theta": 50000.0}) | changes


def vllm(ids: list[int], **changes: Any) -> Config:
    return official(architectures=["Eagle3LlamaForCausalLM"]) | {IDS: ids} | changes


def torchspec_mla(ids: list[int], **changes: Any) -> Config:
    """A full vocabulary, YaRN, no trained length."""
    sizes = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"} | LATENT
    named = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "rope_scaling": YARN}
    vocabulary = {"draft_vocab_size": 96, "num_key_value_heads": 4, "n_routed_experts": 384}
    return sizes | named | vocabulary | {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}} | changes


def speculators(ids: list[int] | None, *, layer: Config | None = None, **changes: Any) -> Config:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    rope = {"rope_type": "default", "rope_theta": SIZES["rope_theta"]}
    inner = {name: value for name, value in SIZES.items() if name != "rope_theta"}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "a/target", "architectures": ["DeepseekV3ForCausalLM"]},
        },
        "transformer_layer_config": inner
        | {"model_type": "llama", "head_dim": HEAD_DIM, "rope_parameters": rope, "layer_types": ["full_attention"]}
        | (layer or {}),
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "target_hidden_size": None,
        IDS: ids,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    } | changes


def as_speculators(named: Tensors) -> Tensors:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in named.items()}


def write(directory: Path, config: Config, named: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory

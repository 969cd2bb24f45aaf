"""The weights that a published target consists of: their names and shapes, from its config alone.

What load_target fills is checked as it is filled; this list says beforehand, from headers, what is missing, misshapen
or strange. Names are those without a wrapper's prefix; one routed expert, its number left out, stands for all of them.
Source: the published checkpoints of DeepSeek-V3 and Kimi-K2.5.
"""

from __future__ import annotations

from minieagle.models.config import TargetConfig

Shapes = dict[str, tuple[int, ...]]


def published_shapes(config: TargetConfig) -> Shapes:
    """Name -> shape [out, in] of every weight of the model, as it is before quantisation."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config, layer).items()}
    return shapes


def _layer(config: TargetConfig, layer: int) -> Shapes:
    hidden = config.hidden_size
    norms = {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    if layer < config.first_k_dense_replace:
        return norms | _attention(config) | _swiglu("mlp", hidden, config.intermediate_size)
    return norms | _attention(config) | _mixture(config)


def _attention(config: TargetConfig) -> Shapes:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    shapes: Shapes = {
        "kv_a_proj_with_mqa": (config.latent_width, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
        "o_proj": (hidden, heads * config.v_head_dim),
    }
    low = config.q_lora_rank
    if low is None:
        shapes["q_proj"] = (heads * config.qk_head_dim, hidden)
    else:
        shapes |= {"q_a_proj": (low, hidden), "q_a_layernorm": (low,), "q_b_proj": (heads * config.qk_head_dim, low)}
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _mixture(config: TargetConfig) -> Shapes:
    hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    router: Shapes = {"mlp.gate.weight": (count, hidden), "mlp.gate.e_score_correction_bias": (count,)}
    shared = config.n_shared_experts * inner
    return (
        router
        | _swiglu("mlp.experts", hidden, inner)
        | (_swiglu("mlp.shared_experts", hidden, shared) if shared else {})
    )


def _swiglu(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }

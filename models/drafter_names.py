"""What the tensors of an EAGLE-3 drafter are called, and what their shapes alone say of it.

Names here are the official ones (SafeAILab/EAGLE): `midlayer.*` for the layer that reads embedding and state. Others
are translated by a table; later layers, which official drafters have none of, keep speculators' `layers.N.*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minieagle.models.checkpoint import CheckpointError
from minieagle.models.drafter_config import DrafterConfig

Shape = tuple[int, ...]

# (what is replaced, by what): each at most once, in this order.
ALIASES: tuple[tuple[str, str], ...] = (
    (
        r"^model\.",
        "",
    ),  # Model-Optimizer, NeMo and checkpoints saved from a serving engine's wrapper: all under `model.`
    (r"^layers\.0\.", "midlayer."),  # speculators, vLLM: the layer by its index
)


def official_name(name: str) -> str:
    """The official name of a tensor that any of the published layouts may hold."""
    for pattern, replacement in ALIASES:
        name = re.sub(pattern, replacement, name, count=1)
    return name


# Buffers that older transformers saved and that are computed here.
_COMPUTED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def official_names(names: Iterable[str]) -> dict[str, str]:
    """Official name -> stored name, computed buffers left out. Raises CheckpointError when two stored names mean one
    tensor."""
    stored: dict[str, str] = {}
    for name in sorted(name for name in names if not _COMPUTED.search(name)):
        official = official_name(name)
        if official in stored:
            raise CheckpointError(
                f"the drafter holds {stored[official]} and {name}, two names of one tensor: remove the stale one"
            )
        stored[official] = name
    return stored


@dataclass(frozen=True, kw_only=True)
class DrafterShapes:
    """What a drafter's tensors say of it without its config. Fields named as in DrafterConfig mean the same; None is
    what the tensors don't say.

    `fc_width` is taps x target hidden size. `query_width` is heads x head_dim: of a latent drafter heads x (nope +
    rope). `value_width` is heads x value width, what o_proj reads. `head_dim` is told by the query norm only;
    `key_value_width` is key heads x head_dim. The three ranks are those of a latent drafter (`latent`).
    """

    hidden_size: int
    fc_width: int
    intermediate_size: int
    num_hidden_layers: int
    query_width: int
    value_width: int
    key_value_width: int | None
    head_dim: int | None
    latent: bool
    q_lora_rank: int | None
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    num_fc_norms: int
    fc_norm: bool
    norm_before_fc: bool
    qk_norm: bool
    own_embeddings: bool
    own_head: bool
    has_d2t: bool
    has_t2d: bool

    def taps(self, target_hidden_size: int) -> int:
        """How many states the fusion layer reads. Raises CheckpointError unless its width is a multiple of theirs."""
        taps, rest = divmod(self.fc_width, target_hidden_size)
        if rest or not taps:
            raise CheckpointError(
                f"fc.weight reads {self.fc_width} numbers, no multiple of the target's hidden_size="
                f"{target_hidden_size}: the drafter belongs to another target"
            )
        return taps


# Two names that no other kind of drafter has both of, and every name that one of these drafters may have.
_TELLING = ("fc.weight", "midlayer.hidden_norm.weight")
_KNOWN = re.compile(
    r"(midlayer|layers\.\d+)\."
    r"(self_attn\.((q|k|v|o|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|(q|k)_norm|(q_a|kv_a)_layernorm)"
    r"|mlp\.(gate|up|down)_proj|input_layernorm|post_attention_layernorm|hidden_norm)\.weight"
    r"|(fc|norm|input_norm|embed_tokens|lm_head|fc_norm\.\d+)\.weight|d2t|t2d"
)


def _lack(name: str, shapes: Mapping[str, Shape]) -> str:
    """What is wrong with tensors, by their official names, of which `name` is missing or of too few dimensions."""
    what = f"has shape {list(shapes[name])}" if name in shapes else "is missing"
    if not any(telling in shapes for telling in _TELLING):
        return f"{name} {what}: the directory holds no EAGLE-3 drafter"
    strange = sorted(other for other in shapes if not _KNOWN.fullmatch(other))
    beside = f"; without a place are {', '.join(strange[:8])}" if strange else ""
    return f"{name} {what}: the drafter is incomplete{beside}; fetch it again, or give the tensor its name"


def drafter_shapes(names_to_shapes: Mapping[str, Shape]) -> DrafterShapes:
    """Read the shapes of a drafter's tensors, under any published names, e.g. from safetensors headers.

    Raises CheckpointError when they are no EAGLE-3 drafter's: a tensor that every one has is missing, or one tensor is
    there under two names.
    """
    stored = official_names(names_to_shapes)
    shapes = {official: tuple(names_to_shapes[name]) for official, name in stored.items()}

    def size(name: str, dim: int) -> int | None:
        return shapes[name][dim] if len(shapes.get(name, ())) > dim else None

    def need(name: str, dim: int) -> int:
        found = size(name, dim)
        if found is None:
            raise CheckpointError(_lack(name, shapes))
        return found

    attention = "midlayer.self_attn"
    later = {int(found[1]) for name in shapes if (found := re.match(r"layers\.(\d+)\.", name))}
    latent = f"{attention}.kv_a_proj_with_mqa.weight" in shapes
    kv_rank = need(f"{attention}.kv_a_layernorm.weight", 0) if latent else None
    q_low = f"{attention}.q_a_proj.weight" in shapes
    num_fc_norms = sum(re.fullmatch(r"fc_norm\.\d+\.weight", name) is not None for name in shapes)
    return DrafterShapes(
        hidden_size=need("fc.weight", 0),
        fc_width=need("fc.weight", 1),
        intermediate_size=need("midlayer.mlp.gate_proj.weight", 0),
        num_hidden_layers=1 + max(later, default=0),
        query_width=need(f"{attention}.{'q_b_proj' if q_low else 'q_proj'}.weight", 0),
        value_width=need(f"{attention}.o_proj.weight", 1),
        key_value_width=None if latent else need(f"{attention}.k_proj.weight", 0),
        head_dim=size(f"{attention}.q_norm.weight", 0),
        latent=latent,
        q_lora_rank=size(f"{attention}.q_a_proj.weight", 0),
        kv_lora_rank=kv_rank,
        qk_rope_head_dim=need(f"{attention}.kv_a_proj_with_mqa.weight", 0) - kv_rank if kv_rank else None,
        vocab_size=size("embed_tokens.weight", 0) or size("t2d", 0),
        draft_vocab_size=size("lm_head.weight", 0) or size("d2t", 0),
        num_fc_norms=num_fc_norms,
        fc_norm=num_fc_norms > 0,
        norm_before_fc="input_norm.weight" in shapes,
        qk_norm=f"{attention}.q_norm.weight" in shapes,
        own_embeddings="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        has_d2t="d2t" in shapes,
        has_t2d="t2d" in shapes,
    )


def _attention_shapes(config: DrafterConfig, width: int) -> dict[str, Shape]:
    """Of an attention that reads `width` numbers, without prefix and `.weight`."""
    heads, sizes, hidden = config.num_attention_heads, config.latent, config.hidden_size
    if sizes is None:
        kv = (config.num_key_value_heads * config.head_dim, width)
        shapes: dict[str, Shape] = {"q_proj": (heads * config.head_dim, width), "k_proj": kv, "v_proj": kv}
        norms: dict[str, Shape] = {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
        return shapes | {"o_proj": (hidden, heads * config.head_dim)} | (norms if config.qk_norm else {})
    q_rows = heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
    shapes = {
        "kv_a_proj_with_mqa": (sizes.kv_lora_rank + sizes.qk_rope_head_dim, width),
        "kv_a_layernorm": (sizes.kv_lora_rank,),
        "kv_b_proj": (heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), sizes.kv_lora_rank),
        "o_proj": (hidden, heads * sizes.v_head_dim),
    }
    rank = sizes.q_lora_rank
    if rank is None:
        return shapes | {"q_proj": (q_rows, width)}
    return shapes | {"q_a_proj": (rank, width), "q_a_layernorm": (rank,), "q_b_proj": (q_rows, rank)}


def _layer_shapes(config: DrafterConfig, index: int) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = _attention_shapes(config, 2 * hidden if index == 0 else hidden)
    shapes: dict[str, Shape] = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    if index == 0:
        shapes["hidden_norm"] = (hidden,)
    return {f"{layer_prefix(index)}.{name}.weight": shape for name, shape in shapes.items()}


def layer_prefix(index: int) -> str:
    return f"layers.{index}" if index else "midlayer"


def official_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Every weight that a drafter of this config has: official name -> shape. d2t and t2d, which may be absent, are for
    draft_vocabulary.py."""
    taps, width, hidden = len(config.boundaries), config.target_hidden_size, config.hidden_size
    shapes: dict[str, Shape] = {"fc.weight": (hidden, taps * width), "norm.weight": (hidden,)}
    for index in range(config.num_hidden_layers):
        shapes |= _layer_shapes(config, index)
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (width,) for tap in range(taps)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (taps * width,)
    if config.own_embeddings:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.own_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    return shapes

"""What a drafter's config.json says, as one frozen dataclass: sizes, and the wiring flags that change its math.

Field names are those of published EAGLE-3 checkpoints. What other projects write is read by spec/wiring.py; this file
knows only minieagle's own spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from minieagle.models.config import ConfigError, Yarn, check_fields, refuse_unless


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Widths of a drafter whose attention is multi-head latent attention, as the MLA drafters for Kimi and DeepSeek
    have it; `q_lora_rank` null is one plain query product."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: it rotates pairs")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """An EAGLE-3 drafter (arXiv 2503.01840): one layer over [normed embedding ; normed fused state], then
    num_hidden_layers - 1 plain ones.

    `boundaries` are the target's hidden states that it reads, in order (boundary b = the state entering layer b);
    `last_state` says whether boundary L is meant before or after the target's final norm. The flags are those that
    published checkpoints carry: `norm_before_residual` takes the residual after hidden_norm, `norm_before_fc` is one
    norm over the concatenated states, `fc_norm` one norm per state, `norm_output` feeds the post-norm state back
    (EAGLE-3.1), `norm_before_head` off gives the head the un-normed state, `qk_norm` norms each query and key head.
    `rope_style` "half" rotates (x_i, x_{i + d/2}) as llama does, "interleaved" (x_0, x_1), (x_2, x_3), ... as DeepSeek
    does. `latent` not null is latent attention. `max_position_embeddings` is the length it was trained for.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_head: bool = True
    qk_norm: bool = False
    num_hidden_layers: int = 1
    rope_style: str = "half"
    yarn: Yarn | None = None
    latent: LatentSizes | None = None
    last_state: str = "pre-norm"
    own_embeddings: bool = False
    own_head: bool = True
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_choices()
        self._check_sharing()
        if not self.boundaries or any(type(b) is not int or b < 0 for b in self.boundaries):
            raise ConfigError(f"boundaries={list(self.boundaries)} must name at least one boundary, each 0 or more")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: it rotates pairs")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError(
                "norm_before_fc=true and fc_norm=true exclude each other: keep the one it was trained with"
            )
        if self.latent is not None and self.qk_norm:
            raise ConfigError("qk_norm=true with latent attention: no published drafter has both, drop one")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be one of {list(choices)}")
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind | None):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {kind.__name__} or null")

    def _check_sharing(self) -> None:
        """What is shared with the target must have the target's shape."""
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}")
        widths = f"hidden_size={self.hidden_size} differs from target_hidden_size={self.target_hidden_size}"
        if self.hidden_size != self.target_hidden_size and not self.own_embeddings:
            raise ConfigError(
                f"{widths}, so the target's embeddings can't be shared: the drafter needs embed_tokens of its own"
            )
        if self.hidden_size != self.target_hidden_size and not self.own_head:
            raise ConfigError(f"{widths}, so the target's head can't be shared: the drafter needs lm_head of its own")
        if self.draft_vocab_size != self.vocab_size and not self.own_head:
            raise ConfigError(
                f"draft_vocab_size={self.draft_vocab_size} is less than vocab_size={self.vocab_size}, but without a "
                "head of its own (own_head=false) the drafter scores the whole vocabulary"
            )

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head are rotated."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def cache_row(self) -> tuple[int, int]:
        """(heads, numbers a head) cached per row and layer: key and value, or rotated shared key and latent."""
        if self.latent is not None:
            return 1, self.latent.qk_rope_head_dim + self.latent.kv_lora_rank
        return self.num_key_value_heads, 2 * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """The config.json of a minieagle drafter; boundaries are named as such, so no convention has to be guessed."""
        named = {"architectures": ["Eagle3Drafter"], "model_type": "minieagle_eagle3"}
        return named | asdict(self) | {"boundaries": list(self.boundaries)}


_CHOICES = {"rope_style": ("half", "interleaved"), "last_state": ("pre-norm", "post-norm")}
_PARTS: dict[str, type[Yarn] | type[LatentSizes]] = {"yarn": Yarn, "latent": LatentSizes}

# Fields that change the math and that minieagle's own spelling has no words for, with the only values implemented.
_FIXED_DRAFTER: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_scaling": (None,),
}


def _made(kind: type[Any], fields: Mapping[str, Any], where: str) -> Any:
    """A dataclass from the fields of a JSON object."""
    try:
        return kind(**fields)
    except TypeError as error:
        raise ConfigError(f"{where} is incomplete or has a field too many: {error}") from None


def drafter_config(config: Mapping[str, Any]) -> DrafterConfig:
    """Parse the config.json of a drafter that states its boundaries. Raises ConfigError for what is missing or not
    implemented."""
    where = "the drafter's config.json"
    refuse_unless(_FIXED_DRAFTER, config, where)
    if not isinstance(config.get("boundaries"), list):
        raise ConfigError(f"{where} lists no `boundaries`: state which target states it reads")
    known: dict[str, Any] = {name: config[name] for name in DrafterConfig.__dataclass_fields__ if name in config}
    known["boundaries"] = tuple(config["boundaries"])
    for name, kind in _PARTS.items():
        if isinstance(known.get(name), Mapping):
            known[name] = _made(kind, known[name], f"{where}: {name}")
    made: DrafterConfig = _made(DrafterConfig, known, where)
    return made

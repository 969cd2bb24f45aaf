"""The EAGLE-3 drafter (arXiv 2503.01840): fused target states, one layer or a few, a reduced vocabulary.

Row t carries the token at position t + 1 and the target's state at position t, and predicts the token at t + 2. On rows
that the target has run, the state is fc of its captured boundaries; on drafted rows it is the parent row's own output.
The first layer reads [norm(embedding) ; norm(state)] and adds to the state; later layers, which few drafters have, are
plain ones. Inference and training share every function here except the attention, which is passed in.

T rows, D drafter width, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from minieagle.models.attention import AttentionPlan
from minieagle.models.cache import Announcer, PagedCache
from minieagle.models.deepseek import Target
from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.gqa import GroupedAttention
from minieagle.models.layers import Linear, RMSNorm, SwiGLU
from minieagle.models.mla import LatentAttention
from minieagle.models.rope import ROTATIONS, RotaryTable
from minieagle.models.rows import Rows
from minieagle.models.shards import WHOLE, Shards


@dataclass(frozen=True)
class DrafterOutput:
    """logits [N, W] float32 at the wanted rows; states [T, D]: what the next draft step takes as its state."""

    logits: Tensor
    states: Tensor


def _attention(config: DrafterConfig, input_width: int) -> GroupedAttention | LatentAttention:
    rotate, heads = ROTATIONS[config.rope_style], config.num_attention_heads
    if config.latent is None:
        return GroupedAttention(
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            input_width=input_width,
            output_width=config.hidden_size,
            rotate=rotate,
            head_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        )
    # The low-rank norms take the drafter's own epsilon: TorchSpec and vLLM agree, unlike for targets (lora_norm_eps).
    return LatentAttention(
        config.latent,
        num_heads=heads,
        input_width=input_width,
        output_width=config.hidden_size,
        norm_eps=config.rms_norm_eps,
        yarn=config.yarn,
        rotate=rotate,
    )


class DrafterLayer(nn.Module):
    """What both kinds of layer are made of: h += attention(what it reads); h += mlp(norm(h))."""

    def __init__(self, config: DrafterConfig, index: int, input_width: int, shards: Shards) -> None:
        super().__init__()
        self.index, self.sum = index, shards.sum
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = _attention(config, input_width)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        width = shards.local(config.intermediate_size, "the drafter's intermediate_size")
        self.mlp = SwiGLU(config.hidden_size, width, shards.num_local)

    def add(self, h: Tensor, read: Tensor, attention: Attention) -> Tensor:
        """Residual h [T, D] and what attention reads [T, input_width] -> [T, D]."""
        h = h + attention(self, read)
        return h + self.sum(self.mlp(self.post_attention_layernorm(h)))


class FirstLayer(DrafterLayer):
    """The layer that every drafter has, with a doubled input."""

    def __init__(self, config: DrafterConfig, shards: Shards) -> None:
        super().__init__(config, 0, 2 * config.hidden_size, shards)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedding: Tensor, state: Tensor, attention: Attention) -> Tensor:
        """embedding, state: [T, D] -> [T, D]."""
        normed = self.hidden_norm(state)
        read = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        return self.add(normed if self.norm_before_residual else state, read, attention)

    __call__ = forward


class LaterLayer(DrafterLayer):
    """A plain layer."""

    def __init__(self, config: DrafterConfig, index: int, shards: Shards) -> None:
        super().__init__(config, index, config.hidden_size, shards)

    def forward(self, h: Tensor, attention: Attention) -> Tensor:
        """h: [T, D] -> [T, D]."""
        return self.add(h, self.input_layernorm(h), attention)

    __call__ = forward


Attention = Callable[[DrafterLayer, Tensor], Tensor]
"""(layer, what it reads [T, input_width]) -> [T, D]: layer.attention over the keys that the caller keeps."""


class Drafter(nn.Module):
    """Weights are filled by drafter_weights.py or by training; `borrow` lends it the target's.

    Over several ranks the feed-forward and the vocabulary are cut, nine tenths of what a draft step of a large drafter
    reads: on two ranks 1.3 to 1.5 times as fast as rank 0 drafting by itself (bench/drafter_ranks.py). Attention and
    fusion are whole on every rank, which saves two collectives a step and leaves key heads uncut."""

    def __init__(self, config: DrafterConfig, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.config, self.shards = config, shards
        taps, target_width = len(config.boundaries), config.target_hidden_size
        if config.fc_norm:
            self.fc_norms = nn.ModuleList(RMSNorm(target_width, config.rms_norm_eps) for _ in range(taps))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * target_width, config.rms_norm_eps)
        self.fc = Linear(taps * target_width, config.hidden_size)
        self.midlayer = FirstLayer(config, shards)
        self.layers = nn.ModuleList(LaterLayer(config, index, shards) for index in range(1, config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.own_head:
            rows = shards.local(config.draft_vocab_size, "draft_vocab_size", summed=False)
            self.lm_head = Linear(config.hidden_size, rows)
        self.lead: Announcer | None = None
        """Rank 0 of several: tells the other ranks before it runs."""
        self.embed_tokens: Tensor
        self.rotary: RotaryTable
        self._target_head: Callable[[Tensor], Tensor]
        self._target_norm: Callable[[Tensor], Tensor]
        self._last_tap: int
        self.target_ids: Tensor
        self.register_buffer("target_ids", torch.empty(config.draft_vocab_size, dtype=torch.int64), persistent=False)

    def borrow(self, target: Target) -> None:
        """Take from the target what the drafter has no own of. What is borrowed is no parameter of the drafter, so
        training leaves it alone."""
        config = self.config
        if not config.own_embeddings:
            self.embed_tokens = target.embed_tokens.detach()
        if not config.own_head:
            self._target_head = lambda h: target.lm_head(h.to(target.dtype))
        if config.last_state == "post-norm":
            self._last_tap = config.boundaries.index(target.config.num_hidden_layers)
            self._target_norm = target.norm.forward

    @property
    def cache_row_bytes(self) -> int:
        """What a token takes in the cache."""
        num_heads, width = self.config.cache_row
        return self.config.num_hidden_layers * num_heads * width * self.norm.weight.dtype.itemsize

    def new_cache(self, num_slots: int) -> PagedCache:
        """An empty key/value cache of num_slots rows a layer, in the drafter's dtype: its own storage over the shared
        pool."""
        like = self.norm.weight
        num_heads, width = self.config.cache_row
        cache = PagedCache(self.config.num_hidden_layers, num_slots, num_heads, width, like.dtype, like.device)
        if self.lead is not None:
            self.lead.cache(cache, of_drafter=True, num_slots=num_slots)
        return cache

    def fuse(self, captured: Tensor) -> Tensor:
        """Captured boundaries [T, taps, target hidden], each before any norm -> states [T, D]."""
        if self.config.last_state == "post-norm":
            captured = captured.clone()
            captured[:, self._last_tap] = self._target_norm(captured[:, self._last_tap]).to(captured.dtype)
        if self.config.fc_norm:
            captured = torch.stack([norm(captured[:, i]) for i, norm in enumerate(self.fc_norms)], dim=1)
        wide = captured.flatten(1).to(self.norm.weight.dtype)
        return self.fc(self.input_norm(wide) if self.config.norm_before_fc else wide)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.shards.lookup(token_ids, self.embed_tokens).to(self.norm.weight.dtype)

    def decode(self, token_ids: Tensor, states: Tensor, attention: Attention) -> Tensor:
        """Rows of tokens [T] and states [T, D] through all layers -> [T, D], before the final norm."""
        h = self.midlayer(self.embed(token_ids), states, attention)
        for layer in self.layers:
            h = layer(h, attention)
        return h

    def all_layers(self) -> Iterator[DrafterLayer]:
        """The first layer, then the later ones."""
        yield self.midlayer
        for layer in self.layers:
            yield cast(DrafterLayer, layer)

    def head(self, h: Tensor) -> Tensor:
        """Logits [T, W] of normed states [T, D], by the drafter's own head or the target's; a rank that doesn't lead
        has its own columns only."""
        piece = self.lm_head(h) if self.config.own_head else self._target_head(h)
        whole = self.shards.join_columns(piece)
        return piece if whole is None else whole

    def finish(self, h: Tensor, logit_rows: Tensor | None = None) -> DrafterOutput:
        """Layers' output [T, D] -> logits at the wanted rows, and the states for the next draft step."""
        normed = self.norm(h)
        read = normed if self.config.norm_before_head else h
        wanted = read if logit_rows is None else read.index_select(0, logit_rows)
        return DrafterOutput(self.head(wanted).float(), normed if self.config.norm_output else h)

    @torch.inference_mode()
    def forward(
        self, rows: Rows, states: Tensor, cache: PagedCache, *, logit_rows: Tensor | None = None
    ) -> DrafterOutput:
        """Run rows (row t: token t + 1, position t) with states [T, D]; writes keys and values into the cache."""
        if self.lead is not None:
            self.lead.drafter(rows, states, cache, logit_rows)
        plan, slots = AttentionPlan.of(rows), rows.write_slots()
        cos, sin = self.rotary.at(rows.positions)

        def attention(layer: DrafterLayer, x: Tensor) -> Tensor:
            return layer.attention(x, cos, sin, cache, layer.index, slots, plan)

        return self.finish(self.decode(rows.token_ids, states, attention), logit_rows)

"""The target: DeepSeek-V3 architecture (arXiv 2412.19437), one forward over rows.

Boundary b is the residual stream entering layer b, before any norm: b = 0 the embedding output, b = L the last layer's
output before the final norm. The forward takes the wanted boundaries as an argument and returns them; there are no
hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from minieagle.models.attention import AttentionPlan, Plan
from minieagle.models.cache import Announcer, PagedCache
from minieagle.models.config import TargetConfig
from minieagle.models.flash_mla import FlashPlan, Prefix
from minieagle.models.graphs import Inputs, VerifyGraphs
from minieagle.models.layers import Linear, RMSNorm, SwiGLU
from minieagle.models.mla import LatentAttention
from minieagle.models.moe import MixtureOfExperts
from minieagle.models.rope import RotaryTable
from minieagle.models.rows import Rows
from minieagle.models.shards import WHOLE, Shards


@dataclass(frozen=True)
class TargetOutput:
    """logits [W, vocab] float32 at the wanted rows; captured [T, len(boundaries), hidden] in the model's dtype."""

    logits: Tensor
    captured: Tensor


class Block(nn.Module):
    """One layer: h += attention(norm(h)); h += feed_forward(norm(h))."""

    def __init__(self, config: TargetConfig, index: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.index, self.add = index, shards.sum
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = LatentAttention(
            config,
            num_heads=shards.local(config.num_attention_heads, "num_attention_heads"),
            input_width=config.hidden_size,
            output_width=config.hidden_size,
            norm_eps=config.lora_norm_eps,
            yarn=config.yarn,
            num_slices=shards.num_local,
        )
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if index < config.first_k_dense_replace:
            width = shards.local(config.intermediate_size, "intermediate_size")
            self.feed_forward = SwiGLU(config.hidden_size, width, shards.num_local)
        else:
            self.feed_forward = MixtureOfExperts(config, shards)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache, slots: Tensor, plan: Plan) -> Tensor:
        h = h + self.add(self.attention(self.input_norm(h), cos, sin, cache, self.index, slots, plan))
        return h + self.add(self.feed_forward(self.post_attention_norm(h)))

    __call__ = forward


class Target(nn.Module):
    """The whole model, or one rank's part of it: heads, intermediate columns and rows of the vocabulary are cut, all
    else is whole on every rank. Weights are filled by target_weights.py."""

    def __init__(self, config: TargetConfig, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.config, self.shards = config, shards
        vocabulary = shards.local(config.vocab_size, "vocab_size", summed=False)
        self.embed_tokens = nn.Parameter(torch.empty(vocabulary, config.hidden_size))
        self.layers = nn.ModuleList(Block(config, index, shards) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, vocabulary)
        self.rotary: RotaryTable
        self.lead: Announcer | None = None
        """Rank 0 of several: tells the other ranks before it runs."""
        self.prefix: Prefix | None = None
        """A library's attention over committed rows, where equal bits are given up for it (models/acceleration.py)."""
        self.graphs: VerifyGraphs | None = None
        """Recorded decode and verify steps."""

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    @property
    def cache_row_bytes(self) -> int:
        """What a token takes in the cache."""
        return self.config.num_hidden_layers * self.config.latent_width * self.dtype.itemsize

    def new_cache(self, num_slots: int) -> PagedCache:
        """An empty latent cache of num_slots rows a layer, in the model's dtype and on its device."""
        layers, width = self.config.num_hidden_layers, self.config.latent_width
        cache = PagedCache(layers, num_slots, 1, width, self.dtype, self.device)
        if self.lead is not None:
            self.lead.cache(cache, of_drafter=False, num_slots=num_slots)
        return cache

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.shards.lookup(token_ids, self.embed_tokens)

    def head(self, h: Tensor) -> Tensor:
        """Logits [T, vocab] float32 of states h [T, hidden] at boundary L; a rank that doesn't lead has its own columns
        only."""
        piece = self.lm_head(self.norm(h)).float()
        whole = self.shards.join_columns(piece)
        return piece if whole is None else whole

    @torch.inference_mode()
    def forward(
        self, rows: Rows, cache: PagedCache, *, boundaries: Sequence[int] = (), logit_rows: Tensor | None = None
    ) -> TargetOutput:
        """Run rows through the model, writing their latents into the cache.

        boundaries: which of 0..L to return, in the order given. logit_rows: [W] int64 rows whose logits are wanted,
        None for all of them.
        """
        if self.lead is not None:
            self.lead.target(rows, cache, boundaries, logit_rows)
        if self.graphs is not None and self.graphs.takes(rows, logit_rows):
            return TargetOutput(*self.graphs.run(rows, cache, boundaries, partial(self._replayed, cache, boundaries)))
        plan = AttentionPlan.of(rows) if self.prefix is None else FlashPlan.of(rows, self.prefix)
        h, captured = self._layers(rows.token_ids, rows.positions, rows.write_slots(), plan, cache, boundaries)
        return TargetOutput(self.head(h if logit_rows is None else h.index_select(0, logit_rows)), captured)

    def _replayed(self, cache: PagedCache, boundaries: Sequence[int], inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The forward that a graph holds: logits and captured boundaries of every row."""
        places = inputs.token_ids, inputs.positions, inputs.write_slots
        h, captured = self._layers(*places, inputs.plan(), cache, boundaries)
        return self.head(h), captured

    def _layers(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: Plan,
        cache: PagedCache,
        boundaries: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Rows at boundary L [T, hidden], and the wanted boundaries [T, count, hidden]."""
        cos, sin = self.rotary.at(positions)
        h = self.embed(token_ids)
        states: dict[int, Tensor] = {0: h} if 0 in boundaries else {}
        for index, layer in enumerate(self.layers):
            h = layer(h, cos, sin, cache, slots, plan)
            if index + 1 in boundaries:
                states[index + 1] = h
        if not boundaries:
            return h, h.new_empty(h.shape[0], 0, h.shape[1])
        return h, torch.stack([states[b] for b in boundaries], dim=1)

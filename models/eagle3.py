"""The EAGLE-3 drafter (arXiv 2503.01840): fused target states, one layer, a reduced vocabulary.

Row t carries the token at position t + 1 and the target's state at position t, and predicts the token at t + 2. On rows
that the target has run, the state is fc of its captured boundaries; on drafted rows it is the parent row's own output.
The layer reads [norm(embedding) ; norm(state)] and adds to the un-normed state. Inference and training share every
function here except the attention, which is passed in.

T rows, D drafter width, H heads, K key heads, P head width, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minieagle.models.attention import AttentionPlan, attend
from minieagle.models.cache import PagedCache
from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.layers import Linear, RMSNorm, SwiGLU
from minieagle.models.rope import RotaryTable, rotate_half
from minieagle.models.rows import Rows

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [T, H, P], k [T, K, P], v [T, K, P]), not yet rotated -> [T, H * P]."""


@dataclass(frozen=True)
class DrafterOutput:
    """logits [N, W] float32 at the wanted rows; states [T, D]: what the next draft step takes as its state."""

    logits: Tensor
    states: Tensor


class DrafterLayer(nn.Module):
    """The one decoder layer, with a doubled input."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.qkv = Linear(2 * width, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim)
        self.o = Linear(self.num_heads * self.head_dim, width)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def forward(self, embedding: Tensor, state: Tensor, attention: Attention) -> Tensor:
        """embedding, state: [T, D] -> [T, D], before the final norm."""
        normed = self.hidden_norm(state)
        qkv = self.qkv(torch.cat((self.input_layernorm(embedding), normed), dim=-1))
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(heads, dim=-2)
        h = (normed if self.norm_before_residual else state) + self.o(attention(q, k, v))
        return h + self.mlp(self.post_attention_layernorm(h))

    __call__ = forward


class Drafter(nn.Module):
    """Weights are filled by drafter_weights.py or by training; `embed_tokens` is the target's unless it has its own."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        taps, target_width = len(config.boundaries), config.target_hidden_size
        if config.fc_norm:
            self.fc_norms = nn.ModuleList(RMSNorm(target_width, config.rms_norm_eps) for _ in range(taps))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * target_width, config.rms_norm_eps)
        self.fc = Linear(taps * target_width, config.hidden_size)
        self.midlayer = DrafterLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)
        self.embed_tokens: Tensor
        self.rotary: RotaryTable
        self.target_ids: Tensor
        self.register_buffer("target_ids", torch.empty(config.draft_vocab_size, dtype=torch.int64), persistent=False)

    def new_cache(self, num_slots: int) -> PagedCache:
        """An empty key/value cache of num_slots rows, in the drafter's dtype: its own storage over the shared pool."""
        layer, like = self.midlayer, self.norm.weight
        return PagedCache(1, num_slots, layer.num_kv_heads, 2 * layer.head_dim, like.dtype, like.device)

    def fuse(self, captured: Tensor) -> Tensor:
        """Captured boundaries [T, taps, target hidden] -> states [T, D]."""
        if self.config.fc_norm:
            captured = torch.stack([norm(captured[:, i]) for i, norm in enumerate(self.fc_norms)], dim=1)
        wide = captured.flatten(1)
        return self.fc(self.input_norm(wide) if self.config.norm_before_fc else wide)

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embed_tokens).to(self.norm.weight.dtype)

    def finish(self, h: Tensor, logit_rows: Tensor | None = None) -> DrafterOutput:
        """Layer output [T, D] -> logits at the wanted rows, and the states for the next draft step."""
        normed = self.norm(h)
        wanted = normed if logit_rows is None else normed.index_select(0, logit_rows)
        return DrafterOutput(self.lm_head(wanted).float(), normed if self.config.norm_output else h)

    @torch.inference_mode()
    def forward(
        self, rows: Rows, states: Tensor, cache: PagedCache, *, logit_rows: Tensor | None = None
    ) -> DrafterOutput:
        """Run rows (row t: token t + 1, position t) with states [T, D]; writes keys and values into the cache."""
        plan, slots = AttentionPlan.of(rows), rows.write_slots()
        cos, sin = self.rotary.at(rows.positions)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = rotate_half(q, cos, sin), rotate_half(k, cos, sin)
            cache.write(0, slots, torch.cat((k, v), dim=-1))
            width = q.shape[-1]
            scaled = q.float() * width**-0.5
            out = attend(scaled, cache.layer(0), plan, key_width=width, value_start=width)
            return out.to(q.dtype).flatten(1)

        return self.finish(self.midlayer(self.embed(rows.token_ids), states, attention), logit_rows)

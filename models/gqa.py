"""Grouped-query attention (arXiv 2305.13245) as llama-style drafters have it, with qwen3's norms of each head.

The cache holds one row per token, layer and key head: the rotated key, then the value. Softmax scale is
head_dim^-0.5 under YaRN too: llama's YaRN scales cos and sin only (transformers, modeling_rope_utils.py), unlike
DeepSeek's.

T rows, H heads, K key heads, P head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minieagle.models.attention import AttentionPlan, attend
from minieagle.models.cache import PagedCache
from minieagle.models.layers import Linear, RMSNorm
from minieagle.models.rope import Rotate


class GroupedAttention(nn.Module):
    """x [T, input_width] -> [T, output_width]; writes its rows into the cache before it reads. `head_norm_eps` not None
    norms each query and key head before rotation."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        input_width: int,
        output_width: int,
        rotate: Rotate,
        head_norm_eps: float | None,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.rotate = (num_heads, num_kv_heads, num_kv_heads), head_dim, rotate
        self.qkv = Linear(input_width, sum(self.heads) * head_dim)
        self.has_head_norms = head_norm_eps is not None
        if head_norm_eps is not None:
            self.q_norm, self.k_norm = RMSNorm(head_dim, head_norm_eps), RMSNorm(head_dim, head_norm_eps)
        self.o = Linear(num_heads * head_dim, output_width)
        self.scale = head_dim**-0.5

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, H, P] and keys [T, K, P], values [T, K, P]."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=-2)
        if self.has_head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin), v

    def output(self, mixed: Tensor, dtype: torch.dtype) -> Tensor:
        """Weighted values [T, H, P] -> [T, output_width] in dtype."""
        return self.o(mixed.to(dtype).flatten(1))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache, layer: int, slots: Tensor, plan: AttentionPlan
    ) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        cache.write(layer, slots, torch.cat((k, v), dim=-1))
        query = q.float() * self.scale
        mixed = attend(query, cache.layer(layer), plan, key_width=self.head_dim, value_start=self.head_dim)
        return self.output(mixed, q.dtype)

    __call__ = forward

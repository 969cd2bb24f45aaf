"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in absorbed form.

The cache holds one row per token and layer: the rotated shared key k_pe [P], then the normed latent c_kv [R]. W_UK is
folded into the query and W_UV into the output, so no per-head key or value is ever built: q_lat = q_nope W_UK,
score = q_pe . k_pe + q_lat . c_kv, o_lat = softmax(score) c_kv, out = o_lat W_UV. Between the two foldings everything
is float32; on a CPU small W_UK and W_UV are too, since small fp32 products take half the time of bf16 ones.

T rows, H heads, N nope, P rotary and V value width per head, R latent rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from minieagle.models.attention import Plan
from minieagle.models.cache import PagedCache
from minieagle.models.config import Yarn
from minieagle.models.layers import Linear, RMSNorm, pad_rows, summed_linear
from minieagle.models.rope import Rotate, rotate_interleaved, softmax_scale

FLOAT32_FOLD = 2**18
"""kv_b weights of up to this many numbers (1 MB in float32, what a core's cache holds) are kept in float32 on a CPU."""


def _per_head(x: Tensor, weight: Tensor, tiled: bool) -> Tensor:
    """x [T, H, a] times weight [H, a, b] -> [T, H, b] in the weight's dtype; fp32 products need rows in fours."""
    rows = x.to(weight.dtype)
    if tiled:
        # Triton comes with CUDA builds of torch only
        from minieagle.models.tiled_linear import tiled_per_head

        return tiled_per_head(rows, weight)
    if weight.dtype == torch.float32:
        rows = pad_rows(rows, 4)
    return torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1)[: x.shape[0]]


class LatentWidths(Protocol):
    """The sizes of latent attention by their published names: a target's config has them, a latent drafter's too."""

    @property
    def q_lora_rank(self) -> int | None: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...


class LatentAttention(nn.Module):
    """x [T, input_width] -> [T, output_width], or num_slices partial sums of it side by side; writes its rows into the
    cache before it reads."""

    def __init__(
        self,
        widths: LatentWidths,
        *,
        num_heads: int,
        input_width: int,
        output_width: int,
        norm_eps: float,
        yarn: Yarn | None,
        rotate: Rotate = rotate_interleaved,
        num_slices: int = 1,
    ) -> None:
        super().__init__()
        self.num_heads, self.nope = num_heads, widths.qk_nope_head_dim
        self.rope, self.rank, self.value = widths.qk_rope_head_dim, widths.kv_lora_rank, widths.v_head_dim
        self.q_rank, self.rotate = widths.q_lora_rank, rotate
        query_width = num_heads * (self.nope + self.rope)
        self.qkv_a = Linear(input_width, (self.q_rank or query_width) + self.rank + self.rope)
        if self.q_rank is not None:
            self.q_a_norm = RMSNorm(self.q_rank, norm_eps)
            self.q_b = Linear(self.q_rank, query_width)
        self.kv_a_norm = RMSNorm(self.rank, norm_eps)
        self.w_uk = nn.Parameter(torch.empty(num_heads, self.nope, self.rank))
        self.w_uv = nn.Parameter(torch.empty(num_heads, self.rank, self.value))
        self.o = summed_linear(num_heads * self.value, output_width, num_slices)
        self.scale = softmax_scale(self.nope + self.rope, yarn)

    def _queries_and_latent(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x -> queries [T, H, N + P], latent c_kv [T, R] (normed), shared key k_pe [T, P] (not yet rotated)."""
        q, c_kv, k_pe = self.qkv_a(x).split((self.qkv_a_q_width, self.rank, self.rope), dim=-1)
        if self.q_rank is not None:
            q = self.q_b(self.q_a_norm(q))
        return q.view(x.shape[0], self.num_heads, -1), self.kv_a_norm(c_kv), k_pe

    @property
    def qkv_a_q_width(self) -> int:
        return self.q_rank or self.num_heads * (self.nope + self.rope)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, H, P + R], the one key [T, 1, P + R] of a row, which is what is cached, and its value
        [T, 1, R], the key's own latent part."""
        q, c_kv, k_pe = self._queries_and_latent(x)
        q_nope, q_pe = q.split((self.nope, self.rope), dim=-1)
        rotated = self.rotate(torch.cat((q_pe, k_pe.unsqueeze(1)), dim=1), cos, sin)
        key = torch.cat((rotated[:, -1], c_kv), dim=-1).unsqueeze(1)
        query = torch.cat((rotated[:, :-1].to(self.w_uk.dtype), _per_head(q_nope, self.w_uk, self.qkv_a.tiled)), dim=-1)
        return query, key, key[..., self.rope :]

    def output(self, mixed: Tensor, dtype: torch.dtype) -> Tensor:
        """Weighted values [T, H, R] -> [T, output_width] in dtype."""
        return self.o(_per_head(mixed, self.w_uv, self.qkv_a.tiled).to(dtype).reshape(mixed.shape[0], -1))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache, layer: int, slots: Tensor, plan: Plan
    ) -> Tensor:
        query, key, _ = self.project(x, cos, sin)
        cache.write(layer, slots, key)
        query = query.float() * self.scale
        mixed = plan.attend(query, cache.layer(layer), key_width=key.shape[-1], value_start=self.rope)
        return self.output(mixed, x.dtype)

    __call__ = forward

"""Attention by flashinfer's paged MLA kernel, where speed is asked for rather than equal bits (exact=False on a GPU).

A row sees two sets of keys: its sequence's committed rows, all of them, which is what the library's kernel is good at;
and its ancestors among the rows of this forward, a tree of any shape, which no library takes and which is small. Each
part gives a softmax over its own keys and the log of its sum; two such parts merge exactly (the log-sum-exp identity,
as in FlashAttention, arXiv 2205.14135). The kernel cuts the committed keys by the whole batch's lengths, so a row's
last bits depend on its company: right, but not the promise that models/attention.py keeps.

flashinfer's interface (0.4 and later): plan and run of BatchMLAPagedAttentionWrapper, docs.flashinfer.ai/api/mla.html.
Its log-sum-exp is to base 2. Pages of one row are our slots.

T rows, H heads, D = P + R: rotary and latent width, n rows of one span.
"""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from minieagle.models.rows import Rows, Span
from minieagle.models.staging import staged

HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
WIDTHS = (512, 64)
"""Latent and rotary width that flashinfer's kernel is made for: DeepSeek-V2's, and every model's since."""
WORKSPACE_BYTES = 128 * 2**20
_HOPPER = 9


def merge(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Two attentions [.., R] of the same queries over two sets of keys, with the natural logs [..] of their sums of
    exponentials -> the attention over both."""
    share = torch.sigmoid(first_lse - second_lse).unsqueeze(-1)
    return first * share + second * (1 - share)


class Prefix(Protocol):
    """Attention over committed rows only."""

    def plan(self, spans: Sequence[Span]) -> None:
        """Called once a forward, with the spans that have committed rows."""
        ...

    def run(self, q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled queries [N, H, D] float32 of these spans' rows over a layer's cache [num_slots, D] -> [N, H, R] and
        the natural log-sum-exp [N, H], both float32."""
        ...


class FlashInferPrefix:
    """flashinfer's paged MLA behind `Prefix`. Mutable: it holds the plan of one forward and a workspace."""

    def __init__(self, device: torch.device, num_heads: int, rank: int, rope: int, dtype: torch.dtype) -> None:
        # heavy (it compiles kernels) and optional: the extra `gpu`
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # pyright: ignore[reportMissingImports]

        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = BatchMLAPagedAttentionWrapper(workspace, backend="fa3" if hopper else "fa2")
        self._sizes, self._rope, self._dtype = (num_heads, rank, rope), rope, dtype

    @staticmethod
    def takes(rank: int, rope: int, dtype: torch.dtype) -> bool:
        return HAS_FLASHINFER and (rank, rope) == WIDTHS and dtype == torch.bfloat16

    def plan(self, spans: Sequence[Span]) -> None:
        lengths = [span.committed for span in spans]
        slots = torch.cat([span.slots[: span.committed] for span in spans]).int()
        rows, keys = _ends([span.num_rows for span in spans]), _ends(lengths)
        is_causal, page_size, scale = False, 1, 1.0  # queries come scaled
        of_kernel = is_causal, scale, self._dtype, self._dtype
        self._wrapper.plan(
            rows, keys, slots, torch.tensor(lengths, dtype=torch.int32), *self._sizes, page_size, *of_kernel
        )

    def run(self, q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        rotary, latent = q[..., : self._rope].to(self._dtype), q[..., self._rope :].to(self._dtype)
        keys = cache.unsqueeze(1)  # pages of one row
        out, log2 = self._wrapper.run(
            latent.contiguous(), rotary.contiguous(), keys[..., self._rope :], keys[..., : self._rope], return_lse=True
        )
        return out.float(), log2 * math.log(2)


def _ends(counts: Sequence[int]) -> Tensor:
    """[0, the running sums], on the host, where the kernel's planner reads them."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


@dataclass(frozen=True)
class _Own:
    """Spans of equal shape and their rows of this forward: rows [B, n] in the flat batch, slots [B, K] of their keys,
    mask [B, n, K] 0 or -inf."""

    rows: Tensor
    slots: Tensor
    mask: Tensor

    @staticmethod
    def of(spans: Sequence[Span], starts: Sequence[int], device: torch.device) -> _Own:
        num_rows, num_keys = spans[0].num_rows, spans[0].first + spans[0].num_rows
        rows = staged(starts, device).unsqueeze(1) + torch.arange(num_rows, device=device)
        slots = torch.stack([span.slots[span.committed :][:num_keys] for span in spans])
        allowed = torch.stack([_allowed(span, num_keys) for span in spans])
        return _Own(rows, slots, torch.where(allowed, 0.0, float("-inf")))

    def attend(self, q: Tensor, cache: Tensor, value_start: int) -> tuple[Tensor, Tensor]:
        """[B, n, H, R] and the log-sum-exp [B, n, H]."""
        keys = cache[self.slots].float()
        scores = torch.einsum("bnhd,bkd->bnhk", q[self.rows], keys) + self.mask.unsqueeze(2)
        return torch.einsum("bnhk,bkr->bnhr", scores.softmax(-1), keys[..., value_start:]), scores.logsumexp(-1)


def _allowed(span: Span, num_keys: int) -> Tensor:
    """[n, K]: which of the rows behind the committed ones each row sees."""
    device = span.slots.device
    if span.ancestors is None:
        return torch.ones(span.num_rows, num_keys, dtype=torch.bool, device=device).tril(num_keys - span.num_rows)
    seen = torch.zeros(span.num_rows, num_keys + 1, dtype=torch.bool, device=device)
    return seen.scatter_(1, torch.where(span.ancestors >= 0, span.ancestors, num_keys), True)[:, :num_keys]


@dataclass(frozen=True)
class FlashPlan:
    """One forward's tables: `with_prefix` [N], the rows whose sequence has committed rows."""

    prefix: Prefix
    with_prefix: Tensor | None
    own: tuple[_Own, ...]

    @staticmethod
    def of(rows: Rows, prefix: Prefix) -> FlashPlan:
        starts = [0, *accumulate(span.num_rows for span in rows.spans)]
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, span in enumerate(rows.spans):
            alike[span.num_rows, span.first].append(index)
        device = rows.token_ids.device
        own = [_Own.of([rows.spans[i] for i in same], [starts[i] for i in same], device) for same in alike.values()]
        behind = [i for i, span in enumerate(rows.spans) if span.committed]
        if not behind:
            return FlashPlan(prefix, None, tuple(own))
        prefix.plan([rows.spans[i] for i in behind])
        flat = [row for i in behind for row in range(starts[i], starts[i + 1])]
        return FlashPlan(prefix, staged(flat, device), tuple(own))

    def attend(self, q: Tensor, cache: Tensor, *, key_width: int, value_start: int) -> Tensor:
        """As models/attention.py's `attend`, for caches of one key head whose value is the key's end."""
        layer = cache.squeeze(1)
        assert layer.shape[-1] == key_width == q.shape[-1], "latent attention only"
        out = q.new_empty(*q.shape[:2], key_width - value_start)
        lse = q.new_empty(q.shape[:2])
        for own in self.own:
            out[own.rows], lse[own.rows] = own.attend(q, layer, value_start)
        if self.with_prefix is not None:
            chosen = self.with_prefix
            found, found_lse = self.prefix.run(q[chosen], layer)
            out[chosen] = merge(found, found_lse, out[chosen], lse[chosen])
        return out

"""Mixture of experts as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): sigmoid routing, a correction bias that
takes part in the choice only, group-limited top-k, and a shared expert that every token passes."""

from __future__ import annotations

from functools import cached_property
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minieagle.models.config import TargetConfig
from minieagle.models.grouped_experts import GroupedExperts
from minieagle.models.int4 import Int4Linear
from minieagle.models.layers import HAS_TRITON, SwiGLU, pad_rows, silu_mul, tiled_product
from minieagle.models.shards import WHOLE, Shards


def _within_best_groups(choice: Tensor, num_groups: int, topk_group: int) -> Tensor:
    """choice [T, E] with -inf outside the topk_group groups whose two best experts sum highest."""
    grouped = choice.unflatten(-1, (num_groups, -1))
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    best = group_scores.topk(topk_group, dim=-1).indices
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


class Router(nn.Module):
    """x [T, D] -> expert ids [T, A] int64 and their weights [T, A] float32, in float32 throughout."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.n_routed_experts))
        self.num_groups, self.topk_group = config.n_group, config.topk_group
        self.topk, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.normalise = config.norm_topk_prob

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A row has the same bits in any batch: the fp32 product gets whole tiles of rows, and the sigmoid is spelled
        with exp, since torch.sigmoid rounds the last few elements of a tensor by other code. On a GPU the product is
        our own: the library's may be TF32, whose 10 bits choose other experts."""
        rows = pad_rows(x).float()
        logits = tiled_product(rows, self.weight) if x.is_cuda and HAS_TRITON else F.linear(rows, self.weight)
        scores = logits.neg_().exp_().add_(1.0).reciprocal_()
        choice = scores + self.e_score_correction_bias
        if self.num_groups > 1:
            choice = _within_best_groups(choice, self.num_groups, self.topk_group)
        ids = choice.topk(self.topk, dim=-1).indices
        weights = scores.gather(-1, ids)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids[: x.shape[0]], weights[: x.shape[0]] * self.scaling

    __call__ = forward


class Expert(nn.Module):
    """One routed expert: two products, each plain or INT4. x [T, D] -> [T, D]."""

    def __init__(self, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down


class MixtureOfExperts(nn.Module):
    """x [T, D] -> [T, D], or partial sums of it side by side: weighted routed experts plus the shared one. `experts` is
    filled by the loader."""

    def __init__(self, config: TargetConfig, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = nn.ModuleList()
        shared = config.n_shared_experts * shards.local(config.moe_intermediate_size, "moe_intermediate_size")
        self.shared = SwiGLU(config.hidden_size, shared, shards.num_local) if shared else None
        self.topk = config.num_experts_per_tok
        self.grouped: GroupedExperts | None = None
        self.shards = shards
        if shards.expert_parallel:
            shards.local(config.n_routed_experts, "n_routed_experts")  # refused where slices would be unequal
        held = np.array(shards.experts(config.n_routed_experts))
        self.places = np.full(config.n_routed_experts, -1)
        self.places[held] = np.arange(held.size)  # where each expert lies in `experts`, -1 for other ranks'

    def pack(self) -> None:
        """Once the experts are there: on a GPU, put their weights one behind the other where the kernel takes them;
        where it doesn't, each INT4 product for itself is PyTorch's."""
        if self.router.weight.is_cuda and HAS_TRITON and GroupedExperts.takes(self.products):
            self.group()
            return
        for module in self.experts.modules():
            if isinstance(module, Int4Linear):
                module.pack()

    def group(self) -> None:
        """From now on compute all experts of a step together (models/grouped_experts.py)."""
        self.grouped = GroupedExperts(self.products)
        nobody = len(self.products)
        places = np.where(self.places < 0, nobody, self.places)
        self.device_places = torch.from_numpy(places).to(self.router.weight.device)

    def _outputs(self, x: Tensor, ids: Tensor) -> Tensor:
        """Each row's chosen experts' outputs [T, A, D], zero for other ranks' experts. Rows are sorted by expert, so
        that an expert reads its weights once. Who goes where is worked out on the host: a dozen integers cost less
        there than kernel launches, and which experts run has to be known there anyway (one copy from the device a
        layer)."""
        if self.grouped is not None:
            return self.grouped(x, self.device_places[ids])
        flat = self.places[ids.flatten().numpy(force=True)]
        num_elsewhere = np.count_nonzero(flat < 0) if self.shards.expert_parallel else 0
        if x.shape[0] == 1 and not num_elsewhere:  # plain decoding: nothing to sort, and half the launches
            return torch.stack([self._expert(e, x) for e in flat.tolist()], dim=1)
        order = np.argsort(flat, kind="stable")[num_elsewhere:]
        if not order.size:
            return x.new_zeros(*ids.shape, x.shape[1])
        counts = np.bincount(flat[order])
        used = np.flatnonzero(counts)
        sizes: list[int] = counts[used].tolist()
        parts = x.index_select(0, torch.from_numpy(order // self.topk).to(x.device)).split(sizes)
        experts = [self.products[e] for e in used.tolist()]
        hidden = silu_mul(torch.cat([gate_up(part) for (gate_up, _), part in zip(experts, parts, strict=True)]))
        parts = hidden.split(sizes)
        out = torch.cat([down(part) for (_, down), part in zip(experts, parts, strict=True)])
        places = torch.from_numpy(order).to(x.device)
        return out.new_zeros(ids.numel(), out.shape[1]).index_copy_(0, places, out).unflatten(0, ids.shape)

    def _expert(self, index: int, x: Tensor) -> Tensor:
        gate_up, down = self.products[index]
        return down(silu_mul(gate_up(x)))

    def _routed(self, x: Tensor) -> Tensor:
        """The weighted sum of the chosen experts [T, D] float32, or with expert_parallel its partial sums [T, num_local
        * D], one for each slice's experts: the same whichever rank holds the slice."""
        ids, weights = self.router(x)
        weighted = self._outputs(x, ids).float().mul_(weights.unsqueeze(-1))
        if not self.shards.expert_parallel or self.shards.slices == 1:
            return self._total(weighted)
        first = self.shards.ranks.rank * self.shards.num_local
        slices = ids // (self.places.size // self.shards.slices)
        others = [(slices != first + i).unsqueeze(-1) for i in range(self.shards.num_local)]
        return torch.cat([self._total(weighted.masked_fill(other, 0.0)) for other in others], dim=-1)

    def _total(self, weighted: Tensor) -> Tensor:
        """[T, A, D] -> [T, D], added in the order of the row's own choice, whatever else is in the batch."""
        total = weighted[:, 0]
        for choice in range(1, self.topk):
            total = total + weighted[:, choice]
        return total

    @cached_property
    def products(self) -> list[tuple[nn.Module, nn.Module]]:
        """(gate_up, down) of each expert in a plain list: module look-ups would cost more than a small product."""
        return [(cast(Expert, expert).gate_up, cast(Expert, expert).down) for expert in self.experts]

    def forward(self, x: Tensor) -> Tensor:
        routed = self._routed(x).to(x.dtype)
        return routed if self.shared is None else routed + self.shared(x)

    __call__ = forward

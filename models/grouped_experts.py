"""All routed experts of a layer on a GPU: their weights one behind the other, so that one product serves a step.

A few experts' products, one after the other, would cost more in launches than in reading, and the host would have to
wait for the router to know which. Here nothing waits: which expert a tile of rows has is a table that stays on the
device (models/grouped_int4.py), which is also what lets a CUDA graph hold the whole step.

T rows, A experts a row, D width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from minieagle.models.int4 import Int4Linear
from minieagle.models.layers import Linear, SlicedLinear, silu_mul

GROUP_SIZES = (16, 32, 64, 128, 256)
"""Columns that share a scale, where the kernel takes them: its inner tile is one group."""


@dataclass(frozen=True)
class Stack:
    """One product of every expert: words [E, out, in / 8] with scales [E, out, in / group], or weights [E, out, in]."""

    weight: Tensor
    scale: Tensor | None


def _stack(products: Sequence[nn.Module]) -> Stack:
    """One product of each expert, moved: the modules go on as views, so that memory holds them once."""
    if isinstance(products[0], Int4Linear):
        packed = [cast(Int4Linear, product) for product in products]
        words, scales = torch.stack([p.codes for p in packed]), torch.stack([p.scale for p in packed])
        for product, own, scale in zip(packed, words, scales, strict=True):
            product.codes, product.scale = own, scale
        return Stack(words, scales)
    plain = [cast(Linear, product) for product in products]
    weights = torch.stack([p.weight.detach() for p in plain])
    for product, weight in zip(plain, weights, strict=True):
        product.weight = nn.Parameter(weight, requires_grad=False)
    return Stack(weights, None)


def _slices(products: Sequence[nn.Module]) -> list[Sequence[nn.Module]]:
    """The same slice of every expert's product, slice by slice; one slice where the product is whole."""
    if not isinstance(products[0], SlicedLinear):
        return [products]
    return [list(parts) for parts in zip(*(cast(SlicedLinear, p).parts for p in products), strict=True)]


class GroupedExperts:
    """x [T, D] -> every chosen expert's output [T, A, D], or its partial sums side by side."""

    def __init__(self, products: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        """products: (gate_up, down) of each expert, all of one kind and shape, in order."""
        self.num_experts = len(products)
        self.gate_up = _stack([gate_up for gate_up, _ in products])
        self.down = [_stack(parts) for parts in _slices([down for _, down in products])]

    @staticmethod
    def takes(products: Sequence[tuple[nn.Module, nn.Module]]) -> bool:
        """Whether the kernel takes these experts: of one kind, plain or INT4 with groups of an inner tile."""
        parts = [part for pair in products for product in pair for part in _parts(product)]
        if parts and all(isinstance(part, Int4Linear) for part in parts):
            packed = [cast(Int4Linear, part) for part in parts]
            return all(not part.native and part.group_size in GROUP_SIZES for part in packed)
        return bool(parts) and all(isinstance(part, Linear) and part.packed is None for part in parts)

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """ids [T, A] int64: places in `products`; one that is E or more is nobody's here, and its output is zero."""
        # Triton comes with CUDA builds of torch only
        from minieagle.models.grouped_int4 import Tiles, grouped_product

        num_pairs, tiles = ids.numel(), Tiles.of(ids, self.num_experts)

        def product(rows: Tensor, stack: Stack, pairs_a_row: int) -> Tensor:
            return grouped_product(rows, stack.weight, stack.scale, tiles, num_pairs=num_pairs, pairs_a_row=pairs_a_row)

        hidden = silu_mul(product(x, self.gate_up, ids.shape[1]))
        pieces = hidden.chunk(len(self.down), dim=1)
        out = [product(piece, stack, 1) for piece, stack in zip(pieces, self.down, strict=True)]
        return torch.cat(out, dim=1).unflatten(0, ids.shape)


def _parts(product: nn.Module) -> list[nn.Module]:
    return list(product.parts) if isinstance(product, SlicedLinear) else [product]

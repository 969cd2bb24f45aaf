"""Rows with parents: the one form in which a prompt chunk, a decode step and a draft tree enter a forward.

A sequence brings a span of rows. Row i of a span is stored behind the sequence's committed rows, at storage index
`committed + i`. In a chain, row i's parent is row i-1 and storage index equals absolute position; in a tree several
rows share a position, and `ancestors` says whom each row descends from. Whether a span is a chunk, a step or a tree is
not told apart anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One sequence's rows in a forward.

    slots: [capacity] int64, the cache slot of each storage index of the sequence; committed: rows already in the cache;
    num_rows: rows of this forward. ancestors: None for a chain, else [num_rows, M] int64, the ancestor of row v at
    depth d as an offset behind the committed rows, v itself at its own depth, -1 beyond it. first: the offset of this
    forward's first row; more than 0 when earlier forwards stored upper levels of the same tree.
    """

    slots: Tensor
    committed: int
    num_rows: int
    ancestors: Tensor | None = None
    first: int = 0

    def write_slots(self) -> Tensor:
        """[num_rows] int64 cache slots that the rows are written to."""
        start = self.committed + self.first
        return self.slots[start : start + self.num_rows]

    def positions(self) -> Tensor:
        """[num_rows] int64 absolute positions: committed + depth."""
        device = self.slots.device
        if self.ancestors is None:
            return torch.arange(self.committed, self.committed + self.num_rows, device=device)
        return (self.ancestors >= 0).sum(1) + (self.committed - 1)


@dataclass(frozen=True)
class Rows:
    """A flat batch of T rows: token_ids [T], positions [T] int64, and the spans they form, in order."""

    token_ids: Tensor
    positions: Tensor
    spans: tuple[Span, ...]

    @staticmethod
    def of(token_ids: Tensor, spans: Sequence[Span]) -> Rows:
        assert sum(span.num_rows for span in spans) == token_ids.shape[0], "spans must cover the rows"
        positions = torch.cat([span.positions() for span in spans])
        return Rows(token_ids, positions, tuple(spans))

    def write_slots(self) -> Tensor:
        """[T] int64 cache slots that the rows are written to."""
        return torch.cat([span.write_slots() for span in self.spans])

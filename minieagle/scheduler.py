"""Which rows run next: first come, first served, in one continuous batch.

A waiting request is admitted when a place in the batch and pages for its whole life are free, so nothing running is
ever evicted. Every step carries each decoding sequence's tree and at most `prefill_chunk` prompt rows, so a long
prompt never holds the others up for longer than one chunk.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from minieagle.models.cache import PagePool
from minieagle.models.rows import Span
from minieagle.models.staging import moved
from minieagle.sequence import Sequence


@dataclass(frozen=True)
class Work:
    """One sequence's part in a step: its next num_rows prompt rows, or its tree."""

    sequence: Sequence
    num_rows: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        tree, start = self.sequence.tree, self.sequence.committed
        return tree.tokens if tree is not None else tuple(self.sequence.tokens[start : start + self.num_rows])

    @property
    def span(self) -> Span:
        tree = self.sequence.tree
        ancestors = None
        if tree is not None and not tree.is_chain:
            ancestors = moved(tree.ancestors, self.sequence.slots.device)
        return Span(self.sequence.slots, self.sequence.committed, self.num_rows, ancestors)

    @property
    def wanted_rows(self) -> range:
        """Rows whose logits are needed: all of a tree, the last one of a prompt, none of an inner chunk."""
        if self.sequence.tree is not None:
            return range(self.num_rows)
        is_last = self.sequence.committed + self.num_rows == self.sequence.prompt_len
        return range(self.num_rows - 1, self.num_rows) if is_last else range(0)


class Scheduler:
    """Mutable: owns the queue and the running list; `add`, `plan` and `remove` change them."""

    def __init__(
        self, pool: PagePool, *, max_seqs: int, prefill_chunk: int, spare_rows: int, device: torch.device
    ) -> None:
        self.pool, self.max_seqs, self.prefill_chunk = pool, max_seqs, prefill_chunk
        self.spare_rows, self.device = spare_rows, device
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def pages_for(self, sequence: Sequence) -> int:
        """Pages for everything the sequence may ever store: its tokens, and a tree behind the last of them."""
        return self.pool.pages_for(sequence.limit + self.spare_rows)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished or aborted sequence and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.free(sequence.pages)
        else:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_seqs:
            sequence = self.waiting[0]
            num_pages = self.pages_for(sequence)
            if num_pages > self.pool.num_free:
                return
            self.waiting.popleft()
            sequence.pages = self.pool.allocate(num_pages)
            sequence.slots = self.pool.slots(sequence.pages, self.device)
            self.running.append(sequence)

    def plan(self) -> list[Work]:
        """The next step's work, in order of admission."""
        self._admit()
        work: list[Work] = []
        budget = self.prefill_chunk
        for sequence in self.running:
            if sequence.tree is not None:
                work.append(Work(sequence, len(sequence.tree.tokens)))
            elif budget:
                num_rows = min(budget, sequence.prompt_len - sequence.committed)
                budget -= num_rows
                work.append(Work(sequence, num_rows))
        return work

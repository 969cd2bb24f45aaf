"""The paged cache: a pool of pages that sequences own, and the rows stored in them.

One pool serves target and drafter: the same slot of both belongs to the same sequence and storage index. Page 0 is
never given out; its rows stay zero and stand in for masked keys. Page size changes nothing but where rows lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minieagle.models.rows import Rows


class OutOfPages(RuntimeError):
    """More pages were asked for than are free."""


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on a device, in bytes; None where the system doesn't tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


class PagePool:
    """Host-side owner of page numbers. Mutable: `allocate` and `free` are the only methods that change it.
    used + free == num_pages always holds."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages, 0, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_slots(self) -> int:
        """Rows a cache over this pool needs, the null page included."""
        return (self.num_pages + 1) * self.page_size

    def pages_for(self, num_rows: int) -> int:
        return -(-num_rows // self.page_size)

    def allocate(self, num_pages: int) -> tuple[int, ...]:
        if num_pages > self.num_free:
            raise OutOfPages(f"{num_pages} pages wanted, {self.num_free} of {self.num_pages} free")
        pages = tuple(self._free.pop() for _ in range(num_pages))
        self._used.update(pages)
        return pages

    def free(self, pages: tuple[int, ...]) -> None:
        assert self._used.issuperset(pages), "a page is freed that nobody owns"
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))

    def slots(self, pages: tuple[int, ...], device: torch.device) -> Tensor:
        """[len(pages) * page_size] int64: the slot of each storage index of a sequence that owns these pages."""
        first = torch.tensor(pages, dtype=torch.int64) * self.page_size
        return (first.unsqueeze(1) + torch.arange(self.page_size)).flatten().to(device)


class Announcer(Protocol):
    """Rank 0's voice (lockstep.py), as caches and models know it: told before each of them does something."""

    def cache(self, cache: PagedCache, *, of_drafter: bool, num_slots: int) -> None: ...
    def keep(self, cache: PagedCache, source: Tensor, target: Tensor) -> None: ...
    def target(self, rows: Rows, cache: PagedCache, boundaries: Sequence[int], logit_rows: Tensor | None) -> None: ...
    def drafter(self, rows: Rows, states: Tensor, cache: PagedCache, logit_rows: Tensor | None) -> None: ...
    def note(self, numbers: Sequence[int]) -> None: ...


class PagedCache:
    """Rows of every layer: data [num_layers, num_slots, num_heads, width]. Mutable: `write` puts the rows of a forward
    behind the committed ones, `keep` moves accepted rows into place."""

    def __init__(
        self, num_layers: int, num_slots: int, num_heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.data = torch.zeros(num_layers, num_slots, num_heads, width, dtype=dtype, device=device)
        self.lead: Announcer | None = None
        """Rank 0 of several: tells the other ranks before rows move."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def layer(self, index: int) -> Tensor:
        """[num_slots, num_heads, width] of one layer."""
        return self.data[index]

    def write(self, index: int, slots: Tensor, rows: Tensor) -> None:
        """Store rows [T, num_heads, width] of layer `index` at slots [T]."""
        self.data[index].index_copy_(0, slots, rows)

    def keep(self, source: Tensor, target: Tensor) -> None:
        """Move rows from slots source [A] to slots target [A] in all layers. The gather is complete before the first
        write, so overlapping moves are safe; positions do not change, so nothing is rotated anew."""
        if self.lead is not None:
            self.lead.keep(self, source, target)
        self.data.index_copy_(1, target, self.data.index_select(1, source))

"""How a model is cut over ranks, and how what was cut is put together again.

The one idea: every product whose outputs are cut (query heads, gate and up, the head's vocabulary) is bit-equal to its
part of the whole product (in float32 on a CPU from 12 columns on, and no model's share is narrower), so only the
products whose *inputs* are cut (o_proj, down_proj) can round otherwise: their partial sums have to be added. They are
added here in one fixed order, in float32, rounded once. With `slices` equal to the number of ranks that is the
cheapest; with a fixed number, such as 8, one rank computes the same partial sums as eight do, and the result is the
same bit for bit on 1, 2, 4 and 8 ranks. It costs a rank slices / ranks times as many, narrower products.

With expert_parallel a slice of a routed sum is an equal run of experts instead of a piece of every expert, added in the
row's own order of choice, and with it goes that slice's piece of the shared expert. Again 1, 2, 4 and 8 ranks give the
same bits with one number of slices, but not those of cut experts, which add the same products in other groups.

D hidden width, T rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minieagle.dist.ranks import ALONE, Ranks
from minieagle.dist.shard import ShardError


@dataclass(frozen=True)
class Shards:
    """ranks: who holds the pieces; slices: pieces of every sum over all ranks, a multiple of the number of ranks;
    expert_parallel: whether routed experts are dealt out whole instead of cut, an equal run of them to each slice."""

    ranks: Ranks = field(default_factory=lambda: Ranks(ALONE))
    slices: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if self.slices < 1 or self.slices % self.ranks.size:
            raise ShardError(
                f"reduction slices={self.slices} must be 1 or more and a multiple of the number of ranks, "
                f"{self.ranks.size}: such as {self.ranks.size}"
            )

    @property
    def num_local(self) -> int:
        """Slices of a sum that one rank computes."""
        return self.slices // self.ranks.size

    def local(self, count: int, what: str, *, summed: bool = True, unit: int = 1) -> int:
        """A rank's share of `count`: equal multiples of `unit` for every slice of what is summed, for every rank of
        what is joined. Raises ShardError otherwise."""
        pieces = self.slices if summed else self.ranks.size
        if count % (pieces * unit):
            works = [n for n in (1, 2, 4, 8) if count % (n * unit) == 0]
            raise ShardError(
                f"{what}={count} can't be cut into {pieces} pieces"
                f"{f' of multiples of {unit}' if unit > 1 else ''}, one for each "
                f"{'reduction slice' if pieces != self.ranks.size else 'rank'}: numbers that work are {works}"
            )
        return count // self.ranks.size

    def experts(self, count: int) -> range:
        """The routed experts, of `count` in all, that this rank holds all or a piece of."""
        return dealt_experts(count, self.ranks.rank, self.ranks.size) if self.expert_parallel else range(count)

    def mine(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's piece of a tensor along `dim`, as a view."""
        length = whole.shape[dim] // self.ranks.size
        return whole.narrow(dim, self.ranks.rank * length, length)

    def sum(self, partial: Tensor) -> Tensor:
        """Partial sums [T, num_local * D] of every rank -> their sum [T, D], on every rank, in partial's dtype."""
        if self.slices == 1:
            return partial
        gathered = self.ranks.gather(partial).unflatten(-1, (self.num_local, -1)).float()
        total = gathered[0, :, 0]
        for index in range(1, self.slices):
            total = total + gathered[index // self.num_local, :, index % self.num_local]
        return total.to(partial.dtype)

    def join_columns(self, piece: Tensor) -> Tensor | None:
        """Columns [T, n] of every rank -> [T, size * n] on rank 0, None elsewhere."""
        if self.ranks.size == 1:
            return piece
        gathered = self.ranks.gather_to_lead(piece)
        return None if gathered is None else gathered.transpose(0, 1).flatten(1)

    def lookup(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows of a table that is cut by rows: ids [T] of the whole table -> [T, D] on every rank."""
        if self.ranks.size == 1:
            return torch.nn.functional.embedding(token_ids, table)
        owner = token_ids // table.shape[0]
        own = torch.where(owner == self.ranks.rank, token_ids % table.shape[0], 0)
        found = self.ranks.gather(torch.nn.functional.embedding(own, table))
        return found[owner, torch.arange(token_ids.shape[0], device=token_ids.device)]


def dealt_experts(count: int, rank: int, size: int) -> range:
    """The experts of one of `size` ranks, when whole experts are dealt out in equal runs: which they are doesn't depend
    on the number of slices, and a rank's slices are runs of its own run."""
    return range(rank * count // size, (rank + 1) * count // size)


WHOLE = Shards()
"""One rank that holds all of a model in one piece."""

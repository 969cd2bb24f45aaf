"""The connection between the ranks of one model: the four things that they say to each other.

The one idea: data and control never share a channel. Tensors of a forward go through collectives on the device's
backend (NCCL on GPUs, gloo on CPUs); what rank 0 decides goes as plain integers over a gloo group of its own, so that
ranks without work wait on the host and not inside a GPU collective. Nothing is pickled: every message is a tensor of a
fixed dtype. On one host gloo listens on the loopback interface only.

Sums are taken in a fixed order. A library's all-reduce may add in another order for another message size, and then a
row's bits would depend on the rows beside it; here every rank gathers the partial sums and adds them itself, in the
order of ranks, which for the few rows of a decode step is the fastest algorithm anyway (one latency instead of two).
"""

# torch annotates its collectives only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from minieagle.dist.group import Group, GroupError
from minieagle.dist.watch import Activity, Store

ANNOUNCED = 4095
"""Integers that travel in one message; longer ones take a second."""

CONNECT_TIMEOUT_S = 60
COLLECTIVE_TIMEOUT_S = 24 * 3600
"""A dead peer closes its sockets and a hung one is found by watch.py: this is for neither, and must outlast both."""


class Ranks:
    """The ranks of `group`, connected. One rank needs no connection; its gathers are the identity.

    Not for several threads at once. Raises GroupError when the others can't be reached within CONNECT_TIMEOUT_S.
    """

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self.activity = Activity()
        self.farewell: Callable[[], None] | None = None
        """What rank 0 does to let the others go, once they listen."""
        if self.size == 1:
            return
        _listen_on_loopback(os.environ)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=CONNECT_TIMEOUT_S))
            lasting = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
            self._data = _new_group(backend, lasting)
            self._control = _new_group("gloo", lasting)
        except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
            raise GroupError(
                f"rank {self.rank} can't reach the other {self.size - 1} ranks within {CONNECT_TIMEOUT_S} s: {error}"
            ) from error

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.rank == 0

    def gather(self, x: Tensor) -> Tensor:
        """x [...] of every rank -> [size, ...], on every rank."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = x.new_empty(self.size, *x.shape)
        with self.activity:
            dist.all_gather(list(out), x.contiguous(), group=self._data)
        return out

    def gather_to_lead(self, x: Tensor) -> Tensor | None:
        """x [...] of every rank -> [size, ...] on rank 0, None elsewhere."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = x.new_empty(self.size, *x.shape) if self.leads else None
        with self.activity:
            dist.gather(x.contiguous(), list(out) if out is not None else None, dst=0, group=self._data)
        return out

    def share(self, x: Tensor) -> None:
        """Rank 0's x, written into every rank's x (same shape and dtype)."""
        if self.size > 1:
            with self.activity:
                dist.broadcast(x.view(torch.uint8), src=0, group=self._data)

    def announce(self, numbers: list[int]) -> None:
        """Rank 0 says integers; every other rank gets them from `listen`."""
        assert self.leads, "only rank 0 decides"
        if self.size == 1:
            return
        message = torch.tensor([len(numbers), *numbers[:ANNOUNCED]], dtype=torch.int64)
        padded = torch.zeros(1 + ANNOUNCED, dtype=torch.int64)
        padded[: message.shape[0]] = message
        dist.broadcast(padded, src=0, group=self._control)
        if len(numbers) > ANNOUNCED:
            dist.broadcast(torch.tensor(numbers[ANNOUNCED:], dtype=torch.int64), src=0, group=self._control)

    def listen(self) -> list[int]:
        """What rank 0 announces next; waits for it."""
        assert not self.leads, "rank 0 listens to nobody"
        padded = torch.zeros(1 + ANNOUNCED, dtype=torch.int64)
        with self.activity:
            dist.broadcast(padded, src=0, group=self._control)
        count = int(padded[0])
        numbers = cast("list[int]", padded[1 : 1 + min(count, ANNOUNCED)].tolist())
        if count > ANNOUNCED:
            rest = torch.zeros(count - ANNOUNCED, dtype=torch.int64)
            dist.broadcast(rest, src=0, group=self._control)
            numbers += cast("list[int]", rest.tolist())
        return numbers

    def new_store(self) -> Store:
        """A connection of its own to the rendezvous store, for a thread that looks on."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address, port, is_master=False, wait_for_workers=False
        )

    def close(self) -> None:
        """Leave the group: rank 0 lets the others go, who call this when they have been told."""
        if self.farewell is not None:
            self.farewell()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _new_group(backend: str, timeout: timedelta) -> ProcessGroup:
    """A group of all ranks."""
    group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, ProcessGroup), "every rank is a member"
    return group


def _listen_on_loopback(environment: Mapping[str, str]) -> None:
    """Keep gloo off the network where all ranks are on this host (torchrun tells both counts). A user's own choice of
    interface stands."""
    on_one_host = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    if on_one_host and "GLOO_SOCKET_IFNAME" not in environment:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"


ALONE = Group(rank=0, size=1, device=torch.device("cpu"))
"""One process: a group without company, on the CPU."""

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
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from minieagle.dist.activity import Activity
from minieagle.dist.group import Group, GroupError
from minieagle.dist.watch import START_TIMEOUT_S, Store

ANNOUNCED = 4095
"""Integers that travel in one message; longer ones take a second."""

COLLECTIVE_TIMEOUT_S = 24 * 3600
"""A dead peer closes its sockets and a hung one is found by watch.py: this is for neither, and must outlast both."""


class RankLost(RuntimeError):
    """The connection to another rank broke, in which nobody can say why: that rank has ended, or its host."""


@contextmanager
def _in_company() -> Generator[None]:
    """Around what fails when another rank ends. Libraries then speak of sockets and lines of their own source."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankLost("the connection to another rank is lost") from error


class Ranks:
    """The ranks of `group`, connected. One rank needs no connection; its gathers are the identity.

    Not for several threads at once. Raises GroupError when the others can't be reached within START_TIMEOUT_S.
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
            dist.init_process_group(backend, timeout=timedelta(seconds=START_TIMEOUT_S))
            lasting = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
            self._data = _new_group(backend, lasting)
            self._control = _new_group("gloo", lasting)
        except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
            raise GroupError(
                f"rank {self.rank} of {self.size} can't reach the others ({START_TIMEOUT_S} s are given): {error}"
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
        with self.activity, _in_company():
            dist.all_gather(list(out), x.contiguous(), group=self._data)
        return out

    def gather_to_lead(self, x: Tensor) -> Tensor | None:
        """x [...] of every rank -> [size, ...] on rank 0, None elsewhere. It ends what rank 0 had announced."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = x.new_empty(self.size, *x.shape) if self.leads else None
        with self.activity, _in_company():
            dist.gather(x.contiguous(), list(out) if out is not None else None, dst=0, group=self._data)
        if self.leads:
            self.activity.rest()
        return out

    def share(self, x: Tensor) -> None:
        """Rank 0's x, written into every rank's x (same shape and dtype)."""
        if self.size > 1:
            with self.activity, _in_company():
                dist.broadcast(x.view(torch.uint8), src=0, group=self._data)

    def announce(self, numbers: list[int]) -> None:
        """Rank 0 says integers; every other rank gets them from `listen`."""
        assert self.leads, "only rank 0 decides"
        if self.size == 1:
            return
        padded = torch.zeros(1 + ANNOUNCED, dtype=torch.int64)
        first = numbers[:ANNOUNCED]
        padded[: 1 + len(first)] = torch.tensor([len(numbers), *first], dtype=torch.int64)
        with _in_company():
            dist.broadcast(padded, src=0, group=self._control)
            if len(numbers) > ANNOUNCED:
                dist.broadcast(torch.tensor(numbers[ANNOUNCED:], dtype=torch.int64), src=0, group=self._control)

    def listen(self) -> list[int]:
        """What rank 0 announces next; waits for it."""
        assert not self.leads, "rank 0 listens to nobody"
        padded = torch.zeros(1 + ANNOUNCED, dtype=torch.int64)
        with self.activity, _in_company():
            dist.broadcast(padded, src=0, group=self._control)
            count = int(padded[0])
            rest = torch.zeros(max(0, count - ANNOUNCED), dtype=torch.int64)
            if count > ANNOUNCED:
                dist.broadcast(rest, src=0, group=self._control)
        return cast("list[int]", torch.cat((padded[1 : 1 + min(count, ANNOUNCED)], rest)).tolist())

    def new_store(self) -> Store:
        """A connection of its own to the rendezvous store, for a thread that looks on. Keys are this job's and this
        attempt's own: torchrun's store outlives a restart, and may serve two jobs."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        start = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
        shared = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address, port, is_master=False, wait_for_workers=False
        )
        return dist.PrefixStore("/".join(("minieagle", *start)), shared)  # pyright: ignore[reportPrivateImportUsage]

    def dismiss(self) -> None:
        """Rank 0 lets the others go."""
        if self.farewell is not None:
            self.farewell()

    def close(self) -> None:
        """Leave the group."""
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

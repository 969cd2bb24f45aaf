"""Tensors read from their files by a thread, each byte once and in the order of the files, just before they are wanted.

The one idea: what is read and not yet taken never exceeds the largest part, a part being what is built as one (a
layer). While a part is built its bytes leave and the next part's come in, so that disk and processor both work and
memory holds one part's bytes. Reads are plain and large, into memory of their own that goes back to the system when the
last tensor in it is gone; mapped files would fault page by page and read far more than is wanted. Pages of the file
cache are dropped behind: a model larger than memory would only push out everything else.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from minieagle.models.checkpoint import CheckpointError, Progress, tensor_in
from minieagle.models.files import FileError, open_plain
from minieagle.models.headers import Stored

RUN_BYTES = 2**23
"""The most that is read in one go, unless a single tensor is larger."""


@dataclass
class _Run:
    """Neighbours in one file that are read in one go. Mutable: num_left counts those not yet taken; memory holds their
    bytes from when they are read until the last is taken, and as long as a tensor over them lives."""

    members: list[Stored]
    num_left: int = field(init=False)
    memory: mmap.mmap | None = None

    def __post_init__(self) -> None:
        self.num_left = len(self.members)

    @property
    def start(self) -> int:
        return self.members[0].start

    @property
    def nbytes(self) -> int:
        return self.members[-1].stop - self.start


def _runs(part: Iterable[Stored]) -> Iterator[_Run]:
    """The tensors in the order of the files; a new run where something else lies between, or RUN_BYTES are full."""
    members: list[Stored] = []
    for stored in sorted((stored for stored in part if stored.nbytes), key=lambda stored: (stored.path, stored.start)):
        if members and not _joins(members, stored):
            yield _Run(members)
            members = []
        members.append(stored)
    if members:
        yield _Run(members)


def _joins(members: Sequence[Stored], stored: Stored) -> bool:
    adjacent = stored.path == members[-1].path and stored.start == members[-1].stop
    return adjacent and stored.stop - members[0].start <= RUN_BYTES


class ReadAhead:
    """A thread that reads part after part. Mutable: `take` hands out each tensor once, one part after the other but in
    any order within. `close` ends the thread.

    progress: called by `take`, with (bytes taken, bytes in all), whenever a stretch of a file is used up.
    """

    def __init__(self, parts: Sequence[Sequence[Stored]], progress: Progress | None = None) -> None:
        self._runs = [run for part in parts for run in _runs(part)]
        self._budget = max((sum(stored.nbytes for stored in part) for part in parts), default=0)
        self._progress = progress
        self._total_bytes = sum(run.nbytes for run in self._runs)
        self._taken_bytes = 0
        self._held_bytes = 0
        self._ready: dict[Stored, _Run] = {}
        self._error: Exception | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="read-ahead", daemon=True)
        self._thread.start()

    def take(self, stored: Stored) -> Tensor:
        """The tensor, over memory that is freed with it. Waits for the thread. Raises CheckpointError for a file that
        can't be read any more."""
        if not stored.nbytes:  # several may lie at one place
            return torch.empty(stored.shape, dtype=stored.dtype)
        with self._changed:
            self._changed.wait_for(lambda: stored in self._ready or self._error is not None or self._ended)
            assert stored in self._ready or self._error is not None, f"{stored} is in no part, or is taken twice"
            if stored not in self._ready:
                raise CheckpointError(f"{stored.path} can't be read ({self._error}): it changed or the disk failed")
            run = self._ready.pop(stored)
            assert run.memory is not None, "a run that is ready was read"
            tensor = tensor_in(run.memory, stored, stored.start - run.start)
            run.num_left -= 1
            if not run.num_left:
                run.memory = None
                self._held_bytes -= run.nbytes
                self._changed.notify_all()
        if not run.num_left:
            self._report(run.nbytes)
        return tensor

    def _report(self, nbytes: int) -> None:
        self._taken_bytes += nbytes
        if self._progress is not None:
            self._progress(self._taken_bytes, self._total_bytes)

    def close(self) -> None:
        """End the thread, after the read it is in."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        try:
            behind: _Run | None = None
            for run in self._runs:
                if not self._wait_for_room(run.nbytes):
                    return
                run.memory = _read_range(run.members[0].path, run.start, run.nbytes)
                _drop_pages(behind)
                behind = run
                with self._changed:
                    self._ready.update(dict.fromkeys(run.members, run))
                    self._changed.notify_all()
            _drop_pages(behind)
            with self._changed:
                self._ended = True
                self._changed.notify_all()
        except Exception as error:  # whatever it is, the other thread waits for it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait_for_room(self, nbytes: int) -> bool:
        """Count nbytes as held once they fit; False when closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._held_bytes + nbytes <= self._budget)
            self._held_bytes += nbytes
            return not self._closed


def _read_range(path: Path, start: int, nbytes: int) -> mmap.mmap:
    """nbytes of the file from `start`, in memory of their own."""
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: the first touch of 4 KB pages costs as much as the reading
        buffer.madvise(mmap.MADV_HUGEPAGE)
    with open_plain(path) as file, memoryview(buffer) as view:
        done = 0
        while done < nbytes:
            count = os.preadv(file.fileno(), [view[done:]], start + done)
            if not count:
                raise FileError(f"it ends at byte {start + done}, its header says {start + nbytes}")
            done += count
    return buffer


def _drop_pages(run: _Run | None) -> None:
    """Have the file cache forget what was read. Of the run before the last: the newest pages still lie in lists of each
    processor, and dropping those waits for all processors, which halves the rate."""
    advise = getattr(os, "posix_fadvise", None)  # not on macOS
    if run is not None and advise is not None:
        with open_plain(run.members[0].path) as file:
            advise(file.fileno(), run.start, run.nbytes, os.POSIX_FADV_DONTNEED)


PREFETCHED_PARTS = 2
PREFETCH_THREADS = 4
SCRATCH_BYTES = 2**20


class Prefetch:
    """Threads that bring what comes next into the system's file cache, for a reader of mapped files: PREFETCHED_PARTS
    parts before they are wanted. A rank of several reads its share of the stretches only, and the others theirs: the
    cache of a host serves all of its ranks. A hint and no more: what can't be read is the reader's to find.

    Measured over 3.4 GB of cold files on two busy cores: one rank loads in 9.4 s instead of 10.9, four at once in 12
    instead of 15.5, and the disk is read once for all four. Faults of the mapping alone ask for too little at a time.

    share: (which, of how many). Mutable: `advance` is called for each part that is begun, `close` ends the threads.
    """

    def __init__(self, parts: Sequence[Sequence[Stored]], share: tuple[int, int]) -> None:
        self._parts, self._share = iter(parts), share
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))  # for all threads: nobody looks at what is in it
        self._pool = ThreadPoolExecutor(PREFETCH_THREADS, thread_name_prefix="prefetch")
        for _ in range(PREFETCHED_PARTS):
            self.advance()

    def advance(self) -> None:
        which, size = self._share
        for run in list(_runs(next(self._parts, ())))[which::size]:
            self._pool.submit(self._touch, run)

    def _touch(self, run: _Run) -> None:
        stop = run.start + run.nbytes
        with open_plain(run.members[0].path) as file:
            for start in range(run.start, stop, SCRATCH_BYTES):
                os.preadv(file.fileno(), [self._scratch[: stop - start]], start)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

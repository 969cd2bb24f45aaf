"""The watch: a thread in every rank that ends the whole job when one rank is dead, stopped, stuck or orphaned.

The one idea: a collective waits for ever on a rank that will not come, so somebody outside the collective has to look.
Each rank's watch publishes a beat in the rendezvous store once a second: that it lives, and since when its main thread
has been stuck (neither waiting for others nor using the processor). Every watch reads all beats and ends its own
process when one is bad, naming the rank that caused it; the rank itself, where it still can, prints its own stack.
Waiting for others is never a fault, however long: an idle server waits for days.

Source of the failure classes: torchrun notices exits only, and sends SIGKILL 30 s after a failure.
"""

# torch annotates its store only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

BEAT_S = 1.0
HANG_TIMEOUT_S = 8.0
"""Silence, or a main thread without progress, for this long ends the job."""

_STORE_TIMEOUT = timedelta(seconds=5)


class Store(Protocol):
    """What the watch needs of torch.distributed's rendezvous store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


@dataclass
class Activity:
    """What a main thread is doing. Mutable: the main thread writes it, the watch reads it.

    waiting: it is inside a call that waits for other ranks; count: such calls begun and ended so far.
    """

    waiting: bool = False
    count: int = 0
    thread: int = field(default_factory=threading.get_ident)

    def __enter__(self) -> None:
        self.waiting, self.count = True, self.count + 1

    def __exit__(self, *exc_info: object) -> None:
        self.waiting, self.count = False, self.count + 1

    def cpu_s(self) -> float:
        """Processor seconds that the main thread has used."""
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread))


class Progress:
    """Since when a main thread has made none. Mutable."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._seen = self._state()
        self._since = time.monotonic()

    def _state(self) -> tuple[int, int, int]:
        return self._activity.count, round(1000 * self._activity.cpu_s()), _bytes_read()

    def stuck_s(self) -> float:
        """Seconds without progress: no collective begun or ended, no processor time, nothing read from a file."""
        state = self._state()
        if self._activity.waiting or state != self._seen:
            self._seen, self._since = state, time.monotonic()
        return time.monotonic() - self._since


def _bytes_read() -> int:
    """Bytes that this process has had read from storage, where the system tells (Linux): a rank that waits for a slow
    disk uses no processor and is not stuck."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    except OSError:
        return 0


class Pulse:
    """What is known of another rank's beats. Mutable."""

    def __init__(self) -> None:
        self._beat = b""
        self._changed = time.monotonic()

    def silent_s(self, beat: bytes) -> float:
        """Seconds since the beat last changed."""
        if beat != self._beat:
            self._beat, self._changed = beat, time.monotonic()
        return time.monotonic() - self._changed


class Watch(threading.Thread):
    """Ends this process with status 1 when a rank is lost. `stop` before the ranks part in order."""

    def __init__(
        self, store: Store, *, rank: int, size: int, activity: Activity, hang_timeout_s: float = HANG_TIMEOUT_S
    ) -> None:
        super().__init__(name="minieagle-watch", daemon=True)
        self._store, self._rank, self._size = store, rank, size
        self._progress, self._timeout_s = Progress(activity), hang_timeout_s
        self._pulses = [Pulse() for _ in range(size)]
        self._parent = os.getppid()
        self._stopped = threading.Event()
        store.set_timeout(_STORE_TIMEOUT)
        store.set(f"minieagle/process/{rank}", f"{os.getpid()} {socket.gethostname()}")

    def stop(self) -> None:
        self._store.set(f"minieagle/left/{self._rank}", "1")
        self._stopped.set()

    def run(self) -> None:
        count = 0
        while not self._stopped.wait(BEAT_S):
            count += 1
            try:
                fault = self._look(count)
            except Exception as error:  # whatever the store raises, it is gone, and with it whoever started the job
                fault = f"the rendezvous store is gone ({type(error).__name__}): the launcher or rank 0 has died"
            if fault is not None and not self._stopped.is_set():
                self._end(fault)

    def _look(self, count: int) -> str | None:
        """Beat once and look at everybody; returns what is wrong."""
        if os.getppid() != self._parent:
            return "the process that started this rank is gone"
        stuck_s = self._progress.stuck_s()
        self._store.set(f"minieagle/beat/{self._rank}", f"{count}:{stuck_s:.0f}")
        if stuck_s > self._timeout_s:
            faulthandler.dump_traceback(sys.stderr)
            return f"this rank has made no progress for {stuck_s:.0f} s (its stack is above)"
        faults = [self._fault(rank) for rank in range(self._size) if rank != self._rank]
        return next((fault for fault in faults if fault is not None), None)

    def _fault(self, rank: int) -> str | None:
        if self._store.check([f"minieagle/failed/{rank}"]):
            return f"rank {rank} failed: {self._store.get(f'minieagle/failed/{rank}').decode(errors='replace')}"
        if self._store.check([f"minieagle/left/{rank}"]):
            return None
        key = f"minieagle/beat/{rank}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        silent_s = self._pulses[rank].silent_s(beat)
        if silent_s > self._timeout_s:
            self._kill(rank)
            return f"rank {rank} has given no sign of life for {silent_s:.0f} s: it is dead or stopped"
        return None

    def _kill(self, rank: int) -> None:
        """A stopped process of this host obeys no other signal, and the launcher would wait 30 s before it sends it."""
        process_id, host = self._store.get(f"minieagle/process/{rank}").decode().split(" ", 1)
        if host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(process_id), signal.SIGKILL)

    def _end(self, fault: str) -> None:
        print(f"minieagle rank {self._rank}: {fault}; the job ends", file=sys.stderr, flush=True)
        os._exit(1)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        try:
            self._store.set(f"minieagle/failed/{self._rank}", f"{type(error).__name__}: {error}"[:1000])
        except Exception:  # the store is gone too; the exit status has to do
            return

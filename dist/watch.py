"""The watch: a thread in every rank that ends the whole job when one rank is dead, stopped, stuck or orphaned.

The one idea: a collective waits for ever on a rank that will not come, so somebody outside the collective has to look.
Each rank's watch publishes a beat in the rendezvous store once a second and reads everybody else's; a rank that ends
publishes why, and whoever ends because of it says the same words, so that the cause is named whoever is asked. Waiting
for others is never a fault, however long, nor is rank 0's waiting for its user: an idle server waits for days.

A busy machine is not a fault either. The watch counts only the time in which it could look itself, and a rank of this
host that uses the processor is alive even when its beats stay away, as they do while a library holds the interpreter.

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
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NoReturn, Protocol

from minieagle.dist.activity import Activity

BEAT_S = 1.0
HANG_TIMEOUT_S = 8.0
"""Silence, or a main thread without progress, for this long ends the job."""

START_TIMEOUT_S = 120
"""For all ranks to come: importing torch in eight processes at once takes long on few cores."""

HERE, LEFT, ENDED = "here", "left", "ended"

_DEAD = "rank {} is dead: its process was killed or crashed"
_STORE_TIMEOUT = timedelta(seconds=30)
_LAST_WORDS_S = 1.0


class Store(Protocol):
    """What the watch needs of torch.distributed's rendezvous store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


class Clock:
    """Seconds in which a thread that looks every BEAT_S could look. Mutable. A pause counts two beats at most: while
    this process was stopped, or had no processor, the others may have had none either."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        now = time.monotonic()
        self.now_s += min(now - self._looked, 2 * BEAT_S)
        self._looked = now
        return self.now_s


class Still:
    """Since when something has not changed. Mutable."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since_s = 0.0

    def seconds(self, seen: object, now_s: float) -> float:
        """Seconds up to now_s for which the same was seen; 0 for something new."""
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        return now_s - self._since_s


def _bytes_read() -> int:
    """Bytes that this process has had read from storage, where the system tells (Linux): a rank that waits for a slow
    disk uses no processor and is not stuck."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    except OSError:
        return 0


def _place() -> str:
    """Names the system whose process ids this process shares; containers may share a host name and still not them."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _process(process_id: int) -> tuple[str, int] | None:
    """State (a letter, "T" when stopped) and processor time of a process of this host, None when it has ended; both
    empty where the system doesn't tell."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if os.path.exists("/proc/self/stat") else ("", 0)
    except OSError:
        return None  # it ended while it was read
    return None if fields[0] in "ZX" else (fields[0], int(fields[11]) + int(fields[12]))


class Peer:
    """Another rank as this one sees it. process: its number and its system, as it published them."""

    def __init__(self, process: str) -> None:
        number, _, place = process.partition(" ")
        self.process_id = int(number) if place == _place() else None
        self._still = Still()

    def look(self) -> tuple[str, int] | None:
        """Its state and processor time, which grows as long as it lives; None when it has ended. Both empty for a rank
        of another host."""
        return ("", 0) if self.process_id is None else _process(self.process_id)

    def silent_s(self, beat: bytes, now_s: float) -> float:
        """Seconds without a new beat or processor time."""
        return self._still.seconds((beat, self.look()), now_s)

    def kill(self) -> None:
        """A stopped process obeys no other signal, and the launcher would wait 30 s before it sends this one."""
        if self.process_id is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.process_id, signal.SIGKILL)


class Watch(threading.Thread):
    """Ends this process with status 1 when a rank is lost. All ranks make theirs before any of them goes on; raises
    RuntimeError when one doesn't come within START_TIMEOUT_S."""

    def __init__(
        self, store: Store, *, rank: int, size: int, activity: Activity, hang_timeout_s: float = HANG_TIMEOUT_S
    ) -> None:
        super().__init__(name="minieagle-watch", daemon=True)
        self._store, self._rank, self._activity, self._timeout_s = store, rank, activity, hang_timeout_s
        self._clock, self._still, self._parent = Clock(), Still(), os.getppid()
        self._stopped, self._wake, self._over = False, threading.Event(), threading.Event()
        self._publishing = threading.Lock()
        self._state, self._count = HERE, 0
        store.set_timeout(timedelta(seconds=START_TIMEOUT_S))
        store.set(f"process/{rank}", f"{os.getpid()} {_place()}")
        self._publish()
        others = [other for other in range(size) if other != rank]
        self._peers = {other: Peer(store.get(f"process/{other}").decode()) for other in others}
        for other in others:
            store.get(f"beat/{other}")
        store.set_timeout(_STORE_TIMEOUT)

    def _publish(self, state: str | None = None) -> None:
        """Beat: a number that grows, and the state with why it is so. The first end that is published stands."""
        with self._publishing:
            if state is not None and not self._state.startswith(ENDED):
                self._state = state
            self._count += 1
            self._store.set(f"beat/{self._rank}", f"{self._count} {self._state}")

    def leave(self) -> None:
        """Say that this rank parts from the others in order."""
        with contextlib.suppress(RuntimeError):  # rank 0 may have gone with the store, once it saw all others leave
            self._publish(LEFT)

    def all_left(self) -> bool:
        """Whether every other rank has left."""
        return all(self._read(other)[1] == LEFT for other in self._peers)

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        self._wake.set()
        self._over.set()
        self.join(2 * BEAT_S)

    def fail(self, words: str) -> None:
        """Tell the other ranks why this one ends. The store may lie in rank 0's process, which gives them the time to
        read it."""
        with contextlib.suppress(RuntimeError):  # the store is gone too; the exit status has to do
            self._publish(f"{ENDED} {words[:1000]}")
        if self._rank == 0:
            time.sleep(1.5 * BEAT_S)

    def find_culprit(self) -> None:
        """For a thread that has lost the connection to another rank: wait for the watch to end this process with the
        cause. Returns when it finds none."""
        self._activity.rest()
        self._wake.set()
        time.sleep(self._timeout_s + BEAT_S)

    def run(self) -> None:
        """See that looking goes on: a call to a store whose process is stopped never returns."""
        looker = threading.Thread(target=self._keep_looking, name="minieagle-look", daemon=True)
        looker.start()
        clock, still = Clock(), Still()
        while not self._over.wait(BEAT_S):
            if still.seconds(self._count, clock.look()) > self._timeout_s:
                self._end(self._seen_here() or "the rendezvous store doesn't answer: the launcher or its host is lost")
        looker.join(BEAT_S)

    def _keep_looking(self) -> None:
        while not self._stopped:
            try:
                fault = self._look()
            except Exception as error:  # whatever the store raises, it is gone, and with it whoever started the job
                fault = self._seen_here() or f"the rendezvous store is gone ({type(error).__name__})"
            if fault is not None and not self._stopped:
                self._end(fault, partial(self.fail, fault))
            self._wake.wait(BEAT_S)
            self._wake.clear()

    def _end(self, fault: str, tell: Callable[[], object] | None = None) -> None:
        end(f"minieagle rank {self._rank}: {fault}; the job ends", tell)

    def _seen_here(self) -> str | None:
        """What is wrong with another rank of this host, seen without the store."""
        for other, peer in self._peers.items():
            seen = peer.look()
            if seen is None:
                return _DEAD.format(other)
            if seen[0] == "T":
                peer.kill()
                return f"rank {other} is stopped"
        return None

    def _look(self) -> str | None:
        """Beat once and look at everybody; returns what is wrong."""
        now_s = self._clock.look()
        if os.getppid() != self._parent:
            return "the process that started this rank is gone"
        self._publish()
        stuck_s = self._stuck_s(now_s)
        if stuck_s > self._timeout_s:
            _speak(partial(faulthandler.dump_traceback, sys.stderr))
            return f"rank {self._rank} has made no progress for {stuck_s:.0f} s (its stack is above)"
        faults = [self._fault(other, now_s) for other in self._peers]
        return next((fault for fault in faults if fault is not None), None)

    def _stuck_s(self, now_s: float) -> float:
        """Seconds without progress that others may wait for: no collective begun or ended, no processor time, nothing
        read from a file."""
        activity = self._activity
        seen = now_s if activity.waiting else (activity.count, round(1000 * activity.cpu_s()), _bytes_read())
        return self._still.seconds(seen, now_s)

    def _read(self, other: int) -> tuple[bytes, str, str]:
        """Another rank's beat, state and words."""
        beat = self._store.get(f"beat/{other}")
        _, state, *words = beat.decode(errors="replace").split(" ", 2)
        return beat, state, "".join(words)

    def _fault(self, other: int, now_s: float) -> str | None:
        peer = self._peers[other]
        is_dead = peer.look() is None  # asked before its beat is read: words published just before the end count
        beat, state, words = self._read(other)
        if state == LEFT:
            return None
        if state == ENDED:
            return words
        if is_dead:
            return _DEAD.format(other)
        silent_s = peer.silent_s(beat, now_s)
        if silent_s > self._timeout_s:
            peer.kill()
            return f"rank {other} has given no sign of life for {silent_s:.0f} s: it is stopped, or its host is lost"
        return None


def _speak(say: Callable[[], object]) -> None:
    """Whoever reads standard error may have stopped reading, which must not keep this process alive."""
    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    speaker.join(_LAST_WORDS_S)


def end(words: str, tell: Callable[[], object] | None = None) -> NoReturn:
    """Say words on standard error, tell the others, and leave without the interpreter's farewell, which would wait for
    threads inside collectives."""
    _speak(partial(print, words, file=sys.stderr, flush=True))
    _speak(sys.stdout.flush)
    if tell is not None:
        tell()
    os._exit(1)

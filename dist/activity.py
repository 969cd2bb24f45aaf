"""What a rank is doing, as far as the others depend on it.

The one idea: a rank owes the others something only within an operation, from its announcement to the gathering of its
result, and while it loads. Then it must make progress, and Ctrl-C has to wait; between operations it may wait for its
user as long as it likes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


@dataclass
class Activity:
    """What a rank's working thread is doing. Mutable: that thread writes it, the watch reads it.

    waiting: for other ranks, or for nothing (`rest`); count: changes so far; thread: the one that works.
    """

    waiting: bool = False
    count: int = 0
    thread: threading.Thread = field(default_factory=threading.current_thread)
    _before: bool = False
    _in_operation: bool = False
    _interrupted: bool = False

    def __enter__(self) -> None:
        self._before = self.waiting
        self._become(True)

    def __exit__(self, *exc_info: object) -> None:
        self._become(self._before)

    def rest(self) -> None:
        """This rank owes the others nothing until it works again: it may wait for its user, or sleep. Raises
        KeyboardInterrupt if one came meanwhile."""
        self._in_operation = False
        self._become(True)
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def work(self) -> None:
        """The others depend on this thread from now on."""
        self.thread, self._in_operation = threading.current_thread(), True
        self._become(False)

    def interrupt(self, *_: object) -> None:
        """A handler of Ctrl-C: the others could not go on after half an operation, so it waits for the end of one."""
        self._interrupted = self._in_operation
        if not self._in_operation:
            raise KeyboardInterrupt

    def _become(self, waiting: bool) -> None:
        self.waiting, self.count = waiting, self.count + 1

    def cpu_s(self) -> float:
        """Processor seconds that the working thread has used; 0 once it has ended."""
        if self.thread.ident is None or not self.thread.is_alive():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))

"""A job: all ranks from the connection to the last goodbye.

The one idea: a rank leaves in one of two ways. In order, when rank 0 has told the others that it is over, be it because
what the user asked for can't be done (a ValueError or OSError on rank 0 once the others listen); or with an error,
which it prints, tells the others through the store, and ends its process with, since a rank that has failed can answer
no collective any more. Signals that the launcher sends to all ranks are rank 0's to act on: the others go when
they are told.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager

from minieagle.dist.group import Group
from minieagle.dist.ranks import Ranks
from minieagle.dist.watch import HANG_TIMEOUT_S, Watch

FAILED = 1


@contextmanager
def job(group: Group, *, hang_timeout_s: float = HANG_TIMEOUT_S) -> Generator[Ranks]:
    """The ranks of `group`, connected and watched, until the block ends. A fault ends the process of a rank that isn't
    alone. Raises GroupError when the ranks can't be connected."""
    ranks = Ranks(group)
    if ranks.size == 1:
        yield ranks
        return
    if not ranks.leads:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    watch = Watch(
        ranks.new_store(), rank=ranks.rank, size=ranks.size, activity=ranks.activity, hang_timeout_s=hang_timeout_s
    )
    watch.start()
    try:
        yield ranks
    except BaseException as error:
        if ranks.farewell is not None and isinstance(error, ValueError | OSError | KeyboardInterrupt):
            watch.stop()
            ranks.close()
            raise
        watch.fail(error)
        _end(ranks.rank, error)
    watch.stop()
    ranks.close()


def _end(rank: int, error: BaseException) -> None:
    """Leave without the interpreter's farewell, which would wait for threads inside collectives."""
    print(f"minieagle rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(FAILED)

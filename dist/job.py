"""A job: all ranks from the connection to the last goodbye.

The one idea: a rank leaves in one of two ways. In order, when rank 0 has told the others that it is over, be it because
what the user asked for can't be done (a ValueError or OSError on rank 0 once the others listen); or with an error,
which it prints, tells the others through the store, and ends its process with, since a rank that has failed can answer
no collective any more. A rank that only lost the connection to another looks for the cause there. Signals that the
launcher sends to all ranks are rank 0's to act on: the others go when they are told.
"""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from minieagle.dist.group import Group, GroupError
from minieagle.dist.ranks import RankLost, Ranks
from minieagle.dist.watch import BEAT_S, HANG_TIMEOUT_S, START_TIMEOUT_S, Watch, end

_ORDERLY = (ValueError, OSError, KeyboardInterrupt, SystemExit)
"""What may end rank 0's work without anything being wrong with the ranks."""

MIN_TIMEOUT_S = 3 * BEAT_S
"""With less, a single late beat would end the job."""

_POLL_S = 0.02
_CLOSE_TIMEOUT_S = 20


@contextmanager
def job(group: Group, *, hang_timeout_s: float = HANG_TIMEOUT_S) -> Generator[Ranks]:
    """The ranks of `group`, connected and watched, until the block ends. A fault ends the process of a rank that isn't
    alone. Raises GroupError when the ranks can't be connected, or hang_timeout_s is below MIN_TIMEOUT_S."""
    if hang_timeout_s < MIN_TIMEOUT_S:
        raise GroupError(
            f"hang timeout={hang_timeout_s:g} s must be at least {MIN_TIMEOUT_S:g} s: ranks give a sign of life once a "
            "second"
        )
    ranks = Ranks(group)
    if ranks.size == 1:
        yield ranks
        return
    if ranks.leads:
        signal.signal(signal.SIGINT, ranks.activity.interrupt)
    else:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    watch = _watch(ranks, hang_timeout_s)
    watch.start()
    refusal: BaseException | None = None
    try:
        try:
            yield ranks
        except _ORDERLY as error:
            if ranks.farewell is None or not ranks.activity.waiting:  # the others don't listen yet, or not now
                raise
            refusal = error
        _part(ranks, watch)
    except BaseException as error:
        _fail(ranks, watch, error)
    if refusal is not None:
        raise refusal


def _watch(ranks: Ranks, hang_timeout_s: float) -> Watch:
    try:
        store = ranks.new_store()
        return Watch(store, rank=ranks.rank, size=ranks.size, activity=ranks.activity, hang_timeout_s=hang_timeout_s)
    except RuntimeError as error:
        raise GroupError(
            f"rank {ranks.rank} misses another of the {ranks.size} ranks after {START_TIMEOUT_S} s: {error}"
        ) from error


def _part(ranks: Ranks, watch: Watch) -> None:
    """Rank 0 lets the others go and waits until they have left, since the store may lie in its process."""
    ranks.dismiss()
    ranks.activity.rest()
    if ranks.leads:
        watch.leave()
        while not watch.all_left():  # the watch, which still looks, ends this when one of them fails
            time.sleep(_POLL_S)
    watch.stop()
    watch.leave()
    faulthandler.dump_traceback_later(_CLOSE_TIMEOUT_S, exit=True)  # nobody looks any more
    ranks.close()
    faulthandler.cancel_dump_traceback_later()


def _fail(ranks: Ranks, watch: Watch, error: BaseException) -> NoReturn:
    """End this process, and with it the job."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, RankLost):
        watch.find_culprit()
        words = str(error)
    end(f"minieagle rank {ranks.rank}: {words}", partial(watch.fail, f"rank {ranks.rank} failed: {words}"))

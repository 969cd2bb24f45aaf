"""The asynchronous front over the one step loop: many coroutines submit requests, one thread owns the engine.

The one idea: the engine has a single owner. Coroutines never touch it; they leave commands (admit, abort) in a deque,
and the loop thread carries them out between steps and hands each step's outputs back in one call per step. With no
work and no command the thread sleeps on a condition. This loop is where rank 0 decides what all ranks do next, so
whatever has to be broadcast passes through `_obey` and `_publish` and nowhere else.

Memory is bounded by the requests themselves: a stream whose reader is slow queues at most its own max_tokens.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Self

from minieagle.dist.ranks import RankLost
from minieagle.engine import Engine, Output, Request
from minieagle.errors import RequestError

_log = logging.getLogger(__name__)


class Unavailable(RuntimeError):
    """The server takes no more requests: it is draining, or its step loop has ended. HTTP 503."""


class Stream:
    """One admitted request's outputs, in order; the last one carries the finish reason. Mutable, event loop only.

    Ends with Unavailable if the step loop fails. `close` must be called by whoever iterates: it aborts the request
    unless it has finished.
    """

    def __init__(self, front: "AsyncFront", request: Request) -> None:
        self.request = request
        self.admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._front = front
        self._queue: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._read_to_end = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._read_to_end:
            raise StopAsyncIteration
        item = await self._queue.get()
        self._read_to_end = isinstance(item, Exception) or item.finish_reason is not None
        if isinstance(item, Exception):
            raise item
        return item

    def deliver(self, item: int | Output | Exception) -> None:
        """Called on the event loop with what the step loop says: the id at admission, outputs, or an end."""
        if isinstance(item, Output):
            self._queue.put_nowait(item)
        elif self.admitted.cancelled():
            return  # its reader left before it was admitted; the abort is on its way
        elif self.admitted.done():
            assert isinstance(item, Exception), "a stream is admitted once"
            self._queue.put_nowait(item)
        elif isinstance(item, Exception):
            self.admitted.set_exception(item)
        else:
            self.admitted.set_result(item)

    def close(self) -> None:
        """Stops listening, and aborts the request unless it has finished. May be called more than once."""
        self._front.release(self)
        self._read_to_end = True


class AsyncFront:
    """Serves `engine` to coroutines of one event loop; use as `async with AsyncFront(engine) as front`.

    `healthy` turns False for good when the step loop raises; `draining` turns True for good when `drain` is called.
    Everything public belongs to the event loop; methods that start with `_run`, `_obey`, `_admit`, `_abort`,
    `_publish` and `_fail` belong to the loop thread, and only those touch the engine's state.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.healthy = True
        self.draining = False
        self._open: set[Stream] = set()
        self._idle = asyncio.Event()
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[Stream], None], Stream]] = deque()
        self._closing = False
        self._admitted: dict[int, Stream] = {}  # by request id; loop thread only
        self._thread = threading.Thread(target=self._run, name="minieagle-steps", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._end_all(Unavailable("the server has stopped; retry elsewhere"))

    async def stream(self, request: Request) -> Stream:
        """Admits `request` and returns its outputs to come.

        Waits for the step in progress to end. Raises RequestError when the engine refuses the request, Unavailable
        when draining or unhealthy. Cancelling aborts the request.
        """
        self._check_available()
        stream = Stream(self, request)
        self._open.add(stream)
        self._idle.clear()
        self._post(self._admit, stream)
        try:
            await stream.admitted
        except BaseException:
            stream.close()
            raise
        return stream

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits until the open streams are read to their end.

        Returns False when that took more than `timeout_s`: what is still open has then been aborted.
        """
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        all_read = not self._open
        self._end_all(Unavailable("the server shuts down and the time for open requests is over; retry elsewhere"))
        return all_read

    def release(self, stream: Stream) -> None:
        """A stream's reader is gone: what the engine may still be doing for it ends."""
        if stream in self._open:
            self._open.discard(stream)
            self._post(self._abort, stream)
        if not self._open:
            self._idle.set()

    def _check_available(self) -> None:
        if not self.healthy:
            raise Unavailable("the engine has stopped after an internal error; restart the server")
        if self.draining:
            raise Unavailable("the server is shutting down; retry elsewhere")

    def _post(self, command: Callable[[Stream], None], stream: Stream) -> None:
        with self._wake:
            self._commands.append((command, stream))
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._obey()
                if self.engine.has_work:
                    self._publish(self.engine.step())
        except Exception as error:  # whatever it is, its state is unknown: end every stream rather than hang them
            if not isinstance(error, RankLost):  # of a lost rank the job itself says which it was
                _log.exception("the step loop ended")
            self._call(self._fail, Unavailable(f"the engine stopped: {error}"))

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when the front closes."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._commands or self.engine.has_work)
            return not self._closing

    def _obey(self) -> None:
        while self._commands:  # only this thread pops, so a non-empty deque stays non-empty
            command, stream = self._commands.popleft()
            command(stream)

    def _admit(self, stream: Stream) -> None:
        try:
            request_id = self.engine.add(stream.request)
        except ValueError as error:  # this request's fault, whichever folder named it; the loop goes on
            refusal = error if isinstance(error, RequestError) else RequestError(str(error))
            self._call(stream.deliver, refusal)
            return
        self._admitted[request_id] = stream
        self._call(stream.deliver, request_id)

    def _abort(self, stream: Stream) -> None:
        """Nothing for a stream whose request has finished, was refused or was never admitted."""
        for request_id in [key for key, value in self._admitted.items() if value is stream]:
            del self._admitted[request_id]
            self.engine.abort(request_id)

    def _publish(self, outputs: list[Output]) -> None:
        """Hands a step's outputs to their streams; those of an aborted request have nowhere to go."""
        known = [(self._admitted[out.request_id], out) for out in outputs if out.request_id in self._admitted]
        for _, output in known:
            if output.finish_reason is not None:
                del self._admitted[output.request_id]
        if known:
            self._call(_deliver_all, known)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Runs `function` on the event loop; a loop that has closed has no readers left."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _fail(self, error: Unavailable) -> None:
        """On the event loop: no request is taken any more and every open stream ends with `error`."""
        self.healthy = False
        self._end_all(error)

    def _end_all(self, error: Unavailable) -> None:
        for stream in self._open:
            stream.deliver(error)


def _deliver_all(deliveries: list[tuple[Stream, Output]]) -> None:
    for stream, output in deliveries:
        stream.deliver(output)

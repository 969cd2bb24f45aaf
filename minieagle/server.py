"""The OpenAI-compatible HTTP server over one engine.

The one idea: a request is parsed, tokenised and admitted before the first byte of the answer, so that whatever is wrong
with it is a real 4xx with its cause; from then on only the engine can fail it. Whoever leaves early, streaming or not,
takes their request out of the engine. At SIGTERM the server refuses new requests with 503, lets open ones finish within
DRAIN_S, and exits with 0.

Errors have OpenAI's shape for every status. There is no authentication here, so the default address is the machine's
own. Sources: OpenAI's API description; the server-sent events standard; uvicorn's documented Server and Config.
"""

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from minieagle.answer import Answer, error_body, to_event, to_json
from minieagle.engine import Engine, Output
from minieagle.errors import MinieagleError, RequestError
from minieagle.front import AsyncFront, Stream, Unavailable
from minieagle.protocol import Call, Json, parse_chat, parse_completion
from minieagle.tokenizer import Tokenizer

MAX_BODY_BYTES: Final = 4 * 2**20
DRAIN_S: Final = 25.0  # torchrun kills its workers 30 s after it passes a SIGTERM on
# Bodies that are parsed and tokenised at once: more would take each other's time, and 100 times their size in memory.
MAX_PARSING: Final = 2
KEEP_ALIVE_S: Final = 15.0  # proxies cut a silent connection after 60 s
_SSE_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_Parser = Callable[[bytes, Tokenizer, int], Call]


class Aborted(RuntimeError):
    """The engine gave one request up: it failed, or somebody else aborted it. HTTP 500."""


def create_app(
    front: AsyncFront, *, served_model_names: Sequence[str], max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The application over a running `front`, which answers to any of `served_model_names`."""
    app = FastAPI(title="minieagle", docs_url=None, redoc_url=None, openapi_url=None)
    models = [_model(front.engine, name) for name in served_model_names]
    parsing = asyncio.Semaphore(MAX_PARSING)

    async def answer(http: Request, parse: _Parser) -> Response:
        raw = await _read_body(http, max_body_bytes)
        engine = front.engine
        async with parsing:
            call = await asyncio.to_thread(parse, raw, engine.tokenizer, engine.max_context_tokens)
        _check_model(call.model, served_model_names)
        reply = Answer(call, call.model or served_model_names[0], engine.tokenizer)
        if not call.stream:
            return await _unless_left(http, _whole(front, call, reply))
        streams = await _admit(front, call)
        return _EventStream(_events(streams, reply), streams)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await answer(http, parse_chat)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await answer(http, parse_completion)

    @app.get("/v1/models")
    async def list_models() -> Json:
        return {"object": "list", "data": models}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Json:
        _check_model(name, served_model_names)
        return next(model for model in models if model["id"] == name)

    @app.get("/health")
    async def health() -> Response:
        if front.healthy and not front.draining:
            return JSONResponse({"status": "ok"})
        return _unavailable("draining" if front.healthy else "the engine has stopped after an internal error")

    _install_error_bodies(app)
    return app


def bind(host: str, port: int) -> socket.socket:
    """A socket that owns the address but doesn't listen yet, so that a busy port is found before weights are loaded.

    Raises MinieagleError when the address can't be had. Port 0 takes a free one.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise MinieagleError(
            f"--host {host} --port {port} can't be had: {error}; choose another port, or 0 for a free one"
        ) from error
    return sock


def run(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    sock: socket.socket | None = None,
    served_model_names: Sequence[str] = (),
    drain_s: float = DRAIN_S,
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status, 0 if every open request could finish.

    `sock` from `bind` takes the place of host and port. Without `served_model_names` the model is called as its folder.
    A second signal cuts open requests off, each with an error of its own.
    """
    names = tuple(served_model_names) or (engine.tokenizer.directory.name,)
    return asyncio.run(_serve(engine, sock or bind(host, port), names, drain_s))


async def _serve(engine: Engine, sock: socket.socket, names: Sequence[str], drain_s: float) -> int:
    async with AsyncFront(engine) as front:
        server = DrainingServer(front, sock, create_app(front, served_model_names=names), drain_s)
        await server.serve(sockets=[sock])
        return 0 if server.drained and front.healthy else 1


class DrainingServer(uvicorn.Server):
    """uvicorn, but a first signal drains and a second one cuts. `drained` tells afterwards how it ended.

    Draining keeps listening, so that load balancers see 503 on /health rather than a refused connection.
    """

    def __init__(self, front: AsyncFront, sock: socket.socket, app: FastAPI, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                ws="none",
                lifespan="off",
                timeout_graceful_shutdown=5,
                # Longer than clients keep an idle connection (5 s in httpx, the default here too): were both equal, a
                # server would at times close the connection that a client is just sending on.
                timeout_keep_alive=75,
            )
        )
        self.drained = False
        self._front = front
        self._sock = sock
        self._drain_s = drain_s
        self._num_signals = 0
        self._drains: list[asyncio.Task[bool]] = []

    def drain(self) -> None:
        """Asks for the end, as a signal does. Safe to call from a signal handler or another thread."""
        self._num_signals += 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Overrides uvicorn's handler, which would refuse connections at once and re-raise the signal at the end."""
        self.drain()
        told = (
            "finishing open requests; a second signal cuts them off" if self._num_signals == 1 else "cutting them off"
        )
        print(f"{signal.Signals(sig).name}: {told}", flush=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._sock.getsockname()[:2]
        if not ipaddress.ip_address(host).is_loopback:
            print(f"warning: whoever reaches {host} can use this server, it asks for no key", flush=True)
        print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks ten times a second whether to stop."""
        if self._num_signals > len(self._drains):
            time_left_s = 0.0 if self._drains else self._drain_s
            self._drains.append(asyncio.create_task(self._front.drain(time_left_s)))
        if self._drains and all(drain.done() for drain in self._drains):
            self.drained = all(drain.result() for drain in self._drains)
            return True
        return await super().on_tick(counter)


class _EventStream(StreamingResponse):
    """A stream of server-sent events that closes its requests even if it is cancelled before its first chunk."""

    def __init__(self, events: AsyncIterator[bytes], streams: Sequence[Stream]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_SSE_HEADERS)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _close(self._streams)


async def _admit(front: AsyncFront, call: Call) -> list[Stream]:
    """A stream for each of the call's requests: all, or none if one is refused."""
    streams: list[Stream] = []
    try:
        for request in call.requests:
            streams.append(await front.stream(request))
    except BaseException:
        _close(streams)
        raise
    return streams


async def _whole(front: AsyncFront, call: Call, reply: Answer) -> Response:
    streams = await _admit(front, call)
    try:
        async with contextlib.aclosing(_merge(streams)) as outputs:
            async for index, output in outputs:
                if output is not None:
                    reply.add(index, _checked(output))
    finally:
        _close(streams)
    return Response(to_json(reply.whole()), media_type="application/json")


async def _events(streams: Sequence[Stream], reply: Answer) -> AsyncIterator[bytes]:
    """The answer as events. An error after the first byte is an event too; no finish reason or [DONE] follows it."""
    try:
        for chunk in reply.opening():
            yield to_event(chunk)
        async with contextlib.aclosing(_merge(streams)) as outputs:
            async for index, output in outputs:
                if output is None:
                    yield b": keep-alive\n\n"
                else:
                    for chunk in reply.add(index, _checked(output)):
                        yield to_event(chunk)
        for chunk in reply.closing():
            yield to_event(chunk)
        yield b"data: [DONE]\n\n"
    except (Aborted, Unavailable) as error:
        yield to_event(error_body(str(error), "server_error"))


async def _merge(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Output | None], None]:
    """Outputs of all streams with their index as they come; (-1, None) whenever KEEP_ALIVE_S pass without one."""
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield -1, None
            for task in done:
                index = waiting.pop(task)
                with contextlib.suppress(StopAsyncIteration):
                    yield index, task.result()
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()


def _checked(output: Output) -> Output:
    if output.finish_reason == "error":
        raise Aborted(f"the engine failed on this request: {output.error}")
    if output.finish_reason == "abort":
        raise Aborted(f"the request was aborted: {output.error or 'by the server'}")
    return output


def _close(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.close()


async def _unless_left(http: Request, work: Awaitable[Response]) -> Response:
    """The result of `work`, which is cancelled if the client disconnects. Starlette watches streams only."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=HTTPStatus.REQUEST_TIMEOUT)  # read by nobody
    finally:
        task.cancel()
        leaving.cancel()


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _read_body(http: Request, max_bytes: int) -> bytes:
    """The request's body; 413 as soon as it is larger than `max_bytes`, whether or not it states its length."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > max_bytes:
            raise HTTPException(413, f"the body is larger than {max_bytes} bytes; shorten the prompt")
    return bytes(body)


def _model(engine: Engine, name: str) -> Json:
    limit = engine.max_context_tokens
    return {"id": name, "object": "model", "created": 0, "owned_by": "minieagle", "root": name, "max_model_len": limit}


def _check_model(name: str | None, served: Sequence[str]) -> None:
    """A request without a model means the one that is served."""
    if name is not None and name not in served:
        raise RequestError(
            f"model={name!r:.80} is not served here, only {', '.join(served)}; name one of them",
            param="model",
            code="model_not_found",
        )


def _install_error_bodies(app: FastAPI) -> None:
    """OpenAI's error shape for whatever goes wrong, routing included."""

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        status = 404 if error.code == "model_not_found" else 400
        body = error_body(str(error), "invalid_request_error", param=error.param, code=error.code)
        return JSONResponse(body, status)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return JSONResponse(error_body(error.detail, kind), error.status_code, headers=error.headers)

    @app.exception_handler(Unavailable)
    async def unavailable(_: Request, error: Unavailable) -> Response:
        return _unavailable(str(error))

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=HTTPStatus.REQUEST_TIMEOUT)  # read by nobody

    @app.exception_handler(Aborted)
    async def aborted(_: Request, error: Aborted) -> Response:
        return JSONResponse(error_body(str(error), "server_error"), 500)

    @app.exception_handler(Exception)  # uvicorn logs it
    async def fault(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body("internal error; see the server's log", "server_error"), 500)


def _unavailable(cause: str) -> Response:
    return JSONResponse(error_body(cause, "server_error", code="unavailable"), 503, headers={"Retry-After": "5"})

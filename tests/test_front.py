"""Many coroutines, one engine: a single thread owns it, everybody gets their own outputs, and every end is told."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minieagle.engine import Request
from minieagle.errors import RequestError
from minieagle.front import AsyncFront, Stream, Unavailable
from minieagle.sampling import SamplingParams
from minieagle.tokenizer import Tokenizer
from tests.fake_engine import TARGET, FakeEngine

TOKENIZER = Tokenizer(TARGET)
ENDLESS = SamplingParams(max_tokens=20_000, ignore_eos=True)
Scenario = Callable[[AsyncFront, FakeEngine], Awaitable[None]]


def play(scenario: Scenario, *, step_s: float = 0.0) -> FakeEngine:
    """Runs `scenario` against a front over a new engine and returns the engine."""
    engine, faults = FakeEngine(TOKENIZER, step_s=step_s), list[object]()

    async def within() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        async with AsyncFront(engine) as front:  # type: ignore[arg-type]
            await asyncio.wait_for(scenario(front, engine), timeout=20)

    asyncio.run(within())
    assert not faults, "a callback on the event loop failed"
    return engine


def request(text: str = "hello there", params: SamplingParams = SamplingParams()) -> Request:  # noqa: B008  (frozen)
    return Request(tuple(TOKENIZER.encode(text)), params)


async def read(stream: Stream) -> str:
    try:
        return "".join([output.text async for output in stream])
    finally:
        stream.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@given(st.lists(st.text("ab é\U0001f600", min_size=1, max_size=20), min_size=1, max_size=12))
def test_concurrent_streams_get_their_own_text(texts: list[str]) -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        async def one(text: str) -> str:
            return await read(await front.stream(request(text)))

        assert await asyncio.gather(*map(one, texts)) == texts

    assert len(play(scenario).threads) == 1


def test_a_refused_request_costs_only_itself() -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        stream = await front.stream(request())
        assert TOKENIZER.bos_id is not None
        with pytest.raises(RequestError, match="starts twice"):
            await front.stream(Request((1, TOKENIZER.bos_id), SamplingParams()))
        assert await read(stream) == "hello there" and front.healthy

    play(scenario)


def test_closing_a_stream_aborts_its_request_and_no_other() -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        left, stays = await front.stream(request(params=ENDLESS)), await front.stream(request(params=ENDLESS))
        await anext(left)
        left.close()
        await until(lambda: engine.aborted)
        await anext(stays)
        stays.close()

    assert play(scenario, step_s=0.001).aborted[0] == 1


def test_a_finished_request_is_not_aborted() -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        await read(await front.stream(request()))

    assert play(scenario).aborted == []


def test_cancelling_while_waiting_for_admission_aborts() -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        busy = await front.stream(request(params=ENDLESS))
        waiting = asyncio.create_task(front.stream(request("late", ENDLESS)))
        await asyncio.sleep(0)
        waiting.cancel()
        await until(lambda: engine.aborted)
        busy.close()

    assert play(scenario, step_s=0.01).aborted[0] == 2


def test_an_exception_in_the_loop_ends_every_stream_and_the_front() -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        streams = [await front.stream(request(params=ENDLESS)) for _ in range(3)]
        engine.fault = RuntimeError("no memory")
        for result in await asyncio.gather(*map(read, streams), return_exceptions=True):
            assert isinstance(result, Unavailable) and "no memory" in str(result)
        assert not front.healthy
        with pytest.raises(Unavailable, match="restart"):
            await front.stream(request())

    play(scenario, step_s=0.001)


def test_draining_refuses_new_requests_and_finishes_open_ones() -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        reading = asyncio.create_task(read(await front.stream(request("a long text " * 9))))
        draining = asyncio.create_task(front.drain(timeout_s=10))
        await until(lambda: front.draining)
        with pytest.raises(Unavailable, match="shutting down"):
            await front.stream(request())
        assert await draining and await reading == "a long text " * 9

    assert play(scenario, step_s=0.002).aborted == []


def test_draining_cuts_what_takes_too_long() -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        reading = asyncio.create_task(read(await front.stream(request(params=ENDLESS))))
        assert not await front.drain(timeout_s=0.05)
        with pytest.raises(Unavailable, match="time for open requests is over"):
            await reading
        await until(lambda: engine.aborted)

    assert play(scenario, step_s=0.001).aborted == [1]


def test_an_idle_front_takes_no_steps() -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        await read(await front.stream(request()))
        await asyncio.sleep(0.02)
        num_polls = engine.num_polls
        await asyncio.sleep(0.05)
        assert engine.num_polls == num_polls

    play(scenario)


def test_closing_the_front_ends_what_is_open() -> None:
    async def scenario(front: AsyncFront, engine: FakeEngine) -> None:
        open_streams.append(await front.stream(request(params=ENDLESS)))

    open_streams: list[Stream] = []
    play(scenario, step_s=0.001)
    with pytest.raises(Unavailable, match="has stopped"):
        asyncio.run(_to_the_end(open_streams[0]))


async def _to_the_end(stream: Stream) -> None:
    async for _ in stream:
        pass

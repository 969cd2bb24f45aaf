"""The HTTP server, driven by the `openai` client and byte by byte. The fixture `engine` alone picks the engine."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from minieagle import serve, server
from minieagle.answer import speculation_metrics
from minieagle.engine import Engine
from minieagle.errors import MinieagleError
from minieagle.front import AsyncFront
from minieagle.llm import LLM
from minieagle.protocol import NEUTRAL, parse_completion
from minieagle.sequence import SpecStats
from minieagle.tokenizer import Tokenizer
from tests.fake_engine import MAX_CONTEXT_TOKENS, TARGET, FakeEngine

TOKENIZER = Tokenizer(TARGET)
HELLO = [{"role": "user", "content": "hello caf\xe9 \U0001f600"}]
SAID = "userhello caf\xe9 \U0001f600assistant"  # the fake engine says the prompt back, markup aside
ENDLESS = {"prompt": "again and ", "max_tokens": 2000, "ignore_eos": True}


def soon(condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true while somebody might still be waiting for it."""
    return any(condition() or time.sleep(0.01) for _ in range(2000))


class Running:
    """A server in a thread of its own, on a free port."""

    def __init__(self, engine: FakeEngine | Engine) -> None:
        self._server: server.DrainingServer | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(engine)), daemon=True)
        self._thread.start()
        assert soon(lambda: self._server is not None and self._server.started), "the server did not start"

    async def _serve(self, engine: FakeEngine | Engine) -> None:
        sock = server.bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with AsyncFront(engine) as self.front:  # type: ignore[arg-type]
            app = server.create_app(self.front, served_model_names=["tiny", "alias"], max_body_bytes=100_000)
            self._server = server.DrainingServer(self.front, sock, app, drain_s=5)
            await self._server.serve(sockets=[sock])

    def stop(self) -> None:
        assert self._server is not None, "it started"
        self._server.drain()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(TOKENIZER, step_s=0.0005)


@pytest.fixture(scope="module")
def running(engine: FakeEngine) -> Iterator[Running]:
    running = Running(engine)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def http(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=20) as client:
        yield client


@pytest.fixture
def broken() -> Iterator[Running]:
    """A server of its own, for tests that break its engine."""
    running = Running(FakeEngine(TOKENIZER, step_s=0.002))
    yield running
    running.stop()


def ask(client: openai.OpenAI, content: str = HELLO[0]["content"], **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def events(response: httpx.Response) -> list[Any]:
    """The payloads of a stream, whose framing is checked byte by byte."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


# --- chat ---


def test_a_chat_is_answered_whole(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.choices[0].message.content == SAID and answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].logprobs is None and answer.choices[0].message.refusal is None


def test_the_usage_counts_prompt_and_completion(client: openai.OpenAI) -> None:
    usage, prompt = ask(client, max_tokens=5).usage, len(TOKENIZER.encode_chat(HELLO))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 5, prompt + 5)


def test_a_streamed_chat_has_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1


def test_the_client_s_own_accumulator_accepts_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:  # type: ignore[arg-type]
        assert stream.get_final_completion().choices[0].message.content == SAID


def test_a_stream_s_bytes(http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": HELLO, "stream": True, "max_tokens": 3}
    response = http.post("/v1/chat/completions", json=body)
    chunks = events(response)
    assert chunks.pop() == "[DONE]" and all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert "usage" not in chunks[-1] and response.headers["cache-control"] == "no-cache"


def test_usage_comes_last_for_those_who_ask(client: openai.OpenAI) -> None:
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == len(TOKENIZER.encode_chat(HELLO))
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_so_far_comes_with_every_chunk_for_those_who_ask(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, max_tokens=6, stream_options={"continuous_usage_stats": True}))
    assert [chunk.usage.completion_tokens for chunk in chunks] == sorted(
        chunk.usage.completion_tokens for chunk in chunks
    )
    assert chunks[-1].usage.completion_tokens == 6 and chunks[-1].choices


def test_a_quiet_stream_is_kept_alive(broken: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.0001)
    monkeypatch.setattr(broken.front.engine, "_step_s", 0.1)  # long beside any delay of the event loop
    body = {"prompt": "one two three", "stream": True}
    text = httpx.post(f"{broken.url}/v1/completions", json=body, timeout=20).text
    assert ": keep-alive\n\n" in text and text.endswith("data: [DONE]\n\n")


def test_speculation_statistics_come_with_the_usage(client: openai.OpenAI) -> None:
    metrics = ask(client, max_tokens=6).metrics["speculative_decoding"]
    assert metrics["acceptance_histogram"] == [0, 3, 0] and metrics["mean_acceptance_length"] == 2.0
    *_, last = ask(client, max_tokens=6, stream=True, stream_options={"include_usage": True})
    assert last.metrics["speculative_decoding"] == metrics


def test_speculation_can_be_switched_off_for_one_request(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert not hasattr(ask(client, extra_body={"speculation": False}), "metrics")
    assert not engine.added[-1].spec
    ask(client)
    assert engine.added[-1].spec


def test_the_histogram_counts_every_step_once() -> None:
    metrics = speculation_metrics(SpecStats(num_steps=10, num_tokens=22, num_drafted=50, reached=[7, 4, 1]))
    assert metrics["acceptance_histogram"] == [3, 3, 3, 1] and metrics["num_accepted_draft_tokens"] == 12
    assert metrics["mean_acceptance_length"] == 2.2 and metrics["draft_acceptance_rate"] == 0.24


def test_chat_logprobs_have_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(item.bytes) for item in content).decode() == SAID and content[0].token == "[BOS]"
    assert [len(item.top_logprobs) for item in content] == [2] * len(content)
    assert content[0].top_logprobs[-1].logprob == -9999.0  # minus infinity has no JSON


def test_streamed_logprobs_are_the_whole_ones(client: openai.OpenAI) -> None:
    chunks = ask(client, logprobs=True, stream=True)
    streamed = [item.token for chunk in chunks for item in getattr(chunk.choices[0].logprobs, "content", None) or []]
    assert streamed == [item.token for item in ask(client, logprobs=True).choices[0].logprobs.content]


# --- completions ---


@pytest.mark.parametrize("prompt", ["one two", ["one two", "three"], [5, 6, 7], [[5, 6], [7]]])
def test_prompts_come_as_text_ids_or_lists_of_either(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt)
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    texts = [one if isinstance(one, str) else TOKENIZER.decode(one) for one in prompts]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(prompts)))


def test_several_prompts_stream_side_by_side(client: openai.OpenAI) -> None:
    prompts = ["alpha " * 5, "beta " * 9, "gamma"]
    texts = ["", "", ""]
    for chunk in client.completions.create(model="tiny", prompt=prompts, stream=True, max_tokens=100):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == prompts


def test_completion_logprobs_have_the_older_shape(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="tiny", prompt="x caf\xe9", logprobs=1, max_tokens=50).choices[0]
    found: Any = choice.logprobs
    ids = TOKENIZER.encode("x caf\xe9")
    assert found.tokens == [TOKENIZER.token_name(one) for one in ids] and found.token_logprobs == [-0.5] * len(ids)
    before = [b"".join(map(TOKENIZER.token_bytes, ids[:k])) for k in range(len(ids))]
    assert found.text_offset == [len(text.decode(errors="ignore")) for text in before]  # whole characters so far
    assert found.top_logprobs[0][found.tokens[0]] == -0.5


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="tiny", prompt="one two three four", stop=[" three"]).choices[0]
    assert choice.text == "one two" and choice.finish_reason == "stop"


def test_sixteen_tokens_are_the_default_and_length_the_reason(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="word " * 50)
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_concurrent_streams_stay_apart(client: openai.OpenAI) -> None:
    def one(index: int) -> str:
        chunks = ask(client, f"number {index} " * 9, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(12) as pool:
        for index, text in enumerate(pool.map(one, range(24))):
            assert text == "user" + f"number {index} " * 9 + "assistant"


# --- parameters ---


def test_every_parameter_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    own = {"top_k": 7, "min_p": 0.1, "stop_token_ids": [3], "ignore_eos": True}
    ask(client, temperature=0.5, top_p=0.9, seed=11, max_tokens=4, stop="zzz", logprobs=True, extra_body=own)
    params = engine.added[-1].params
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.5, 0.9, 11, 4)
    assert (params.top_k, params.min_p, params.stop_token_ids, params.ignore_eos) == (7, 0.1, (3,), True)
    assert (params.stop, params.logprobs) == (("zzz",), 0)


def test_absent_parameters_follow_the_model_s_recommendation(client: openai.OpenAI, engine: FakeEngine) -> None:
    ask(client)
    params = engine.added[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.95, 0)
    assert params.max_tokens == MAX_CONTEXT_TOKENS - len(TOKENIZER.encode_chat(HELLO))


def test_neutral_values_and_labels_are_accepted(client: openai.OpenAI) -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    labels = {"user": "me", "metadata": {"a": "b"}, "audio": None, "temperature": None, "top_k": -1}
    assert ask(client, extra_body=neutral | labels).choices[0].message.content == SAID


BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("temprature", 1, "temprature"),
    ("temprature", None, "temprature"),
    ("n", 2, "n"),
    ("n", True, "n"),
    ("echo", True, "echo"),
    ("frequency_penalty", 0.5, "frequency_penalty"),
    ("logit_bias", {"5": 1}, "logit_bias"),
    ("response_format", {"type": "json_object"}, "response_format"),
    ("tools", [{"type": "function"}], "tools"),
    ("temperature", "1", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", -1, "temperature"),
    ("temperature", 1e999, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.5, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", 2, "min_p"),
    ("seed", 2**64, "seed"),
    ("seed", "7", "seed"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", "5", "max_tokens"),
    ("max_tokens", 10**400, "max_tokens"),
    ("stop", "", "stop"),
    ("stop", 5, "stop"),
    ("stop", ["a", 5], "stop"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", [True], "stop_token_ids"),
    ("stop_token_ids", [TOKENIZER.vocab_size], "stop_token_ids"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("stream_options", {"what": True}, "stream_options.what"),
    ("ignore_eos", 1, "ignore_eos"),
    ("speculation", 0, "speculation"),
    ("model", 5, "model"),
]
BAD_CHATS: list[tuple[str, Any, str]] = [
    ("messages", [], "messages"),
    ("messages", "hi", "messages"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    ("max_completion_tokens", -1, "max_tokens"),
    ("top_logprobs", 3, "top_logprobs"),
    ("logprobs", 1, "logprobs"),
    ("prompt", "x", "prompt"),
]
BAD_COMPLETIONS: list[tuple[str, Any, str]] = [
    ("prompt", "", "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", [[]], "prompt"),
    ("prompt", None, "prompt"),
    ("prompt", 5, "prompt"),
    ("prompt", [1.5], "prompt"),
    ("prompt", [1, True], "prompt"),
    ("prompt", [1, "a"], "prompt"),
    ("prompt", [-1], "prompt"),
    ("prompt", [TOKENIZER.vocab_size], "prompt"),
    ("prompt", [2**63], "prompt"),
    ("prompt", ["a"] * 129, "prompt"),
    ("prompt", [1, TOKENIZER.bos_id], "prompt"),  # refused by the engine, at admission
    ("logprobs", 21, "logprobs"),
    ("logprobs", -1, "logprobs"),
    ("messages", HELLO, "messages"),
]


def check_refused(response: httpx.Response, param: str | None, *, status: int = 400) -> str:
    """Checks an error of OpenAI's shape and returns its message."""
    error = response.json()["error"]
    assert response.status_code == status and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["type"] == "invalid_request_error"
    return str(error["message"])


@pytest.mark.parametrize(("name", "value", "param"), BAD_FIELDS + BAD_CHATS)
def test_a_bad_chat_field_is_refused_by_name(http: httpx.Client, name: str, value: Any, param: str) -> None:
    body = json.dumps({"model": "tiny", "messages": HELLO} | {name: value}).replace("Infinity", "1e999")
    assert param.split(".")[-1] in check_refused(http.post("/v1/chat/completions", content=body), param)


@pytest.mark.parametrize(("name", "value", "param"), BAD_FIELDS + BAD_COMPLETIONS)
def test_a_bad_completion_field_is_refused_by_name(http: httpx.Client, name: str, value: Any, param: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x"} | {name: value}).replace("Infinity", "1e999")
    check_refused(http.post("/v1/completions", content=body), param)


NO_OBJECTS = [b"", b"{", b"[]", b"5", b"\xff", b'{"prompt": NaN}', b"[" * 9999, b'{"a": "\\ud800"}']


@pytest.mark.parametrize("body", NO_OBJECTS)
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    assert "JSON" in check_refused(http.post("/v1/completions", content=body), None)


def test_contradicting_limits_are_refused(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}
    check_refused(http.post("/v1/chat/completions", json=body), "max_completion_tokens")


def test_too_long_a_prompt_is_refused_with_both_counts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"2000 prompt tokens and max_tokens=49 exceed .* 2048") as caught:
        client.completions.create(model="tiny", prompt=[5] * 2000, max_tokens=49)
    assert caught.value.code == "context_length_exceeded"
    assert client.completions.create(model="tiny", prompt=[5] * 2000, max_tokens=48).choices


def test_a_text_of_too_many_bytes_is_refused_untokenised(http: httpx.Client) -> None:
    text = "x" * 90_000
    for path, body in (
        ("completions", {"prompt": text}),
        ("chat/completions", {"messages": [HELLO[0] | {"content": text}]}),
    ):
        said = check_refused(http.post(f"/v1/{path}", json=body), "prompt" if "prompt" in body else "messages")
        assert "90000 bytes of text are at least" in said


def test_health_answers_while_prompts_are_tokenised_two_at_a_time(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, goes_on = list[int](), threading.Event()

    def slow(*arguments: Any) -> Any:
        going.append(1)
        goes_on.wait(20)
        return parse_completion(*arguments)

    monkeypatch.setattr(server, "parse_completion", slow)
    with ThreadPoolExecutor(4) as pool:
        try:
            asked = [pool.submit(http.post, "/v1/completions", json={"prompt": "x"}) for _ in range(4)]
            assert soon(lambda: len(going) == 2) and http.get("/health").status_code == 200
            assert len(going) == server.MAX_PARSING
        finally:
            goes_on.set()
        assert [one.result().status_code for one in asked] == [200] * 4


def test_a_bad_stream_is_refused_before_it_starts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="starts twice"):
        client.completions.create(model="tiny", prompt=[1, TOKENIZER.bos_id or 0], stream=True)


# --- routes, models, errors of the protocol ---


def test_the_served_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").model_extra == {"root": "alias", "max_model_len": MAX_CONTEXT_TOKENS}


def test_an_alias_answers_and_an_unknown_model_does_not(client: openai.OpenAI) -> None:
    assert client.completions.create(model="alias", prompt="x").model == "alias"
    with pytest.raises(openai.NotFoundError, match="only tiny, alias") as caught:
        client.completions.create(model="gpt-5", prompt="x")
    assert caught.value.code == "model_not_found"


def test_routing_errors_have_the_same_shape(http: httpx.Client) -> None:
    check_refused(http.get("/v1/nowhere"), None, status=404)
    check_refused(http.get("/v1/completions"), None, status=405)


def test_too_large_a_body_is_refused_whether_or_not_its_length_is_stated(http: httpx.Client) -> None:
    for body in (b"x" * 100_001, iter([b"x" * 60_000] * 2)):
        assert "100000" in check_refused(http.post("/v1/completions", content=body), None, status=413)


def test_health_is_ok(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200


# --- the embedded model ---


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def test_the_embedded_model_answers_a_crowd_as_it_answers_one(llm: LLM) -> None:
    questions = ["I would like to find a cab.", "Find me a restaurant in San Jose.", "What is on at the cinema?"] * 2
    alone = [llm.chat([{"role": "user", "content": one}], max_tokens=24) for one in questions]
    running = Running(llm.engine)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

        def one(question: str) -> str:
            chunks = ask(client, question, stream=True, temperature=0, max_tokens=24)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        with ThreadPoolExecutor(len(questions)) as pool:
            assert list(pool.map(one, questions)) == [result.text for result in alone]
    running.stop()


# --- leaving, failing, stopping ---


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(http: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    num_aborted = len(engine.aborted)
    with pytest.raises(httpx.ReadTimeout):
        with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": stream}, timeout=0.1) as response:
            for _ in response.iter_raw():
                raise httpx.ReadTimeout("enough")
    assert soon(lambda: len(engine.aborted) > num_aborted)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_fails_is_the_only_one_hurt(http: httpx.Client, stream: bool) -> None:
    response = http.post("/v1/completions", json={"prompt": [5, 5, FakeEngine.FAILING], "stream": stream})
    body = events(response)[-1] if stream else response.json()
    assert "NaN in the logits" in body["error"]["message"] and body["error"]["type"] == "server_error"
    assert response.status_code == (200 if stream else 500)
    assert http.get("/health").status_code == 200


def test_a_stopped_engine_ends_streams_and_turns_health_to_503(broken: Running) -> None:
    with httpx.Client(base_url=broken.url, timeout=20) as http:
        with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            broken.front.engine.fault = RuntimeError("no memory")  # type: ignore[attr-defined]
            assert [line for line in lines if line][-1].startswith('data: {"error":{"message":"the engine stopped')
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "x"}).headers["retry-after"] == "5"


class Process:
    """The fake engine's server in a process of its own, as torchrun would start it."""

    def __init__(self, drain_s: float) -> None:
        command = [sys.executable, "-m", "tests.fake_engine", str(drain_s)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
        assert self.popen.stdout is not None
        self.url = self.popen.stdout.readline().split()[-1].removesuffix("/v1")

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.popen.kill()
        self.popen.communicate()


def test_sigterm_finishes_open_streams_and_exits_with_0() -> None:
    with Process(drain_s=20) as process, httpx.Client(base_url=process.url, timeout=20) as http:
        body = {"prompt": "word " * 60, "max_tokens": 100, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            while httpx.get(f"{process.url}/health").status_code != 503:
                pass
            assert httpx.post(f"{process.url}/v1/completions", json={"prompt": "x"}).status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.popen.wait(10) == 0


def test_a_stream_that_outlasts_the_drain_is_cut_and_the_exit_says_so() -> None:
    with Process(drain_s=0.2) as process, httpx.Client(base_url=process.url, timeout=20) as http:
        with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            assert "time for open requests is over" in [line for line in lines if line][-1]
        assert process.popen.wait(10) == 1


def test_a_second_signal_cuts_at_once() -> None:
    with Process(drain_s=60) as process, httpx.Client(base_url=process.url, timeout=20) as http:
        with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.stdout is not None and "second signal" in process.popen.stdout.readline()
            process.popen.send_signal(signal.SIGINT)
            assert "shuts down" in [line for line in lines if line][-1]
        assert process.popen.wait(10) == 1


def test_a_busy_port_is_named_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with server.bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MinieagleError, match=f"--port {port} can't be had"):
            server.bind("127.0.0.1", port)
        assert serve.main(["--port", str(port), "--model", "nowhere"]) == 2
    assert f"--port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ("--eagle-topk 4", "num_steps"),
        ("--num-steps 3 --eagle-topk 2", "num_draft_tokens"),
        ("--num-steps 3 --eagle-topk 1 --num-draft-tokens 8", "num_draft_tokens"),
        ("--no-spec --tree chain:3", "drafter"),
        ("--model nowhere", "nowhere"),
        ("--max-seqs 0", "max_seqs"),
    ],
)
def test_inconsistent_options_are_refused(capsys: pytest.CaptureFixture[str], options: str, cause: str) -> None:
    assert serve.main(["--port", "0", *options.split()]) == 2
    assert cause in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--served-model-name", ""),
        ("--served-model-name", "a", "\x1b"),
        *[("--hang-timeout", s) for s in "-1 0 nan inf x".split()],
    ],
)
def test_options_that_mean_nothing_are_refused(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--port", "0", *options])
    assert f"argument {options[0]}: " in capsys.readouterr().err


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--spec-algorithm", "EAGLE"])
    assert "--spec-algorithm" in capsys.readouterr().err

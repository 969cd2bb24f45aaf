"""The OpenAI wire format: a request body becomes engine requests, and their outputs become a body or stream chunks.

The one idea: nothing that a caller asks for is dropped. A field is honoured, or it asks for nothing (its value is the
neutral one in NEUTRAL, or null), or the answer is a 400 that names it. What a field may hold is said once: types here,
sampling bounds in `SamplingParams`, messages in `tokenizer.check_messages`.

Beyond OpenAI's fields: top_k, min_p, stop_token_ids, ignore_eos (names as in vLLM and SGLang), `speculation` (default
true; false decodes plainly, with the same text), and `metrics.speculative_decoding` on the final body or usage chunk,
in the shape that vLLM sends. Where temperature, top_p, top_k or min_p is absent, the model's generation_config.json
decides, then OpenAI's default. Sources: OpenAI's API description; vLLM pull request 48915 for the metrics.
"""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from minieagle.engine import Output, Request, TokenLogprob
from minieagle.errors import RequestError
from minieagle.sampling import MAX_LOGPROBS, SamplingParams
from minieagle.sequence import SpecStats
from minieagle.tokenizer import Detokenizer, Tokenizer

Json = dict[str, Any]

MAX_PROMPTS: Final = 128
COMPLETION_MAX_TOKENS: Final = 16  # the API's default for /v1/completions; a chat goes on to the end of the context
LEAST_LOGPROB: Final = -9999.0  # stands for minus infinity, which JSON has no word for

# Fields that other servers offer and this one doesn't, with the values that ask for nothing. None always does.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
}
# Labels for a caller's own books: accepted whatever they say, since they ask for nothing.
LABELS: Final = ("user", "safety_identifier", "prompt_cache_key", "metadata")
_DEFAULTS: Final[dict[str, float]] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage so far on every chunk."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(BaseModel):
    """The fields that both endpoints share; null and absent mean the same."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1 is 0, as in vLLM and SGLang
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    speculation: bool = True


class ChatBody(_Body):
    """The body of /v1/chat/completions. The messages are checked by the tokenizer, which knows what it can render."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class CompletionBody(_Body):
    """The body of /v1/completions. `prompt` is text, token ids, or a list of either."""

    prompt: Any
    logprobs: int | None = None


BodyT = TypeVar("BodyT", bound=_Body)
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP request, parsed: the engine requests that it stands for, one a choice, and how to answer."""

    requests: tuple[Request, ...]
    model: str | None
    is_chat: bool
    stream: bool
    stream_options: StreamOptions


def parse_chat(raw: bytes, tokenizer: Tokenizer, max_context_tokens: int) -> Call:
    """The call that the body `raw` of /v1/chat/completions asks for; RequestError naming the field at fault."""
    body = _validate(ChatBody, raw)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true; add it", param="top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt = tokenizer.encode_chat(body.messages)
    params = _params(body, tokenizer, _chat_max_tokens(body, max_context_tokens - len(prompt)), num_logprobs)
    return _call(body, [prompt], params, max_context_tokens, is_chat=True)


def parse_completion(raw: bytes, tokenizer: Tokenizer, max_context_tokens: int) -> Call:
    """The call that the body `raw` of /v1/completions asks for; RequestError naming the field at fault."""
    body = _validate(CompletionBody, raw)
    prompts = _prompts(body.prompt, tokenizer)
    params = _params(body, tokenizer, _given(body.max_tokens, COMPLETION_MAX_TOKENS), body.logprobs)
    return _call(body, prompts, params, max_context_tokens, is_chat=False)


@dataclass
class Choice:
    """One choice of an answer as it grows. Mutable; `Answer.add` alone changes it."""

    detokenizer: Detokenizer
    text: str = ""
    finish_reason: str | None = None
    num_tokens: int = 0
    num_chars: int = 0  # of the tokens so far, for text_offset
    logprobs: list[TokenLogprob] = field(default_factory=lambda: [])
    offsets: list[int] = field(default_factory=lambda: [])


class Answer:
    """Builds the bodies that answer one call, whole or in chunks. Mutable; `add` is what changes it."""

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._choices = [Choice(Detokenizer(tokenizer)) for _ in call.requests]
        self._stats = SpecStats()
        kind = "chat.completion" if call.is_chat else "text_completion"
        self._object = kind + ".chunk" if call.is_chat and call.stream else kind
        self._head: Json = {
            "id": f"{'chatcmpl' if call.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": self._object,
            "created": int(time.time()),
            "model": model,
        }

    def add(self, index: int, output: Output) -> list[Json]:
        """Takes in an output of choice `index`; returns the chunks that tell it to a stream."""
        choice = self._choices[index]
        choice.text += output.text
        choice.num_tokens += len(output.token_ids)
        choice.finish_reason = output.finish_reason
        logprobs = self._take_logprobs(choice, output)
        if output.stats is not None:
            self._stats.add(output.stats)
        chunks: list[Json] = []
        if output.text or logprobs is not None:
            chunks.append(self._chunk(index, {"content": output.text}, output.text, logprobs, None))
        if output.finish_reason is not None:
            chunks.append(self._chunk(index, {}, "", None, output.finish_reason))
        return chunks

    def opening(self) -> list[Json]:
        """The chunks that come before any text: a chat announces the role, once a choice."""
        if not self._call.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta, "", None, None) for index in range(len(self._choices))]

    def closing(self) -> list[Json]:
        """The chunk after the last choice has ended, for callers that asked for the usage."""
        if not self._call.stream_options.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": self._usage(), **self._metrics()}]

    def whole(self) -> Json:
        """The body that answers a call which doesn't stream, when every choice has ended."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": self._usage(), **self._metrics()}

    def _chunk(self, index: int, delta: Json, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        content: Json = {"delta": delta} if self._call.is_chat else {"text": text}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        options = self._call.stream_options
        usage = self._usage() if options.continuous_usage_stats else None
        return {**self._head, "choices": [choice], **({"usage": usage} if options.include_usage or usage else {})}

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        content: Json = {"message": message} if self._call.is_chat else {"text": choice.text}
        asked = self._call.requests[index].params.logprobs is not None
        logprobs = self._logprobs(choice.logprobs, choice.offsets) if asked else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _take_logprobs(self, choice: Choice, output: Output) -> Json | None:
        if not output.logprobs:
            return None
        offsets: list[int] = []
        for token in output.logprobs:
            offsets.append(choice.num_chars)
            choice.num_chars += len(choice.detokenizer.push(token.token_id))
        choice.logprobs += output.logprobs
        choice.offsets += offsets
        return self._logprobs(output.logprobs, offsets)

    def _logprobs(self, tokens: Sequence[TokenLogprob], offsets: list[int]) -> Json:
        if self._call.is_chat:
            return {"content": [self._chat_logprob(token) for token in tokens], "refusal": None}
        return {
            "tokens": [self._tokenizer.token_name(token.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._named_top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _chat_logprob(self, token: TokenLogprob) -> Json:
        top = [self._named(token_id, logprob) for token_id, logprob in token.top]
        return {**self._named(token.token_id, token.logprob), "top_logprobs": top}

    def _named(self, token_id: int, logprob: float) -> Json:
        name = self._tokenizer.token_name(token_id)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(self._tokenizer.token_bytes(token_id))}

    def _named_top(self, token: TokenLogprob) -> dict[str, float]:
        """The alternatives and the chosen token by name; of two cut characters with one name the likelier stays."""
        pairs = sorted({*token.top, (token.token_id, token.logprob)}, key=lambda pair: pair[1])
        return {self._tokenizer.token_name(token_id): _finite(logprob) for token_id, logprob in pairs}

    def _usage(self) -> Json:
        prompt = sum(len(request.prompt_ids) for request in self._call.requests)
        completion = sum(choice.num_tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _metrics(self) -> Json:
        """Absent where nothing was drafted: speculation off, no drafter, or a single token."""
        if not self._stats.num_drafted:
            return {}
        return {"metrics": {"speculative_decoding": speculation_metrics(self._stats)}}


def speculation_metrics(stats: SpecStats) -> Json:
    """`acceptance_histogram[j]` steps accepted exactly j draft tokens; lengths count the bonus token, rates don't.

    In a tree most drafted tokens are alternatives of each other, so that draft_acceptance_rate is low by design.
    """
    survivors = [stats.num_steps, *stats.reached, 0]  # steps that accepted at least j
    return {
        "mean_acceptance_length": stats.tokens_per_step,
        "draft_acceptance_rate": sum(stats.reached) / stats.num_drafted if stats.num_drafted else 0.0,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(survivors)],
        "num_spec_steps": stats.num_steps,
        "num_accepted_draft_tokens": sum(stats.reached),
        "num_draft_tokens": stats.num_drafted,
        "num_spec_tokens": len(stats.reached),
    }


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """An error in OpenAI's shape; `kind` is its type, such as "invalid_request_error"."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_json(body: Json) -> str:
    """`body` on one line, as UTF-8 text."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def to_event(body: Json) -> bytes:
    """`body` as one server-sent event."""
    return f"data: {to_json(body)}\n\n".encode()


def _validate(kind: type[BodyT], raw: bytes) -> BodyT:
    fields = _without_neutral(_read_object(raw), kind)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _named_cause(error) from None


def _read_object(raw: bytes) -> Json:
    try:
        body = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}; send one JSON object") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON {type(body).__name__}; send one JSON object")
    return body


def _without_neutral(body: Json, kind: type[BaseModel]) -> Json:
    """`body` less what asks for nothing. Unknown fields stay, for the validation to name."""
    asked = {name: value for name, value in body.items() if value is not None or _is_unknown(name, kind)}
    for name, value in tuple(asked.items()):
        if name in LABELS or any(type(value) is type(one) and value == one for one in NEUTRAL.get(name, ())):
            del asked[name]
        elif name in NEUTRAL:
            only = " or ".join(map(json.dumps, NEUTRAL[name])) or "null"
            raise RequestError(
                f"{name}={value!r:.80} is not supported, only {only}; leave it out", param=name, code="unsupported"
            )
    return asked


def _is_unknown(name: str, kind: type[BaseModel]) -> bool:
    return name not in kind.model_fields and name not in NEUTRAL and name not in LABELS


def _named_cause(error: ValidationError) -> RequestError:
    """The first of a validation's findings, in our words where they can be clearer than the library's."""
    finding = error.errors(include_url=False)[0]
    path = finding["loc"] if finding["loc"][0] == "stream_options" else finding["loc"][:1]  # beyond: union branches
    name = ".".join(map(str, path))
    if finding["type"] == "extra_forbidden":
        return RequestError(f"{name} is not a field that this server knows; remove it", param=name)
    if finding["type"] == "missing":
        return RequestError(f"{name} is missing; add it", param=name)
    return RequestError(f"{name}={finding['input']!r:.80} is refused: {finding['msg']}", param=name)


def _params(body: _Body, tokenizer: Tokenizer, max_tokens: int, num_logprobs: int | None) -> SamplingParams:
    defaults = _DEFAULTS | tokenizer.sampling_defaults
    chosen: Json = {name: _given(getattr(body, name), default) for name, default in defaults.items()}
    if chosen["top_k"] == -1:
        chosen["top_k"] = 0
    _check_ids(body.stop_token_ids, tokenizer, "stop_token_ids")
    if num_logprobs is not None and not 0 <= num_logprobs <= MAX_LOGPROBS:
        name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        raise RequestError(f"{name}={num_logprobs} must be in 0..{MAX_LOGPROBS}; ask for fewer", param=name)
    try:
        return SamplingParams(
            **chosen,
            seed=body.seed,
            max_tokens=max_tokens,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            logprobs=num_logprobs,
        )
    except ValueError as error:  # its message starts with the field's name
        name = str(error).split()[0]
        raise RequestError(str(error), param=name if name in type(body).model_fields else None) from None


def _chat_max_tokens(body: ChatBody, room: int) -> int:
    """The two names of one limit; without either, the rest of the context (at least 1, for the check of lengths)."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens={old} contradicts max_completion_tokens={new}; send one of them", param="max_completion_tokens"
        )
    return _given(new, _given(old, max(room, 1)))


def _prompts(prompt: object, tokenizer: Tokenizer) -> list[list[int]]:
    """One list of token ids for each prompt: text, token ids, or a list of either."""
    if isinstance(prompt, str) or _is_ids(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt or len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt must be text, token ids, or a list of 1 to {MAX_PROMPTS} of either; split it", param="prompt"
        )
    return [_prompt_ids(one, tokenizer) for one in prompt]


def _prompt_ids(prompt: object, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list) or (prompt and not _is_ids(prompt)):
        raise RequestError(f"prompt={prompt!r:.80} must be text or a list of token ids", param="prompt")
    _check_ids(prompt, tokenizer, "prompt")
    return prompt


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _check_ids(ids: Sequence[int], tokenizer: Tokenizer, name: str) -> None:
    for token_id in ids:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise RequestError(
                f"{name} holds {token_id}; token ids must be in 0..{tokenizer.vocab_size - 1}", param=name
            )


def _call(
    body: _Body, prompts: list[list[int]], params: SamplingParams, max_context_tokens: int, *, is_chat: bool
) -> Call:
    for prompt in prompts:
        _check_length(len(prompt), params.max_tokens, max_context_tokens, "messages" if is_chat else "prompt")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true; add it or leave them out", param="stream_options")
    return Call(
        requests=tuple(Request(tuple(prompt), params, body.speculation) for prompt in prompts),
        model=body.model,
        is_chat=is_chat,
        stream=body.stream,
        stream_options=body.stream_options or StreamOptions(),
    )


def _check_length(num_prompt: int, max_tokens: int, max_context_tokens: int, param: str) -> None:
    if num_prompt == 0:
        raise RequestError(f"{param} is empty; send at least one token of text", param=param)
    if num_prompt + max_tokens > max_context_tokens:
        raise RequestError(
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} exceed the context of {max_context_tokens} "
            "tokens; shorten the prompt or lower max_tokens",
            param=param,
            code="context_length_exceeded",
        )


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB

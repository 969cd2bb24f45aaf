"""What a caller may ask for over HTTP: the body of an OpenAI request becomes engine requests.

The one idea: nothing that a caller asks for is dropped. A field is honoured, or it asks for nothing (its value is the
neutral one in NEUTRAL, or null), or the answer is a 400 that names it. What a field may hold is said once: types here,
sampling bounds in `SamplingParams`, messages in `messages.check_messages`.

Beyond the fields of OpenAI: top_k (0, or -1 as in vLLM and SGLang, for all), min_p, stop_token_ids, ignore_eos (names
as there), and `speculation` (default true; false decodes plainly, with the same text). Where temperature, top_p, top_k
or min_p is absent, the model's generation_config.json decides, then the default of OpenAI. The answers are in
`answer.py`. Source: the API description that OpenAI publishes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from minieagle.engine import Request
from minieagle.errors import RequestError
from minieagle.sampling import MAX_LOGPROBS, SamplingParams
from minieagle.tokenizer import Tokenizer

Json = dict[str, Any]

MAX_PROMPTS: Final = 128
COMPLETION_MAX_TOKENS: Final = 16  # the API's default for /v1/completions; a chat goes on to the end of the context

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
    prompt = tokenizer.encode_chat(body.messages, max_context_tokens=max_context_tokens)
    params = _params(body, tokenizer, _chat_max_tokens(body, max_context_tokens - len(prompt)), num_logprobs)
    return _call(body, [prompt], params, max_context_tokens, is_chat=True)


def parse_completion(raw: bytes, tokenizer: Tokenizer, max_context_tokens: int) -> Call:
    """The call that the body `raw` of /v1/completions asks for; RequestError naming the field at fault."""
    body = _validate(CompletionBody, raw)
    prompts = _prompts(body.prompt, tokenizer, max_context_tokens)
    params = _params(body, tokenizer, _given(body.max_tokens, COMPLETION_MAX_TOKENS), body.logprobs)
    return _call(body, prompts, params, max_context_tokens, is_chat=False)


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
    name = ".".join(map(str, path))[:80]
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


def _prompts(prompt: object, tokenizer: Tokenizer, max_context_tokens: int) -> list[list[int]]:
    """One list of token ids for each prompt: text, token ids, or a list of either."""
    if isinstance(prompt, str) or _is_ids(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt or len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt must be text, token ids, or a list of 1 to {MAX_PROMPTS} of either; split it", param="prompt"
        )
    return [_prompt_ids(one, tokenizer, max_context_tokens) for one in prompt]


def _prompt_ids(prompt: object, tokenizer: Tokenizer, max_context_tokens: int) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, max_context_tokens=max_context_tokens)
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

"""What a caller gets over HTTP: outputs of the engine become one body, or the chunks of a stream, in OpenAI's shapes.

The one idea: an `Answer` takes every output in once and can tell it both ways, so that a stream adds up to the body.
Chat and plain completions differ in three places only: the delta, the message and the logprobs.

Beyond OpenAI's fields, the body or the usage chunk carries `metrics.speculative_decoding` in the shape that vLLM sends,
which benchmark clients read. Sources: OpenAI's API description; vLLM pull request 48915 for the metrics.
"""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from minieagle.engine import Output, TokenLogprob
from minieagle.protocol import Call, Json
from minieagle.sequence import SpecStats
from minieagle.tokenizer import Detokenizer, Tokenizer

LEAST_LOGPROB: Final = -9999.0  # stands for minus infinity, which JSON has no word for


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


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB

"""The embedded model, loaded once for the tests that run it, and engines over it in any setting."""

from __future__ import annotations

from functools import cache
from typing import Any

from minieagle.engine import Engine, EngineConfig, Output, Request
from minieagle.llm import embedded
from minieagle.models.deepseek import Target
from minieagle.models.drafter_weights import load_drafter
from minieagle.models.eagle3 import Drafter
from minieagle.models.target_weights import load_target
from minieagle.sampling import SamplingParams
from minieagle.sequence import SpecStats
from minieagle.spec.tree import parse_shape
from minieagle.tokenizer import Tokenizer

MESSAGES = (
    "I would like to find a restaurant in San Jose.",
    "Can you find flights for me? I want to go to Seattle.",
    "Is Scream playing somewhere nearby? I want to see it tonight if possible.",
    "Natalia has 12 apples and gives 5 to her friend. How many are left?",
    "How do I use tar?",
    "Hi!",
)


@cache
def target() -> Target:
    return load_target(embedded("target"))


@cache
def drafter() -> Drafter:
    return load_drafter(embedded("drafter"), target(), max_positions=4096)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(embedded("target"))


@cache
def prompt(index: int) -> tuple[int, ...]:
    return tuple(tokenizer().encode_chat([{"role": "user", "content": MESSAGES[index]}]))


def engine(tree: str = "chain:5", **options: Any) -> Engine:
    return Engine(target(), tokenizer(), drafter=drafter(), config=EngineConfig(shape=parse_shape(tree), **options))


def run(engine: Engine, requests: list[Request]) -> list[list[Output]]:
    """All outputs of each request, in the order of the requests."""
    ids = [engine.add(request) for request in requests]
    outputs: dict[int, list[Output]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return [outputs[request_id] for request_id in ids]


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs(outputs: list[Output]) -> list[float]:
    return [entry.logprob for output in outputs for entry in output.logprobs or ()]


def stats(outputs: list[Output]) -> SpecStats:
    found = outputs[-1].stats
    assert found is not None, "the last output carries the statistics"
    return found


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": 40, "ignore_eos": True, "logprobs": 0} | fields))

"""Runs of the engine as the benches need them: engines that share one loaded model, and requests with times.

One model is loaded; plain, chain and tree are engines over the same weights (an engine is only a scheduler and a
cache), so that they differ in nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from minieagle.engine import Engine, EngineConfig, Output, Request, TokenLogprob
from minieagle.errors import ModelError
from minieagle.llm import load_engine
from minieagle.sampling import SamplingParams
from minieagle.sequence import SpecStats
from minieagle.spec.draft import draft_rows
from minieagle.spec.tree import Shape, TreeShape

PLAIN = "plain"


@dataclass(frozen=True)
class Run:
    """One finished request. first_s and total_s: seconds from its start to its first and to its last token."""

    token_ids: tuple[int, ...]
    first_s: float
    total_s: float
    stats: SpecStats
    logprobs: tuple[TokenLogprob, ...] = ()


def load(model: Path | None, drafter: Path | None, shapes: Sequence[Shape], threads: int | None = None) -> Engine:
    """Load the target and, if any shape is to be drafted, the drafter, with room for the largest of them."""
    if threads is not None:
        if threads < 1:
            raise ModelError(f"--threads {threads} must be at least 1")
        torch.set_num_threads(threads)
    tree = max(shapes, key=draft_rows) if shapes else None
    return load_engine(model, drafter=drafter, spec=bool(shapes), tree=tree, max_seqs=1)


def variant(
    loaded: Engine, shape: Shape | None, *, max_seqs: int = 1, page_size: int = 16, prefill_chunk: int = 512
) -> Engine:
    """An engine over the same weights that drafts `shape`, or decodes plainly (None)."""
    config = EngineConfig(
        shape=shape or TreeShape.chain(1), max_seqs=max_seqs, page_size=page_size, prefill_chunk=prefill_chunk
    )
    assert shape is None or loaded.drafter is not None, f"{shape} without a drafter"
    return Engine(loaded.target, loaded.tokenizer, drafter=loaded.drafter if shape else None, config=config)


def check_room(max_context_tokens: int, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
    """Refuse prompts that would be cut short by the context: a shorter text is another measurement."""
    longest = max(map(len, prompts))
    if longest + max_tokens > max_context_tokens:
        raise ModelError(
            f"a prompt of {longest} tokens and --max-tokens {max_tokens} exceed the model's context of "
            f"{max_context_tokens}: lower --max-tokens"
        )


class _Request:
    """Mutable: what has come of one request so far."""

    def __init__(self, index: int) -> None:
        self.index, self.started = index, time.perf_counter()
        self.first_s = 0.0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []

    def add(self, output: Output) -> None:
        if not self.tokens:
            self.first_s = time.perf_counter() - self.started
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or ()

    def finished(self, output: Output) -> Run:
        if output.error is not None:
            raise RuntimeError(f"prompt {self.index} ended with an error: {output.error}")
        assert output.stats is not None, "a finished output carries its statistics"
        total_s = time.perf_counter() - self.started
        return Run(tuple(self.tokens), self.first_s, total_s, output.stats, tuple(self.logprobs))


def run_all(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    progress: Callable[[int], None] = lambda done: None,
) -> list[Run]:
    """Run every prompt, max_seqs of them at a time in one continuous batch; results in the prompts' order."""
    waiting = iter(range(len(prompts)))
    running: dict[int, _Request] = {}
    done: dict[int, Run] = {}
    while len(done) < len(prompts):
        while len(running) < engine.config.max_seqs and (index := next(waiting, None)) is not None:
            running[engine.add(Request(prompts[index], params[index]))] = _Request(index)
        for output in engine.step():
            request = running[output.request_id]
            request.add(output)
            if output.finish_reason is not None:
                done[request.index] = running.pop(output.request_id).finished(output)
                progress(len(done))
    return [done[index] for index in range(len(prompts))]


def total_stats(runs: Sequence[Run]) -> SpecStats:
    """The statistics of all runs together."""
    total = SpecStats()
    for run in runs:
        total.add(run.stats)
    return total


def repeated_4grams(texts: Sequence[tuple[int, ...]]) -> float:
    """Share of 4-token windows that occur earlier in the same text, over all texts."""
    windows = [[text[i : i + 4] for i in range(len(text) - 3)] for text in texts]
    count = sum(map(len, windows))
    return 1 - sum(len(set(found)) for found in windows) / count if count else 0.0

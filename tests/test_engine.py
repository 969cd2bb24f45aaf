"""The step loop: speculation is invisible, shows in the counts, and one request never hurts another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minieagle.engine import Engine, EngineConfig, Request, Taken
from minieagle.errors import RequestError
from minieagle.models.rows import Rows, Span
from tests import embedded
from tests.embedded import MESSAGES, engine, logprobs, params, prompt, run, stats, tokens

TREES = ("chain:1", "chain:5", "dynamic:4,3,8", "dynamic:5,5,24", "static:0,1,2,0.0,0.1,0.0.0,1.0")


def requests(indices: Sequence[int], spec: bool, **fields: Any) -> list[Request]:
    return [Request(prompt(i), params(**(fields | {"seed": i})), spec=spec) for i in indices]


@settings(max_examples=20)
@given(
    indices=st.lists(st.integers(0, len(MESSAGES) - 1), min_size=1, max_size=4),
    tree=st.sampled_from(TREES),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    cut=st.sampled_from([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.8}]),
    page_size=st.sampled_from([1, 16, 64]),
    prefill_chunk=st.sampled_from([1, 7, 512]),
    max_seqs=st.sampled_from([1, 2, 8]),
)
def test_speculation_is_invisible(
    indices: list[int],
    tree: str,
    temperature: float,
    cut: dict[str, float],
    page_size: int,
    prefill_chunk: int,
    max_seqs: int,
) -> None:
    """Same tokens and logprobs, bit for bit, as plain decoding alone with other pages and chunks."""
    fields = {"temperature": temperature, **cut}
    plain = [run(engine(max_seqs=1), [request])[0] for request in requests(indices, False, **fields)]
    sizes = {"page_size": page_size, "prefill_chunk": prefill_chunk, "max_seqs": max_seqs}
    got = run(engine(tree, **sizes), requests(indices, True, **fields))
    assert [tokens(outputs) for outputs in got] == [tokens(outputs) for outputs in plain]
    assert [logprobs(outputs) for outputs in got] == [logprobs(outputs) for outputs in plain]


def test_plain_and_speculative_requests_share_a_batch() -> None:
    mixed = [*requests([0, 1], True), *requests([0, 1], False)]
    got = [tokens(outputs) for outputs in run(engine("dynamic:4,3,8"), mixed)]
    assert got[:2] == got[2:]


@pytest.mark.parametrize("tree", TREES)
def test_drafts_are_accepted(tree: str) -> None:
    """Wiring faults leave the text right and only lower this number."""
    counts = [stats(outputs) for outputs in run(engine(tree), requests([0, 1, 2], True, ignore_eos=False))]
    rate = sum(c.num_tokens for c in counts) / sum(c.num_steps for c in counts)
    assert rate > (1.4 if tree == "chain:1" else 1.9)


@settings(max_examples=8)
@given(
    page_size=st.sampled_from([1, 16, 64]), prefill_chunk=st.sampled_from([1, 7, 33]), max_seqs=st.sampled_from([1, 4])
)
def test_acceptance_depends_on_the_text_only(page_size: int, prefill_chunk: int, max_seqs: int) -> None:
    """The same counts whatever the pages, chunks and batch: each chunk's last row has the next prompt token."""
    sizes = {"page_size": page_size, "prefill_chunk": prefill_chunk, "max_seqs": max_seqs}
    wanted = [stats(outputs) for outputs in run(engine("dynamic:4,3,8"), requests([0, 1, 3], True))]
    assert [stats(outputs) for outputs in run(engine("dynamic:4,3,8", **sizes), requests([0, 1, 3], True))] == wanted


@contextmanager
def mutated(name: str, value: Any) -> Iterator[None]:
    kept = getattr(Engine, name)
    setattr(Engine, name, value)
    try:
        yield
    finally:
        setattr(Engine, name, kept)


def _keep_without_moving(self: Engine, taken: Sequence[Taken]) -> None:
    for item in taken:
        item.sequence.committed += len(item.path)


def test_negative_control_rows_left_where_they_were() -> None:
    wanted = [tokens(outputs) for outputs in run(engine("dynamic:5,5,24"), requests(range(6), True))]
    with mutated("_keep", _keep_without_moving):
        assert [tokens(outputs) for outputs in run(engine("dynamic:5,5,24"), requests(range(6), True))] != wanted


def _last_tokens_shifted(kept: Any) -> Any:
    def draft(self: Engine, taken: Sequence[Taken], captured: torch.Tensor) -> None:
        kept(self, taken, captured.roll(1, dims=0))

    return draft


def test_negative_control_states_off_by_one_position() -> None:
    """A shift between token and state keeps the text and loses acceptance: the counts see what no output test can."""
    wanted = run(engine(), requests([0, 1, 2], True))
    with mutated("_draft", _last_tokens_shifted(Engine._draft)):
        got = run(engine(), requests([0, 1, 2], True))
    assert [tokens(outputs) for outputs in got] == [tokens(outputs) for outputs in wanted]
    assert sum(stats(o).num_steps for o in got) > 1.2 * sum(stats(o).num_steps for o in wanted)


@settings(max_examples=6)
@given(tree=st.sampled_from(TREES), num_steps=st.integers(1, 12))
def test_draft_cache_is_that_of_a_clean_prefill(tree: str, num_steps: int) -> None:
    """After any number of steps the committed drafter rows are those of the text alone: nothing guessed is left."""
    running = engine(tree)
    running.add(requests([0], True, max_tokens=200)[0])  # not over after 12 steps of any tree
    for _ in range(num_steps):
        running.step()
    sequence = running.scheduler.running[0]
    count, ids = sequence.committed, torch.tensor(sequence.tokens)
    assert running.draft_cache is not None
    clean_cache, slots = embedded.drafter().new_cache(count + 1), torch.arange(1, count + 1)
    cache = embedded.target().new_cache(count + 1)
    rows = Rows.of(ids[:count], [Span(slots, 0, count)])
    captured = embedded.target()(rows, cache, boundaries=embedded.drafter().config.boundaries).captured
    embedded.drafter()(Rows.of(ids[1 : count + 1], rows.spans), embedded.drafter().fuse(captured), clean_cache)
    mine = sequence.slots[:count]
    assert torch.equal(running.draft_cache.data[:, mine], clean_cache.data[:, slots])
    assert torch.equal(running.cache.data[:, mine], cache.data[:, slots])


def test_pages_come_back() -> None:
    running = engine(max_seqs=3, page_size=4)
    pool = running.scheduler.pool
    ids = [running.add(request) for request in requests(range(6), True)]
    for _ in range(5):
        running.step()
    running.abort(ids[0])  # running
    running.abort(ids[5])  # still waiting
    running.abort(99)  # never was
    while running.has_work:
        running.step()
    assert pool.num_free == pool.num_pages


@contextmanager
def poisoned(token: int) -> Iterator[None]:
    """The embedding of one token is NaN."""
    table = embedded.target().embed_tokens
    kept = table[token].clone()
    table.data[token] = float("nan")
    try:
        yield
    finally:
        table.data[token] = kept


@pytest.mark.parametrize("tree", ["chain:5", "dynamic:4,3,8"])
def test_a_nan_costs_only_its_own_request(tree: str) -> None:
    wanted = tokens(run(engine(tree), requests([0], True))[0])
    bad = Request((*prompt(1), 4000, *prompt(2)), params())
    with poisoned(4000):
        first, broken, last = run(engine(tree, max_seqs=2), [requests([0], True)[0], bad, requests([0], True)[0]])
    assert broken[-1].finish_reason == "error" and "not finite" in str(broken[-1].error)
    assert tokens(first) == tokens(last) == wanted


@pytest.mark.parametrize(
    ("ids", "words"),
    [((), "empty"), ((1, 4096), "4096"), ((-1,), "-1"), ((1,) * 64, "64 tokens"), ((1,) * 500, "500 tokens")],
)
def test_bad_prompts_are_refused(ids: tuple[int, ...], words: str) -> None:
    running = engine(max_context_tokens=64)
    with pytest.raises(RequestError, match=words):
        running.add(Request(ids))
    assert not running.has_work


def test_a_request_beyond_the_cache_is_refused() -> None:
    with pytest.raises(RequestError, match="cache"):
        engine(cache_tokens=64).add(Request(prompt(0), params(max_tokens=100)))


@pytest.mark.parametrize(
    "options", [{"max_seqs": 0}, {"page_size": -1}, {"prefill_chunk": True}, {"cache_tokens": 1.5}]
)
def test_bad_sizes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        EngineConfig(**options)


@pytest.mark.parametrize("tree", TREES)
def test_ends_exactly_at_the_limits(tree: str) -> None:
    """max_tokens and the context cut inside a tree too."""
    for limit in (1, 2, 3, 9):
        outputs = run(engine(tree), requests([0], True, max_tokens=limit))[0]
        assert len(tokens(outputs)) == limit and outputs[-1].finish_reason == "length"
    full = run(engine(tree, max_context_tokens=48), requests([0], True, max_tokens=100))[0]
    assert len(prompt(0)) + len(tokens(full)) == 48
    assert tokens(full) == tokens(run(engine(), requests([0], False, max_tokens=100))[0])[: len(tokens(full))]


def text(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs)


@settings(max_examples=8)
@given(start=st.integers(0, 60), length=st.integers(1, 12), tree=st.sampled_from(TREES))
def test_stop_strings_cut_where_they_begin(start: int, length: int, tree: str) -> None:
    whole = text(run(engine(), requests([0], False))[0])
    stop = whole[start : start + length]
    if not stop:
        return
    outputs = run(engine(tree), requests([0], True, stop=(stop, "never in this text")))[0]
    assert text(outputs) == whole[: whole.index(stop)]
    assert outputs[-1].finish_reason == "stop"


def test_stop_token_ids_end_the_text() -> None:
    whole = tokens(run(engine(), requests([0], False))[0])
    stop = whole[10]
    outputs = run(engine("dynamic:5,5,24"), requests([0], True, stop_token_ids=(stop,)))[0]
    assert tokens(outputs) == whole[: whole.index(stop) + 1] and outputs[-1].finish_reason == "stop"


def test_end_token_ends_unless_ignored() -> None:
    outputs = run(engine(), requests([0], True, ignore_eos=False, max_tokens=200))[0]
    assert outputs[-1].finish_reason == "stop" and tokens(outputs)[-1] in embedded.tokenizer().stop_ids
    longer = run(engine(), requests([0], True, max_tokens=200))[0]
    assert tokens(longer)[: len(tokens(outputs))] == tokens(outputs) and len(tokens(longer)) == 200


def test_counts_agree_with_the_tokens() -> None:
    outputs = run(engine(), requests([0], True))[0]
    found = stats(outputs)
    assert found.num_tokens == len(tokens(outputs)) - 1  # the first comes from the prompt's own pass
    assert found.num_tokens == found.num_steps + sum(found.reached)
    assert found.reached == sorted(found.reached, reverse=True)

"""Recorded verify steps, with a recorder that repeats the forward into the same tensors, as a graph's replay does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minieagle.models import graphs
from minieagle.models.cache import PagedCache
from minieagle.models.graphs import ROW_BUCKETS, VerifyGraphs, padded
from minieagle.models.rows import Rows, Span
from tests import embedded
from tests.embedded import params, prompt, tokens
from tests.strategies import SEEDS, ancestors, near_blocks, parents, shuffled_slots

Output = tuple[Tensor, Tensor]


class Recorder:
    """A graph without a GPU: `replay` runs the forward again and puts its outputs where the first ones lie."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
        self.recorded += 1
        outputs = run()
        for output in outputs:
            output.fill_(float("nan"))  # recording computes nothing

        def replay() -> None:
            self.replayed += 1
            for output, new in zip(outputs, run(), strict=True):
                output.copy_(new)

        return replay, outputs


@pytest.fixture
def recorder():
    """The embedded target with recorded steps."""
    made = Recorder()
    embedded.target().graphs = VerifyGraphs(made)
    yield made
    embedded.target().graphs = None


def sampled(tree: str, **fields: Any) -> list[list[Any]]:
    engine = embedded.engine(tree, max_seqs=3)
    requests = [embedded.Request(prompt(i), params(**fields)) for i in range(3)]
    outputs = embedded.run(engine, requests)
    return [[tokens(own), embedded.logprobs(own)] for own in outputs]


@pytest.mark.parametrize("tree", ["chain:3", "dynamic:3,3,8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_steps_change_no_bit(tree: str, temperature: float, recorder: Recorder) -> None:
    recorded = sampled(tree, temperature=temperature, max_tokens=16)
    assert recorder.replayed > recorder.recorded > 0
    embedded.target().graphs = None
    assert sampled(tree, temperature=temperature, max_tokens=16) == recorded


def spans_of(drawn: list[tuple[int, list[int]]], seed: int) -> list[Span]:
    slots = shuffled_slots(sum(committed + len(tree) for committed, tree in drawn), 1, seed)
    parts = slots.split([committed + len(tree) for committed, tree in drawn])
    return [Span(own, c, len(tree), ancestors(tree)) for own, (c, tree) in zip(parts, drawn, strict=True)]


def rows_of(spans: list[Span], seed: int) -> Rows:
    count = sum(span.num_rows for span in spans)
    return Rows.of(torch.randint(4096, (count,), generator=torch.Generator().manual_seed(seed)), spans)


def filled_cache(num_slots: int, seed: int) -> PagedCache:
    cache = embedded.target().new_cache(num_slots)
    cache.data.normal_(generator=torch.Generator().manual_seed(seed))
    cache.data[:, 0] = 0
    return cache


@settings(max_examples=8)
@given(st.lists(st.tuples(near_blocks(3), parents(7)), min_size=1, max_size=3), SEEDS)
def test_padding_leaks_nowhere(drawn: list[tuple[int, list[int]]], seed: int) -> None:
    """Logits, states and the whole cache are those of the plain forward, in whatever bucket."""
    rows, target = rows_of(spans_of(drawn, seed), seed), embedded.target()
    num_slots = 1 + max(int(span.slots.max()) for span in rows.spans)
    plain, recorded = filled_cache(num_slots, seed), filled_cache(num_slots, seed)
    wanted = target(rows, plain, boundaries=(0, 5, 8))
    target.graphs = VerifyGraphs(Recorder())
    try:
        got = target(rows, recorded, boundaries=(0, 5, 8))
    finally:
        target.graphs = None
    assert torch.equal(got.logits, wanted.logits) and torch.equal(got.captured, wanted.captured)
    assert torch.equal(recorded.data, plain.data)


@given(st.lists(st.tuples(near_blocks(3), parents(9)), min_size=1, max_size=3), SEEDS)
def test_padding_rows_are_copies_of_the_first(drawn: list[tuple[int, list[int]]], seed: int) -> None:
    rows = rows_of(spans_of(drawn, seed), seed)
    count = rows.token_ids.shape[0]
    for table in padded(rows).tensors():
        assert table.shape[0] == next(size for size in ROW_BUCKETS if size >= count)
        assert all(torch.equal(row, table[0]) for row in table[count:])


def test_what_was_returned_outlives_the_next_replay(recorder: Recorder) -> None:
    target, cache = embedded.target(), filled_cache(300, 0)
    spans = [Span(torch.arange(1, 200), 70, 2, ancestors([-1, 0]))]
    first = target(rows_of(spans, 0), cache)
    kept = first.logits.clone()
    target(rows_of(spans, 1), cache)
    assert recorder.recorded == 1 and torch.equal(first.logits, kept)


def test_other_boundaries_are_recorded_anew(recorder: Recorder) -> None:
    target, cache, rows = embedded.target(), filled_cache(100, 0), rows_of([Span(torch.arange(1, 90), 10, 1)], 0)
    one, two, none = (target(rows, cache, boundaries=wanted).captured for wanted in ((0,), (8,), ()))
    assert recorder.recorded == 3 and not torch.equal(one, two) and none.shape[1] == 0


def test_prompts_and_long_contexts_are_not_recorded() -> None:
    slots = torch.arange(graphs.MOST_KEYS + 3)
    assert VerifyGraphs.takes(rows_of([Span(slots, 5, 3)], 0), None)
    assert not VerifyGraphs.takes(rows_of([Span(slots, 5, 3)], 0), torch.tensor([2]))
    assert not VerifyGraphs.takes(rows_of([Span(slots, 5, ROW_BUCKETS[-1] + 1)], 0), None)
    assert not VerifyGraphs.takes(rows_of([Span(slots, graphs.MOST_KEYS + 1, 1)], 0), None)


def test_another_cache_is_recorded_anew(recorder: Recorder) -> None:
    spans = [Span(torch.arange(1, 90), 10, 1)]
    target, first, second = embedded.target(), filled_cache(100, 0), filled_cache(100, 1)
    target(rows_of(spans, 0), first)
    target(rows_of(spans, 0), second)
    assert recorder.recorded == 2

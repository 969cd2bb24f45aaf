"""The offline score equals what the engine measures online, exactly, on the target's own greedy text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minieagle.engine import Request
from minieagle.spec.walk import total, walk
from tests import embedded
from tests.embedded import MESSAGES, engine, params, prompt, run, stats, tokens


@settings(max_examples=8)
@given(
    index=st.integers(0, len(MESSAGES) - 1),
    num_steps=st.integers(1, 6),
    max_tokens=st.integers(1, 60),
    ignore_eos=st.booleans(),
)
def test_walk_equals_the_engine(index: int, num_steps: int, max_tokens: int, ignore_eos: bool) -> None:
    asked = Request(prompt(index), params(max_tokens=max_tokens, ignore_eos=ignore_eos))
    outputs = run(engine(f"chain:{num_steps}"), [asked])[0]
    text = (*prompt(index), *tokens(outputs))
    online, offline = stats(outputs), walk(embedded.target(), embedded.drafter(), text, len(prompt(index)), num_steps)
    assert (offline.num_steps, offline.num_tokens) == (online.num_steps, online.num_tokens)
    assert list(offline.reached)[: len(online.reached)] == online.reached
    assert sum(offline.reached) == sum(online.reached)


def test_walk_of_no_decoding_is_empty() -> None:
    scored = walk(embedded.target(), embedded.drafter(), (*prompt(0), 5), len(prompt(0)), 3)
    assert (scored.num_steps, scored.num_tokens, scored.tokens_per_step) == (0, 0, 0.0)


def test_total_adds_rounds() -> None:
    one = walk(embedded.target(), embedded.drafter(), (*prompt(0), 5, 6, 7), len(prompt(0)), 3)
    assert total([one, one]).num_tokens == 2 * one.num_tokens == 4
    assert total([one, one]).tokens_per_step == pytest.approx(one.tokens_per_step)

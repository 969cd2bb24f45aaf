"""Alarms: counts are right, healthy curves are silent, and each shape of a fault is named, by the counts alone."""

from __future__ import annotations

import copy
import logging
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minieagle.engine import Engine, EngineConfig, Request
from minieagle.spec.accept import accept
from minieagle.spec.alarm import MIN_TRIALS, Acceptance, Condition, Group, diagnose, wilson
from minieagle.spec.tree import Tree
from tests import embedded
from tests.embedded import engine, params, prompt, run, stats
from tests.strategies import parents

DEPTH = 4
SEEDS = st.integers(0, 2**32)
HEALTHY = st.tuples(st.floats(0.5, 0.95), st.floats(0.8, 1.05))
"""Depth 1, and each deeper one beside it."""
STEPS = st.integers(2 * MIN_TRIALS, 3000)


def curve(
    seed: int, num_steps: int, first: float, ratio: float, condition: Condition = "whole prompt", context: int = 64
) -> Group:
    """Chains of DEPTH drafted by a drafter with these rates, each step drawn by itself."""
    draw = random.Random(seed)
    tried, reached = [0] * DEPTH, [0] * DEPTH
    for _ in range(num_steps):
        for level in range(DEPTH):
            tried[level] += 1
            if draw.random() >= min(1.0, first * (ratio if level else 1.0)):
                break
            reached[level] += 1
    return Group(condition, context, tuple(tried), tuple(reached))


def kind(*groups: Group) -> str | None:
    alarm = diagnose(groups)
    return None if alarm is None else alarm.kind


@given(successes=st.integers(0, 500), failures=st.integers(0, 500))
def test_wilson_bounds_are_the_shares_just_z_deviations_off(successes: int, failures: int) -> None:
    trials = max(1, successes + failures)
    successes = min(successes, trials)
    share, z = successes / trials, 2.5
    for bound in wilson((successes, trials), z):
        assert (share - bound) ** 2 == pytest.approx(z**2 * bound * (1 - bound) / trials, abs=1e-12)


@given(parents=parents(), tokens=st.lists(st.integers(0, 2), min_size=20, max_size=20))
def test_counts_are_those_of_a_walk(parents: list[int], tokens: list[int]) -> None:
    """A depth was tried where the node above was accepted and had a child."""
    tree = Tree(tuple(tokens[: len(parents)]), tuple(parents))
    path = accept(tree, tokens[10 : 10 + len(parents)]).path
    counted = Acceptance(10)
    counted.count(tree, path, context=100, condition="whole prompt")
    (group,) = counted.snapshot().groups
    has_child = [any(tree.parents[v] == node for v in range(len(parents))) for node in path]
    assert sum(group.reached) == len(path) - 1 and group.context == 64
    assert list(group.tried) == [int(level < len(path) and has_child[level]) for level in range(10)]


@given(healthy=HEALTHY, seed=SEEDS, sizes=st.lists(STEPS, min_size=1, max_size=6))
def test_healthy_curves_are_silent(healthy: tuple[float, float], seed: int, sizes: list[int]) -> None:
    conditions: tuple[Condition, ...] = ("whole prompt", "chunked prompt", "prefix hit")
    groups = [curve(seed + i, n, *healthy, conditions[i % 3], 64 << (i // 3)) for i, n in enumerate(sizes)]
    assert kind(*groups) is None


@given(first=st.floats(0, 0.15), seed=SEEDS, num_steps=st.integers(500, 3000))
def test_low_from_the_start_is_wiring(first: float, seed: int, num_steps: int) -> None:
    assert kind(curve(seed, num_steps, first, 0.5)) == "wiring"


@given(first=st.floats(0.6, 0.95), ratio=st.floats(0, 0.35), seed=SEEDS)
def test_low_from_depth_2_is_feedback(first: float, ratio: float, seed: int) -> None:
    assert kind(curve(seed, 2000, first, ratio), curve(seed + 1, 300, first, ratio, context=1024)) == "feedback"


@given(healthy=HEALTHY, share=st.floats(0, 0.2), seed=SEEDS, edge=st.integers(1, 3))
def test_low_in_long_contexts_only(healthy: tuple[float, float], share: float, seed: int, edge: int) -> None:
    first, ratio = healthy
    groups = [curve(seed + i, 600, first * (share if i >= edge else 1), ratio, context=64 << i) for i in range(4)]
    alarm = diagnose(groups)
    assert alarm is not None and alarm.kind == "long context"
    assert f"below {64 << edge} tokens" in alarm.message


@pytest.mark.parametrize("condition", ["chunked prompt", "prefix hit"])
@given(healthy=HEALTHY, share=st.floats(0, 0.2), seed=SEEDS)
def test_low_after_a_condition_only(
    condition: Condition, healthy: tuple[float, float], share: float, seed: int
) -> None:
    first, ratio = healthy
    low = curve(seed + 1, 600, first * share, ratio, condition)
    assert kind(curve(seed, 600, first, ratio), low) == condition


@given(healthy=HEALTHY, share=st.floats(0, 0.2), seed=SEEDS)
def test_long_and_chunked_are_not_told_apart_without_the_one_or_the_other(
    healthy: tuple[float, float], share: float, seed: int
) -> None:
    first, ratio = healthy
    short, low = curve(seed, 600, first, ratio), first * share
    assert kind(short, curve(seed, 600, low, ratio, "chunked prompt", 1024)) == "long context or chunks"
    chunked = curve(seed, 600, first, ratio, "chunked prompt"), curve(seed, 600, low, ratio, "chunked prompt", 1024)
    assert kind(short, *chunked) == "long context"


@given(seed=SEEDS, num_steps=st.integers(0, MIN_TRIALS - 1))
def test_few_steps_say_nothing(seed: int, num_steps: int) -> None:
    assert kind(curve(seed, num_steps, 0.02, 0.5)) is None
    assert kind(curve(seed, num_steps, 0.02, 0.5, "chunked prompt"), curve(seed, 3000, 0.8, 0.9)) is None


def test_noise_of_high_temperature_is_no_fault() -> None:
    assert kind(curve(0, 3000, 0.05, 0.5, "high temperature"), curve(0, 600, 0.7, 0.9)) is None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The engine's; loading has some of its own."""
    return [record.message for record in caplog.records if record.name == "minieagle.engine"]


def requests(num_tokens: int, **fields: float) -> list[Request]:
    return [Request(prompt(i), params(max_tokens=num_tokens, **fields)) for i in range(len(embedded.MESSAGES))]


def test_the_embedded_drafter_is_silent_and_counted_as_its_requests_are(caplog: pytest.LogCaptureFixture) -> None:
    running = engine("dynamic:4,3,8")
    outputs = run(running, requests(16))
    reached = [sum(found) for found in zip(*(group.reached for group in running.acceptance.groups), strict=True)]
    shown = [sum(stats(out).reached[level] for out in outputs if level < len(stats(out).reached)) for level in range(4)]
    assert reached[0] >= shown[0] > 20 and all(a >= b for a, b in zip(reached, shown, strict=True))  # a text may end
    assert running.acceptance.alarms == () and not warnings(caplog)
    assert all(rate > 0.6 for rate in running.acceptance.rates())


@pytest.mark.parametrize(
    ("chunk", "fields", "condition"),
    [(512, {}, "whole prompt"), (5, {}, "chunked prompt"), (5, {"temperature": 1.2}, "high temperature")],
)
def test_the_engine_tells_conditions(chunk: int, fields: dict[str, float], condition: str) -> None:
    running = engine(prefill_chunk=chunk)
    run(running, requests(4, **fields)[:1])
    assert {group.condition for group in running.acceptance.groups} == {condition}


def misread_vocabulary() -> Engine:
    """d2t taken for the identity: the text stays right, and nothing drafted is ever accepted."""
    drafter = copy.copy(embedded.drafter())
    drafter._buffers = drafter._buffers | {"target_ids": torch.arange(drafter.config.draft_vocab_size)}
    return Engine(embedded.target(), embedded.tokenizer(), drafter=drafter, config=EngineConfig())


def test_a_wiring_fault_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    broken = misread_vocabulary()
    with caplog.at_level(logging.WARNING):
        run(broken, requests(24) + requests(8))
    assert [alarm.kind for alarm in broken.acceptance.alarms] == ["wiring"]
    assert warnings(caplog) == [broken.acceptance.alarms[0].message]
    assert "minieagle doctor" in caplog.text and "d2t" in caplog.text


def test_plain_requests_are_not_counted() -> None:
    running = engine()
    run(running, [Request(prompt(0), params(max_tokens=4), spec=False)])
    assert running.acceptance.groups == ()

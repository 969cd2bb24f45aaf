"""Sampling: what is refused, the filters against a plain float64 re-statement, and bits that no batch changes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import minieagle.sampling as sampling
from minieagle.sampling import (
    SamplingBatch,
    SamplingError,
    SamplingParams,
    emit,
    logprobs,
    processed_logprobs,
    ranked,
)
from minieagle.spec.noise import gumbel

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 1000]),
    top_p=st.sampled_from([1.0, 0.97, 0.83, 0.41, 0.05]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
)
LOGIT = st.one_of(st.integers(-4, 4).map(float), st.just(-math.inf))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[SamplingParams]]:
    """Logits with many ties, and the parameters of each row."""
    params = draw(st.lists(PARAMS, min_size=1, max_size=5))
    vocab = draw(st.integers(1, 9))
    rows = [draw(st.lists(LOGIT, min_size=vocab, max_size=vocab)) for _ in params]
    logits = torch.tensor(rows)
    logits[logits.isinf().all(-1)] = 0.0  # a row without any token is the engine's to refuse
    return logits, params


def processed(logits: Tensor, params: list[SamplingParams], **options: bool) -> Tensor:
    batch = SamplingBatch.of([(p, 0) for p in params])
    return processed_logprobs(logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, **options)


def naive(row: list[float], params: SamplingParams) -> tuple[list[float], float]:
    """The processed distribution in float64, filter by filter, and how far the nearest mass is from a cut."""
    if params.is_greedy:
        return [float(i == row.index(max(row))) for i in range(len(row))], 1.0
    law = normalised([math.exp((x - max(row)) / params.temperature) for x in row])
    ranking = sorted(range(len(row)), key=lambda i: (-law[i], i))
    law = kept(law, set(ranking[: params.top_k or None]))
    before = [sum(law[j] for j in ranking[:rank]) for rank in range(len(ranking))]
    margins = [abs(mass - params.top_p) for mass in before if params.top_p < 1]
    law = kept(law, {i for i, mass in zip(ranking, before, strict=True) if mass < params.top_p or params.top_p == 1})
    margins += [abs(p - params.min_p * max(law)) for p in law if 0 < p < max(law)]
    return kept(law, {i for i, p in enumerate(law) if p >= params.min_p * max(law)}), min([1.0, *margins])


def kept(law: list[float], ids: set[int]) -> list[float]:
    return normalised([p if i in ids else 0.0 for i, p in enumerate(law)])


def normalised(law: list[float]) -> list[float]:
    return [p / sum(law) for p in law]


# ---- the filters


@settings(max_examples=300)
@given(batches())
def test_processed_equals_float64_filters(batch: tuple[Tensor, list[SamplingParams]]) -> None:
    logits, params = batch
    laws, margins = zip(*(naive(row, p) for row, p in zip(logits.tolist(), params, strict=True)), strict=True)
    assume(min(margins) > 1e-6)  # else float32 and float64 may cut apart
    law = processed(logits, params).double().exp()
    torch.testing.assert_close(law, torch.tensor(laws, dtype=torch.float64), atol=2e-6, rtol=2e-6)


@given(st.integers(0, 10**6), st.lists(PARAMS, min_size=1, max_size=6), st.integers(1, 700))
def test_row_keeps_its_bits_in_any_batch(seed: int, params: list[SamplingParams], vocab: int) -> None:
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed)) * 4
    together = processed(logits, params)
    alone = torch.cat([processed(logits[i : i + 1], [p]) for i, p in enumerate(params)])
    assert torch.equal(together, alone)


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.lists(PARAMS, min_size=1, max_size=2), st.integers(1, 9), st.booleans())
def test_ranking_a_few_equals_ranking_all(seed: int, params: list[SamplingParams], few: int, ties: bool) -> None:
    logits = torch.randn(len(params), 40, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.round() if ties else logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_CANDIDATES", few)
        fast = processed(logits, params)
    assert torch.equal(fast, processed(logits, params))


def test_top_p_sees_all_that_top_k_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5 is under 0.6 of what the three best hold, but over 0.6 of what the two that are ranked at first hold."""
    monkeypatch.setattr(sampling, "_CANDIDATES", 2)
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert processed(logits, [SamplingParams(temperature=1.0, top_k=3, top_p=0.6)]).isfinite().sum() == 2


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.1]), st.integers(1, 300))
def test_uncut_rows_have_the_same_bits_without_ranking(seed: int, min_p: float, vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed))
    params = [SamplingParams(temperature=0.7, min_p=min_p)] * 4
    assert torch.equal(processed(logits, params, cut=False), processed(logits, params))


def test_lower_id_wins_a_tie_at_the_cut() -> None:
    params = [SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.4)]
    finite = processed(torch.tensor([[0.0, 1.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]]), params).isfinite()
    assert finite.tolist() == [[False, True, True, False], [True, True, False, False]]


def test_a_filter_that_is_off_drops_nothing() -> None:
    """Probabilities that round to zero still count as kept: only a filter that was asked for removes a token."""
    logits = torch.tensor([[0.0, -200.0, -300.0, -1000.0]] * 2)
    finite = processed(logits, [SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=1.0)]).isfinite()
    assert finite.tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ([{}, {"top_p": 0.5}], (False, False)),
        ([{}, {"temperature": 1.0, "min_p": 0.1}], (True, False)),
        ([{"temperature": 1.0, "top_p": 0.9}, {}], (True, True)),
        ([{"temperature": 1.0, "top_k": 9}], (True, True)),
    ],
)
def test_flags_say_what_the_rows_need(options: list[dict[str, Any]], flags: tuple[bool, bool]) -> None:
    batch = SamplingBatch.of([(SamplingParams(**o), 0) for o in options])
    assert (batch.any_sampled, batch.any_cut) == flags


@given(st.lists(st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 2.0]), min_size=2, max_size=12), st.data())
def test_ranked_is_a_stable_sort(row: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(row)))
    want = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert ranked(torch.tensor([row]), count)[0].tolist() == want


# ---- emission


def test_greedy_is_argmax_of_the_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    batch = SamplingBatch.of([(SamplingParams(), 5), (SamplingParams(seed=1), 1)])
    assert emit(logits, batch, torch.tensor([4, 4])).tolist() == [1, 0]


@given(st.integers(0, 10**6), st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 10**6))
def test_emitted_token_does_not_depend_on_the_batch(seed: int, params: list[SamplingParams], start: int) -> None:
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(seed))
    rows = [(p, seed + i) for i, p in enumerate(params)]
    positions = torch.arange(len(params)) + start
    alone = [emit(logits[i : i + 1], SamplingBatch.of([row]), positions[i : i + 1]) for i, row in enumerate(rows)]
    assert torch.equal(emit(logits, SamplingBatch.of(rows), positions), torch.cat(alone))


@given(st.integers(0, 10**6), PARAMS, st.integers(0, 10**6))
def test_emission_is_processed_plus_noise(seed: int, params: SamplingParams, position: int) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed))
    at = torch.tensor([position])
    want = (processed(logits, [params]) + gumbel(torch.tensor([seed]), at, 50)).argmax(-1)
    assert torch.equal(emit(logits, SamplingBatch.of([(params, seed)]), at), want)


def test_emission_follows_the_processed_law() -> None:
    params, draws = SamplingParams(temperature=0.8, top_k=6, top_p=0.95, min_p=0.02), 20_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -6.0])
    batch = SamplingBatch.of([(params, 3)] * draws)
    counts = torch.bincount(emit(logits.expand(draws, -1), batch, torch.arange(draws)), minlength=8)
    want = torch.tensor(naive(logits.tolist(), params)[0]) * draws
    inside = want > 0
    assert counts[~inside].sum() == 0 and (~inside).any()
    freedom = int(inside.sum()) - 1
    statistic = ((counts - want)[inside] ** 2 / want[inside]).sum()
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@given(batches(), st.integers(0, 999))
def test_impossible_tokens_are_never_emitted(batch: tuple[Tensor, list[SamplingParams]], position: int) -> None:
    logits, params = batch
    tokens = emit(logits, SamplingBatch.of([(p, 1) for p in params]), torch.full((len(params),), position))
    assert processed(logits, params).gather(1, tokens[:, None]).isfinite().all()


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -1.0], [0.0, 0.0, 0.0, 3.0]]).bfloat16()
    result = logprobs(logits, torch.tensor([3, 0]), 2)
    raw = logits.double().log_softmax(-1)
    assert result.top_ids.tolist() == [[1, 2], [3, 0]]
    torch.testing.assert_close(result.chosen.double(), raw[[0, 1], [3, 0]])
    torch.testing.assert_close(result.top.double(), raw.gather(1, result.top_ids))
    assert logprobs(logits, torch.tensor([3, 0]), 0).top.shape == (2, 0)


# ---- parameters


def test_stop_is_normalised() -> None:
    params = SamplingParams(stop="\n", stop_token_ids=[3, 4])  # pyright: ignore[reportArgumentType]
    assert (params.stop, params.stop_token_ids) == (("\n",), (3, 4))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # pyright: ignore[reportArgumentType]
    assert hash(params) == hash(SamplingParams(stop=("\n",), stop_token_ids=(3, 4)))


def test_integers_pass_for_reals() -> None:
    params = SamplingParams(temperature=1, top_p=1, min_p=0)
    assert [type(x) for x in (params.temperature, params.top_p, params.min_p)] == [float] * 3


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "seed", "max_tokens", "logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", [1], -(2**64), 2**64])
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=f"{name} is .*must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, r"temperature is -0.1.* 0\.\.100"),
        ({"temperature": 1e-9}, "temperature is 1e-09.*use 0"),
        ({"temperature": None}, "temperature is None"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be a number in 1.11e-16..1 "),
        ({"top_p": 1.01}, r"top_p is 1.01.*\.\.1 "),
        ({"min_p": 1.5}, r"min_p is 1.5.*0\.\.1"),
        ({"top_k": -1}, "top_k is -1.*0 keeps every token"),
        ({"top_k": 1.0}, "top_k is 1.0"),
        ({"max_tokens": 0}, "max_tokens is 0.*at least one"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"logprobs": 21}, r"logprobs is 21.*0\.\.20"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"stop": ""}, "stop is ''"),
        ({"stop": ["a", ""]}, "stop is"),
        ({"stop": [1]}, "stop is"),
        ({"stop": None}, "stop is None"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3"),
        ({"stop_token_ids": [-1]}, "a stop token id is -1"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
    ],
)
def test_bounds_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SamplingError, match=named):
        SamplingParams(**options)


def test_parameters_are_named_and_frozen() -> None:
    with pytest.raises(TypeError):
        SamplingParams(0.7)  # pyright: ignore[reportCallIssue]
    with pytest.raises(AttributeError):
        SamplingParams().seed = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_bounds_themselves_are_accepted() -> None:
    SamplingParams(temperature=100, top_k=2**31 - 1, top_p=1e-9, min_p=1, seed=-(2**63), max_tokens=1, logprobs=20)


def test_stop_strings_are_bounded() -> None:
    SamplingParams(stop=("ab",) * 16)
    for stop in (("a",) * 17, ("a" * 4097,)):
        with pytest.raises(SamplingError, match="at most 16 strings of 4096 characters"):
            SamplingParams(stop=stop)

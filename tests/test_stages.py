"""Traces: they change nothing, agree whatever the steps were, and the first parting names the stage at fault."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minieagle import tracing
from minieagle.engine import Engine, Request, Taken
from minieagle.llm import load_engine
from minieagle.models.deepseek import TargetOutput
from minieagle.spec.stages import (
    PHASES,
    Line,
    Place,
    Steps,
    Trace,
    TraceError,
    decode_places,
    encode_places,
    trace_text,
)
from minieagle.tracing import diff, fold, read, report
from tests import embedded
from tests.embedded import engine, logprobs, params, prompt, run, tokens

ALL = Steps.parse("0-")
SHORT = 5  # the embedded model's shortest prompt


def requests(spec: bool = True, **fields: Any) -> list[Request]:
    return [Request(prompt(i), params(**({"max_tokens": 12, "seed": i} | fields)), spec=spec) for i in (SHORT, 3)]


def traced(path: Path, tree: str = "dynamic:4,3,8", *, spec: bool = True, **options: Any) -> list[Line]:
    running = engine(tree, **options)
    running.trace = Trace(path, steps=ALL, layers=True)
    run(running, requests(spec))
    return read(path)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    return traced(tmp_path_factory.mktemp("trace") / "usual")


@pytest.mark.parametrize(("tree", "temperature"), [("chain:3", 0.0), ("dynamic:4,3,8", 0.8)])
def test_a_trace_changes_no_bit(tmp_path: Path, tree: str, temperature: float) -> None:
    engines = [engine(tree, prefill_chunk=7) for _ in range(2)]
    engines[1].trace = Trace(tmp_path / "t", layers=True)
    plain, seen = (run(running, requests(temperature=temperature)) for running in engines)
    assert [tokens(out) for out in seen] == [tokens(out) for out in plain]
    assert [logprobs(out) for out in seen] == [logprobs(out) for out in plain]
    for name in ("cache", "draft_cache"):
        assert torch.equal(getattr(engines[0], name).data, getattr(engines[1], name).data)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_trace_as_one(tmp_path: Path, usual: list[Line], chunk: int) -> None:
    chunked = traced(tmp_path / "t", prefill_chunk=chunk)
    found = diff(usual, chunked)
    assert not found.unequal and set(found.compared) == {line.stage for line in usual}
    assert {line.phase for line in usual} == {"prefill", "verify", "extend"}
    assert {line.phase for line in chunked} == {"chunk", "verify", "extend"}


def test_a_tree_traces_as_plain_decoding_does(tmp_path: Path, usual: list[Line]) -> None:
    """On committed rows; others were there and are marked."""
    plain = traced(tmp_path / "t", spec=False)
    found = diff(plain, usual)
    assert not found.unequal and set(found.compared) >= {"capture 2", "verify logits", "emitted token", "cache keep"}
    assert {line.phase for line in plain} == {"prefill", "decode", "extend"}
    assert {line.kept for line in usual} == {True, False} and {line.kept for line in plain} == {True}


def test_training_traces_as_serving_does(tmp_path: Path, usual: list[Line]) -> None:
    text = [*prompt(3), *tokens(run(engine(), requests())[1])]
    trace = Trace(tmp_path / "t", layers=True)
    trace_text(embedded.target(), embedded.drafter(), text, trace, request=1)
    found = diff(read(tmp_path / "t"), usual)
    assert not found.unequal and found.compared["draft logits"] >= 2 and found.compared["verify logits"] >= 12
    assert found.compared["drafter output"] >= len(text) - 6


def test_a_text_of_one_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="at least 2"):
        trace_text(embedded.target(), embedded.drafter(), [5], Trace(tmp_path / "t"))


# ---- faults: the first parting names the stage


def next_boundary(kept: Any, taps: Sequence[int] = (2, 5, 8)) -> Any:
    def forward(self: Engine, work: Any) -> tuple[TargetOutput, Any]:
        out, wanted = kept(self, work)
        captured = out.captured.clone()
        captured[:, 1] = captured[:, len(taps) + taps[1] + 1]  # the trace's own columns hold every boundary
        return dataclasses.replace(out, captured=captured), wanted

    return forward


def shifted_states(kept: Any) -> Any:
    return lambda self, taken, captured: kept(self, taken, captured.roll(1, dims=0))


def rows_left_in_place(_: Any) -> Any:
    def keep(self: Engine, taken: Sequence[Taken]) -> None:
        for item in taken:
            item.sequence.committed += len(item.path)

    return keep


def another_token(kept: Any) -> Any:
    return lambda self, logits, wanted: (kept(self, logits, wanted) + 1) % logits.shape[1]


@pytest.mark.parametrize(
    ("method", "fault", "stage"),
    [
        ("_forward", next_boundary, "capture 1"),
        ("_draft", shifted_states, "fusion input"),
        ("_keep", rows_left_in_place, "cache keep"),
        ("_draw", another_token, "emitted token"),
    ],
)
def test_a_fault_is_found_at_its_stage(
    method: str, fault: Callable[[Any], Any], stage: str, tmp_path: Path, usual: list[Line], monkeypatch: Any
) -> None:
    monkeypatch.setattr(Engine, method, fault(getattr(Engine, method)))
    found = diff(usual, traced(tmp_path / "t"))
    assert found.first_a and found.first_a[0].stage == found.first_b[0].stage == stage
    assert found.first_a[0].position == found.first_b[0].position


def test_a_drafter_declared_one_boundary_off_is_found_at_its_capture(tmp_path: Path, usual: list[Line]) -> None:
    drafter = copy.copy(embedded.drafter())
    drafter.config = dataclasses.replace(drafter.config, boundaries=(2, 6, 8))
    trace = Trace(tmp_path / "t")
    run(Engine(embedded.target(), embedded.tokenizer(), drafter=drafter, trace=trace), requests())
    found = diff(usual, read(tmp_path / "t"))
    assert (found.first_a[0].boundary, found.first_b[0].boundary) == (5, 6)
    assert "capture 1 (boundary 5) of request 0, position 0" in tracing.report(found)


# ---- ranks


def by_rank(directory: Path, states: Sequence[torch.Tensor]) -> Path:
    """A trace of two stages by as many ranks as states, which are those of the second stage."""
    for rank, state in enumerate(states):
        trace = Trace(directory / "t", rank=rank)
        trace.begin()
        place = Place.chain(0, "prefill", 0, len(state))
        trace.rows("embedding", place, torch.ones(len(state), 4))
        trace.rows("capture 0", place, state, boundary=2)
    return directory / "t"


def test_ranks_that_agree_fold_into_one_line(tmp_path: Path) -> None:
    state = torch.randn(3, 4)
    lines = read(by_rank(tmp_path, [state] * 4))
    assert len(lines) == 6 and {line.ranks for line in lines} == {(0, 1, 2, 3)} and all(line.equal for line in lines)


def test_a_rank_that_holds_a_partial_sum_is_marked(tmp_path: Path) -> None:
    """Rank 2 captured one row before the reduction."""
    parts = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(0))
    whole = parts.sum(0)
    early = whole.clone()
    early[1] = parts[2, 1]
    lines = read(by_rank(tmp_path, [whole, whole, early]))
    unequal = [(line.stage, line.position, line.ranks) for line in lines if not line.equal]
    assert unequal == [("capture 0", 1, (0, 1)), ("capture 0", 1, (2,))]
    found = diff([dataclasses.replace(line, equal=True) for line in lines if 0 in line.ranks], lines)
    assert found.first_b[1].ranks == (2,) and found.unequal == {"capture 0": 1}


LINES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b"])), unique=True, max_size=6)


def line(position: int, stage: str, content: str = "00", **fields: Any) -> Line:
    usual: dict[str, Any] = {"step": 0, "phase": "prefill", "request": 0, "ranks": (0,), "row": position, "kept": True}
    values: dict[str, Any] = {"shape": (1,), "dtype": "float32", "norm": 1.0, "first": (1.0,), "hash": content}
    return Line(**(usual | values | {"stage": stage, "position": position} | fields))


@given(places=LINES, num_ranks=st.integers(1, 4), data=st.data())
def test_folding_keeps_every_version_once(places: list[tuple[int, str]], num_ranks: int, data: st.DataObject) -> None:
    contents = {
        place: data.draw(st.lists(st.sampled_from("xy"), min_size=num_ranks, max_size=num_ranks)) for place in places
    }
    folded = fold({rank: [line(*place, contents[place][rank]) for place in places] for rank in range(num_ranks)})
    assert len(folded) == sum(len(set(found)) for found in contents.values())
    for one in folded:
        found = contents[one.position, one.stage]
        assert one.ranks == tuple(rank for rank in range(num_ranks) if found[rank] == one.hash)
        assert one.equal == (len(set(found)) == 1)


def test_a_line_that_a_rank_lacks_is_marked() -> None:
    assert [one.equal for one in fold({0: [line(0, "a"), line(1, "a")], 1: [line(0, "a")]})] == [True, False]


def test_a_stage_that_one_rank_traces_alone_is_no_disagreement() -> None:
    """Logits, trees and paths are rank 0's."""
    folded = fold({0: [line(0, "a"), line(0, "verify logits")], 1: [line(0, "a")]})
    assert [(one.stage, one.ranks, one.equal) for one in folded] == [("a", (0, 1), True), ("verify logits", (0,), True)]


PLACES = st.builds(
    lambda request, phase, rows: Place(
        request, phase, tuple(range(len(rows))), tuple(p for p, _ in rows), tuple(kept for _, kept in rows)
    ),
    st.integers(0, 2**40),
    st.sampled_from(PHASES),
    st.lists(st.tuples(st.integers(0, 2**20), st.booleans()), max_size=5),
)


@given(step=st.integers(0, 10**6), items=st.lists(st.tuples(st.integers(0, 4096), PLACES), max_size=4))
def test_places_reach_other_ranks_as_they_were(step: int, items: list[tuple[int, Place]]) -> None:
    assert decode_places(encode_places(step, items)) == (step, items)


def test_another_rank_writes_the_states_that_rank_0_describes(tmp_path: Path) -> None:
    captured = torch.arange(24.0).view(4, 2, 3)
    items = [(0, Place.chain(7, "decode", 9, 1)), (1, Place.chain(8, "chunk", 3, 3))]
    Trace(tmp_path / "t", rank=1).follow(encode_places(5, items), captured, (2,), 4)
    found = read(tmp_path / "t.rank1")
    assert [(one.request, one.position, one.stage, one.first[0]) for one in found] == [
        *[(7, 9, "embedding", 3.0), (7, 9, "capture 0", 0.0)],
        *[(8, 3 + i, "embedding", 9.0 + 6 * i) for i in range(3)],
        *[(8, 3 + i, "capture 0", 6.0 + 6 * i) for i in range(3)],
    ]


# ---- lines, steps and files


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=12))
def test_lines_survive_json(values: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever the numbers; JSON readers without NaN can read them too."""
    path = tmp_path_factory.mktemp("trace") / "t"
    Trace(path).rows("a", Place.chain(0, "chunk", 3, 1), torch.tensor([values]), boundary=1)
    text = path.read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert Line.from_json(text).to_json() == text.rstrip("\n")


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=4), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


@given(value=JSON, field=st.sampled_from([field.name for field in dataclasses.fields(Line)][:13]))
def test_what_is_no_line_is_refused(value: Any, field: str) -> None:
    for text in (json.dumps(value), json.dumps(value)[:-1], "{"):
        with pytest.raises(TraceError, match="no line of a trace"):
            Line.from_json(text)
    shown = json.loads(line(0, "a").to_json())
    del shown[field]
    with pytest.raises(TraceError, match="no line of a trace"):
        Line.from_json(json.dumps(shown))


@given(
    ranges=st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(0, 9)), min_size=1), step=st.integers(0, 50)
)
def test_steps_are_those_named(ranges: list[tuple[int, int | None]], step: int) -> None:
    text = ",".join(f"{first}-" if more is None else f"{first}-{first + more}" for first, more in ranges)
    wanted = any(first <= step and (more is None or step <= first + more) for first, more in ranges)
    assert (step in Steps.parse(text)) == wanted


@pytest.mark.parametrize("text", ["", "-3", "1,,2", "a", "3-1", "1-2-3", "1.5"])
def test_what_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match="trace steps"):
        Steps.parse(text)


def test_only_the_chosen_steps_are_written(tmp_path: Path) -> None:
    running = engine("chain:3")
    running.trace = Trace(tmp_path / "t", steps=Steps.parse("1,3"))
    run(running, requests())
    lines = read(tmp_path / "t")
    assert {line.step for line in lines} == {1, 3} and not any(line.stage.startswith("boundary") for line in lines)


def test_a_trace_replaces_a_trace_and_nothing_else(tmp_path: Path) -> None:
    by_rank(tmp_path, [torch.ones(1, 4)])
    by_rank(tmp_path, [torch.ones(2, 4)])
    assert len(read(tmp_path / "t")) == 4
    (tmp_path / "other").write_text("precious")
    with pytest.raises(TraceError, match="is no trace"):
        Trace(tmp_path / "other")
    assert (tmp_path / "other").read_text() == "precious"


# ---- the command


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    tracing.add_options(parser)
    return tracing.run(parser.parse_args(arguments))


def test_the_command_says_equal_or_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    by_rank(tmp_path, [torch.ones(2, 4)]).with_name("t.rank0").rename(one)
    by_rank(tmp_path, [torch.ones(2, 4) * 1.001]).with_name("t.rank0").rename(two)
    assert command("diff", str(one), str(one)) == 0
    assert "all equal" in capsys.readouterr().out
    assert command("diff", str(one), str(two)) == 1
    assert "part at capture 0 (boundary 2) of request 0, position 0\nA {" in capsys.readouterr().out
    assert command("diff", str(one), str(two), "--rtol", "0.01") == 0
    assert command("diff", str(one), str(two), "--rtol", "0.0001", "--json") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["first"]["b"][0]["stage"] == "capture 0"


def test_lines_that_one_trace_lacks_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    by_rank(tmp_path, [torch.ones(2, 4)]).with_name("t.rank0").rename(short)
    by_rank(tmp_path, [torch.ones(5, 4)]).with_name("t.rank0").rename(long)
    assert command("diff", str(short), str(long)) == 0
    assert "all equal\n" in (out := capsys.readouterr().out)
    assert out.endswith("only B has 6 lines: 3 embedding, 3 capture 0\n")


def test_traces_of_other_numbers_of_ranks_are_told_of_slices() -> None:
    found = diff([line(0, "a", "x", ranks=(0, 1))], [line(0, "a", "y")])
    assert report(found).endswith("with the same --reduction-slices; else compare with --rtol")
    assert "--reduction-slices" not in report(diff([line(0, "a", "x")], [line(0, "a", "y")]))


def test_the_command_folds_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("fold", str(by_rank(tmp_path, [torch.ones(1, 4)] * 2))) == 0
    assert [json.loads(text)["ranks"] for text in capsys.readouterr().out.splitlines()] == [[0, 1]] * 2
    assert command("fold", str(by_rank(tmp_path, [torch.ones(1, 4), torch.zeros(1, 4)]))) == 1
    assert "nothing to fold" not in capsys.readouterr().err
    assert command("fold", f"{tmp_path / 't'}.rank0") == 0
    assert "the lines of one rank: there is nothing to fold" in capsys.readouterr().err


@given(cell=st.integers(0, 39), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_every_bit_of_a_row_counts(cell: int, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> None:
    values = torch.arange(80).view(2, 40).to(dtype)
    other = values.clone()
    other[1, cell] += 1
    path, place = tmp_path_factory.mktemp("trace") / "t", Place.chain(0, "decode", 0, 2)
    for stage, rows in (("a", values), ("b", values.T.contiguous().T), ("c", other)):
        Trace(path.with_name(stage)).rows("x", place, rows)
    hashes = [[line.hash for line in read(path.with_name(stage))] for stage in "abc"]
    assert hashes[0] == hashes[1] and hashes[0][0] == hashes[2][0] and hashes[0][1] != hashes[2][1]


@pytest.mark.parametrize(
    ("fields", "is_within"),
    [
        ({"norm": 4.03, "first": (2.01,)}, True),
        ({"dtype": "bfloat16"}, True),
        ({"norm": 4.5}, False),
        ({"first": (2.1,)}, False),
        ({"norm": "nan"}, False),
        ({"shape": (5,)}, False),
        ({"boundary": 2}, False),
        ({"dtype": "int64"}, False),
    ],
)
def test_a_tolerance_is_on_norm_and_values(fields: dict[str, Any], is_within: bool) -> None:
    """Relative to the norm, and to the root mean square of one value, here 4 / sqrt(4)."""
    usual: dict[str, Any] = {"shape": (4,), "norm": 4.0, "first": (2.0,)}
    found = diff([line(0, "a", "x", **usual)], [line(0, "a", "y", **(usual | fields))], rtol=0.01)
    assert bool(found.unequal) != is_within


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("{}\n")
    for arguments, words in [
        (("diff", str(tmp_path / "none"), str(tmp_path / "none")), "does not exist"),
        (("diff", str(tmp_path / "junk"), str(tmp_path / "junk")), "junk"),
        (("diff", "a", "b", "--rtol", "nan"), "rtol"),
    ]:
        with pytest.raises(TraceError, match=words):
            command(*arguments)
    with pytest.raises(TraceError, match="share no line"):
        diff([line(0, "a")], [line(1, "a"), line(0, "a", kept=False)])


def test_options_reach_the_engine(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    tracing.add_trace_options(parser)
    options = parser.parse_args(["--trace", str(tmp_path / "t"), "--trace-steps", "2-4", "--trace-layers"])
    trace = load_engine(**vars(options)).trace
    assert trace is not None and trace.layers and 2 in trace.steps and 1 not in trace.steps
    with pytest.raises(TraceError, match="need a file"):
        load_engine(trace_steps="0-3")


def test_without_a_trace_nothing_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine()
    for name in ("Place", "Trace", "_place", "_phase", "_trace_extend"):
        monkeypatch.setattr(f"minieagle.engine.{name}", None)
    assert running.trace is None and all(len(tokens(out)) == 12 for out in run(running, requests()))

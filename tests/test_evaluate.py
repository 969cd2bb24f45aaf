"""`minieagle eval`: exact on the target's own greedy text, counted anew on any other, and the same when streamed."""

import argparse
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minieagle import evaluate
from minieagle.engine import Request
from minieagle.errors import ModelError
from minieagle.evaluate import Evaluation
from minieagle.models.eagle3 import DrafterOutput
from minieagle.models.rows import Rows, Span
from minieagle.passages import PROMPTS, Passage, read_passages, written
from minieagle.spec.observe import TextError, observe_texts
from minieagle.spec.stages import TraceError
from minieagle.spec.walk import Agreement, Walk, score, total_agreement
from minieagle.texts import read_documents
from minieagle.tracing import read as read_trace
from tests import embedded
from tests.embedded import params, run, stats


@cache
def own() -> list[Passage]:
    """What the embedded model writes to the built-in prompts."""
    return written(embedded.target(), embedded.tokenizer(), 40)


def changed(passage: Passage) -> Passage:
    """One token is not the target's choice."""
    tokens = list(passage.tokens)
    tokens[passage.prompt_len + 3] += 1
    return Passage("changed", tuple(tokens), passage.prompt_len)


def evaluated(passages: list[Passage], num_steps: int = 4) -> Evaluation:
    return evaluate.evaluate(embedded.target(), embedded.drafter(), passages, num_steps)


def test_the_targets_own_text_is_scored_as_in_use() -> None:
    asked = [Request(text.tokens[: text.prompt_len], params(max_tokens=40, ignore_eos=False)) for text in own()]
    online = [stats(outputs) for outputs in run(embedded.engine("chain:4"), asked)]
    walks = evaluated(own()).walks
    assert [(w.num_steps, w.num_tokens) for w in walks] == [(s.num_steps, s.num_tokens) for s in online]


def test_one_foreign_token_makes_it_another_kind_of_text() -> None:
    found = evaluated([own()[0], changed(own()[0])])
    assert [type(score) for score in found.scores] == [Walk, Agreement]
    assert found.to_json()["texts"][1]["greedy"] is False and len(found.notes()) == 2


def drafted_alone(tokens: tuple[int, ...], captured: torch.Tensor, position: int, num_steps: int) -> list[int]:
    """The draft at one position in a cache of its own: committed rows, then one row a step with the text's tokens."""
    drafter, slots = embedded.drafter(), torch.arange(1, 1 + position + num_steps)
    cache = drafter.new_cache(1 + position + num_steps)

    def rows(start: int, fed: tuple[int, ...], states: torch.Tensor) -> DrafterOutput:
        out = drafter(Rows.of(torch.tensor(fed), [Span(slots, start, len(fed))]), states, cache)
        return DrafterOutput(out.logits[-1:], out.states[-1:])

    out = rows(0, tokens[1 : position + 1], drafter.fuse(captured[:position]))
    best = [int(drafter.target_ids[out.logits.argmax()])]
    for step in range(1, min(num_steps, len(tokens) - position)):
        out = rows(position + step - 1, (tokens[position + step],), out.states)
        best.append(int(drafter.target_ids[out.logits.argmax()]))
    return best


@settings(max_examples=5)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 100))
def test_agreement_is_counted_right(num_steps: int, index: int, prompt_len: int) -> None:
    tokens = tuple(embedded.tokenizer().encode(PROMPTS[index] * 5))  # more rows than are committed at a time
    seen = observe_texts(embedded.target(), [tokens], embedded.drafter().config.boundaries)[0]
    prompt_len = min(prompt_len, len(tokens))
    hits, counts = [0] * num_steps, [0] * num_steps
    for position in range(prompt_len, len(tokens)):
        for depth, token in enumerate(drafted_alone(tokens, seen.captured, position, num_steps)):
            counts[depth] += 1
            hits[depth] += token == int(seen.best[position + depth])
    if prompt_len < len(tokens):
        assert score(embedded.drafter(), seen, prompt_len, num_steps) == Agreement(tuple(hits), tuple(counts))


def test_agreements_add_up() -> None:
    assert total_agreement([Agreement((1, 0), (4, 3)), Agreement((2, 2), (5, 4))]) == Agreement((3, 2), (9, 7))
    assert Agreement((3, 0), (12, 0)).rates == (0.25, 0.0)


# ---- the command


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    evaluate.add_options(parser)
    return evaluate.run(parser.parse_args(["--threads", "1", *arguments]))


def test_streamed_and_resident_print_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("Is there a concert this weekend? I like jazz.", encoding="utf-8")
    lines = [json.dumps({"tokens": text.tokens, "prompt_len": text.prompt_len}) for text in own()[:2]]
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, ""]))
    texts = ["--text", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "--json"]
    assert command(*texts) == 0
    resident = capsys.readouterr().out
    assert command(*texts, "--stream-layers") == 0
    assert capsys.readouterr().out == resident
    assert [text["greedy"] for text in json.loads(resident)["texts"]] == [False, True, True]


def test_without_a_text_the_target_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--max-tokens", "8") == 0
    out = capsys.readouterr().out
    assert "greedy" in out and "tokens per step: emitted tokens" in out and "agreement by depth" not in out


def test_columns_say_which_number_they_hold() -> None:
    own_text = own()[0]
    found = evaluated([own_text, changed(own_text)])
    titles = [str(column.header) for column in found.table().columns]
    assert titles[3:] == ["tokens per step", "acceptance by depth", "agreement by depth"]
    assert [list(column.cells)[1] for column in found.table().columns][3:5] == ["-", "-"]
    alone = Evaluation(found.passages[1:], found.scores[1:])
    assert [str(column.header) for column in alone.table().columns][3:] == ["agreement by depth"]


def test_marks_in_plain_text_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("one<|endoftext|>two", encoding="utf-8")
    (tmp_path / "b.txt").write_text("one<|im_end|>two", encoding="utf-8")
    (tmp_path / "c.txt").write_text("one two", encoding="utf-8")
    for name in "abc":
        read_passages(tmp_path / f"{name}.txt", embedded.tokenizer(), 8)
    names, told = ("<|endoftext|>", "<|im_end|>"), [record.getMessage() for record in caplog.records]
    assert [name for words in told for name in names if name in words] == list(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stream-layers"], "--stream-layers needs --text"),
        (["--num-steps", "0"], "--num-steps 0 must be in 1..32"),
        (["--max-tokens", "1"], "--max-tokens 1 must be at least 2"),
        (["--model", "x", "--text", "README.md"], "x"),
        (["--text", "none.txt"], "none.txt can't be read"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command(*arguments)


def test_a_model_needs_its_drafter(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Good morning, how are you?", encoding="utf-8")
    model = embedded.embedded("target")
    with pytest.raises(ModelError, match="needs --drafter"):
        command("--model", str(model), "--text", str(tmp_path / "a.txt"))


# ---- text files


def test_plain_text_is_cut_into_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(PROMPTS[0], encoding="utf-8")
    pieces = read_passages(path, embedded.tokenizer(), 5)
    assert {len(piece.tokens) for piece in pieces[:-1]} == {5} and {piece.prompt_len for piece in pieces} == {1}
    assert [token for piece in pieces for token in piece.tokens] == embedded.tokenizer().encode(PROMPTS[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a.jsonl:2: a line must be \{"),
        ("[1]", "a.jsonl:2: a line must be"),
        ("[" * 100_000, "a.jsonl:2: a line must be"),
        ('{"tokens": "x"}', "a.jsonl:2: tokens must be a list"),
        ('{"tokens": [1, true]}', "a.jsonl:2: tokens must be a list"),
        ('{"tokens": [1, 2], "prompt_len": 3}', "prompt_len=3 must be in 1..2"),
        ('{"tokens": [1, 2], "prompt_len": 0}', "prompt_len=0 must be"),
        ('{"tokens": []}', "prompt_len=1 must be in 1..0"),
        ('{"tokens": [1, 2], "prompt_len": 2}', "holds nothing to score"),
    ],
)
def test_a_line_that_is_no_passage_is_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(TextError, match=message):
        read_passages(tmp_path / "a.jsonl", embedded.tokenizer(), 10)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_a_file_without_text_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(TextError, match="a.txt"):
        read_passages(tmp_path / "a.txt", embedded.tokenizer(), 10)


def test_ids_beyond_the_vocabulary_are_refused_before_loading(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 999999]}')
    with pytest.raises(TextError, match="token id 999999"):
        command("--text", str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_texts_that_never_end_are_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(path := tmp_path / "a.txt")
    for read in (lambda: read_passages(path, embedded.tokenizer(), 10), lambda: [*read_documents(path)]):
        with pytest.raises(ValueError, match=r"a\.txt"):
            read()
    with pytest.raises(TraceError, match=r"a\.txt"):
        read_trace(path)

"""Corpora and training texts: what is read, and what a damaged or a cut file gives."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from minieagle.errors import ModelError
from minieagle.texts import Text, check_settings, read_documents, read_texts, sample_prompts, write_texts
from tests import embedded

CORPUS = "User: a\nAssistant: b\nstill b\n<|endoftext|>\nUser: c\n"
LINE = {"index": 0, "prompt_len": 1, "tokens": [1, 2]}


@pytest.mark.parametrize("name", ["corpus.txt", "corpus.xz"])
def test_conversations_are_parted_and_lines_go_on(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(lzma.compress(CORPUS.encode()) if name.endswith("xz") else CORPUS.encode())
    first, second = read_documents(tmp_path / name)
    assert [message["content"] for message in first] == ["a", "b\nstill b"]
    assert second == [{"role": "user", "content": "c"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("none.txt", None),
        ("cut.xz", lzma.compress(CORPUS.encode())[:-8]),
        ("other.xz", CORPUS.encode()),
        ("latin.txt", b"User: \xff"),
        (".", None),
    ],
)
def test_a_corpus_that_cannot_be_read_is_named(name: str, content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name} can't be read .*pass files of conversations"):
        sample_prompts([tmp_path / name], 1, 0)


@pytest.mark.parametrize("line", ["{", "{}", "[1]", '{"index": 0, "prompt_len": 1, "tokens": 3}', "\x80"])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(f"{json.dumps(LINE)}\n{line}\n".encode("latin-1"))
    with pytest.raises(ModelError, match="texts.jsonl:2 is damaged"):
        read_texts(path)


def test_half_a_line_is_dropped_and_what_is_there_counts(tmp_path: Path) -> None:
    path, seen = tmp_path / "texts.jsonl", []
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | {"index": 1})[:9])
    engine = embedded.engine(max_seqs=1)
    prompts = [[{"role": "user", "content": "Hi!"}]] * 2
    write_texts(engine, prompts, path, new_tokens=2, progress=lambda *done: seen.append(done))
    assert seen == [(1, 2), (2, 2)]
    assert read_texts(path)[0] == Text((1, 2), 1) and len(read_texts(path)) == 2


def test_texts_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "training" / "texts.json"
    check_settings(path, {"seed": 1})
    check_settings(path, {"seed": 1})
    with pytest.raises(ModelError, match="written with seed=1, now 2"):
        check_settings(path, {"seed": 2})

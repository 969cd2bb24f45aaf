"""Kimi's rank files: the ids of tiktoken, control tokens at their own ids, and a clear error for a damaged file."""

import base64
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from minieagle.errors import ModelError
from minieagle.tiktoken_file import read_tiktoken
from minieagle.tokenizer import Detokenizer, Tokenizer
from tests.tokenizer_files import (
    CORPUS,
    KIMI,
    KIMI_SHOWN,
    PATTERN,
    family,
    rank_file,
    trained_merges,
    trained_ranks,
    write_json,
    write_kimi,
)

RANKS = trained_ranks()
FIRST = len(RANKS)
TOKENIZER = family("Kimi-K2.5")
IDS = {name: FIRST + offset for name, offset in KIMI.items()}

mixed = st.lists(
    st.one_of(
        st.sampled_from(
            [*KIMI, "don't", "WE'LL", " \u4e2d\u6587", "12345", "\r\n\r\n", "   ", "\u00e9\u0301", "\u01c5"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from(CORPUS.split(" ")),
    )
).map("".join)
tokens = st.lists(
    st.binary(min_size=2, max_size=4).map(lambda token: bytes(b"ab c"[b % 4] for b in token)), max_size=12
)


def oracle(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("oracle", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


ORACLE = oracle(RANKS)


def loaded(content: bytes, named: dict[int, Any] | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "tiktoken.model")
        path.write_bytes(content)
        return read_tiktoken(path, named or {})


@given(mixed)
def test_the_ids_are_those_of_tiktoken(text: str) -> None:
    assert TOKENIZER.encode(text) == ORACLE.encode(text, disallowed_special=())


@settings(max_examples=40)
@given(tokens, st.text("ab c", max_size=20))
def test_any_rank_file_gives_tiktoken_s_ids_or_is_refused(tokens: list[bytes], text: str) -> None:
    ranks = {token: i for i, token in enumerate(dict.fromkeys([*(bytes([b]) for b in range(256)), *tokens]))}
    with tempfile.TemporaryDirectory() as directory:
        write_kimi(Path(directory), added_tokens_decoder={}, bos_token=None, eos_token=None, pad_token=None)
        Path(directory, "tiktoken.model").write_bytes(rank_file(ranks))
        try:
            ids = Tokenizer(directory).encode(text)
        except ModelError as error:
            assert "ranked before its parts" in str(error)
        else:
            assert ids == oracle(ranks).encode(text)


def test_the_merges_recovered_are_those_of_the_training() -> None:
    spelling = bytes_to_unicode()
    expected = [["".join(spelling[byte] for byte in part) for part in merge] for merge in trained_merges()]
    assert loaded(rank_file(RANKS))["model"]["merges"] == expected


def test_control_tokens_keep_their_ids_and_gaps_are_reserved() -> None:
    assert {name: TOKENIZER.token_name(i) for name, i in IDS.items()} == {name: name for name in KIMI}
    gaps = set(range(FIRST, FIRST + 256)) - set(IDS.values())
    assert all(TOKENIZER.token_name(i) == f"<|reserved_token_{i}|>" for i in gaps)
    assert TOKENIZER.special_ids == gaps | {i for name, i in IDS.items() if name not in KIMI_SHOWN}


def test_the_markup_uses_the_true_ids() -> None:
    ids = TOKENIZER.encode_chat([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    parts = ["<|im_system|>", "system", "<|im_middle|>", "x", "<|im_end|>", "<|im_user|>", "user", "<|im_middle|>", "y"]
    parts += ["<|im_end|>", "<|im_assistant|>", "assistant", "<|im_middle|>", "<think>"]
    assert ids == [one for part in parts for one in ([IDS[part]] if part in IDS else ORACLE.encode(part))]


def test_the_kind_the_size_and_the_ends() -> None:
    assert (TOKENIZER.kind, TOKENIZER.vocab_size) == ("tiktoken", FIRST + 256)
    assert set(TOKENIZER.stop_ids) == {IDS["[EOS]"], IDS["<|im_end|>"]}  # config.json names [EOS] alone
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id) == (IDS["[BOS]"], IDS["[EOS]"])


@given(mixed)
def test_text_never_becomes_a_control_token(text: str) -> None:
    assert max(TOKENIZER.encode(text), default=0) < FIRST


@given(mixed)
def test_a_stream_never_emits_half_a_character(text: str) -> None:
    stream = Detokenizer(TOKENIZER)
    pieces = [stream.push(one) for one in TOKENIZER.encode(text)]
    assert "".join(pieces) == text and stream.flush() == ""


@given(st.lists(st.integers(0, FIRST + 300), max_size=30))
def test_a_stream_s_pieces_make_up_the_whole_text(ids: list[int]) -> None:
    stream = Detokenizer(TOKENIZER)
    assert "".join(map(stream.push, ids)) + stream.flush() == TOKENIZER.decode(ids)


LINES = rank_file(RANKS).splitlines(keepends=True)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "byte 0x00 has no token"),
        (b"".join(LINES[1:]), "ranks are not 0 to"),
        (b"".join(LINES[:255]), "byte 0xff has no token"),
        (b"".join([*LINES, LINES[3]]), "line {next}: the token .* stands there twice"),
        (b"".join([*LINES, b"YWJjZGVm 5\n"]), "ranks are not 0 to"),
        (b"".join([*LINES, b"YWJjZGVm\n"]), "line {next} is not a base64 token and its rank"),
        (b"".join([*LINES, b"YWJjZGVm -1\n"]), "line {next} is not a base64 token"),
        (b"".join([*LINES, b"YWJj!GVm 5\n"]), "line {next}: .* is not base64"),
        (b"".join([*LINES, b"= 5\n"]), "line {next}"),
        (b"YQ== 0" + b" " * 3000, "line 1 is not"),
        (b"\x00\xff", "line 1 is not"),
    ],
)
def test_a_damaged_rank_file_is_refused_with_its_line(content: bytes, cause: str) -> None:
    with pytest.raises(ModelError, match=rf"tiktoken\.model.*{cause.replace('{next}', str(FIRST + 1))}"):
        loaded(content)


def test_a_token_that_no_merges_make_is_one_where_it_is_a_whole_piece(tmp_path: Path) -> None:
    write_kimi(tmp_path, added_tokens_decoder={}, bos_token=None, eos_token=None, pad_token=None)
    ranks = {token: rank for rank, token in enumerate([*list(RANKS)[:256], b"xyz"])}
    (tmp_path / "tiktoken.model").write_bytes(rank_file(ranks))
    assert Tokenizer(tmp_path).encode("xyz") == [256] == oracle(ranks).encode("xyz")
    assert Tokenizer(tmp_path).encode("xyza") == oracle(ranks).encode("xyza") == list(b"xyza")


def test_a_token_ranked_before_its_parts_is_refused() -> None:
    swapped = {token: rank for rank, token in enumerate([*list(RANKS)[:256], b"xyz", b"xy"])}
    with pytest.raises(ModelError, match="ranked before its parts"):
        loaded(rank_file(swapped))


def test_a_file_that_would_take_minutes_is_refused() -> None:
    long = {b"%d" % number + b"x" * 1400: FIRST + number for number in range(120)}
    with pytest.raises(ModelError, match="tokens are too long"):
        loaded(rank_file(RANKS | long))


def test_a_control_token_outside_its_room_is_refused() -> None:
    with pytest.raises(ModelError, match=rf"'<more>' at {FIRST + 256}"):
        loaded(rank_file(RANKS), {FIRST + 256: {"content": "<more>"}})


@given(st.data())
def test_a_flipped_rank_file_loads_or_is_refused(data: st.DataObject) -> None:
    content = bytearray(rank_file(RANKS))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        loaded(bytes(content))
    except ModelError as error:
        assert "tiktoken.model" in str(error)


def test_two_files_that_disagree_about_an_id_are_refused(tmp_path: Path) -> None:
    write_kimi(tmp_path)
    shifted = {"id": FIRST + 5, "content": "<|im_system|>", "special": True}
    spec = loaded(rank_file(RANKS)) | {"added_tokens": [shifted]}
    write_json(tmp_path / "tokenizer.json", spec)
    with pytest.raises(ModelError, match=rf"'<\|im_system\|>' is {FIRST + 5} in tokenizer.json and {FIRST + 10} in"):
        Tokenizer(tmp_path)


def test_base64_is_read_strictly() -> None:
    assert base64.b64decode(b"YW!Jj") == b"abc"  # the default skips what is none
    with pytest.raises(ModelError, match="is not base64"):
        loaded(b"YW!Jj 0\n")

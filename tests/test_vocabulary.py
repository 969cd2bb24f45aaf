"""Tokenizer files as strangers write them: each loads, or is refused by a ModelError that names the file."""

import json
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minieagle.errors import ModelError, RequestError
from minieagle.model_file import MAX_TEXT_BYTES
from minieagle.tokenizer import Tokenizer
from tests.tokenizer_files import DEEPSEEK, THINK, trained_ranks, write_deepseek, write_kimi

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja")
with tempfile.TemporaryDirectory() as directory:
    CONTENT = {path.name: path.read_text() for path in write_deepseek(Path(directory), *THINK).iterdir()}

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from([-1, 0, 5, 2**31, 10**30, 1e400, -0.5, "", "x", "\ud800", "ByteLevel", "BPE", "\u0120the"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["id", "content", "special", "type", "name", "template", "0", "x"]), inner),
    ),
    max_leaves=6,
)
FIELDS = [
    *(
        ("tokenizer.json", path)
        for path in ("added_tokens", "model", "decoder", "normalizer", "pre_tokenizer", "post_processor")
    ),
    *(("tokenizer.json", path) for path in ("truncation", "padding", "version")),
    *(
        ("tokenizer.json", f"model.{name}")
        for name in ("vocab", "merges", "type", "unk_token", "dropout", "ignore_merges")
    ),
    *(("tokenizer.json", f"added_tokens.0.{name}") for name in ("id", "content", "special", "lstrip", "normalized")),
    *(("tokenizer.json", "model.merges.0"), ("tokenizer.json", "model.vocab.a"), ("tokenizer.json", "decoder.type")),
    *(("tokenizer_config.json", name) for name in ("added_tokens_decoder", "bos_token", "eos_token", "chat_template")),
    *(("tokenizer_config.json", name) for name in ("add_bos_token", "pad_token")),
    *(("generation_config.json", name) for name in ("eos_token_id", "temperature", "top_k")),
    *(("config.json", name) for name in ("eos_token_id", "text_config", "model_type")),
]


def loads_or_is_refused(files: dict[str, str | bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, content in (CONTENT | files).items():
            Path(directory, name).write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            tokenizer = Tokenizer(directory)
            assert isinstance(tokenizer.decode(tokenizer.encode("the cat <think>")), str)
            tokenizer.encode_chat([{"role": "user", "content": "x"}])
        except ModelError as error:
            assert directory in str(error)
        except RequestError:
            pass  # of a template that loaded


def replaced(content: Any, path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        content = content[int(name) if isinstance(content, list) else name]
    content[int(last) if isinstance(content, list) else last] = value


@pytest.mark.parametrize(("file", "field"), FIELDS)
@settings(max_examples=8)
@given(st.data())
def test_any_value_of_a_field_loads_or_is_refused(file: str, field: str, data: st.DataObject) -> None:
    content = json.loads(CONTENT.get(file, "{}"))
    replaced(content, field.split("."), data.draw(values))
    loads_or_is_refused({file: json.dumps(content)})


@pytest.mark.parametrize("file", FILES)
@given(st.data())
def test_any_bytes_of_a_file_load_or_are_refused(file: str, data: st.DataObject) -> None:
    content = bytearray(CONTENT.get(file, "{{ messages[0].content }}").encode())
    start = data.draw(st.integers(0, len(content) - 1))
    content[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=4))
    loads_or_is_refused({file: bytes(content)})


@settings(max_examples=10)
@given(st.one_of(st.binary(max_size=20), st.integers(1, 20_000).map(lambda depth: b"[" * depth), st.just(b"9" * 9999)))
def test_any_file_instead_loads_or_is_refused(content: bytes) -> None:
    for name in FILES:
        loads_or_is_refused({name: content})


NO_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}

# One row: a file, the changes to it, and what the error must name beside the file.
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("tokenizer.json", {"added_tokens": 5}, "added_tokens must be a list"),
    ("tokenizer.json", {"added_tokens": [5]}, r"added_tokens\[0\] must be an object"),
    ("tokenizer.json", {"added_tokens": [{"id": 5}]}, r"added_tokens\[0\] must be an object with its text"),
    ("tokenizer.json", {"added_tokens": [{"content": "x"}]}, r"added_tokens\[0\]\.id: the id None must be"),
    ("tokenizer.json", {"added_tokens": [{"id": True, "content": "x"}]}, r"the id True must be"),
    ("tokenizer.json", {"added_tokens": [{"id": 1, "content": "\udfff"}]}, r"added_tokens\[0\]"),
    (
        "tokenizer.json",
        {"added_tokens": [{"id": 1, "content": "x"}, {"id": 1, "content": "y"}]},
        "two tokens of one id",
    ),
    ("tokenizer.json", {"added_tokens": [{"id": 1, "content": "x"}, {"id": 2, "content": "x"}]}, "two tokens of one c"),
    ("tokenizer.json", {"model": None}, r"model\.vocab must be an object"),
    ("tokenizer.json", {"model": {"vocab": [["a", 1]]}}, r"model\.vocab must be an object"),
    ("tokenizer.json", {"model": {"vocab": {"a": "1"}}}, r"model\.vocab\['a'\]: the id '1' must be"),
    ("tokenizer.json", {"model": {"vocab": {"a": 2**40}}}, r"model\.vocab\['a'\]: the id"),
    ("tokenizer.json", {"decoder": None}, "decoder type None is not supported"),
    ("tokenizer.json", {"decoder": {"type": "Sequence", "decoders": []}}, "decoder type 'Sequence'"),
    ("tokenizer.json", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "'Precompiled' is not"),
    ("tokenizer.json", {"normalizer": {"type": "Strip"}}, "normalizer: type 'Strip' is not supported"),
    ("tokenizer.json", {"normalizer": "NFC"}, "normalizer: type None is not"),
    ("tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence"}]}}, r"s\[0\]: type 'S"),
    ("tokenizer.json", {"normalizer": REPLACE | {"content": "x" * 9}}, r"normalizer\.content has 9 characters"),
    ("tokenizer.json", {"normalizer": REPLACE | {"pattern": {"Regex": ""}}}, r"normalizer\.pattern={'Regex': ''} must"),
    ("tokenizer.json", {"post_processor": NO_TOKEN}, "cannot be used: no entry found for key"),
    ("tokenizer.json", {"normalizer": REPLACE | {"content": 5}}, r"normalizer\.content must be text, not int"),
    (
        "tokenizer.json",
        {"normalizer": {"type": "Sequence", "normalizers": [REPLACE | {"content": "bb"}] * 4}},
        r"normalizers\[3\] can make text more than 8 times",
    ),
    ("tokenizer.json", {"normalizer": {"type": "Prepend", "prepend": "x" * 99}}, r"normalizer\.prepend has 99"),
    ("tokenizer_config.json", {"added_tokens_decoder": [5]}, "added_tokens_decoder must be an object"),
    (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"x": {"content": "y"}}},
        r"added_tokens_decoder\['x'\]: the id",
    ),
    (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"9": {"content": DEEPSEEK[0]}}},
        "is 500 in tokenizer.json and 9",
    ),
    ("tokenizer_config.json", {"eos_token": "\ud800"}, r"eos_token='.ud800' must be a token's text"),
    ("tokenizer_config.json", {"bos_token": 5}, "bos_token=5 must be a token's text"),
    ("tokenizer_config.json", {"eos_token": "<none>"}, "eos_token='<none>' is no token of tokenizer.json"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template must be text"),
    ("generation_config.json", {"eos_token_id": [1, "x"]}, "eos_token_id=.* must be a token id or a list"),
    ("generation_config.json", {"top_p": "high"}, "top_p='high' must be a number"),
    ("config.json", {"eos_token_id": -1}, "eos_token_id=-1 must be a token id"),
]


@pytest.mark.parametrize(("file", "changes", "cause"), FAULTS)
def test_a_fault_is_named(tmp_path: Path, file: str, changes: dict[str, Any], cause: str) -> None:
    path = write_deepseek(tmp_path, *THINK) / file
    path.write_text(json.dumps(json.loads(CONTENT.get(file, "{}")) | changes))
    with pytest.raises(ModelError, match=f"{tmp_path.name}.*{cause}"):
        Tokenizer(tmp_path)


def test_added_tokens_may_be_null(tmp_path: Path) -> None:
    spec = json.loads(CONTENT["tokenizer.json"]) | {"added_tokens": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer(tmp_path).special_ids == frozenset()


def test_encoding_is_never_random(tmp_path: Path) -> None:
    spec = json.loads(CONTENT["tokenizer.json"])
    spec["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert len({tuple(Tokenizer(tmp_path).encode("the cat sat on the mat")) for _ in range(9)}) == 1


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    spec = json.loads(CONTENT["tokenizer.json"]) | {"truncation": cut}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer(tmp_path).decode(Tokenizer(tmp_path).encode("the cat sat")) == "the cat sat"


@pytest.mark.parametrize("name", ["tokenizer.json", "tiktoken.model", "tokenizer_config.json"])
def test_a_pipe_does_not_block_and_a_folder_is_no_file(tmp_path: Path, name: str) -> None:
    write_kimi(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=rf"{name} is a pipe, a device, a folder or"):
        Tokenizer(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ModelError, match=rf"{name} is a pipe, a device, a folder or"):
        Tokenizer(tmp_path)


def test_a_file_beyond_its_bound_is_not_read(tmp_path: Path) -> None:
    write_kimi(tmp_path)
    with (tmp_path / "tiktoken.model").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: a terabyte of zeros that takes no room
    with pytest.raises(ModelError, match=rf"tiktoken\.model is larger than {MAX_TEXT_BYTES} bytes"):
        Tokenizer(tmp_path)


def test_no_code_of_the_directory_is_run(tmp_path: Path) -> None:
    write_kimi(tmp_path, auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]})
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('run')")
    assert Tokenizer(tmp_path).vocab_size == len(trained_ranks()) + 256


NORMALIZERS: list[Any] = [
    None,
    {"type": "Sequence", "normalizers": []},
    {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "_"}, REPLACE]},
]


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_normalizers_as_published_are_let_in(tmp_path: Path, normalizer: Any) -> None:
    files = CONTENT | {"tokenizer.json": json.dumps(json.loads(CONTENT["tokenizer.json"]) | {"normalizer": normalizer})}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    text = Tokenizer(tmp_path).decode(Tokenizer(tmp_path).encode("a cat"))
    assert text == ("_b cbt" if normalizer and normalizer["normalizers"] else "a cat")


class Panic(BaseException):
    """What the library's panics are: no Exception."""


@pytest.mark.parametrize(("raised", "expected"), [(Panic("at\x1b[2J"), RequestError), (KeyboardInterrupt(), None)])
def test_a_panic_while_encoding_is_a_refusal_and_an_interrupt_is_not(raised: BaseException, expected: Any) -> None:
    class Library:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            raise raised

    with tempfile.TemporaryDirectory() as directory:
        vocabulary = replace(Tokenizer(write_deepseek(Path(directory), *THINK))._vocabulary, plain=Library())  # type: ignore[arg-type]
    with pytest.raises(expected or KeyboardInterrupt) as caught:
        vocabulary.encode("x", add_special_tokens=True)
    assert "\x1b" not in str(caught.value)


def test_other_threads_go_on_while_one_encodes(tmp_path: Path) -> None:
    tokenizer, ticks, done = Tokenizer(write_deepseek(tmp_path, *THINK)), list[int](), threading.Event()

    def tick() -> None:
        while not done.wait(0.0005):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    before = len(ticks)
    tokenizer.encode("the cat sat " * 50_000)
    during = len(ticks) - before
    done.set()
    thread.join()
    assert during > 9


@pytest.mark.parametrize("write", [lambda path: write_deepseek(path, *THINK), write_kimi])
def test_published_layouts_bound_a_text_by_its_bytes(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    write(tmp_path)
    vocabulary = Tokenizer(tmp_path)._vocabulary
    plain = vocabulary.token_bytes.keys() - set(vocabulary.added.values())
    assert vocabulary.longest_token_bytes == max(len(vocabulary.token_bytes[token_id]) for token_id in plain)

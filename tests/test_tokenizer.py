"""Text in and out: special tokens come from the template only, and a stream's text equals the whole's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

import minieagle
from minieagle.errors import ModelError, RequestError
from minieagle.tokenizer import Detokenizer, Tokenizer

TARGET = Path(minieagle.__file__).parent / "assets" / "target"
TOKENIZER = Tokenizer(TARGET)
ORACLE = FastTokenizer.from_file(str(TARGET / "tokenizer.json"))
SPECIAL = [token.content for token in ORACLE.get_added_tokens_decoder().values()]
BYTE_IDS = {TOKENIZER.token_bytes(i)[0]: i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}

ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
hostile = st.lists(st.one_of(st.sampled_from([*SPECIAL, "<|im_", "end|>", "[BOS", "{{", "}}"]), words)).map("".join)
turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), words), min_size=1, max_size=4)


def chat(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


def variant(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A copy of the model's text files in which the JSON file `name` has `changes`."""
    for source in TARGET.iterdir():
        if source.suffix in (".json", ".jinja"):
            shutil.copyfile(source, tmp_path / source.name)
    content = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps(content | changes))
    return tmp_path


def without_family(directory: Path) -> Path:
    """`directory` with one of the control tokens that mark the family under another name."""
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(text.replace("<|im_system|>", "<|im_other|>"))
    return directory


@given(hostile)
def test_encoding_a_text_and_decoding_it_gives_it_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(hostile)
def test_text_never_becomes_a_control_token(text: str) -> None:
    assert not TOKENIZER.special_ids & set(TOKENIZER.encode(text))


@given(st.text(st.characters(codec="ascii", exclude_characters="[<"), max_size=30))
def test_encoding_agrees_with_the_tokenizers_library(text: str) -> None:
    assert TOKENIZER.encode(text) == ORACLE.encode(text).ids


@given(turns)
def test_a_chat_of_plain_text_encodes_as_its_rendered_whole(turns: list[tuple[str, str]]) -> None:
    whole = "".join(f"<|im_{role}|>{role}<|im_middle|>{text}<|im_end|>" for role, text in turns)
    expected = ORACLE.encode(f"[BOS]{whole}<|im_assistant|>assistant<|im_middle|>").ids
    assert TOKENIZER.encode_chat([{"role": role, "content": text} for role, text in turns]) == expected


@given(st.lists(hostile, min_size=1, max_size=4))
def test_a_chat_holds_the_template_s_control_tokens_and_no_others(contents: list[str]) -> None:
    special = [one for one in TOKENIZER.encode_chat(chat(*contents)) if one in TOKENIZER.special_ids]
    markup = "[BOS]" + "<|im_user|><|im_middle|><|im_end|>" * len(contents) + "<|im_assistant|><|im_middle|>"
    assert special == ORACLE.encode(markup).ids


@given(hostile)
def test_a_chat_shows_every_character_of_a_message(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode_chat(chat(text))) == f"user{text}assistant"


def test_without_generation_prompt_the_chat_ends_with_its_last_turn() -> None:
    assert TOKENIZER.encode_chat(chat("hi"), add_generation_prompt=False)[-1] == ORACLE.token_to_id("<|im_end|>")


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert TOKENIZER.encode_chat(chat(parts)) == TOKENIZER.encode_chat(chat("ab"))
    developer, system = ({"role": role, "content": "x"} for role in ("developer", "system"))
    assert TOKENIZER.encode_chat([developer]) == TOKENIZER.encode_chat([system])


def test_text_that_touches_plain_markup_is_encoded_in_one_piece(tmp_path: Path) -> None:
    (variant(tmp_path, "config.json") / "chat_template.jinja").write_text("Us{{ messages[0].content }}")
    assert Tokenizer(tmp_path).encode_chat(chat("er and more")) == TOKENIZER.encode("User and more")


def test_a_template_that_trims_still_trims(tmp_path: Path) -> None:
    (variant(tmp_path, "config.json") / "chat_template.jinja").write_text("<{{ messages[0].content | trim }}>")
    assert Tokenizer(tmp_path).decode(Tokenizer(tmp_path).encode_chat(chat("\n a b  "))) == "<a b>"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "Ann"}], "messages[0].name"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([*chat("x"), {"role": "assistant", "content": "", "tool_calls": [1]}], "messages[1].tool_calls[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], "messages[0].content[0]"),
    ],
)
def test_a_bad_message_is_refused_by_name(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        TOKENIZER.encode_chat(messages)
    assert caught.value.param == param and param in str(caught.value)


def test_an_image_is_refused_with_the_cause() -> None:
    with pytest.raises(RequestError, match="reads no images"):
        TOKENIZER.encode_chat(chat([{"type": "image_url", "image_url": {"url": "http://example.com"}}]))


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("nothing", "leaves this user message out"),
    ],
)
def test_a_template_that_refuses_or_drops_costs_the_request(tmp_path: Path, template: str, cause: str) -> None:
    (variant(tmp_path, "config.json") / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=cause):
        Tokenizer(tmp_path).encode_chat(chat("x"))


@given(ids)
def test_decoding_agrees_with_the_tokenizers_library(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == ORACLE.decode(ids, skip_special_tokens=True)


@given(ids)
def test_a_stream_s_pieces_make_up_the_whole_text(ids: list[int]) -> None:
    stream = Detokenizer(TOKENIZER)
    assert "".join(map(stream.push, ids)) + stream.flush() == TOKENIZER.decode(ids)


@given(words)
def test_a_stream_never_emits_half_a_character(text: str) -> None:
    stream = Detokenizer(TOKENIZER)
    pieces = [stream.push(BYTE_IDS[byte]) for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text) and stream.flush() == ""


def test_an_endless_run_of_broken_bytes_is_neither_held_back_nor_lost() -> None:
    stream = Detokenizer(TOKENIZER)
    shown = [len(stream.push(BYTE_IDS[0xE2])) for _ in range(50_000)]
    assert sum(shown) == 49_999 and stream.flush() == "\N{REPLACEMENT CHARACTER}"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert TOKENIZER.decode([TOKENIZER.vocab_size, 10**9]) == ""


@pytest.mark.parametrize(("declared", "expected"), [(7, (7,)), ([7, 8], (7, 8)), (None, (4089,))])
def test_stop_ids_come_from_the_generation_config_first(tmp_path: Path, declared: Any, expected: Any) -> None:
    directory = without_family(variant(tmp_path, "generation_config.json", eos_token_id=declared))
    assert Tokenizer(directory).stop_ids == expected


@pytest.mark.parametrize("declared", [7, [4090], 4089, None])
def test_a_family_s_ends_are_added_to_those_declared(tmp_path: Path, declared: Any) -> None:
    directory = variant(tmp_path, "generation_config.json", eos_token_id=declared)
    assert {4089, 4090} <= set(Tokenizer(directory).stop_ids)


def test_the_embedded_model_stops_at_both_its_ends() -> None:
    assert [TOKENIZER.token_name(one) for one in TOKENIZER.stop_ids] == ["[EOS]", "<|im_end|>"]


def test_a_start_token_is_added_where_the_model_says_so(tmp_path: Path) -> None:
    added = Tokenizer(variant(tmp_path, "tokenizer_config.json", add_bos_token=True)).encode("hi")
    assert added == [TOKENIZER.bos_id, *TOKENIZER.encode("hi")]


def test_the_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    (variant(tmp_path, "config.json") / "chat_template.jinja").unlink()
    assert Tokenizer(tmp_path).encode_chat(chat("hi")) == TOKENIZER.encode_chat(chat("hi"))


def test_without_any_template_a_chat_is_refused(tmp_path: Path) -> None:
    (variant(tmp_path, "tokenizer_config.json", chat_template=None) / "chat_template.jinja").unlink()
    without_family(tmp_path)
    with pytest.raises(RequestError, match="chat template"):
        Tokenizer(tmp_path).encode_chat(chat("hi"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer.json", {"decoder": {"type": "Metaspace"}}),
        ("tokenizer.json", {"model": {"type": "Nonsense"}}),
        ("tokenizer.json", {"added_tokens": [{"id": 4088, "content": "[BOS]", "special": True, "lstrip": True}]}),
        ("tokenizer_config.json", {"bos_token": "<s>"}),
        ("generation_config.json", {"eos_token_id": "[EOS]"}),
    ],
)
def test_an_unusable_directory_is_named(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=tmp_path.name):
        Tokenizer(variant(tmp_path, name, **changes))


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        Tokenizer(tmp_path)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match=r"U\+D800 at character 1"):
        TOKENIZER.encode("a\ud800")


@given(
    st.one_of(
        hostile, st.text("a\u00e9\u4e2d\U0001f600 1\n", max_size=60), st.integers(1, 99).map(lambda n: "the " * n)
    )
)
def test_no_text_that_fits_is_refused_for_its_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.encode(text, max_context_tokens=len(ids) + 1) == ids
    whole = TOKENIZER.encode_chat(chat(text))
    assert TOKENIZER.encode_chat(chat(text), max_context_tokens=len(whole) + 1) == whole


def test_a_text_that_cannot_fit_is_refused_before_any_work() -> None:
    longest = max(len(TOKENIZER.token_bytes(i)) for i in range(TOKENIZER.vocab_size))
    text = "x" * (longest * 63 + 1)
    assert TOKENIZER.encode(text[1:], max_context_tokens=64)
    cause = f"prompt: {len(text)} bytes of text are at least 64 tokens .a token has at most {longest} bytes.*holds 64,"
    with pytest.raises(RequestError, match=cause):
        TOKENIZER.encode(text, max_context_tokens=64)
    with pytest.raises(RequestError, match="messages: ") as caught:
        TOKENIZER.encode_chat(chat(text), max_context_tokens=64)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("changes", [{"normalizer": {"type": "NFC"}}, {"pre_tokenizer": {"type": "Whitespace"}}])
def test_bytes_tell_nothing_where_text_may_shrink(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert Tokenizer(variant(tmp_path, "tokenizer.json", **changes)).encode("x" * 9999, max_context_tokens=2)

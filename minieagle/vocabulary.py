"""The tokens of a model directory: what plain text encodes to, which control tokens there are, the bytes of each id.

The one idea: control tokens are kept apart from the tokenizer that reads plain text, which knows none of them. Their
ids are the ones that the files declare, gaps and all; two files that disagree about an id are an error, since one
shifted id spoils every conversation without a word.

A directory holds tokenizer.json (the tokenizers library's format) or tiktoken.model (Kimi's, see `tiktoken_file.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tokenizers import Tokenizer as FastTokenizer

from minieagle.errors import ModelError, RequestError
from minieagle.model_file import read_object
from minieagle.pipeline import check_normalizer, longest_token_bytes
from minieagle.tiktoken_file import byte_alphabet, read_tiktoken

MAX_TOKEN_ID: Final = (1 << 24) - 1  # a hundred times the published vocabularies; beyond it a file is damaged
_SWALLOWING: Final = ("single_word", "lstrip", "rstrip")

Kind = Literal["tokenizer.json", "tiktoken"]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """`plain` encodes text and knows no control token; `added` holds the control tokens' ids by name; those in
    `special_ids` decode to no text; `token_bytes` holds the bytes of every id in use; `longest_token_bytes` is the most
    text that one plain token stands for, None if unknown (`pipeline.py`)."""

    kind: Kind
    plain: FastTokenizer
    added: Mapping[str, int]
    special_ids: frozenset[int]
    token_bytes: Mapping[int, bytes]
    longest_token_bytes: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of plain text, without a bound on its length. Raises RequestError when the files can't encode it: their
        patterns may fail on some texts only."""
        try:
            # Not `encode`, which holds Python's lock throughout: 4 MB would stop every other thread for two seconds.
            return self.plain.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as in _load
            raise RequestError(
                f"the model's {self.kind} can't encode this text: {_cause(error)}; mend the file"
            ) from error


def read_vocabulary(directory: Path, settings: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of `directory`, whose tokenizer_config.json holds `settings`; ModelError naming file and field."""
    named = _named_tokens(settings, directory / "tokenizer_config.json")
    ranks = directory / "tiktoken.model"
    if ranks.exists() and not (directory / "tokenizer.json").exists():
        return _vocabulary(read_tiktoken(ranks, named), "tiktoken", ranks)
    path = directory / "tokenizer.json"
    vocabulary = _vocabulary(read_object(path, required=True), "tokenizer.json", path)
    for token_id, token in named.items():
        known = vocabulary.added.get(token["content"], token_id)
        if known != token_id:
            raise ModelError(
                f"{directory}: {token['content']!r} is {known} in tokenizer.json and {token_id} in "
                "tokenizer_config.json; use files of one model"
            )
    return vocabulary


def _vocabulary(spec: dict[str, Any], kind: Kind, path: Path) -> Vocabulary:
    check_normalizer(spec, path)
    tokens = _added_tokens(spec, path)
    table = _token_bytes(spec, path)
    # A prompt is refused when too long, never cut, and it has the same ids each time: dropout is for training.
    model = {**spec["model"], "dropout": None}
    plain = _load({**spec, "model": model, "added_tokens": [], "truncation": None, "padding": None}, path)
    added = {token["content"]: token["id"] for token in tokens}
    return Vocabulary(
        kind=kind,
        plain=plain,
        added=added,
        special_ids=frozenset(token["id"] for token in tokens if token.get("special")),
        token_bytes=table | {token_id: content.encode() for content, token_id in added.items()},
        longest_token_bytes=longest_token_bytes(spec, table.values()),
    )


def _load(spec: dict[str, Any], path: Path) -> FastTokenizer:
    try:
        tokenizer = FastTokenizer.from_str(json.dumps(spec))
        tokenizer.encode_batch_fast(["a"])  # some faults of a file show only here
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and a panic is not even that
        raise ModelError(f"{path} cannot be used: {_cause(error)}; copy it again") from error


def _cause(error: BaseException) -> str:
    return f"{str(error)[:300]!r}"[1:-1]  # a panic's text may quote the file, control characters included


def _added_tokens(spec: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    tokens = spec.get("added_tokens") or []
    if not isinstance(tokens, list):
        raise ModelError(f"{path}: added_tokens must be a list, not {type(tokens).__name__}; copy it again")
    for index, token in enumerate(tokens):
        _check_token(token, f"{path}: added_tokens[{index}]")
        _check_id(token.get("id"), f"{path}: added_tokens[{index}].id")
    for name in ("id", "content"):
        if len({token[name] for token in tokens}) < len(tokens):
            raise ModelError(f"{path}: added_tokens holds two tokens of one {name}; copy it again")
    return tokens


def _named_tokens(settings: Mapping[str, Any], path: Path) -> dict[int, dict[str, Any]]:
    """tokenizer_config.json's added_tokens_decoder: an id, as text, to a token."""
    declared = settings.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict):
        raise ModelError(f"{path}: added_tokens_decoder must be an object; copy it again")
    for name, token in declared.items():
        where = f"{path}: added_tokens_decoder[{name!r:.40}]"
        _check_token(token, where)
        _check_id(int(name) if name.isascii() and name.isdigit() and len(name) < 10 else name, where)
    return {int(name): token for name, token in declared.items()}


def _check_token(token: object, where: str) -> None:
    """Flags that make a token swallow its neighbours' spaces are refused, not ignored."""
    content = token.get("content") if isinstance(token, dict) else None
    if not isinstance(token, dict) or not isinstance(content, str) or not content or not is_text(content):
        raise ModelError(f"{where} must be an object with its text under content; copy the file again")
    flags = [flag for flag in _SWALLOWING if token.get(flag)]
    if flags:
        raise ModelError(f"{where}: {content!r:.80} sets {', '.join(flags)}, which is not supported; set it to false")


def _check_id(token_id: object, where: str) -> None:
    if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
        raise ModelError(f"{where}: the id {token_id!r:.40} must be in 0..{MAX_TOKEN_ID}; copy the file again")


def is_text(text: str) -> bool:
    """Whether a string is Unicode text: JSON can state halves of a surrogate pair, which UTF-8 can't."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _token_bytes(spec: Mapping[str, Any], path: Path) -> dict[int, bytes]:
    """The bytes of every id but the control tokens'."""
    decoder, model = spec.get("decoder"), spec.get("model")
    kind = decoder.get("type") if isinstance(decoder, dict) else decoder
    if kind != "ByteLevel":
        raise ModelError(
            f"{path}: decoder type {kind!r:.40} is not supported, only 'ByteLevel'; use a byte-level tokenizer, as "
            "DeepSeek-V3 and Kimi have"
        )
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not vocab:
        raise ModelError(f"{path}: model.vocab must be an object of ids by token; copy it again")
    bytes_of = {char: byte for byte, char in byte_alphabet().items()}
    for token, token_id in vocab.items():
        _check_id(token_id, f"{path}: model.vocab[{token!r:.40}]")
        if not is_text(token):
            raise ModelError(f"{path}: model.vocab[{token!r:.40}] is not text; copy it again")
    return {token_id: _to_bytes(token, bytes_of) for token, token_id in vocab.items()}


def _to_bytes(token: str, bytes_of: Mapping[str, int]) -> bytes:
    return bytes(map(bytes_of.__getitem__, token)) if bytes_of.keys() >= set(token) else token.encode()

"""Text to token ids and back, for byte-level tokenizers, with the chat markup of the model's own template.

The one idea: control tokens come from the template only. What a user writes is encoded by a copy of the tokenizer that
knows no added tokens, so "<|im_end|>" in a message stays eight characters of text and can't close the turn. The
template never sees a message's text either: it renders unguessable placeholders, the result is cut at them, and markup
and text are encoded apart (but text that touches plain markup is encoded in one piece, as in training).

The other direction works on bytes: every token has its bytes, and an incremental UTF-8 decoder holds back at most the
three bytes of an unfinished character, so a stream costs O(1) a token even when its bytes never form a character.

Sources: the `tokenizer.json` format of the tokenizers library; the byte alphabet of GPT-2's encoder; the conventions
of Hugging Face chat templates (trimmed blocks, `raise_exception`).
"""

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from minieagle.errors import ModelError, RequestError

ROLES: Final = ("system", "developer", "user", "assistant")
_SAMPLING_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p")


class Tokenizer:
    """The tokenizer, chat template and stop tokens of one model directory. Immutable after construction.

    `vocab_size` counts ids up to the largest one in use; `bos_id` and `eos_id` are None where the model declares none;
    `stop_ids` end a generation (generation_config.json, else config.json, else the tokenizer's own end token);
    `special_ids` decode to no text; `sampling_defaults` are what generation_config.json recommends.
    """

    def __init__(self, directory: str | Path) -> None:
        """Reads `tokenizer.json` and, where present, the template and the configs beside it; ModelError if unusable."""
        self.directory = Path(directory)
        spec = _read_json(self.directory / "tokenizer.json", required=True)
        self._added = _added_tokens(spec, self.directory)
        self._plain = _load(json.dumps({**spec, "added_tokens": []}), self.directory)
        self._bytes = _token_bytes(spec, self._added, self.directory)
        self.special_ids = frozenset(token["id"] for token in spec.get("added_tokens", ()) if token.get("special"))
        self.vocab_size = max(self._bytes) + 1
        self._settings = _read_json(self.directory / "tokenizer_config.json")
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        generation = _read_json(self.directory / "generation_config.json")
        self.stop_ids = self._stop_ids(generation)
        self.sampling_defaults: dict[str, float] = {
            name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None
        }
        self._markup = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        self._template = self._load_template()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, read as plain text throughout: the text of a special token is text, never that token.

        A start token is added only where tokenizer.json or tokenizer_config.json says so. Raises RequestError for a
        string that is not Unicode text (a lone surrogate).
        """
        _check_text(text, "prompt")
        ids = self._plain.encode(text).ids
        lacks_bos = self._settings.get("add_bos_token") is True and ids[:1] != [self.bos_id]
        return [self.bos_id, *ids] if lacks_bos and self.bos_id is not None else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the model's markup, open for the assistant's turn if `add_generation_prompt`.

        A message is {"role": one of ROLES, "content": text or [{"type": "text", "text": ...}, ...]}; "developer" is
        rendered as "system". Raises RequestError naming the message and field at fault.
        """
        turns = check_messages(messages)
        return self._encode_pieces(self._pieces(turns, add_generation_prompt))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens have none, and bytes that form no character become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to the text: none for special tokens and for ids without a token."""
        return b"" if token_id in self.special_ids else self._bytes.get(token_id, b"")

    def token_name(self, token_id: int) -> str:
        """One token by itself, as logprobs show it: its text, special tokens by name, cut characters as U+FFFD."""
        return self._bytes.get(token_id, b"").decode("utf-8", errors="replace")

    def _pieces(self, turns: list[tuple[str, str]], add_generation_prompt: bool) -> Iterator[int | str]:
        """Rendered conversation as control token ids and plain text, in order."""
        if self._template is None:
            raise RequestError(
                f"messages need a chat template, and {self.directory.name} has neither chat_template.jinja nor one in "
                "tokenizer_config.json; send a plain prompt instead"
            )
        mark = secrets.token_hex(16)
        names = [f"{mark}-{index}-" for index in range(len(turns))]
        shown = [
            {"role": role, "content": _stand_in(text, name)} for (role, text), name in zip(turns, names, strict=True)
        ]
        rendered = self._render(shown, add_generation_prompt)
        for index, piece in enumerate(re.split(f"{mark}-([0-9]+)-", rendered)):
            if index % 2:
                yield turns[int(piece)][1].strip()
            else:
                yield from self._split_markup(piece)
        _check_all_shown(turns, names, rendered)

    def _split_markup(self, markup: str) -> Iterator[int | str]:
        start = 0
        for match in self._markup.finditer(markup):
            yield markup[start : match.start()]
            yield self._added[match.group()]
            start = match.end()
        yield markup[start:]

    def _encode_pieces(self, pieces: Iterable[int | str]) -> list[int]:
        ids: list[int] = []
        for is_text, run in groupby(pieces, key=lambda piece: isinstance(piece, str)):
            if is_text:
                ids += self._plain.encode("".join(map(str, run)), add_special_tokens=False).ids
            else:
                ids += map(int, run)
        return ids

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        assert self._template is not None, "checked by the caller"
        names = {name: _content(self._settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **names
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"messages: the chat template refuses this conversation: {error}; change the order or the roles of the "
                "messages",
                param="messages",
            ) from error

    def _load_template(self) -> jinja2.Template | None:
        source = _template_source(self.directory, self._settings)
        if source is None:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        try:
            return environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template of {self.directory} is not valid Jinja: {error}; mend it") from error

    def _named_id(self, name: str) -> int | None:
        """The id of the token that tokenizer_config.json declares under `name`."""
        token = _content(self._settings.get(name))
        if token is None:
            return None
        token_id = self._added.get(token, self._plain.token_to_id(token))
        if token_id is None:
            raise ModelError(
                f"{self.directory / 'tokenizer_config.json'}: {name}={token!r} is not in tokenizer.json; use files of "
                "one model"
            )
        return token_id

    def _stop_ids(self, generation: Mapping[str, Any]) -> tuple[int, ...]:
        config = _read_json(self.directory / "config.json")
        declared = next((c["eos_token_id"] for c in (generation, config) if c.get("eos_token_id") is not None), None)
        if declared is None:
            return () if self.eos_id is None else (self.eos_id,)
        ids = declared if isinstance(declared, list) else [declared]
        for token_id in ids:
            if type(token_id) is not int or token_id < 0:
                raise ModelError(
                    f"{self.directory}: eos_token_id={declared!r} must be a token id or a list of token ids; correct "
                    "generation_config.json or config.json"
                )
        return tuple(ids)


class Detokenizer:
    """Turns one sequence's token ids into text as they come. Mutable; `push` and `flush` are what changes it.

    The concatenation of everything returned equals `tokenizer.decode` of all ids. Each call costs O(bytes of the
    token): at most three bytes of an unfinished character are held, whatever came before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is unfinished."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished, else ""."""
        return self._decoder.decode(b"", final=True)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(role, text) of each message, or RequestError naming the message and field at fault."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages={messages!r:.80} must be a list of messages", param="messages")
    if not messages:
        raise RequestError("messages=[] is empty; send at least one message", param="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], where: str) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise RequestError(f'{where} must be an object with "role" and "content"', param=where)
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, [], {}):
            raise RequestError(f"{where}.{name} is not supported; send role and content only", param=f"{where}.{name}")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role={role!r:.80} must be one of {', '.join(ROLES)}", param=f"{where}.role")
    return "system" if role == "developer" else role, _check_content(message.get("content"), f"{where}.content")


def _check_content(content: object, where: str) -> str:
    if isinstance(content, str):
        _check_text(content, where)
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    return "".join(_check_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _check_part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(
            f'{where}.type={kind!r:.80}: only "text" parts are supported, the model reads no images, audio or files; '
            "describe them in words",
            param=where,
        )
    assert isinstance(part, Mapping), "a part with a type is a mapping"
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string", param=f"{where}.text")
    _check_text(text, f"{where}.text")
    return text


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is not "
            "text; remove it",
            param=where,
        ) from None


def _stand_in(text: str, name: str) -> str:
    """What the template sees of a message: its outer white space, which templates trim, around a placeholder."""
    core = text.strip()
    return text.replace(core, name) if core else text


def _check_all_shown(turns: list[tuple[str, str]], names: list[str], rendered: str) -> None:
    """A template that leaves a message out would drop what the user said without a word."""
    for index, ((role, text), name) in enumerate(zip(turns, names, strict=True)):
        if text.strip() and name not in rendered:
            where = f"messages[{index}]"
            raise RequestError(f"{where}: the chat template leaves this {role} message out; remove it", param=where)


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in `path`; {} where an optional file is absent."""
    if not path.exists() and not required:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; name a directory that holds a model") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not JSON: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold an object, not {type(content).__name__}; copy it again")
    return content


def _load(spec: str, directory: Path) -> FastTokenizer:
    try:
        return FastTokenizer.from_str(spec)
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise ModelError(f"{directory / 'tokenizer.json'} cannot be used: {error}; copy it again") from error


def _added_tokens(spec: Mapping[str, Any], directory: Path) -> dict[str, int]:
    """Added tokens by content. Flags that make a token swallow its neighbours' spaces are refused, not ignored."""
    for token in spec.get("added_tokens", ()):
        flags = [flag for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)]
        if flags:
            raise ModelError(
                f"{directory / 'tokenizer.json'}: added token {token['content']!r} sets {', '.join(flags)}, which is "
                "not supported; set it to false"
            )
    return {token["content"]: token["id"] for token in spec.get("added_tokens", ())}


def _token_bytes(spec: Mapping[str, Any], added: Mapping[str, int], directory: Path) -> dict[int, bytes]:
    """The bytes of every id, added tokens by their content."""
    kind = (spec.get("decoder") or {}).get("type")
    if kind != "ByteLevel":
        raise ModelError(
            f"{directory / 'tokenizer.json'}: decoder type {kind!r} is not supported, only 'ByteLevel'; use a "
            "byte-level tokenizer, as DeepSeek-V3 and Kimi have"
        )
    alphabet = _byte_alphabet()
    table = {token_id: _to_bytes(token, alphabet) for token, token_id in spec["model"]["vocab"].items()}
    return table | {token_id: content.encode() for content, token_id in added.items()}


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes: printable Latin-1 for itself, the rest from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


def _to_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    return bytes(map(alphabet.__getitem__, token)) if alphabet.keys() >= set(token) else token.encode()


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    declared = settings.get("chat_template")
    if isinstance(declared, list):  # several named templates; "default" is the one for plain conversations
        return next((entry["template"] for entry in declared if entry.get("name") == "default"), None)
    return declared


def _content(token: object) -> str | None:
    """A token in tokenizer_config.json is its text, or an object that holds it."""
    return token.get("content") if isinstance(token, Mapping) else token if isinstance(token, str) else None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

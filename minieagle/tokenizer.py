"""Text to token ids and back, for byte-level tokenizers, and conversations in the model's own markup.

The one idea: control tokens come from markup only. What a user writes is encoded by a tokenizer that knows no control
tokens, so "<|im_end|>" in a message stays ten characters of text and can't close the turn. A rendered conversation is
cut at its control tokens, and what lies between is encoded in one piece, markup and text together, as in training.

The other direction works on bytes: every token has its bytes, and an incremental UTF-8 decoder holds back at most the
three bytes of an unfinished character, so a stream costs O(1) a token even when its bytes never form a character.

The files are read by `vocabulary.py`, conversations checked by `messages.py` and rendered by `chat.py`.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from minieagle.chat import Chat, Conversation, token_text
from minieagle.errors import ModelError, RequestError
from minieagle.family import find_family
from minieagle.messages import check_messages, check_text, check_tools
from minieagle.model_file import read_object
from minieagle.vocabulary import Kind, is_text, read_vocabulary

_SAMPLING_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p")


class Tokenizer:
    """The tokenizer, chat markup and stop tokens of one model directory. Immutable after construction.

    `vocab_size` counts ids up to the largest one in use; `bos_id` and `eos_id` are None where the model declares none;
    `stop_ids` end a generation (generation_config.json's, else config.json's, else the tokenizer's own end token; and
    those of the model's family); `special_ids` decode to no text; `sampling_defaults` are what generation_config.json
    recommends; `family` is the model family by name, None if unknown.
    """

    def __init__(self, directory: str | Path) -> None:
        """Reads tokenizer.json or tiktoken.model and, where present, the template and the configs beside it; ModelError
        naming the file and field if they can't be used."""
        self.directory = Path(directory)
        self._settings = read_object(self.directory / "tokenizer_config.json")
        self._vocabulary = read_vocabulary(self.directory, self._settings)
        self.special_ids = self._vocabulary.special_ids
        self.vocab_size = max(self._vocabulary.token_bytes) + 1
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        config = read_object(self.directory / "config.json")
        family = find_family(self._vocabulary.added, config)
        self.family = None if family is None else family.name
        path = self.directory / "generation_config.json"
        generation = read_object(path)
        declared = _declared_stops(generation, path) or _declared_stops(config, self.directory / "config.json")
        own = () if self.eos_id is None else (self.eos_id,)
        stops = () if family is None else map(self._vocabulary.added.__getitem__, family.stops)
        self.stop_ids = tuple(dict.fromkeys((*(declared or own), *stops)))
        self.sampling_defaults = _sampling_defaults(generation, path)
        self._chat = Chat(self.directory, self._settings, family)
        names = sorted(self._vocabulary.added, key=len, reverse=True)
        self._control_tokens = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @property
    def kind(self) -> Kind:
        """Which file the tokens come from: "tokenizer.json" or "tiktoken"."""
        return self._vocabulary.kind

    def encode(self, text: str, *, max_context_tokens: int | None = None) -> list[int]:
        """Ids of `text`, read as plain text throughout: the text of a special token is text, never that token.

        A start token is added only where tokenizer.json or tokenizer_config.json says so. Raises RequestError for a
        string that is not Unicode text (a lone surrogate), and with `max_context_tokens` for one that can't fit it,
        before any work.
        """
        self._check_room(len(check_text(text, "prompt").encode()), max_context_tokens, "prompt")
        ids = self._vocabulary.encode(text, add_special_tokens=True)
        lacks_bos = self._settings.get("add_bos_token") is True and ids[:1] != [self.bos_id]
        return [self.bos_id, *ids] if lacks_bos and self.bos_id is not None else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        max_context_tokens: int | None = None,
        **switches: Any,
    ) -> list[int]:
        """Ids of a conversation in the model's markup, open for the assistant's turn if `add_generation_prompt`.

        `messages` and `tools` are those of the OpenAI API: text as content, "developer" rendered as "system", tool
        calls and results, `name`, and `reasoning_content` of assistant turns. `switches` are variables that the
        template reads, such as `thinking=False`. Raises RequestError naming the message and field at fault, and for
        whatever the model's markup can't show, and with `max_context_tokens` for contents that can't fit it.
        """
        conversation = Conversation(
            messages=check_messages(messages),
            tools=check_tools(tools),
            switches=switches,
            add_generation_prompt=add_generation_prompt,
        )
        contents = (message["content"] or "" for message in conversation.messages)
        num_bytes = sum(len(content.strip().encode()) for content in contents)  # templates may trim
        self._check_room(num_bytes, max_context_tokens, "messages")
        return self._encode_pieces(self._pieces(conversation))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens have none, and bytes that form no character become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to the text: none for special tokens and for ids without a token."""
        return b"" if token_id in self.special_ids else self._vocabulary.token_bytes.get(token_id, b"")

    def token_name(self, token_id: int) -> str:
        """One token by itself, as logprobs show it: its text, special tokens by name, cut characters as U+FFFD."""
        return self._vocabulary.token_bytes.get(token_id, b"").decode("utf-8", errors="replace")

    def _check_room(self, num_bytes: int, max_context_tokens: int | None, param: str) -> None:
        """Refuses a text whose bytes alone are too many: encoding it first would cost a hundred times its size."""
        longest = self._vocabulary.longest_token_bytes
        if longest is None or max_context_tokens is None or num_bytes <= longest * (max_context_tokens - 1):
            return
        raise RequestError(
            f"{param}: {num_bytes} bytes of text are at least {-(-num_bytes // longest)} tokens (a token has at most "
            f"{longest} bytes), and the context holds {max_context_tokens}, answer included; shorten it",
            param=param,
            code="context_length_exceeded",
        )

    def _pieces(self, conversation: Conversation) -> Iterator[int | str]:
        """The rendered conversation as control token ids and plain text, in order."""
        rendered, guard = self._chat.render(conversation, self._vocabulary.added)
        start = 0
        for match in self._control_tokens.finditer(rendered):
            yield guard.clear(rendered[start : match.start()])
            yield self._vocabulary.added[match.group()]
            start = match.end()
        yield guard.clear(rendered[start:])

    def _encode_pieces(self, pieces: Iterable[int | str]) -> list[int]:
        ids: list[int] = []
        for is_plain, run in groupby(pieces, key=lambda piece: isinstance(piece, str)):
            if is_plain:
                ids += self._vocabulary.encode("".join(map(str, run)), add_special_tokens=False)
            else:
                ids += map(int, run)
        return ids

    def _named_id(self, name: str) -> int | None:
        """The id of the token that tokenizer_config.json declares under `name`."""
        path, declared = self.directory / "tokenizer_config.json", self._settings.get(name)
        token = token_text(declared)
        if declared is not None and (token is None or not is_text(token)):
            raise ModelError(f"{path}: {name}={declared!r:.80} must be a token's text; correct it")
        if token is None:
            return None
        token_id = self._vocabulary.added.get(token, self._vocabulary.plain.token_to_id(token))
        if token_id is None:
            raise ModelError(f"{path}: {name}={token!r:.80} is no token of {self.kind}; use files of one model")
        return token_id


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


def _declared_stops(config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """eos_token_id of a config, or of the text model within it: an id or a list of ids."""
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else {}
    declared = config.get("eos_token_id", inner.get("eos_token_id"))
    if declared is None:
        return ()
    ids = declared if isinstance(declared, list) else [declared]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ModelError(
                f"{path}: eos_token_id={declared!r:.80} must be a token id or a list of token ids; correct it"
            )
    return tuple(ids)


def _sampling_defaults(generation: Mapping[str, Any], path: Path) -> dict[str, float]:
    chosen = {name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None}
    for name, value in chosen.items():
        if type(value) not in (int, float):
            raise ModelError(f"{path}: {name}={value!r:.80} must be a number; correct it")
    return chosen

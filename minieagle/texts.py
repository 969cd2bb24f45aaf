"""Texts to train a drafter on: prompts from a corpus, continued by the target itself.

A drafter imitates what the target writes, so the target writes its training text: part greedily up to its own stop,
part sampled past the stops, so that it also plays the user's turns. Texts are kept as token ids, one JSON object a
line; hidden states are never stored (57 KB a token for a large model) but computed again while training.
"""

from __future__ import annotations

import io
import json
import lzma
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minieagle.engine import Engine, Request
from minieagle.errors import ModelError
from minieagle.models.config import read_json
from minieagle.models.files import FileError, open_plain
from minieagle.sampling import SamplingParams

Messages = list[dict[str, str]]
_ROLES = {"User: ": "user", "Assistant: ": "assistant"}


@dataclass(frozen=True)
class Text:
    """One training text: token ids, of which the first prompt_len were given and the rest written by the target."""

    tokens: tuple[int, ...]
    prompt_len: int


def read_documents(path: Path) -> Iterator[Messages]:
    """The conversations of a corpus file (plain or .xz): `User: ` / `Assistant: ` turns, documents parted by a line
    `<|endoftext|>`."""
    try:
        with open_plain(path) as file:
            unpacked = lzma.open(file) if path.suffix == ".xz" else file
            with io.TextIOWrapper(unpacked, encoding="utf-8") as lines:
                yield from _documents(lines)
    except (OSError, EOFError, UnicodeDecodeError, FileError, lzma.LZMAError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(
            f"the corpus {path} can't be read ({why}): pass files of conversations, plain text or .xz"
        ) from None


def _documents(lines: Iterable[str]) -> Iterator[Messages]:
    messages: Messages = []
    for line in lines:
        role = next((name for mark, name in _ROLES.items() if line.startswith(mark)), None)
        if line.rstrip("\n") == "<|endoftext|>":
            yield messages
            messages = []
        elif role is not None:
            messages.append({"role": role, "content": line.split(": ", 1)[1].rstrip("\n")})
        elif messages:
            messages[-1]["content"] += "\n" + line.rstrip("\n")
    if messages:
        yield messages


def _prompt(messages: Messages, rng: random.Random) -> Messages | None:
    """The conversation up to a random turn of the user's."""
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "user"]
    return messages[: rng.choice(ends)] if ends else None


def sample_prompts(paths: list[Path], count: int, seed: int) -> list[Messages]:
    """`count` prompts drawn from the files, half of them from the first, the rest shared equally by the others."""
    rng = random.Random(seed)
    shares = [0.5] + [0.5 / (len(paths) - 1)] * (len(paths) - 1) if len(paths) > 1 else [1.0]
    prompts: list[Messages] = []
    for path, share in zip(paths, shares, strict=True):
        found = [prompt for document in read_documents(path) if (prompt := _prompt(document, rng))]
        if not found:
            raise ModelError(f"{path} holds no `User: ` turn: a corpus is conversations parted by <|endoftext|> lines")
        rng.shuffle(found)
        prompts += found[: max(1, round(count * share))]
    rng.shuffle(prompts)
    return prompts


def _request(engine: Engine, messages: Messages, index: int, new_tokens: int) -> Request | None:
    """Every other text greedy, every other sampled at 0.7 or 1.0 through the stops."""
    ids = engine.tokenizer.encode_chat(messages)
    if len(ids) + new_tokens > engine.max_context_tokens:
        return None
    heat = (0.0, 0.7, 0.0, 1.0)[index % 4]
    params = SamplingParams(temperature=heat, seed=index, max_tokens=new_tokens, ignore_eos=heat > 0)
    return Request(tuple(ids), params, spec=False)


def write_texts(
    engine: Engine, prompts: list[Messages], path: Path, *, new_tokens: int, progress: Callable[[int, int], None]
) -> None:
    """Continue every prompt and append the texts to `path`; prompts already in the file are skipped."""
    _drop_cut_line(path)
    done = {index for index, _ in _stored(path) if index < len(prompts)} if path.exists() else set()
    progress(len(done), len(prompts))
    waiting = iter([i for i in range(len(prompts)) if i not in done])
    running: dict[int, tuple[int, list[int], int]] = {}
    with path.open("a") as file:
        while True:
            while len(running) < engine.config.max_seqs and (index := next(waiting, None)) is not None:
                request = _request(engine, prompts[index], index, new_tokens)
                if request is not None:
                    running[engine.add(request)] = index, list(request.prompt_ids), len(request.prompt_ids)
            if not running:
                return
            for output in engine.step():
                index, tokens, prompt_len = running[output.request_id]
                tokens += output.token_ids
                if output.finish_reason is not None:
                    del running[output.request_id]
                    file.write(json.dumps({"index": index, "prompt_len": prompt_len, "tokens": tokens}) + "\n")
                    done.add(index)
                    progress(len(done), len(prompts))


def read_texts(path: Path) -> list[Text]:
    """The texts that `write_texts` wrote, in the order of their prompts. Raises ModelError for a damaged line."""
    return [text for _, text in sorted(_stored(path), key=lambda pair: pair[0])]


def _stored(path: Path) -> Iterator[tuple[int, Text]]:
    """(index of its prompt, text) of each line."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            read = json.loads(line)
            text = Text(tuple(map(int, read["tokens"])), int(read["prompt_len"]))
            yield int(read["index"]), text
        except (ValueError, TypeError, LookupError, RecursionError):
            raise ModelError(f"{path}:{number} is damaged: remove that line, and the text is written anew") from None


def _drop_cut_line(path: Path) -> None:
    """A run that was killed may have left half a line at the end."""
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Keep in `path` what texts are written with, or raise ModelError naming the first setting that is not what the
    texts beside it were written with: the same prompt numbers would mean other prompts."""
    before = read_json(path) if path.exists() else dict(settings)
    for name, value in settings.items():
        if before.get(name) != value:
            raise ModelError(
                f"the texts in {path.parent} were written with {name}={before.get(name)!r}, now {value!r} is asked "
                "for: go on with the same options or train into a new directory"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(before, indent=1) + "\n", encoding="utf-8")

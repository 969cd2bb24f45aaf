"""Prompts for the benches: a JSONL file of conversations, or a handful of the benches' own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minieagle.errors import ModelError
from minieagle.tokenizer import Tokenizer

_OWN = (
    "I am looking for a cheap restaurant in the north of town.",
    "Can you find me a flight to Boston next Friday?",
    "What is the weather like in Berlin today?",
    "I would like to book a table for four people tonight.",
    "Is there a concert this weekend? I like jazz.",
    "Please find me a dentist who is open on Saturday.",
    "I need a hotel room for two nights, not too expensive.",
    "Which films are showing near me this evening?",
)


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation, open for the assistant's turn. category: what kind of text it is."""

    category: str
    messages: tuple[dict[str, str], ...]


def _parse(line: str, where: str) -> BenchPrompt:
    try:
        found = json.loads(line)
        return BenchPrompt(str(found.get("category", "all")), tuple(found["messages"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f'{where} is no prompt: a line is {{"category": ..., "messages": [...]}}') from None


def read_prompts(path: Path | None, count: int | None) -> list[BenchPrompt]:
    """The file's prompts (None: the benches' own), `count` of them taken at even distances so that every category keeps
    its share. Raises ModelError for a file that can't be used or holds fewer."""
    if path is None:
        found = [BenchPrompt("dialogue", ({"role": "user", "content": text},)) for text in _OWN]
    elif not path.is_file():
        raise ModelError(f"{path} is no file: pass a JSONL file of prompts")
    else:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    wanted = len(found) if count is None else count
    if not 1 <= wanted <= len(found):
        raise ModelError(f"--num-prompts {wanted} must be in 1..{len(found)}, what {path or 'the built-in list'} holds")
    return [found[index * len(found) // wanted] for index in range(wanted)]


def encode(tokenizer: Tokenizer, prompts: Sequence[BenchPrompt]) -> list[tuple[int, ...]]:
    """Token ids by the model's chat template."""
    return [tuple(tokenizer.encode_chat(prompt.messages)) for prompt in prompts]

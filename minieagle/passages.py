"""Texts that a drafter is scored on: read from a file, or written by the target."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from minieagle.engine import Engine, EngineConfig, Request
from minieagle.errors import ModelError
from minieagle.models.deepseek import Target
from minieagle.models.files import read_plain
from minieagle.sampling import SamplingParams
from minieagle.spec.observe import TextError
from minieagle.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

PROMPTS = (
    "I would like to find a restaurant in San Jose.",
    "Can you find flights for me? I want to go to Seattle.",
    "I want to watch a movie tonight. What is playing nearby?",
    "Natalia has 12 apples and gives 5 to her friend. How many are left?",
    "How do I use tar?",
    "Please recommend some music for a long drive.",
    "Can you help me to pay a bill?",
    "What is the weather like in Chicago this weekend?",
)


@dataclass(frozen=True)
class Passage:
    """A text to score: tokens, of which the first prompt_len are a prompt that nobody drafts; where it came from."""

    origin: str
    tokens: tuple[int, ...]
    prompt_len: int


def written(target: Target, tokenizer: Tokenizer, new_tokens: int, *, ignore_eos: bool = False) -> list[Passage]:
    """What the target writes greedily to PROMPTS, at most new_tokens each; ignore_eos: past its own stops too. Raises
    ModelError when it can't answer."""
    engine = Engine(target, tokenizer, config=EngineConfig(max_seqs=len(PROMPTS)))
    prompts = [tuple(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in PROMPTS]
    tokens: dict[int, list[int]] = {}
    for prompt in prompts:
        room = max(1, min(new_tokens, engine.max_context_tokens - len(prompt)))
        params = SamplingParams(max_tokens=room, ignore_eos=ignore_eos)
        tokens[engine.add(Request(prompt, params))] = list(prompt)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise ModelError(f"the target could not answer a built-in prompt ({output.error}): pass --text FILE")
            tokens[output.request_id] += output.token_ids
    pairs = zip(tokens.values(), prompts, strict=True)
    return [Passage(f"prompt {i}", tuple(text), len(prompt)) for i, (text, prompt) in enumerate(pairs)]


def read_passages(path: Path, tokenizer: Tokenizer, max_tokens: int) -> list[Passage]:
    """The passages of a file. Plain text is cut into pieces of max_tokens tokens, each scored by itself; of .jsonl a
    line is {"tokens": [...], "prompt_len": n}, prompt_len being 1 where it is left out. Raises TextError naming the
    file, and the line."""
    try:
        content = read_plain(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise TextError(f"--text {path} can't be read as UTF-8 text: {error}") from None
    if path.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
        found = [_passage(line, f"{path}:{number}") for number, line in lines]
    else:
        _warn_of_marks(content, path, tokenizer)
        ids = tokenizer.encode(content)
        pieces = [ids[start : start + max_tokens] for start in range(0, len(ids), max_tokens)]
        found = [Passage(str(path), tuple(piece), 1) for piece in pieces]
    if not any(len(passage.tokens) > passage.prompt_len for passage in found):
        raise TextError(f"--text {path} holds nothing to score: a passage needs a token behind its prompt")
    return found


def _warn_of_marks(content: str, path: Path, tokenizer: Tokenizer) -> None:
    """Plain text is text throughout, which may not be what marks in it are meant for."""
    marks = ("<|endoftext|>", *map(tokenizer.token_name, sorted(tokenizer.special_ids)))
    found = next((mark for mark in marks if mark and mark in content), None)
    if found is not None:
        _log.warning("%s holds %s, which is read as text, not as a token; write ids in .jsonl to mean one", path, found)


def _passage(line: str, where: str) -> Passage:
    try:
        read = json.loads(line)
        tokens, prompt_len = read["tokens"], read.get("prompt_len", 1)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TextError(f'{where}: a line must be {{"tokens": [...], "prompt_len": n}}') from None
    if type(tokens) is not list or not all(type(token) is int for token in tokens):
        raise TextError(f"{where}: tokens must be a list of token ids")
    if type(prompt_len) is not int or not 1 <= prompt_len <= len(tokens):
        raise TextError(f"{where}: prompt_len={prompt_len!r} must be in 1..{len(tokens)}, the passage's tokens")
    return Passage(where, tuple(tokens), prompt_len)

"""Tiny tokenizers of the families that minieagle knows, written as their owners publish them.

Nothing here uses the code under test: the merges are trained naively, the rank file and tokenizer.json are spelled
out, and control tokens stand at the published distances, gaps included.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from minieagle.tokenizer import Tokenizer

# The split pattern as published, letter for letter.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
CORPUS = (
    "The cat sat on the mat, and the other cat sat there too. I don't think they'll mind; WE'RE all THE same. "
    "\u4e2d\u6587\u548cEnglish\u6df7\u5408\u6587\u5b57\uff0c\u4e2d\u6587\u4e2d\u6587\u3002 caf\xe9 na\xefve "
    "a \u4e2d\u6587 \u4e2d\u6587 b\u4e2d\u6587b I don't don't 'REx 1234 1234  \n\n  \n\n -\n-\n"
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 12345 1234 "
    '\U0001f600\U0001f600 {"city": "Berlin"}\n\n  def f(x):\n    return x + 100\n<|im_end|> <think>\n'
)
# Distance behind the ranks, as in Kimi-K2.5: 5, 8 and 16 are gaps.
KIMI = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "<|media_pad|>": 21,
    "<think>": 22,
    "</think>": 23,
    "[UNK]": 254,
    "[PAD]": 255,
}
KIMI_SHOWN = {
    name for name in KIMI if name.startswith("<|tool") or "think" in name
}  # not "special" in the published file
DEEPSEEK = (
    *("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<|EOT|>"),
    *(
        f"<\uff5ctool\u2581{name}\uff5c>"
        for name in (
            *("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep"),
            *("outputs\u2581begin", "outputs\u2581end", "output\u2581begin", "output\u2581end"),
        )
    ),
)
BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
THINK = ("<think>", "</think>")
SEARCH = ("<\uff5csearch\u2581begin\uff5c>", "<\uff5csearch\u2581end\uff5c>")


@cache
def trained_merges() -> tuple[tuple[bytes, bytes], ...]:
    """All merges of byte-pair encoding over CORPUS, most frequent pair first. The corpus is not split before, so that
    tokens reach over pieces of PATTERN, and each cut that the pattern makes shows in the ids."""
    text = [bytes([byte]) for byte in CORPUS.encode()]
    merges = []
    for _ in range(120):
        pairs = Counter(pairwise(text))
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        text = merged(text, merges[-1])
    return tuple(merges)


def merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def trained_ranks() -> dict[bytes, int]:
    tokens = [*(bytes([byte]) for byte in range(256)), *(left + right for left, right in trained_merges())]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def rank_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def write_kimi(directory: Path, *, model_type: str = "kimi_k25", thinks: bool = True, **settings: Any) -> Path:
    ranks = trained_ranks()
    names = {name: offset for name, offset in KIMI.items() if thinks or name not in THINK}
    declared = {
        str(len(ranks) + offset): {"content": name, "special": name not in KIMI_SHOWN} for name, offset in names.items()
    }
    (directory / "tiktoken.model").write_bytes(rank_file(ranks))
    write_json(
        directory / "tokenizer_config.json",
        {"added_tokens_decoder": declared, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"} | settings,
    )
    write_json(directory / "config.json", {"model_type": model_type, "text_config": {"eos_token_id": len(ranks) + 1}})
    return directory


def write_deepseek(directory: Path, *more: str, **settings: Any) -> Path:
    """V3, or R1 with THINK as `more`, or V3.1 with SEARCH too."""
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.train_from_iterator([CORPUS], trainer)
    spec = json.loads(fast.to_str())
    for number, name in enumerate((*DEEPSEEK, *more)):
        spec["added_tokens"].append({"id": 500 + 3 * number, "content": name, "special": False, "normalized": True})
    write_json(directory / "tokenizer.json", spec)
    write_json(directory / "tokenizer_config.json", {"bos_token": {"content": BEGIN}, "eos_token": END} | settings)
    write_json(directory / "config.json", {"model_type": "deepseek_v3", "eos_token_id": 1})
    return directory


WRITERS = {
    "Kimi-K2.5": write_kimi,
    "Kimi-K2-Thinking": lambda directory, **more: write_kimi(directory, model_type="kimi_k2", **more),
    "Kimi-K2": lambda directory, **more: write_kimi(directory, model_type="kimi_k2", thinks=False, **more),
    "DeepSeek-V3.1": lambda directory, **more: write_deepseek(directory, *THINK, *SEARCH, **more),
    "DeepSeek-R1": lambda directory, **more: write_deepseek(directory, *THINK, **more),
    "DeepSeek-V3": lambda directory, **more: write_deepseek(directory, **more),
}


@cache
def family(name: str, template: str | None = None) -> Tokenizer:
    """The tiny tokenizer of a family, with a template of its own or without."""
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(WRITERS[name](Path(directory), **({} if template is None else {"chat_template": template})))


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def names(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The tokens as text, control tokens by name."""
    return b"".join(tokenizer.token_bytes(one) or tokenizer.token_name(one).encode() for one in ids).decode()

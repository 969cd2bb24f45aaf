"""What a tokenizer.json does to text before its vocabulary sees it: what is let in, and what it says of lengths.

The one idea: a tokenizer.json comes from strangers, and its first step may make gigabytes of a sentence or throw text
away. So only steps of known growth are let in; and where no step can shorten a text, its bytes alone tell how few
tokens it can have, before any work is done on it.

Source: the format of the tokenizers library, whose byte-level models give every byte a token.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from minieagle.errors import ModelError

# How many times longer replacements may make a text, all together. Published ones put one character for another.
MAX_GROWTH: Final = 8
MAX_PREFIX_CHARS: Final = 32
# Unicode's own forms: harmless, but they may shorten a text. DeepSeek's tokenizer.json has an empty Sequence.
_FORMS: Final = ("NFC", "NFD", "NFKC", "NFKD")
_KNOWN: Final = (*_FORMS, "Prepend", "Replace", "Sequence")
# Steps that cut a text without dropping any of it; Split unless it removes what it finds.
_CUTS: Final = ("ByteLevel", "Digits", "Split")


def check_normalizer(spec: Mapping[str, Any], path: Path) -> None:
    """ModelError naming the field unless the normalizer is of a known, harmless kind."""
    growth = 1
    for where, step in _steps(spec.get("normalizer"), f"{path}: normalizer"):
        growth *= _growth(step, where)
        if growth > MAX_GROWTH:
            raise ModelError(f"{where} can make text more than {MAX_GROWTH} times longer; use another tokenizer.json")


def longest_token_bytes(spec: Mapping[str, Any], tokens: Iterable[bytes]) -> int | None:
    """The most bytes of text that one token stands for; None where a step may drop or shorten text, so that bytes tell
    nothing. `tokens` are those that plain text can have."""
    known = set(tokens)
    cuts = _parts(spec.get("pre_tokenizer"), "pretokenizers")
    kinds = [cut.get("type") if isinstance(cut, Mapping) else None for cut in cuts]
    keeps_all = (
        not _parts(spec.get("normalizer"), "normalizers")
        and "ByteLevel" in kinds
        and all(kind in _CUTS and cut.get("behavior") != "Removed" for kind, cut in zip(kinds, cuts, strict=True))
        and spec["model"].get("type") == "BPE"
        and all(bytes([byte]) in known for byte in range(256))
    )
    return max(map(len, known)) if keeps_all else None


def _parts(step: Any, name: str) -> list[Any]:
    """The steps that one field stands for: none, one, or those of a Sequence."""
    if step is None:
        return []
    parts = step.get(name) if isinstance(step, Mapping) and step.get("type") == "Sequence" else [step]
    return parts if isinstance(parts, list) else [parts]


def _steps(normalizer: Any, where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The normalizer's steps, each with the name of its field."""
    is_sequence = isinstance(normalizer, Mapping) and normalizer.get("type") == "Sequence"
    steps = [
        (f"{where}.normalizers[{index}]" if is_sequence else where, step)
        for index, step in enumerate(_parts(normalizer, "normalizers"))
    ]
    for place, step in steps:
        kind = step.get("type") if isinstance(step, Mapping) else None
        if kind not in _KNOWN or (kind == "Sequence" and is_sequence):
            raise ModelError(
                f"{place}: type {kind!r:.40} is not supported, only {', '.join(_KNOWN)}; use another model"
            )
    return steps


def _growth(step: Mapping[str, Any], where: str) -> int:
    """How many times longer a step may make a text, Unicode's own forms aside."""
    if step["type"] == "Prepend":
        _check_text(step.get("prepend"), f"{where}.prepend", MAX_PREFIX_CHARS)
        return 1
    if step["type"] == "Replace":
        pattern = step.get("pattern")
        if not isinstance(pattern, Mapping) or not isinstance(pattern.get("String"), str) or not pattern["String"]:
            raise ModelError(f"{where}.pattern={pattern!r:.80} must be {{'String': text}}; use another tokenizer.json")
        return max(1, _check_text(step.get("content"), f"{where}.content", MAX_GROWTH))
    return 1


def _check_text(text: object, where: str, limit: int) -> int:
    """The length of a text, which must not exceed `limit`."""
    if not isinstance(text, str):
        raise ModelError(f"{where} must be text, not {type(text).__name__}; copy the file again")
    if len(text) > limit:
        raise ModelError(f"{where} has {len(text)} characters, more than {limit}; use another tokenizer.json")
    return len(text)

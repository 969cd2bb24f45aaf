"""Kimi's `tiktoken.model`, turned into the content of a tokenizer.json.

The file is text: one token a line, base64 and rank. A rank file holds no merges, and needs none: a token of several
bytes was made by one last merge, and running the merges of lower rank over its bytes leaves exactly the two parts of
it. So the merges follow from the ranks, once, and the tokenizers library then gives the ids that tiktoken gives.

The 256 ids behind the ranks are control tokens. tokenizer_config.json names some of them, with gaps between; the others
are reserved. Each keeps its own id: numbering the named ones one after another shifts every id behind the first gap.

Source: the tokenizer code that Moonshot publishes with Kimi-K2 and K2.5 (the split pattern, the number and the names of
the reserved ids), restated.
"""

import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minieagle.errors import ModelError
from minieagle.model_file import MAX_TEXT_BYTES, read_bytes

NUM_RESERVED: Final = 256
MAX_LINE_BYTES: Final = 2048
# What recovering the merges costs, in bytes squared a token: Kimi's 163,584 tokens need a twentieth of it.
MAX_MERGE_WORK: Final = 200_000_000

_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD: Final = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The first alternative that matches cuts the text: runs of Han, words, numbers, punctuation, white space.
SPLIT_PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def byte_alphabet() -> dict[int, str]:
    """The 256 characters that stand for bytes: printable Latin-1 for itself, the rest from U+0100 upwards (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(rest)}


def read_tiktoken(path: Path, named: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """What a tokenizer.json for the rank file `path` would hold, with the control tokens `named` by
    tokenizer_config.json.

    Raises ModelError naming the line when the file is damaged, and the id when a named token lies outside the 256.
    """
    ranks = _read_ranks(path)
    alphabet = byte_alphabet()
    spelled = {token: "".join(map(alphabet.__getitem__, token)) for token in ranks}
    merges = [[spelled[left], spelled[right]] for left, right in _merges(ranks, path)]
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": _control_tokens(len(ranks), named, path),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, as_bytes]},
        "decoder": as_bytes,
        "model": {
            "type": "BPE",
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": merges,
            "ignore_merges": True,  # as in tiktoken: a piece that is a token needs no merges to be one
        },
    }


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Rank of each token, in order of rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, max_bytes=MAX_TEXT_BYTES).splitlines(), start=1):
        if line:
            token, rank = _read_line(line, f"{path}, line {number}")
            if token in ranks:
                raise ModelError(f"{path}, line {number}: the token {token!r:.80} stands there twice; copy it again")
            ranks[token] = rank
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path}: its {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once; copy it again")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise ModelError(f"{path}: the byte 0x{lacking[0]:02x} has no token, so some text has none; copy it again")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _read_line(line: bytes, where: str) -> tuple[bytes, int]:
    fields = line.split()
    if len(line) > MAX_LINE_BYTES or len(fields) != 2 or not fields[1].isdigit():
        raise ModelError(f"{where} is not a base64 token and its rank: {line!r:.60}; copy it again")
    try:
        token = binascii.a2b_base64(fields[0], strict_mode=True)
    except binascii.Error as error:
        raise ModelError(f"{where}: {fields[0]!r:.60} is not base64: {error}; copy it again") from error
    if not token:
        raise ModelError(f"{where} holds an empty token; copy it again")
    return token, int(fields[1])


def _merges(ranks: Mapping[bytes, int], path: Path) -> list[tuple[bytes, bytes]]:
    """The last merge of every token that merging can reach, in order of rank. A token without any two parts is one only
    where it is all of a piece of text; one that is ranked before its parts no training makes, and no merges express."""
    work = sum(len(token) ** 2 for token in ranks)
    if work > MAX_MERGE_WORK:
        raise ModelError(f"{path}: its tokens are too long: {work} bytes squared of {MAX_MERGE_WORK}; copy it again")
    merges = {token: _last_merge(token, ranks) for token in ranks if len(token) > 1}
    for token, merge in merges.items():
        if merge is None and any(token[:cut] in ranks and token[cut:] in ranks for cut in range(1, len(token))):
            raise ModelError(f"{path}: the token {token!r:.80} is ranked before its parts; copy it again")
    return [merge for merge in merges.values() if merge is not None]


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that merging in order of rank leaves of `token` before it is one; None when it leaves more."""
    limit = ranks[token]
    cuts = list(range(len(token) + 1))  # part i is token[cuts[i]:cuts[i + 1]], pair i the two from there
    pairs = [ranks.get(token[cut : cut + 2], limit) for cut in cuts[:-2]]
    while len(pairs) > 1:
        rank = min(pairs)
        if rank >= limit:
            return None
        at = pairs.index(rank)
        del cuts[at + 1], pairs[at]
        for near in range(max(at - 1, 0), min(at + 1, len(pairs))):
            pairs[near] = ranks.get(token[cuts[near] : cuts[near + 2]], limit)
    return token[: cuts[1]], token[cuts[1] :]


def _control_tokens(first: int, named: Mapping[int, Mapping[str, Any]], path: Path) -> list[dict[str, Any]]:
    """An added token for each id behind the ranks: the named ones by name, reserved ones for the gaps."""
    ids = range(first, first + NUM_RESERVED)
    outside = sorted(set(named) - set(ids))
    if outside:
        raise ModelError(
            f"{path} leaves the ids {first} to {ids[-1]} to control tokens, but tokenizer_config.json has "
            f"{named[outside[0]]['content']!r} at {outside[0]}; use files of one model"
        )
    reserved = {token_id: {"content": f"<|reserved_token_{token_id}|>", "special": True} for token_id in ids}
    return [{**(reserved | dict(named))[token_id], "id": token_id} for token_id in ids]

"""Files that others wrote, of a model directory or beside it: only plain ones, only so large, JSON only so much of it.

The one idea: every bound is checked before memory is taken or a byte is waited for, so that a hostile file costs an
error message. What a JSON text may grow to in memory is bounded by its values, not by its bytes: "[],[],..." takes 20
times its length.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

JSON_LIMIT_BYTES = 64 << 20
"""The largest JSON text that is read. All 208,550 names of Kimi-K2.5 in one file would take half of it."""
MOST_VALUES = 2_000_000
"""Values in one JSON text: at most 600 MB as Python objects. Kimi-K2.5's names in one file would have 1.7 million."""


class FileError(ValueError):
    """A file that is no plain file, can't be read, is too large, or isn't JSON. The message names it."""


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file, or a link to one. Raises FileNotFoundError, and FileError for a directory, a pipe or a device
    (which might never end) and for what the system refuses to open."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer; on plain files the flag does nothing.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"{path} can't be opened: {error}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError(f"{path} is a pipe or a device: only plain files are read")
    return file


def read_plain(path: Path, limit: int = JSON_LIMIT_BYTES) -> bytes:
    """The bytes of a plain file of at most `limit` bytes."""
    with open_plain(path) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise FileError(f"{path} can't be read: {error}") from None
    if len(content) > limit:
        raise FileError(f"{path} has more than {limit} bytes, the most that is read")
    return content


def parse_json(text: bytes, where: str) -> Any:
    """The value of a JSON text in UTF-8; `where` names it in errors. Raises FileError, also for a key that an object
    states twice: readers differ on which one counts."""
    if sum(map(text.count, (b",", b"{", b"["))) > MOST_VALUES:
        raise FileError(f"{where} can't be read as JSON: it has more than {MOST_VALUES} values")
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise FileError(f"{where} can't be read as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise FileError(f"{where} can't be read as JSON: {error}") from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{double!r:.100} is stated twice")
    return made

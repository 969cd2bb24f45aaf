"""The small files of a model directory, read with bounds: text and JSON objects.

The one idea: a model directory comes from strangers. Whatever a file holds (a device, gigabytes, bytes that are no
text, brackets nested without end), reading it ends in its content or in a ModelError that names it. The bounds are
those of models/files.py; the words are for whoever put the directory together.
"""

from pathlib import Path
from typing import Any, Final

from minieagle.errors import ModelError
from minieagle.models.files import JSON_LIMIT_BYTES, FileError, open_plain, parse_json

MAX_TEXT_BYTES: Final = 16 << 20
"""The largest template that is published has 20 kB."""


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """The content of `path`; ModelError when it is missing, not a plain file, unreadable or too large."""
    try:
        if not path.parent.is_dir():
            raise ModelError(f"{path.parent} is no directory that exists; name one that holds a model")
        if not path.exists() and not path.is_symlink():
            raise ModelError(f"{path.parent} has no {path.name}; name a directory that holds a model")
        if not path.is_file():  # a pipe or a device would block or never end
            raise ModelError(
                f"{path} is a pipe, a device, a folder or a link to nothing; put a plain file in its place"
            )
        with open_plain(path) as file:
            content = file.read(max_bytes + 1)
    except FileError as error:
        raise ModelError(f"{error}; check its permissions") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    if len(content) > max_bytes:
        raise ModelError(f"{path} is larger than {max_bytes} bytes, the most that is read; copy it again")
    return content


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text in `path`; ModelError as in `read_bytes`, and when it is not UTF-8."""
    try:
        return read_bytes(path, max_bytes=max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}; copy it again") from error


def read_object(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; {} where an optional file is absent; ModelError naming the file otherwise."""
    if not required and not path.exists():
        return {}
    try:
        content = parse_json(read_bytes(path, max_bytes=JSON_LIMIT_BYTES), "its content")
    except FileError as error:
        raise ModelError(f"{path} is not JSON that can be used: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold an object, not {type(content).__name__}; copy it again")
    return content

"""A model directory that is written from another one: it appears when it is whole, or not at all.

Until then, what is written lies beside it under a name of its own, which a killed run leaves behind without a
config.json; to try again is to start again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minieagle.errors import ModelError

_COPIED = (
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "MODEL_CARD.md",
)


@contextmanager
def new_directory(source: Path, target: Path) -> Iterator[Path]:
    """The directory to write to instead of `target`, which it becomes at the end. Raises ModelError when target isn't
    new or empty, or lies in the source, and for what can't be written."""
    target = _checked_target(source, target)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, target)
    except OSError as error:
        raise ModelError(f"{target} can't be written: {error}") from error
    finally:  # nothing is left there when all went well
        shutil.rmtree(partial, ignore_errors=True)


def _checked_target(source: Path, target: Path) -> Path:
    target = target.resolve()
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target} is a file: pass a new directory")
    if target.exists() and any(target.iterdir()):
        raise ModelError(f"{target} is not empty: pass a new directory")
    if target.is_relative_to(source.resolve()):
        raise ModelError(f"{target} lies inside {source}, which is read: pass a directory elsewhere")
    return target


def write_companions(source: Path, target: Path, config: Mapping[str, Any]) -> None:
    """What stands beside the weights; config.json last, for without it no directory is a model."""
    for name in _COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    (target / "config.json").write_text(json.dumps(config, indent=1))

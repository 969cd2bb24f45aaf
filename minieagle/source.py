"""Where `eval` and `doctor` take target and drafter from: a target in memory, or one streamed from disk layer by layer.

Both give the same bits (spec/observe.py), so nothing else needs to know which it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as ProgressBar

from minieagle.errors import ModelError
from minieagle.llm import embedded, set_threads
from minieagle.models.checkpoint import Progress
from minieagle.models.deepseek import Target
from minieagle.models.eagle3 import Drafter
from minieagle.models.stream import StreamedTarget
from minieagle.models.target_weights import load_target
from minieagle.options import add_wiring_options
from minieagle.spec.observe import Source
from minieagle.spec.wiring import Wiring, open_drafter


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which target and drafter, and how they are loaded."""
    add = parser.add_argument_group("model").add_argument
    add("--model", "--model-path", metavar="DIR", help="directory of the target (default: the embedded model)")
    add("--drafter", "--speculative-draft-model-path", metavar="DIR", help="directory of the EAGLE-3 drafter")
    add(
        "--stream-layers",
        action="store_true",
        help="read the target from disk one layer at a time: memory for about two layers, the same results",
    )
    add("--dtype", choices=("bfloat16", "float32"), help="compute in this type (default: the checkpoint's)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one for a small model, else all cores)")
    add_wiring_options(parser)


def model_directory(options: argparse.Namespace) -> Path:
    """The target's directory: --model or the embedded model's."""
    return embedded("target") if options.model is None else Path(options.model)


def drafter_directory(options: argparse.Namespace) -> Path:
    """The drafter's directory: --drafter, or the embedded one for the embedded model."""
    if options.drafter is not None:
        return Path(options.drafter)
    if options.model is not None:
        raise ModelError(f"--model {options.model} needs --drafter: pass the directory of the drafter to judge")
    return embedded("drafter")


def open_source(options: argparse.Namespace, console: Console) -> Source:
    """The target, loaded with a progress bar or, with --stream-layers, left on disk."""
    set_threads(options.threads, options.model)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.stream_layers:
        return StreamedTarget(model_directory(options), dtype=dtype)
    with reading("loading", console) as progress:
        return load_target(model_directory(options), dtype=dtype, progress=progress)


def open_pair(options: argparse.Namespace, console: Console) -> tuple[Source, Drafter, Wiring]:
    """Target and drafter. Raises what reading either raises, the drafter's faults before the target is loaded."""
    directory = drafter_directory(options)
    source = open_source(options, console)
    target = cast(Target, source)  # a drafter takes its config, place, embedding and head, which both kinds have
    drafter, wiring = open_drafter(
        directory, target, convention=options.capture_convention, boundaries=options.boundaries
    )
    return source, drafter, wiring


@contextmanager
def reading(description: str, console: Console) -> Iterator[Progress]:
    """A progress bar of bytes, with the rate and the time left; gives the function to call with (done, in all)."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with ProgressBar(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

"""transformers' generate on the same weights, in a process of its own: its memory and threads don't mix with ours.

The functions here run inside that process; `bench/decode.py` calls them through a pool of one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.report import peak_memory_bytes
from bench.runs import Run
from minieagle.errors import ModelError
from minieagle.sequence import SpecStats

_loaded: list[Any] = []
"""The one model of this process."""


def check_installed() -> None:
    """Raises ModelError when transformers is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise ModelError("transformers is not installed: pip install 'minieagle[test]', or pass --no-transformers")


def load(directory: Path, threads: int) -> None:
    """Load the bf16 model once, with transformers' own defaults (grouped experts, sdpa attention)."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # a test extra that takes seconds to import: only this process needs it
    from transformers import DeepseekV3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    torch.set_num_threads(threads)
    _loaded.append(DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval())


class _Clock:
    """A streamer that only notes when tokens come: `put` is called with the prompt, then with every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(prompt: tuple[int, ...], max_tokens: int, stop_ids: tuple[int, ...]) -> Run:
    """Greedy continuation; no stop_ids: exactly max_tokens."""
    from transformers import GenerationConfig  # loaded already by `load`

    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=list(stop_ids) or None, pad_token_id=0
    )
    ids, clock = torch.tensor([prompt]), _Clock()
    start = time.perf_counter()
    with torch.inference_mode():
        out = _loaded[0].generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock)
    tokens = tuple(out[0, len(prompt) :].tolist())
    stats = SpecStats(num_steps=len(tokens) - 1, num_tokens=len(tokens) - 1)
    return Run(tokens, clock.times[1] - start, clock.times[-1] - start, stats)


def peak_memory() -> int:
    """Bytes, of this process."""
    return peak_memory_bytes()

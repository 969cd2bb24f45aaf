"""What a GPU is asked for beyond the default: library kernels instead of our own, and recorded steps.

By default a row's bits depend on no other row there either (models/tiled_linear.py, models/row_attention.py), which
speculation's promise rests on. exact=False gives that up for the library's products, and for flashinfer's attention
where it is installed and takes the model's widths: faster, above all on long prompts, and right up to near-ties.
cuda_graph records decode and verify steps (models/graphs.py); recorded steps keep our own attention.
"""

from __future__ import annotations

import logging

import torch

from minieagle.models.deepseek import Block, Target
from minieagle.models.eagle3 import Drafter
from minieagle.models.flash_mla import FlashInferPrefix
from minieagle.models.graphs import VerifyGraphs
from minieagle.models.layers import set_exact

_log = logging.getLogger(__name__)


class AccelerationError(ValueError):
    """A GPU's feature was asked for without a GPU."""


def check_acceleration(device: torch.device, *, exact: bool, cuda_graph: bool) -> None:
    """Raises AccelerationError for what this device doesn't have."""
    if device.type == "cuda":
        return
    if not exact:
        raise AccelerationError(f"exact=False chooses kernels of a GPU, and this is a {device.type}: leave it out")
    if cuda_graph:
        raise AccelerationError(f"cuda_graph=True records steps of a GPU, and this is a {device.type}: leave it out")


def accelerate(target: Target, drafter: Drafter | None, *, exact: bool, cuda_graph: bool) -> None:
    """Set up loaded models, on every rank alike and before the first forward: recording runs a forward twice."""
    if not exact:
        _take_the_library(target, drafter)
    if cuda_graph:
        target.graphs = VerifyGraphs()


def _take_the_library(target: Target, drafter: Drafter | None) -> None:
    for model in (target, drafter):
        if model is not None:
            set_exact(model, False)
    block = target.layers[0]
    assert isinstance(block, Block)
    attention = block.attention
    if FlashInferPrefix.takes(attention.rank, attention.rope, target.dtype):
        sizes = attention.num_heads, attention.rank, attention.rope
        target.prefix = FlashInferPrefix(target.device, *sizes, target.dtype)
        return
    _log.info(
        "attention stays minieagle's own: flashinfer is not installed (extra `gpu`), or not made for latent width %d, "
        "rotary width %d and %s",
        attention.rank,
        attention.rope,
        target.dtype,
    )

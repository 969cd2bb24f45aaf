"""PyTorch's INT4 product of a GPU as a fake on the CPU: its rules, read off aten/src/ATen/native/cuda/int4mm.cu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from minieagle.models import int4


def gpu_layout(halves: Tensor, tiles: int) -> Tensor:
    """A row's even columns lie in the high half bytes. The fake keeps the codes in the order of the columns."""
    assert halves.dtype == torch.uint8 and halves.is_contiguous() and tiles in (2, 4, 8)
    rows, columns = halves.shape[0], 2 * halves.shape[1]
    assert rows % 8 == 0 and columns % (16 * tiles) == 0 and columns >= 16 * tiles
    codes = torch.stack((halves >> 4, halves & 15), dim=-1).view(rows, columns).int()
    words = (codes.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return words.view(rows // 8, columns // (16 * tiles), 32, tiles // 2)


def gpu_product(x: Tensor, codes: Tensor, group_size: int, scales: Tensor) -> Tensor:
    assert x.dtype == scales.dtype == torch.bfloat16 and x.is_contiguous() and group_size in (32, 64, 128, 256)
    rows, columns = codes.shape[0] * 8, x.shape[1]
    assert codes.shape[1] == columns // (codes.shape[3] * 32) and scales.shape == (columns // group_size, rows, 2)
    words = codes.reshape(rows, columns // 8)
    q = ((words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15).view(rows, -1, group_size) - 8
    scale, zero = scales.float().permute(2, 1, 0).unsqueeze(-1)
    weight = (q * scale + zero).bfloat16().flatten(1)
    return (x.float() @ weight.float().t()).bfloat16()


@contextmanager
def as_on_a_gpu(
    *, takes: bool = True, layout: Callable[..., Tensor] = gpu_layout, product: Callable[..., Tensor] = gpu_product
) -> Iterator[None]:
    """Words stay words until `pack`, and the library's edge is the fake."""
    with ExitStack() as stack:
        fakes = {"_GPU_LAYOUT": layout, "_GPU_PRODUCT": product}
        fakes |= {"_on_gpu": lambda _: takes, "_cpu_takes": lambda *_: False}
        for name, fake in fakes.items():
            stack.enter_context(patch.object(int4, name, fake))
        yield

"""The few integers that a step brings from the host, copied to the device without waiting for it.

`torch.tensor(numbers, device=...)` copies from pageable memory and waits until the device has caught up; from pinned
memory the copy is queued like a kernel. torch's allocator of pinned memory reuses a block only after the copies out of
it are done, so nothing has to be kept here.

Where the host waits for the device all the same, and why: for the emitted tokens and whether logits are finite, once a
step (the host accepts, stops and answers); for the drafted tree, once a step (trees live on the host); for logprobs,
where they are asked for; on rank 0 of several, for the token ids of every forward, which it announces as integers
(models/lockstep.py); for the router, once a layer, where experts are not grouped (models/grouped_experts.py); for the
slots of a new sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def staged(numbers: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """[N] of `dtype` on `device`."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return moved(torch.tensor(numbers, dtype=dtype, pin_memory=True), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on `device`, by way of pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)

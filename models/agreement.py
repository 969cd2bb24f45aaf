"""Whether all ranks loaded the same model in the same way, asked once before the first forward.

The one idea: ranks that were started with different options or files would add pieces that don't belong together, which
gives wrong text or a broken collective and names nobody. What must agree is said in words, hashed, and compared number
by number, so that the first difference has a name. Weights speak through what every rank holds whole and no two models
share: the norms.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from minieagle.dist.ranks import Ranks
from minieagle.models.deepseek import Target
from minieagle.models.eagle3 import Drafter
from minieagle.models.layers import RMSNorm


class AgreementError(ValueError):
    """Ranks of one job that were started differently."""


def check_agreement(ranks: Ranks, target: Target, drafter: Drafter | None) -> None:
    """Every rank calls this once it has loaded. Raises AgreementError on all of them when one differs from rank 0."""
    facts = _facts(target, drafter)
    every = ranks.gather(torch.tensor([_number(fact) for fact in facts.values()], device=ranks.device))
    for (what, mine), numbers in zip(facts.items(), every.t().tolist(), strict=True):
        if others := [rank for rank, number in enumerate(numbers) if number != numbers[0]]:
            raise AgreementError(
                f"{what} of rank {others[0]} is not that of rank 0 (on rank {ranks.rank} it is {mine}): start all "
                "ranks with the same options and files"
            )


def _facts(target: Target, drafter: Drafter | None) -> dict[str, str]:
    """What must be the same on all ranks, by name."""
    return {
        "reduction_slices": str(target.shards.slices),
        "expert_parallel": str(target.shards.expert_parallel),
        "dtype": str(target.dtype),
        "the config": _digest(repr(target.config).encode()),
        "the model": _weights(target),
        "the drafter": "none" if drafter is None else _weights(drafter, drafter.target_ids, text=repr(drafter.config)),
    }


def _weights(model: nn.Module, *more: Tensor, text: str = "") -> str:
    norms = [module.weight for module in model.modules() if isinstance(module, RMSNorm)]
    parts = [part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for part in (*norms, *more)]
    return _digest(b"".join([text.encode(), *parts]))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _number(fact: str) -> int:
    """Of 56 bits, which an int64 holds."""
    return int.from_bytes(hashlib.sha256(fact.encode()).digest()[:7], "big")

"""Ranks that were started differently are told so, by the name of what differs, before the first forward."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from minieagle.dist.ranks import ALONE, Ranks
from minieagle.llm import embedded as directory
from minieagle.models.agreement import AgreementError, check_agreement
from minieagle.models.deepseek import Target
from minieagle.models.shards import Shards
from minieagle.models.target_weights import load_target
from tests import embedded


class Company:
    """Rank 0 of two; the other rank says what it was given."""

    rank, size, device = 0, 2, torch.device("cpu")

    def __init__(self, theirs: Tensor | None = None) -> None:
        self.theirs, self.said = theirs, torch.empty(0)

    def gather(self, x: Tensor) -> Tensor:
        self.said = x
        return torch.stack([x, x if self.theirs is None else self.theirs])


def said(target: Target, drafter: Any = None) -> Tensor:
    company = Company()
    check_agreement(cast(Ranks, company), target, drafter)
    return company.said


def check(theirs: Tensor, target: Target, drafter: Any = None) -> None:
    check_agreement(cast(Ranks, Company(theirs)), target, drafter)


def other(**fields: Any) -> Target:
    """The embedded target, but for some fields."""
    made = load_target(directory("target"))
    vars(made).update(fields)
    return made


def test_ranks_that_are_alike_go_on() -> None:
    check(said(embedded.target(), embedded.drafter()), other(), embedded.drafter())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"shards": Shards(slices=8)}, "reduction_slices"),
        ({"shards": Shards(expert_parallel=True)}, "expert_parallel"),
        ({"embed_tokens": torch.zeros(1)}, "dtype"),
        ({"config": SimpleNamespace(hidden_size=1)}, "the config"),
    ],
)
def test_what_differs_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(AgreementError, match=f"^{named} of rank 1 is not that of rank 0"):
        check(said(other(**fields)), embedded.target())


def test_other_weights_of_the_same_shape_are_noticed() -> None:
    trained_on = other()
    trained_on.norm.weight.data[3] += 1
    with pytest.raises(AgreementError, match="^the model of rank 1"):
        check(said(trained_on), embedded.target())


def test_a_drafter_on_one_rank_only_is_noticed() -> None:
    with pytest.raises(AgreementError, match="^the drafter of rank 1.*on rank 0 it is none"):
        check(said(embedded.target(), embedded.drafter()), embedded.target())


def test_one_rank_agrees_with_itself() -> None:
    check_agreement(Ranks(ALONE), embedded.target(), None)

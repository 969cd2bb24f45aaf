"""dist/group.py: an environment gives one group or one error that names the value, the bound and the remedy."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minieagle.dist.group import MAX_SIZE, Group, GroupError, from_environment

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_plain_process_is_a_group_of_one():
    group = from_environment({"PATH": "/bin"})
    assert (group.rank, group.size) == (0, 1)


def test_one_torchrun_worker_is_the_same_group_as_a_plain_process():
    assert from_environment(TORCHRUN) == from_environment({})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GroupError, match="is set but"):
        from_environment()


@pytest.mark.parametrize(("available", "device"), [(False, "cpu"), (True, "cuda:0")])
def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, available: bool, device: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert from_environment(TORCHRUN).device == torch.device(device)


@given(size=st.integers(MAX_SIZE + 1, 4096))
def test_more_ranks_are_refused_with_value_bound_and_remedy(size: int):
    with pytest.raises(GroupError, match=rf"WORLD_SIZE={size} .*\b{MAX_SIZE}, .*--nproc-per-node {MAX_SIZE}$"):
        from_environment(TORCHRUN | {"WORLD_SIZE": str(size)})


@given(size=st.integers(max_value=0))
def test_a_group_of_nobody_is_refused(size: int):
    with pytest.raises(GroupError, match=f"WORLD_SIZE={size} must be at least 1"):
        from_environment(TORCHRUN | {"WORLD_SIZE": str(size)})


@given(name=st.sampled_from(["RANK", "LOCAL_RANK"]), index=st.integers().filter(lambda index: index != 0))
def test_an_index_outside_the_group_is_refused(name: str, index: int):
    with pytest.raises(GroupError, match=rf"^{name}={index} must be in 0\.\.0"):
        from_environment(TORCHRUN | {name: str(index)})


@given(name=st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK"]), text=st.text("abc.-", min_size=1))
def test_what_is_not_an_integer_is_refused(name: str, text: str):
    with pytest.raises(GroupError, match=f"{name}={text!r} must be an integer"):
        from_environment(TORCHRUN | {name: text})


@given(kept=st.sets(st.sampled_from(sorted(TORCHRUN)), min_size=1, max_size=3))
def test_a_group_half_described_is_refused_by_what_is_missing(kept: set[str]):
    with pytest.raises(GroupError) as caught:
        from_environment({name: TORCHRUN[name] for name in kept})
    said_missing = str(caught.value).split(" but ")[1].split(" is not;")[0]
    assert set(said_missing.split(", ")) == set(TORCHRUN) - kept


def test_a_group_error_is_a_value_error():
    assert issubclass(GroupError, ValueError)


def test_a_group_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Group(rank=0, size=1, device=torch.device("cpu")).rank = 1  # type: ignore[misc]

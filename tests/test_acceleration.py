"""What is asked of a GPU is refused without one, and reaches both models where it is there."""

from typing import Any

import pytest
import torch

from minieagle import llm
from minieagle.dist import group
from minieagle.dist.group import GroupError, alone, from_environment
from minieagle.models import acceleration
from minieagle.models.acceleration import AccelerationError, accelerate, check_acceleration
from minieagle.models.graphs import VerifyGraphs
from minieagle.models.layers import Linear
from minieagle.models.staging import moved, staged
from tests import embedded

CPU = torch.device("cpu")


@pytest.mark.parametrize("asked", [{"exact": False, "cuda_graph": False}, {"exact": True, "cuda_graph": True}])
def test_a_cpu_is_not_asked_for_a_gpus_features(asked: dict[str, bool]) -> None:
    with pytest.raises(AccelerationError, match="this is a cpu"):
        check_acceleration(CPU, **asked)
    check_acceleration(torch.device("cuda", 0), **asked)


@pytest.mark.parametrize("asked", [{"exact": False}, {"cuda_graph": True}])
def test_an_engine_is_not_loaded_with_them_either(asked: dict[str, Any]) -> None:
    with pytest.raises(AccelerationError):
        llm.load_engine(device="cpu", **asked)


def test_recording_and_the_library_are_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = embedded.target(), embedded.drafter()
    linears = [m for model in (target, drafter) for m in model.modules() if isinstance(m, Linear)]
    for linear in linears:
        monkeypatch.setattr(linear, "tiled", True)
    monkeypatch.setattr(target, "graphs", None)
    monkeypatch.setattr(target, "prefix", None)
    monkeypatch.setattr(acceleration.FlashInferPrefix, "takes", lambda *_: True)
    monkeypatch.setattr(acceleration.FlashInferPrefix, "__init__", lambda *_: None)
    accelerate(target, drafter, exact=False, cuda_graph=True)
    assert isinstance(target.graphs, VerifyGraphs) and isinstance(target.prefix, acceleration.FlashInferPrefix)
    assert not any(linear.tiled for linear in linears)


def environment(local_rank: int) -> dict[str, str]:
    own = str(local_rank)
    return {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_every_rank_of_a_host_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(group.torch.cuda, "device_count", lambda: 2)
    assert alone().device == from_environment({}).device == torch.device("cuda", 0)
    assert from_environment(environment(1)).device == torch.device("cuda", 1)
    with pytest.raises(GroupError, match="LOCAL_RANK=2 is beyond this host's 2 GPUs"):
        from_environment(environment(2))


def test_staged_numbers_are_plain_tensors_on_a_cpu() -> None:
    assert staged([1, 2], CPU).tolist() == [1, 2] and staged([0.5], CPU, torch.float32).dtype == torch.float32
    assert moved(torch.tensor([3]), CPU).tolist() == [3]

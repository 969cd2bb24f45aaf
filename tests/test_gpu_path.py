"""The GPU's path through a whole model, in Triton's interpreter; and its kernels through a GPU's compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minieagle.models import attention, moe
from minieagle.models.deepseek import Target
from minieagle.models.layers import Linear
from minieagle.models.moe import MixtureOfExperts
from minieagle.models.rows import Rows, Span
from minieagle.models.target_weights import load_target
from tests.oracles import save_target
from tests.strategies import ancestors

pytest.importorskip("triton", reason="Triton is not installed: its kernels can't be tried")


def on_a_gpu(target: Target, patch: pytest.MonkeyPatch) -> Target:
    """As the loader and the dispatch set a target up where its weights lie on a GPU."""
    for module in target.modules():
        if isinstance(module, Linear):
            module.tiled = True
        if isinstance(module, MixtureOfExperts):
            module.group()
    patch.setattr(attention, "_attend_group", attention._attend_on_gpu)
    patch.setattr(moe.F, "linear", moe.tiled_product)  # the router's
    return target


@torch.inference_mode()
def test_the_whole_path_gives_the_cpus_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_target(tmp_path, num_hidden_layers=2)
    ids, slots = torch.arange(7), torch.arange(1, 91)
    spans = [Span(slots[:40], 0, 3), Span(slots[40:], 0, 4, ancestors([-1, 0, 0, 1]))]
    rows = Rows.of(ids, spans)
    plain, gpu = load_target(directory), on_a_gpu(load_target(directory), monkeypatch)
    found = gpu(rows, gpu.new_cache(91), boundaries=(1, 2))
    monkeypatch.undo()
    wanted = plain(rows, plain.new_cache(91), boundaries=(1, 2))
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.captured, wanted.captured, rtol=1e-4, atol=1e-4)


def test_every_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """For Hopper, compute capability 9.0."""
    script = Path(__file__).with_name("gpu_kernels.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script, "90"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shared memory") == 7

"""Training: its unrolled logits are those of serving, it learns, and a killed run goes on where it stopped."""

from __future__ import annotations

import random
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.drafter_weights import load_drafter
from minieagle.models.eagle3 import Drafter, DrafterOutput
from minieagle.models.rows import Rows, Span
from minieagle.spec.train import (
    Report,
    TrainConfig,
    Trainer,
    TrainingError,
    batches,
    draft_vocabulary,
    new_drafter,
    observe,
    unroll,
)
from tests import embedded
from tests.embedded import prompt

CONFIG = DrafterConfig(
    hidden_size=256,
    target_hidden_size=256,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=4096,
    draft_vocab_size=300,
    boundaries=(0, 4, 8),
    max_position_embeddings=256,
)
TEXTS = tuple(prompt(i % 6) + prompt((i + 1) % 6) for i in range(24))
TRAINING = TrainConfig(num_steps=3, batch_tokens=256, num_updates=8, warmup_updates=1, checkpoint_every=4, heldout=0.1)


def trainer(directory: Path, config: DrafterConfig = CONFIG, training: TrainConfig = TRAINING) -> Trainer:
    return Trainer(embedded.target(), TEXTS, config, training, directory)


def serve_chain(drafter: Drafter, text: tuple[int, ...], slot: int, num_steps: int) -> list[torch.Tensor]:
    """Logits of `num_steps` drafted rows behind committed rows 0 .. slot, as the engine's cache computes them."""
    ids, slots = torch.tensor(text), torch.arange(1, 65)
    seen = embedded.target()(
        Rows.of(ids, [Span(slots, 0, len(text))]), embedded.target().new_cache(65), boundaries=(0, 4, 8)
    )
    cache = drafter.new_cache(65)
    rows = Rows.of(ids[1 : slot + 2], [Span(slots, 0, slot + 1)])
    out = drafter(rows, drafter.fuse(seen.captured[: slot + 1].float()), cache)
    out, logits = DrafterOutput(out.logits[-1:], out.states[-1:]), [out.logits[-1]]
    for step in range(1, num_steps):
        rows = Rows.of(ids[slot + 1 + step : slot + 2 + step], [Span(slots, slot + step, 1)])
        out = drafter(rows, out.states, cache)
        logits.append(out.logits[0])
    return logits


@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_residual": True}])
def test_unrolled_logits_are_those_of_serving(flags: dict[str, bool]) -> None:
    """Train/serve parity, which is where acceptance is lost without anyone noticing."""
    config = replace(CONFIG, **flags)
    ids = torch.arange(0, 3000, 10)
    drafter = new_drafter(config, embedded.target(), ids, seed=1)
    text = TEXTS[0][:40]
    with torch.no_grad():
        steps = [
            logits for logits, _, _ in unroll(drafter, observe(embedded.target(), [text, text[:9]], (0, 4, 8), ids), 4)
        ]
    for slot in (0, 5, 30):
        for step, served in enumerate(serve_chain(drafter, text, slot, 4)):
            torch.testing.assert_close(steps[step][0, slot], served, atol=2e-4, rtol=2e-4)


def test_targets_are_the_target_s_next_tokens() -> None:
    text, ids = TEXTS[0], torch.arange(4096)
    batch = observe(embedded.target(), [text], (2,), ids)
    drafter = new_drafter(
        replace(CONFIG, boundaries=(2,), draft_vocab_size=4096),
        embedded.target(),
        ids,
        0,
    )
    slots = torch.arange(1, len(text) + 1)
    logits = embedded.target()(
        Rows.of(torch.tensor(text), [Span(slots, 0, len(text))]), embedded.target().new_cache(len(text) + 1)
    ).logits
    with torch.no_grad():
        for step, (_, targets, best) in enumerate(unroll(drafter, batch, 3)):
            assert torch.equal(best[0], logits.argmax(-1)[step + 1 :])
            torch.testing.assert_close(targets[0], logits.softmax(-1)[step + 1 :])


def test_training_lowers_the_loss_and_saves_a_loadable_drafter(tmp_path: Path) -> None:
    seen: list[Report] = []
    trainer(
        tmp_path,
        training=TrainConfig(num_steps=3, batch_tokens=512, num_updates=30, warmup_updates=2, checkpoint_every=30),
    ).run(seen.append)
    assert seen[-1].loss < 0.8 * seen[0].loss
    assert seen[-1].score is not None and seen[-1].score.tokens_per_step > 1.1
    loaded = load_drafter(tmp_path, embedded.target())
    assert loaded.config.boundaries == (0, 4, 8) and loaded.target_ids.shape == (300,)


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole: list[Report] = []
    trainer(tmp_path / "whole").run(whole.append)

    class Killed(Exception):
        pass

    def kill(report: Report) -> None:
        if report.update == 5:
            raise Killed

    with pytest.raises(Killed):
        trainer(tmp_path / "cut").run(kill)
    rest: list[Report] = []
    again = trainer(tmp_path / "cut")
    assert again.update == 4
    again.run(rest.append)
    assert [report.loss for report in rest] == [report.loss for report in whole[4:]]


def test_resuming_another_drafter_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).save_checkpoint()
    other = replace(CONFIG, boundaries=(2, 4, 8))
    with pytest.raises(TrainingError, match="boundaries"):
        trainer(tmp_path, other)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"learning_rate": 1e-4}, {"num_updates": 7}])
def test_resuming_with_other_settings_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer(tmp_path).save_checkpoint()
    with pytest.raises(TrainingError, match=next(iter(changes))):
        trainer(tmp_path, training=replace(TRAINING, **changes))


@pytest.mark.parametrize("kept", [0, 100, None])
def test_a_damaged_checkpoint_is_refused_in_words(kept: int | None, tmp_path: Path) -> None:
    trainer(tmp_path).save_checkpoint()
    path = tmp_path / "training" / "checkpoint.safetensors"
    if kept is None:
        with safe_open(path, framework="pt") as file:
            save_file({"target_ids": file.get_tensor("target_ids")}, path, metadata=file.metadata())
    else:
        path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(TrainingError, match="checkpoint.safetensors is damaged .*remove it"):
        trainer(tmp_path)


def test_what_is_written_follows_the_umask(tmp_path: Path) -> None:
    trainer(tmp_path).save_checkpoint()
    files = tmp_path / "model.safetensors", tmp_path / "training" / "checkpoint.safetensors", tmp_path / "config.json"
    assert len({stat.S_IMODE(file.stat().st_mode) for file in files}) == 1


def test_a_learning_rate_is_checked() -> None:
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TrainingError, match="learning_rate"):
            replace(TRAINING, learning_rate=rate)


def test_draft_vocabulary_is_the_most_frequent() -> None:
    assert draft_vocabulary([(5, 5, 5, 2, 2, 9, 1)], 2, 10).tolist() == [2, 5]
    assert draft_vocabulary([(5, 5, 5, 2, 2, 9, 1)], 3, 10).tolist() == [1, 2, 5]
    with pytest.raises(TrainingError, match="draft_vocab_size=11"):
        draft_vocabulary([(1,)], 11, 10)


def test_batches_hold_every_text_once_within_the_budget() -> None:
    groups = list(batches(TEXTS, 200, random.Random(0)))
    assert sorted(text for group in groups for text in group) == sorted(TEXTS)
    assert all(len(group) * max(map(len, group)) <= 200 for group in groups)


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="too few"):
        Trainer(embedded.target(), [(1, 2, 3)], CONFIG, TRAINING, tmp_path)

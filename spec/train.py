"""Training a drafter with training-time test (EAGLE-3, arXiv 2503.01840, section 3): it learns on its own outputs.

States come from the target's own forward, the function that serves, one batch at a time; nothing is stored. Slot t of a
text holds the captured states at position t and the token at t + 1. Step k = 0 .. K-1 feeds the token at t + 1 + k and
the slot's own previous output, and is scored against the target's distribution at position t + 1 + k. A slot attends to
the step-0 keys of slots <= t and to its own keys of later steps: exactly what a chain drafted from a committed cache
sees, so acceptance measured here is acceptance in use.

B texts, S slots, K draft steps, W draft vocabulary, H heads, P head width.
"""

# torch and safetensors annotate some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minieagle.models.deepseek import Target
from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.drafter_weights import drafter_tensors, load_drafter
from minieagle.models.eagle3 import Drafter, DrafterLayer
from minieagle.models.layers import Linear, RMSNorm
from minieagle.models.mla import LatentAttention
from minieagle.models.rope import RotaryTable
from minieagle.models.rows import Rows, Span
from minieagle.models.tensor_file import write_tensors
from minieagle.spec.golden import NUM_TOKENS, golden_vectors
from minieagle.spec.wiring import FILE as WIRING
from minieagle.spec.wiring import make_wiring, write_wiring

TokenText = tuple[int, ...]


class TrainingError(ValueError):
    """Training data or settings that can't be used."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """num_steps: draft steps unrolled (K); step_decay: weight of step k is step_decay^k; batch_tokens: slots an update;
    num_updates: updates in all; learning_rate: AdamW's peak, after warmup_updates, with cosine decay to a tenth."""

    num_steps: int = 6
    step_decay: float = 0.9
    batch_tokens: int = 2048
    num_updates: int = 1000
    learning_rate: float = 1e-3
    warmup_updates: int = 50
    grad_clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    heldout: float = 0.02

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_tokens", "num_updates", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.learning_rate <= 1:
            raise TrainingError(f"learning_rate={self.learning_rate} must be above 0 and at most 1")
        if not 0 < self.heldout < 1:
            raise TrainingError(f"heldout={self.heldout} must be between 0 and 1: the share of texts kept for scoring")


@dataclass(frozen=True)
class Batch:
    """What the target says of B padded texts. tokens [B, S] int64; captured [B, S, taps, hidden]; targets [B, S, W]
    float32, its distribution over the draft vocabulary at each position; best [B, S], the draft id of its argmax, -1
    when that is outside; lengths [B]."""

    tokens: Tensor
    captured: Tensor
    targets: Tensor
    best: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Score:
    """Top-1 agreement with the target by draft step: hits / counts, each [K]. A target token outside the draft
    vocabulary counts as a miss."""

    hits: Tensor
    counts: Tensor

    @property
    def rates(self) -> list[float]:
        return (self.hits / self.counts.clamp(min=1)).tolist()

    @property
    def tokens_per_step(self) -> float:
        """1 + sum of products of the rates: a quick look that ignores correlation between steps (walk.py is exact)."""
        product, total = 1.0, 1.0
        for rate in self.rates:
            product *= rate
            total += product
        return total


def draft_vocabulary(texts: Sequence[TokenText], size: int, vocab_size: int) -> Tensor:
    """[size] int64 ascending: the most frequent tokens of the texts, equals by lower id."""
    if not 1 <= size <= vocab_size:
        raise TrainingError(f"draft_vocab_size={size} must be in 1..{vocab_size}, the target's vocabulary")
    counts = torch.bincount(torch.tensor([t for text in texts for t in text]), minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def check_trainable(config: DrafterConfig) -> None:
    """Raises TrainingError for a drafter that isn't trained here: embeddings are the target's and the head its own."""
    if config.own_embeddings or not config.own_head:
        raise TrainingError(
            f"own_embeddings={config.own_embeddings}, own_head={config.own_head}: training keeps the target's "
            "embeddings (so hidden_size must be the target's) and trains a head of the drafter's own"
        )


def new_drafter(config: DrafterConfig, target: Target, target_ids: Tensor, seed: int) -> Drafter:
    """An untrained float32 drafter on the target's device: norms at 1, products at random, the head from the target's
    rows and the final norm from the target's. Raises TrainingError for a wiring that isn't trained."""
    check_trainable(config)
    torch.manual_seed(seed)
    with torch.device(target.device):
        drafter = Drafter(config)
        for module in drafter.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            if isinstance(module, LatentAttention):
                for fold in (module.w_uk, module.w_uv):
                    nn.init.normal_(fold, std=module.rank**-0.5)
        drafter.rotary = RotaryTable(config.rotary_dim, config.rope_theta, config.max_position_embeddings, config.yarn)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.lm_head.dense_weight()[target_ids])
        drafter.norm.weight.copy_(target.norm.weight)
    drafter.borrow(target)
    drafter.target_ids = target_ids
    return drafter


def observe(target: Target, texts: Sequence[TokenText], boundaries: tuple[int, ...], target_ids: Tensor) -> Batch:
    """Run the target over the texts, as serving would, and keep what training needs of it."""
    lengths = [len(text) for text in texts]
    starts = [1 + sum(lengths[:i]) for i in range(len(texts))]
    cache = target.new_cache(1 + sum(lengths))
    spans = [
        Span(torch.arange(start, start + n, device=target.device), 0, n)
        for start, n in zip(starts, lengths, strict=True)
    ]
    flat = torch.tensor([t for text in texts for t in text], device=target.device)
    out = target(Rows.of(flat, spans), cache, boundaries=boundaries)
    draft_id = torch.full((target.config.vocab_size,), -1, device=target.device)
    draft_id[target_ids] = torch.arange(target_ids.shape[0], device=target.device)

    def padded(rows: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(rows.split(lengths)), batch_first=True)

    probabilities = out.logits.index_select(1, target_ids).softmax(-1)
    best = draft_id[out.logits.argmax(-1)]
    return Batch(padded(flat), padded(out.captured).float(), padded(probabilities), padded(best), torch.tensor(lengths))


class _UnrolledAttention:
    """Attention of step k: step-0 keys of slots <= t, then the slot's own keys of steps 1 .. k; for every layer."""

    def __init__(self, drafter: Drafter, batch: int, num_slots: int) -> None:
        self.drafter, self.batch, self.num_slots = drafter, batch, num_slots
        self.keys: list[list[Tensor]] = [[] for _ in drafter.all_layers()]
        self.values: list[list[Tensor]] = [[] for _ in drafter.all_layers()]
        future = torch.ones(num_slots, num_slots, dtype=torch.bool, device=drafter.target_ids.device).triu(1)
        self.mask = torch.zeros(future.shape, device=future.device).masked_fill_(future, -math.inf)

    def __call__(self, layer: DrafterLayer, x: Tensor) -> Tensor:
        keys, values = self.keys[layer.index], self.values[layer.index]
        step = len(keys)
        positions = torch.arange(step, step + self.num_slots, device=x.device).repeat(self.batch)
        q, k, v = layer.attention.project(x, *self.drafter.rotary.at(positions))
        group = q.shape[1] // k.shape[1]
        q = self._by_head(q, 1) * layer.attention.scale
        keys.append(self._by_head(k, group))
        values.append(self._by_head(v, group))
        scores = q @ keys[0].transpose(-1, -2) + self.mask
        own = [(q * mine).sum(-1, keepdim=True) for mine in keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = weights[..., : self.num_slots] @ values[0]
        for index, mine in enumerate(values[1:]):
            out = out + weights[..., self.num_slots + index, None] * mine
        return layer.attention.output(out.transpose(1, 2).flatten(0, 1), out.dtype)

    def _by_head(self, x: Tensor, repeats: int) -> Tensor:
        """[B * S, heads, P] -> [B, heads * repeats, S, P]."""
        return x.unflatten(0, (self.batch, self.num_slots)).transpose(1, 2).repeat_interleave(repeats, dim=1)


def rollout(drafter: Drafter, tokens: Tensor, states: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Per draft step k: logits [B, S, W] of every slot, after it was fed the text's tokens t + 1 .. t + 1 + k.

    tokens: [B, S]; states: [B * S, D], the fused target states. Slot t of step k predicts position t + 2 + k; the last
    1 + k slots wrap round to the text's start and mean nothing.
    """
    attention = _UnrolledAttention(drafter, *tokens.shape)
    for step in range(num_steps):
        fed = torch.roll(tokens, -1 - step, dims=1)
        out = drafter.finish(drafter.decode(fed.flatten(), states, attention))
        states = out.states
        yield out.logits.unflatten(0, tokens.shape)


def unroll(drafter: Drafter, batch: Batch, num_steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Per draft step: logits [B, n, W] of the slots that have a target, its distribution [B, n, W] and best id [B, n].

    The target's word on position t + 2 + k is its output at t + 1 + k, so S - 1 - k slots have one; padding is told by
    best's lengths.
    """
    states = drafter.fuse(batch.captured.flatten(0, 1))
    for step, logits in enumerate(rollout(drafter, batch.tokens, states, num_steps)):
        seen = logits.shape[1] - 1 - step
        yield logits[:, :seen], batch.targets[:, step + 1 :], batch.best[:, step + 1 :]


def losses(drafter: Drafter, batch: Batch, config: TrainConfig) -> tuple[Tensor, Score]:
    """The weighted soft cross-entropy over all steps, and the agreement by step."""
    total = torch.zeros((), device=batch.captured.device)
    hits, counts = [], []
    for step, (logits, targets, best) in enumerate(unroll(drafter, batch, config.num_steps)):
        there = torch.arange(logits.shape[1])[None] + step + 1 < batch.lengths[:, None]
        there = there.to(logits.device)
        in_vocabulary = there & (best >= 0)
        cross_entropy = -(targets * logits.log_softmax(-1)).sum(-1)
        mean = (cross_entropy * in_vocabulary).sum() / in_vocabulary.sum().clamp(min=1)
        total = total + config.step_decay**step * mean
        hits.append(((logits.argmax(-1) == best) & there).sum())
        counts.append(there.sum())
    return total, Score(torch.stack(hits).float(), torch.stack(counts).float())


def batches(texts: Sequence[TokenText], batch_tokens: int, rng: random.Random) -> Iterator[list[TokenText]]:
    """One pass over the texts in random batches of texts of similar length, at most batch_tokens slots with padding."""
    order = sorted(texts, key=lambda text: len(text) + rng.random() * 32)
    groups: list[list[TokenText]] = [[]]
    for text in order:
        if groups[-1] and (len(groups[-1]) + 1) * max(len(text), *map(len, groups[-1])) > batch_tokens:
            groups.append([])
        groups[-1].append(text)
    rng.shuffle(groups)
    yield from groups


def _schedule(update: int, config: TrainConfig) -> float:
    """Learning rate factor: linear warm-up, then cosine to a tenth."""
    if update < config.warmup_updates:
        return (update + 1) / config.warmup_updates
    done = (update - config.warmup_updates) / max(1, config.num_updates - config.warmup_updates)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass
class Report:
    """What training tells its caller after an update; `score` is the held-out one when it was just measured."""

    update: int
    loss: float
    agreement: list[float]
    score: Score | None = None


class Trainer:
    """Mutable: a drafter, its optimiser and how far it has come. `run` trains; a checkpoint in `directory` resumes."""

    def __init__(
        self,
        target: Target,
        texts: Sequence[TokenText],
        drafter: DrafterConfig,
        config: TrainConfig,
        directory: Path,
        *,
        tokenizer: str | None = None,
    ) -> None:
        """tokenizer: the fingerprint of the target's, for the drafter's wiring; None leaves it unsaid."""
        long_enough = [text for text in texts if len(text) > config.num_steps + 1]
        num_heldout = max(1, round(len(long_enough) * config.heldout))
        if len(long_enough) <= num_heldout:
            raise TrainingError(
                f"{len(long_enough)} texts longer than {config.num_steps + 1} tokens are too few to train on"
            )
        self.target, self.config, self.directory, self.tokenizer = target, config, directory, tokenizer
        self.heldout, self.texts = long_enough[:num_heldout], long_enough[num_heldout:]
        saved = self._saved(drafter)
        ids = saved.get("target_ids")
        if ids is None:
            ids = draft_vocabulary(self.texts, drafter.draft_vocab_size, target.config.vocab_size)
        self.drafter = new_drafter(drafter, target, ids.to(target.device), config.seed)
        self.parameters = list(self.drafter.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.update = 0
        if saved:
            self._resume(saved)

    def run(self, report: Callable[[Report], None]) -> None:
        """Train up to num_updates; calls report after every update."""
        while self.update < self.config.num_updates:
            for group in self._epoch():
                loss, score = self._step(group)
                due = self.update % self.config.checkpoint_every == 0 or self.update == self.config.num_updates
                if due:
                    self.save_checkpoint()
                report(Report(self.update, loss, score.rates, self.evaluate() if due else None))
                if self.update == self.config.num_updates:
                    return

    def _epoch(self) -> Iterator[list[TokenText]]:
        """The rest of the current pass over the texts: passes are seeded by their number, so a resumed run goes on
        where the killed one stopped."""
        epoch, skipped = 0, self.update
        while True:
            groups = list(batches(self.texts, self.config.batch_tokens, random.Random(f"{self.config.seed}:{epoch}")))
            if skipped < len(groups):
                yield from groups[skipped:]
                return
            skipped, epoch = skipped - len(groups), epoch + 1

    def _observe(self, texts: Sequence[TokenText]) -> Batch:
        return observe(self.target, texts, self.drafter.config.boundaries, self.drafter.target_ids)

    def _step(self, texts: Sequence[TokenText]) -> tuple[float, Score]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * _schedule(self.update, self.config)
        batch = self._observe(texts)
        with self._autocast():
            loss, score = losses(self.drafter, batch, self.config)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip)
        self.optimizer.step()
        self.update += 1
        return float(loss.detach()), score

    def _autocast(self) -> torch.autocast:
        """Products in bf16, half the time on a CPU with bf16 units; weights and sums stay float32."""
        return torch.autocast(self.target.device.type, torch.bfloat16)

    @torch.no_grad()
    def evaluate(self) -> Score:
        """Agreement by step on the held-out texts."""
        hits = counts = torch.zeros(self.config.num_steps)
        for group in batches(self.heldout, self.config.batch_tokens, random.Random(0)):
            batch = self._observe(group)
            with self._autocast():
                _, score = losses(self.drafter, batch, self.config)
            hits, counts = hits + score.hits.cpu(), counts + score.counts.cpu()
        return Score(hits, counts)

    @property
    def _checkpoint(self) -> Path:
        """Beside the drafter, not among its weights."""
        return self.directory / "training" / "checkpoint.safetensors"

    def save_checkpoint(self) -> None:
        """Weights and optimiser state, replaced atomically: a kill leaves the previous one or this one."""
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight.{name}": p.detach() for name, p in self.drafter.named_parameters()}
        for name, parameter in self.drafter.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}.{name}"] = value
        tensors["target_ids"] = self.drafter.target_ids
        path, metadata = (
            self._checkpoint,
            {"drafter": json.dumps(self.drafter.config.to_json()), "training": json.dumps(asdict(self.config))},
        )
        write_tensors(path.with_suffix(".new"), tensors, metadata)
        os.replace(path.with_suffix(".new"), path)
        save_drafter(self.drafter, self.directory)
        self._state_wiring()

    def _state_wiring(self) -> None:
        """Write the contract of the drafter just saved, with golden vectors of the files as they load."""
        saved = load_drafter(self.directory, self.target, dtype=self.target.dtype, max_positions=NUM_TOKENS)
        golden, target = golden_vectors(self.target, saved), self.target.config
        wiring = make_wiring(self.directory, saved.config, target, golden=golden, tokenizer=self.tokenizer)
        write_wiring(self.directory, wiring)

    def _saved(self, drafter: DrafterConfig) -> dict[str, Tensor]:
        """The checkpoint in the directory, {} when there is none. Raises TrainingError when it is another drafter's,
        was trained otherwise, or is damaged."""
        path = self._checkpoint
        if not path.exists():
            return {}
        try:
            with safe_open(path, framework="pt") as file:
                before = [json.loads(file.metadata()[part]) for part in ("drafter", "training")]
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError, TypeError, LookupError, ValueError) as error:
            raise self._damaged(error) from None
        _check_same(path, before[0], drafter.to_json())
        _check_same(path, before[1], asdict(self.config))
        return tensors

    def _damaged(self, error: Exception) -> TrainingError:
        return TrainingError(f"{self._checkpoint} is damaged ({error}): remove it to train from the start")

    def _resume(self, saved: dict[str, Tensor]) -> None:
        try:
            self._restore(saved)
        except (LookupError, RuntimeError) as error:  # tensors that are missing, or of other shapes
            raise self._damaged(error) from None

    def _restore(self, saved: dict[str, Tensor]) -> None:
        for name, parameter in self.drafter.named_parameters():
            with torch.no_grad():
                parameter.copy_(saved[f"weight.{name}"])
            self.optimizer.state[parameter] = {key: saved[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        self.update = int(saved[f"step.{next(iter(self.drafter.named_parameters()))[0]}"])


# What may differ in a run that goes on: it may become longer, though not shorter.
_FREE = ("num_updates", "checkpoint_every")


def _check_same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises TrainingError naming the first setting that is not what the checkpoint was trained with."""
    now = json.loads(json.dumps(now))
    changed = sorted(name for name in now if before.get(name) != now[name] and name not in _FREE)
    if now.get("num_updates", 0) < before.get("num_updates", 0):
        changed.append("num_updates")
    if changed:
        raise TrainingError(
            f"{path} was trained with {changed[0]}={before.get(changed[0])!r}, now {now[changed[0]]!r} is asked for: "
            "go on with the same options (num_updates may grow) or train into a new directory"
        )


def save_drafter(drafter: Drafter, directory: Path) -> None:
    """Write the drafter in bf16 under the official EAGLE-3 names, with d2t as offsets, and a config that states its
    boundaries. A wiring.json of the weights before goes away first."""
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().contiguous().cpu()
        for name, tensor in drafter_tensors(drafter).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / WIRING).unlink(missing_ok=True)
    write_tensors(directory / "model.safetensors.new", stored)
    os.replace(directory / "model.safetensors.new", directory / "model.safetensors")
    config = replace(drafter.config, dtype="bfloat16").to_json()
    (directory / "config.json").write_text(json.dumps(config, indent=1))

"""One request in flight: its tokens, where its rows lie, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from minieagle.sampling import SamplingParams
from minieagle.spec.tree import Tree
from minieagle.stop import StopStrings
from minieagle.tokenizer import Detokenizer


@dataclass
class SpecStats:
    """Counts over the decode phase of one request. num_steps: target forwards; num_tokens: tokens they emitted, the
    bonus tokens included; num_drafted: nodes verified, roots excluded; reached[k]: steps whose accepted path reaches
    depth k + 1 (survival, not conditional)."""

    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    reached: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """Share of steps whose accepted path reaches depth 1, 2, ...: survival."""
        return tuple(count / self.num_steps for count in self.reached)

    def count(self, num_emitted: int, tree: Tree) -> None:
        """Add one step that emitted num_emitted tokens (num_emitted - 1 of them drafted) from `tree`."""
        self.num_steps += 1
        self.num_tokens += num_emitted
        self.num_drafted += len(tree.tokens) - 1
        self.reached += [0] * (max(tree.depths) - len(self.reached))
        for depth in range(num_emitted - 1):
            self.reached[depth] += 1

    def add(self, other: SpecStats) -> None:
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.num_drafted += other.num_drafted
        self.reached += [0] * (len(other.reached) - len(self.reached))
        for depth, count in enumerate(other.reached):
            self.reached[depth] += count


@dataclass
class Sequence:
    """Mutable, host side; the engine's step is its only writer.

    tokens: prompt and emitted ids; committed: how many of them have their rows in the caches (the last token never
    has); slots: the cache slot of each storage index; tree: what the next step verifies, None while the prompt is not
    through.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    spec: bool
    limit: int
    """Total tokens at which it ends: prompt + max_tokens, or the context."""
    text: Detokenizer
    stop: StopStrings
    stop_ids: frozenset[int]
    pages: tuple[int, ...] = ()
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    committed: int = 0
    num_chunks: int = 0
    """Steps that its prompt took."""
    tree: Tree | None = None
    finish_reason: str | None = None
    error: str | None = None
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def num_left(self) -> int:
        """Tokens it may still emit."""
        return self.limit - len(self.tokens)

    def append(self, token: int) -> str:
        """Take one emitted token; returns the text to show for it and sets finish_reason when it ends here."""
        self.tokens.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return self._rest()
        shown = self.stop.push(self.text.push(token))
        if self.stop.stopped:
            self.finish_reason = "stop"
        elif self.num_left == 0:
            self.finish_reason = "length"
            return shown + self._rest()
        return shown

    def _rest(self) -> str:
        shown = self.stop.push(self.text.flush())
        return shown if self.stop.stopped else shown + self.stop.flush()

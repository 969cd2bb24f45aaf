"""A target that doesn't fit in memory: one layer at a time from its files, the next one's bytes read meanwhile.

A pass over the layers reads every byte once, in the order of the files (readahead.py), and holds one built layer and
one layer's bytes: 2 x 9 GB of the 595 GB of Kimi-K2.5. The embedding stays mapped, and only the rows of the tokens at
hand are touched. What runs over the layers is spec/observe.py; a layer here is the same module, filled by the same
code, as in a target in memory, hence the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minieagle.models.checkpoint import Checkpoint, CheckpointError, Filler, Progress, check_filled
from minieagle.models.deepseek import Block
from minieagle.models.layers import Linear, RMSNorm
from minieagle.models.readahead import ReadAhead
from minieagle.models.rope import RotaryTable
from minieagle.models.shards import WHOLE
from minieagle.models.target_names import by_layer
from minieagle.models.target_weights import fill_block, give_back_memory, open_target

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class StreamedTarget:
    """A target on disk. Mutable only in that the final norm and the head stay once they have been read.

    It has what a Target has but `forward`: config, dtype, device, shards (it is never cut over ranks), rotary, embed,
    head, norm, lm_head, embed_tokens ([V, hidden]; mapped, unless another dtype than the file's is wanted). dtype: None
    keeps the checkpoint's; max_positions sizes the rotary table, None takes the config's limit. Raises ConfigError or
    CheckpointError naming what is wrong.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        max_positions: int | None = None,
    ) -> None:
        self.directory = directory
        self.config, fill = open_target(directory, dtype, device)
        self.dtype, self.device, self.shards = fill.dtype, fill.device, WHOLE
        self._ends: tuple[RMSNorm, Linear] | None = None
        self._parts(fill.checkpoint)  # refuses unknown tensors before anything is read
        table = fill.view(EMBEDDING, (self.config.vocab_size, self.config.hidden_size))
        self.embed_tokens = table.to(self.device, self.dtype)
        positions = max_positions or self.config.max_position_embeddings
        rotary = RotaryTable(self.config.qk_rope_head_dim, self.config.rope_theta, positions, self.config.yarn)
        self.rotary = rotary.to(self.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden]."""
        return F.embedding(token_ids, self.embed_tokens)

    def head(self, h: Tensor) -> Tensor:
        """Logits [T, vocab] float32 of states h [T, hidden] at boundary L."""
        return self.lm_head(self.norm(h)).float()

    @property
    def norm(self) -> RMSNorm:
        """The final norm, read with the head."""
        return self._norm_and_head()[0]

    @property
    def lm_head(self) -> Linear:
        """The head. Read by itself when it is wanted before a pass over the layers has brought it."""
        return self._norm_and_head()[1]

    def _norm_and_head(self) -> tuple[RMSNorm, Linear]:
        if self._ends is None:
            _, fill = open_target(self.directory, self.dtype, self.device)
            self._ends = self._read_ends(fill)
        return self._ends

    def load_layers(self, progress: Progress | None = None) -> Generator[Block, None, None]:
        """The layers in order, read anew in every pass. Drop each before asking for the next, or memory holds one more.
        With the last one come the norm and the head.

        progress: called with (bytes done, bytes in all).
        """
        _, fill = open_target(self.directory, self.dtype, self.device)
        parts = self._parts(fill.checkpoint)
        ahead = ReadAhead([[fill.checkpoint.stored[name] for name in part] for part in parts], progress)
        fill.checkpoint.fetch = ahead.take
        try:
            for index in range(self.config.num_hidden_layers):
                yield self._read_layer(fill, index, parts[index])
            if self._ends is None:
                self._ends = self._read_ends(fill)
        finally:
            ahead.close()
            give_back_memory()

    def _parts(self, checkpoint: Checkpoint) -> list[list[str]]:
        """The names of each layer's tensors and, unless they are there, the norm's and the head's. Raises
        CheckpointError for names that belong to neither."""
        parts, others = by_layer(checkpoint.left, self.config.num_hidden_layers)
        _refuse(set(others) - {EMBEDDING, NORM, HEAD}, self.directory)
        ends = [name for name in (NORM, self._head_name) if name in checkpoint]
        return parts if self._ends else [*parts, ends]

    @property
    def _head_name(self) -> str:
        return EMBEDDING if self.config.tie_word_embeddings else HEAD

    def _read_layer(self, fill: Filler, index: int, names: Sequence[str]) -> Block:
        with torch.device("meta"):
            block = Block(self.config, index)
        fill_block(fill, block, self.config, f"model.layers.{index}")
        check_filled(block, self.directory)
        _refuse(fill.checkpoint.left.intersection(names), self.directory)
        return block

    def _read_ends(self, fill: Filler) -> tuple[RMSNorm, Linear]:
        with torch.device("meta"):
            norm = RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
            head = Linear(self.config.hidden_size, self.config.vocab_size)
        give_back_memory()  # the last layer's, into whose holes a head doesn't fit; layers fit into each other's
        fill.fill(norm, NORM)
        fill.fill(head, self._head_name)
        return norm, head


def _refuse(names: Collection[str], directory: Path) -> None:
    if names:
        raise CheckpointError(
            f"{directory} holds {len(names)} tensors that the model has no place for: {sorted(names)[:5]}"
        )

"""What the target says of given texts: its states at any boundaries and its next-token choices, in one pass.

The one idea: the pass goes layer by layer, all texts through one layer before the next is touched. So it is the same
function for a target in memory and for one that is read from disk a layer at a time (models/stream.py), it needs the
latents of one layer only, and rows are independent of their company (models/attention.py), so the bits are those of
`Target.forward`. Logits are too many to keep (163,840 float32 a token): they are reduced a few rows at a time.

T rows of all texts together, S tokens of one text, V vocabulary, W chosen ids, K top ids.
"""

# torch annotates some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from minieagle.models.attention import AttentionPlan
from minieagle.models.cache import PagedCache
from minieagle.models.checkpoint import Progress
from minieagle.models.config import TargetConfig
from minieagle.models.deepseek import Block, Target
from minieagle.models.rows import Rows, Span
from minieagle.models.stream import StreamedTarget

Source = Target | StreamedTarget

# What a pass takes beside weights and states is bounded by these: rows of a piece, attention scores of a piece (256 MB
# of float32), logits of a piece (64 MB). Fewer rows a piece would read the experts' weights more often; 192 were as
# fast as 512 on a model of 1.7 billion parameters, where a layer's temporaries are 180 KB a row.
PIECE_ROWS = 192
PIECE_SCORES = 2**26
PIECE_LOGITS = 2**24
LEAST_ROWS = 16


class TextError(ValueError):
    """A text that the target can't be run over: names the text, the value, the bound and the remedy."""


@dataclass(frozen=True)
class Observed:
    """The target's view of one text of S tokens.

    tokens [S] int64. captured [S, taps, hidden] in the model's dtype: the boundaries in the order asked for.
    best [S] int64: the id it puts first behind each token, its greedy choice for position s + 1; of equals the lowest.
    best_logprob [S] float32: that id's log-probability. text_logprob [S - 1] float32: that of the text's own next
    token. top_ids [S, K] int64 and top_logprobs [S, K] float32, best first. chosen_logprobs [S, W] float32: of the
    chosen ids.
    """

    tokens: Tensor
    captured: Tensor
    best: Tensor
    best_logprob: Tensor
    text_logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    chosen_logprobs: Tensor


class _LayerCache(PagedCache):
    """The latents of whichever layer is running: the layers follow each other and none looks back."""

    def layer(self, index: int) -> Tensor:
        return super().layer(0)

    def write(self, index: int, slots: Tensor, rows: Tensor) -> None:
        super().write(0, slots, rows)


class _Texts:
    """All texts as one flat run of T rows, cut into pieces. Row r lives in slot r + 1; slot 0 stays empty."""

    def __init__(self, texts: Sequence[Sequence[int]], config: TargetConfig, device: torch.device) -> None:
        self.lengths = [len(text) for text in texts]
        self.starts = [0, *accumulate(self.lengths)]
        self.ids = torch.tensor([token for text in texts for token in text], device=device)
        self.slots = torch.arange(1, 1 + self.num_rows, device=device)
        scores_a_row = config.num_attention_heads * max(self.lengths)
        self.piece_rows = min(PIECE_ROWS, max(LEAST_ROWS, PIECE_SCORES // scores_a_row))

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    def pieces(self) -> Iterator[tuple[slice, Rows]]:
        """Stretches of the flat rows, each with its spans: the parts of the texts that lie in it."""
        for first in range(0, self.num_rows, self.piece_rows):
            piece = slice(first, min(first + self.piece_rows, self.num_rows))
            yield piece, Rows.of(self.ids[piece], list(self._spans(piece)))

    def _spans(self, piece: slice) -> Iterator[Span]:
        for start, length in zip(self.starts, self.lengths, strict=False):
            first, last = max(start, piece.start), min(start + length, piece.stop)
            if first < last:
                yield Span(self.slots[start : start + length], first - start, last - first)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split(self.lengths)


@torch.inference_mode()
def observe_texts(
    source: Source,
    texts: Sequence[Sequence[int]],
    boundaries: Sequence[int],
    *,
    top_k: int = 0,
    chosen_ids: Tensor | None = None,
    progress: Progress | None = None,
) -> list[Observed]:
    """Run the target over the texts, each by itself from position 0, and keep what is asked for.

    boundaries: any of 0..L. top_k: how many best ids to keep with their log-probabilities. chosen_ids: [W] int64 whose
    log-probabilities to keep. progress: called with (bytes read, bytes in all) of a streamed target, never otherwise.
    Memory beside the source: T x hidden states, T x taps x hidden captured ones and T x latent width. Raises TextError
    for texts that are empty, too long or not of this vocabulary, CheckpointError for a streamed target's files.
    """
    check_texts(texts, source.config, source.rotary.cos.shape[0])
    assert all(0 <= b <= source.config.num_hidden_layers for b in boundaries), f"boundaries {boundaries} not in 0..L"
    flat = _Texts(texts, source.config, source.device)
    captured = torch.empty(
        flat.num_rows, len(boundaries), source.config.hidden_size, dtype=source.dtype, device=source.device
    )
    h = _run_layers(source, flat, boundaries, captured, progress)
    chosen = torch.empty(0, dtype=torch.int64) if chosen_ids is None else chosen_ids
    reduced = _reduce(source, h, flat, top_k, chosen.to(source.device))
    parts = [flat.split(tensor) for tensor in (flat.ids, captured, *reduced)]
    return [
        Observed(tokens, states, best, best_logprob, text_logprob[:-1], *rest)
        for tokens, states, best, best_logprob, text_logprob, *rest in zip(*parts, strict=True)
    ]


def check_texts(texts: Sequence[Sequence[int]], config: TargetConfig, max_positions: int) -> None:
    """Raises TextError unless every text can be run: 1 to max_positions tokens, all ids of the vocabulary."""
    if not texts:
        raise TextError("there is no text: pass at least one")
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= max_positions:
            raise TextError(f"text {index} has {len(text)} tokens: it must have 1 to {max_positions}, the context")
        outside = [token for token in text if not 0 <= token < config.vocab_size]
        if outside:
            raise TextError(
                f"text {index} has token id {outside[0]}: ids must be in 0..{config.vocab_size - 1}; "
                "was it encoded by another model's tokenizer?"
            )


def _layers(source: Source, progress: Progress | None) -> Iterable[Block]:
    return source.load_layers(progress) if isinstance(source, StreamedTarget) else source.layers  # type: ignore[return-value]


def _run_layers(
    source: Source, flat: _Texts, boundaries: Sequence[int], captured: Tensor, progress: Progress | None
) -> Tensor:
    """All texts through all layers; returns the states [T, hidden] at boundary L and fills `captured`."""
    h = source.embed(flat.ids)
    cache = _LayerCache(1, 1 + flat.num_rows, 1, source.config.latent_width, source.dtype, source.device)
    _capture(captured, boundaries, 0, h)
    for layer in _layers(source, progress):  # no enumerate: it holds on to what it gave last
        _run_layer(layer, source, flat, cache, h)
        _capture(captured, boundaries, layer.index + 1, h)
        del layer  # or it would stay in memory while the next is loaded
    return h


def _run_layer(layer: Block, source: Source, flat: _Texts, cache: PagedCache, h: Tensor) -> None:
    for piece, rows in flat.pieces():
        cos, sin = source.rotary.at(rows.positions)
        h[piece] = layer(h[piece], cos, sin, cache, rows.write_slots(), AttentionPlan.of(rows))


def _capture(captured: Tensor, boundaries: Sequence[int], boundary: int, h: Tensor) -> None:
    for index, wanted in enumerate(boundaries):
        if wanted == boundary:
            captured[:, index] = h


def _reduce(source: Source, h: Tensor, flat: _Texts, top_k: int, chosen: Tensor) -> list[Tensor]:
    """Over all rows: best id, its log-probability, the next token's, top ids and theirs, the chosen ids'."""
    num_rows = min(PIECE_ROWS, max(LEAST_ROWS, PIECE_LOGITS // source.config.vocab_size))
    following = flat.ids.roll(-1)  # a text's last row gets another text's token, and is cut off
    pieces: list[tuple[Tensor, ...]] = []
    for states, next_ids in zip(h.split(num_rows), following.split(num_rows), strict=True):
        logits = source.head(states)
        best = logits.argmax(-1)
        logprobs = logits.log_softmax(-1)
        known = logprobs.gather(1, torch.stack([best, next_ids], dim=1))
        top = logprobs.topk(top_k)
        pieces.append((best, known[:, 0], known[:, 1], top.indices, top.values, logprobs[:, chosen]))
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

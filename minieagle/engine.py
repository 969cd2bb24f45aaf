"""The step loop: plan, forward, accept, keep, draft, emit. Plain decoding is the same loop with one-node trees.

    plan     which prompt chunks and trees run                        Scheduler.plan
    forward  target(rows, cache, boundaries) -> logits, states        Engine._forward
    accept   per sequence, the tree's path that the target emits      Engine._accept
    keep     accepted rows move into place in the cache               Engine._keep
    draft    the drafter takes the committed rows, grows new trees    Engine._draft
    emit     stop rules, text, what the caller sees                   Engine._emit

One thread owns an Engine. A Sequence's `committed` moves only in `_keep`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from minieagle.errors import RequestError
from minieagle.models.cache import PagePool, free_bytes
from minieagle.models.deepseek import Target, TargetOutput
from minieagle.models.eagle3 import Drafter, DrafterOutput
from minieagle.models.rows import Rows
from minieagle.models.staging import staged
from minieagle.sampling import SamplingBatch, SamplingParams, emit, logprobs
from minieagle.scheduler import Scheduler, Work
from minieagle.sequence import Sequence, SpecStats
from minieagle.spec.accept import accept
from minieagle.spec.alarm import MAX_TEMPERATURE, Acceptance, Condition, Snapshot
from minieagle.spec.draft import Commit, Root, draft_rows, extend, grow
from minieagle.spec.stages import Phase, Place, Trace, encode_places
from minieagle.spec.tree import Shape, Tree, TreeShape
from minieagle.stop import StopStrings
from minieagle.tokenizer import Detokenizer, Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. shape: the trees it drafts; max_seqs: sequences in one batch; page_size: cache rows a page;
    prefill_chunk: prompt rows a step; max_context_tokens: prompt and answer together, None = the model's limit;
    cache_tokens: rows the cache holds, None = max_seqs full contexts."""

    shape: Shape = field(default_factory=lambda: TreeShape.chain(5))
    max_seqs: int = 8
    page_size: int = 16
    prefill_chunk: int = 512
    max_context_tokens: int | None = None
    cache_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_seqs", "page_size", "prefill_chunk", "max_context_tokens", "cache_tokens"):
            value = getattr(self, name)
            if value is None and name in ("max_context_tokens", "cache_tokens"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r:.80} must be an integer of at least 1")

    def context(self, limit: int) -> int:
        """Tokens of a context, for a model of that limit. Raises ValueError for a context beyond it, and for pages that
        no context fills."""
        context = self.max_context_tokens or limit
        if context > limit:
            raise ValueError(f"max_context_tokens={context} is beyond the model's {limit}: lower it")
        if self.page_size > max(context, EngineConfig.page_size):
            raise ValueError(f"page_size={self.page_size} is beyond the context of {context} tokens: lower it")
        return context


@dataclass(frozen=True)
class Request:
    """What a caller asks for: prompt ids, sampling, and whether to speculate (which changes nothing but the speed)."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    spec: bool = True


@dataclass(frozen=True)
class TokenLogprob:
    """One emitted token's log-probability under the model's own distribution, and the best alternatives'."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Output:
    """What one step brought one request. text holds complete characters, trimmed at a stop string. The last output
    carries finish_reason ("stop", "length", "abort", "error") and the statistics of the request."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    stats: SpecStats | None = None


class Engine:
    """Continuous batching over one target and an optional drafter. Single threaded. trace: where the stages of chosen
    steps are written; it changes no bit of what comes out."""

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        *,
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.target, self.drafter, self.tokenizer, self.trace = target, drafter, tokenizer, trace
        self.config = config or EngineConfig()
        self.max_context_tokens = self.config.context(target.config.max_position_embeddings)
        self.boundaries = drafter.config.boundaries if drafter is not None else ()
        spare = draft_rows(self.config.shape) if drafter is not None else 1
        page_size = self.config.page_size
        room = self.config.cache_tokens or self.config.max_seqs * (self.max_context_tokens + spare + page_size)
        self._check_memory(room)
        pool = PagePool(max(1, room // page_size), page_size)
        self.scheduler = Scheduler(
            pool,
            max_seqs=self.config.max_seqs,
            prefill_chunk=self.config.prefill_chunk,
            spare_rows=spare,
            device=target.device,
        )
        self.cache = target.new_cache(pool.num_slots)
        self.draft_cache = drafter.new_cache(pool.num_slots) if drafter is not None else None
        self._acceptance = Acceptance(self.config.shape.num_steps)
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0

    def _check_memory(self, num_rows: int) -> None:
        """Refuse a cache that can't be had, rather than die of it."""
        row = self.target.cache_row_bytes + (self.drafter.cache_row_bytes if self.drafter is not None else 0)
        needed, free = num_rows * row, free_bytes(self.target.device)
        if free is not None and needed > free:
            raise ValueError(
                f"a cache of {num_rows} tokens takes {needed} bytes ({row} each), of which {free} are free: lower "
                f"max_seqs={self.config.max_seqs}, max_context_tokens={self.max_context_tokens} or cache_tokens"
            )

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def acceptance(self) -> Snapshot:
        """Acceptance by depth, context length and condition since the engine was made, and the alarms raised."""
        return self._acceptance.snapshot()

    @property
    def _tracing(self) -> Trace | None:
        """The trace if this step is written to it."""
        return self.trace if self.trace is not None and self.trace.due else None

    def add(self, request: Request) -> int:
        """Queue a request; returns its id. Raises RequestError when it can never run."""
        self._check(request)
        params, prompt = request.params, list(request.prompt_ids)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(self.tokenizer.stop_ids)
        )
        sequence = Sequence(
            id=self._next_id,
            tokens=prompt,
            prompt_len=len(prompt),
            params=params,
            seed=seed,
            spec=request.spec and self.drafter is not None,
            limit=min(len(prompt) + params.max_tokens, self.max_context_tokens),
            text=Detokenizer(self.tokenizer),
            stop=StopStrings(params.stop),
            stop_ids=stop_ids,
        )
        needed, there = self.scheduler.pages_for(sequence), self.scheduler.pool.num_pages
        if needed > there:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens with max_tokens={params.max_tokens} needs {needed} cache pages, the "
                f"cache has {there}: lower max_tokens or raise cache_tokens",
                param="max_tokens",
            )
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        self.scheduler.add(sequence)
        return sequence.id

    def _check(self, request: Request) -> None:
        prompt, vocab = request.prompt_ids, self.target.config.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty: send at least one token", param="prompt")
        wrong = [token for token in prompt if not 0 <= token < vocab]
        if wrong:
            raise RequestError(f"prompt token {wrong[0]} is outside the vocabulary 0..{vocab - 1}", param="prompt")
        beyond = [token for token in request.params.stop_token_ids if token >= vocab]
        if beyond:
            raise RequestError(
                f"stop_token_ids holds {beyond[0]}, outside the vocabulary 0..{vocab - 1}: no answer would stop there",
                param="stop_token_ids",
            )
        if len(prompt) >= self.max_context_tokens:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the context {self.max_context_tokens} with the answer included: "
                "shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )

    def abort(self, request_id: int) -> None:
        """Forget a request, whatever its state; unknown ids are ignored (it may just have finished)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def step(self) -> list[Output]:
        """One forward of the target over everything that is due, and all that follows from it."""
        work = self.scheduler.plan()
        if not work:
            return []
        if self.trace is not None:
            self.trace.begin()
        out, wanted = self._forward(work)
        taken = self._accept(work, out, wanted)
        if (trace := self._tracing) is not None:
            self._trace_forward(trace, work, taken, out)
        self._keep(taken)
        if trace is not None:
            self._trace_keep(trace, taken)
        self._draft(taken, out.captured)
        if trace is not None:
            self._trace_trees(trace, taken)
        return [self._emit(item) for item in taken if item.tokens or item.sequence.finish_reason]

    def _forward(self, work: Items[Work]) -> tuple[TargetOutput, Wanted]:
        tokens = [token for item in work for token in item.token_ids]
        rows = Rows.of(staged(tokens, self.target.device), [item.span for item in work])
        wanted = Wanted.of(work, rows.positions)
        boundaries = self.boundaries if any(item.sequence.spec for item in work) else ()
        if (trace := self._tracing) is not None:
            boundaries = self.boundaries + trace.extra(self.target.config.num_hidden_layers)
        return self.target(rows, self.cache, boundaries=boundaries, logit_rows=wanted.rows), wanted

    def _accept(self, work: Items[Work], out: TargetOutput, wanted: Wanted) -> list[Taken]:
        """Draw the token at every wanted row, walk each tree by them, and append what is emitted to its sequence."""
        emitted: list[int] = self._draw(out.logits, wanted).tolist()
        broken = _not_finite(out.logits)
        taken: list[Taken] = []
        first_row = first_wanted = 0
        for item in work:
            mine = slice(first_wanted, first_wanted + len(item.wanted_rows))
            if any(broken[mine]):
                taken.append(_failed(item, first_row))
            else:
                taken.append(self._take(item, first_row, emitted[mine], out.logits[mine]))
            first_row, first_wanted = first_row + item.num_rows, mine.stop
        return taken

    def _draw(self, logits: Tensor, wanted: Wanted) -> Tensor:
        """The token that each wanted row emits, [W] int64."""
        if all(item.params.is_greedy for item in wanted.owners):
            return logits.argmax(-1)
        batch = SamplingBatch.of([(item.params, item.seed) for item in wanted.owners], self.target.device)
        return emit(logits, batch, wanted.positions)

    def _take(self, item: Work, first_row: int, emitted: list[int], logits: Tensor) -> Taken:
        sequence = item.sequence
        if sequence.tree is None:
            path, tokens = tuple(range(item.num_rows)), tuple(emitted)
            nodes = (0,) * len(tokens)
            sequence.num_chunks += 1
        else:
            accepted = accept(sequence.tree, emitted)
            path = nodes = accepted.path
            tokens = accepted.tokens
            self._watch(sequence, sequence.tree, path)
        text, count = "", 0
        while count < len(tokens) and sequence.finish_reason is None:
            text += sequence.append(tokens[count])
            count += 1
        if sequence.tree is not None:
            sequence.stats.count(count, sequence.tree)
        found = None
        if sequence.params.logprobs is not None and count:
            found = _logprobs(logits[list(nodes[:count])], tokens[:count], sequence.params.logprobs)
        return Taken(sequence, first_row, path, tokens[:count], text, found)

    def _watch(self, sequence: Sequence, tree: Tree, path: tuple[int, ...]) -> None:
        """Count what was accepted of a draft; warn, once for each kind, when the counts point to a fault."""
        if len(tree.tokens) == 1:
            return
        alarm = self._acceptance.count(tree, path, context=sequence.committed, condition=_condition(sequence))
        if alarm is not None:
            _log.warning("%s", alarm.message)

    def _keep(self, taken: Items[Taken]) -> None:
        """Move accepted rows behind the committed ones; this alone moves `committed`."""
        source: list[Tensor] = []
        target: list[Tensor] = []
        for item in taken:
            slots, start = item.sequence.slots, item.sequence.committed
            if item.path != tuple(range(len(item.path))):
                source.append(slots[start:].index_select(0, staged(item.path, slots.device)))
                target.append(slots[start : start + len(item.path)])
            item.sequence.committed += len(item.path)
        if source:
            self.cache.keep(torch.cat(source), torch.cat(target))

    def _draft(self, taken: Items[Taken], captured: Tensor) -> None:
        """Give every sequence that goes on its next tree; the drafter first takes the rows that were committed."""
        alive = [item for item in taken if item.sequence.finish_reason is None]
        for item in alive:
            if item.tokens:
                item.sequence.tree = Tree.root(item.sequence.tokens[-1])
        followed = [item for item in alive if item.sequence.spec]
        if not followed:
            return
        assert self.drafter is not None and self.draft_cache is not None, "a sequence speculates without a drafter"
        observer = None
        if (trace := self._tracing) is not None:
            captured = captured[:, : len(self.boundaries)]
            observer = partial(_trace_extend, trace, followed)
        commits = [_commit(item, captured) for item in followed]
        out = extend(self.drafter, self.draft_cache, commits, observer=observer)
        growing = [i for i, item in enumerate(followed) if item.tokens and item.sequence.num_left > 1]
        if not growing:
            return
        sequences = [followed[i].sequence for i in growing]
        if len(growing) < len(followed):
            chosen = staged(growing, out.logits.device)
            out = DrafterOutput(out.logits.index_select(0, chosen), out.states.index_select(0, chosen))
        trees = grow(self.drafter, self.draft_cache, [_root(s) for s in sequences], out, self.config.shape)
        for sequence, tree in zip(sequences, trees, strict=True):
            deepest = sequence.num_left - 1
            sequence.tree = tree if max(tree.depths) <= deepest else tree.cut(deepest)

    def _trace_forward(self, trace: Trace, work: Items[Work], taken: Items[Taken], out: TargetOutput) -> None:
        """The stages before `keep`, request by request."""
        first_wanted = 0
        places = [_place(item, done) for item, done in zip(work, taken, strict=True)]
        if self.target.lead is not None:
            firsts = [done.first_row for done in taken]
            self.target.lead.note(encode_places(trace.step, list(zip(firsts, places, strict=True))))
        for item, done, place in zip(work, taken, places, strict=True):
            wanted = item.wanted_rows
            states = out.captured[done.first_row : done.first_row + item.num_rows]
            trace.states(place, states, self.boundaries, self.target.config.num_hidden_layers)
            mine = slice(first_wanted, first_wanted := first_wanted + len(wanted))
            trace.rows("verify logits", place.at(wanted), out.logits[mine])
            emitting = [row for row in done.path if row in wanted][: len(done.tokens)]
            trace.rows("emitted token", place.at(emitting), torch.tensor(done.tokens, dtype=torch.int64)[:, None])
            if item.sequence.tree is not None and done.path:
                trace.integers("accepted path", place.at([0]), [done.path], tree=self._drafted_by(item.sequence))

    def _trace_keep(self, trace: Trace, taken: Items[Taken]) -> None:
        """The rows that were kept, as the cache holds them now."""
        for item in taken:
            count, end = len(item.path), item.sequence.committed
            place = Place.chain(item.sequence.id, _phase(item.sequence, count), end - count, count)
            slots = item.sequence.slots[end - count : end]
            trace.rows("cache keep", place, self.cache.data[:, slots].transpose(0, 1))

    def _trace_trees(self, trace: Trace, taken: Items[Taken]) -> None:
        for sequence in (item.sequence for item in taken if item.sequence.finish_reason is None):
            if (tree := sequence.tree) is not None:
                place = Place.chain(sequence.id, "extend", sequence.committed, 1)
                trace.integers("tree", place, [tree.tokens, tree.parents], tree=self._drafted_by(sequence))

    def _drafted_by(self, sequence: Sequence) -> str:
        return str(self.config.shape) if sequence.spec else "plain"

    def _emit(self, item: Taken) -> Output:
        sequence = item.sequence
        finished = sequence.finish_reason is not None
        if finished:
            self.abort(sequence.id)
        return Output(
            request_id=sequence.id,
            token_ids=item.tokens,
            text=item.text,
            logprobs=item.logprobs,
            finish_reason=sequence.finish_reason,
            error=sequence.error,
            stats=sequence.stats if finished else None,
        )


@dataclass(frozen=True)
class Wanted:
    """The rows whose logits a step needs: rows [W] int64 (None = all), whose they are, and the positions [W] of the
    tokens they emit (the row's own plus 1)."""

    rows: Tensor | None
    owners: list[Sequence]
    positions: Tensor

    @staticmethod
    def of(work: Items[Work], positions: Tensor) -> Wanted:
        indices: list[int] = []
        owners: list[Sequence] = []
        start = 0
        for item in work:
            indices += [start + row for row in item.wanted_rows]
            owners += [item.sequence] * len(item.wanted_rows)
            start += item.num_rows
        if len(indices) == start:
            return Wanted(None, owners, positions + 1)
        rows = staged(indices, positions.device)
        return Wanted(rows, owners, positions.index_select(0, rows) + 1)


@dataclass(frozen=True)
class Taken:
    """What a step made of one sequence: its first row in the batch, the rows kept, the tokens appended, their text."""

    sequence: Sequence
    first_row: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


def _condition(sequence: Sequence) -> Condition:
    """What acceptance is counted under."""
    if sequence.params.temperature > MAX_TEMPERATURE:
        return "high temperature"
    return "chunked prompt" if sequence.num_chunks > 1 else "whole prompt"


def _phase(sequence: Sequence, num_rows: int) -> Phase:
    if sequence.tree is None:
        return "prefill" if num_rows == sequence.prompt_len else "chunk"
    return "decode" if len(sequence.tree.tokens) == 1 else "verify"


def _place(item: Work, done: Taken) -> Place:
    """Where a sequence's rows of a step stand, for its trace; before `keep`."""
    sequence, rows = item.sequence, tuple(range(item.num_rows))
    depths = rows if sequence.tree is None else sequence.tree.depths
    positions = tuple(sequence.committed + depth for depth in depths)
    kept = tuple(row in done.path for row in rows)
    return Place(sequence.id, _phase(sequence, item.num_rows), rows, positions, kept)


def _trace_extend(trace: Trace, followed: Items[Taken], captured: Tensor, fused: Tensor, output: DrafterOutput) -> None:
    """The drafter's stages over the committed rows."""
    first = 0
    for i, item in enumerate(followed):
        count = len(item.path)
        place = Place.chain(item.sequence.id, "extend", item.sequence.committed - count, count)
        mine = slice(first, first := first + count)
        trace.drafted(place, captured[mine], fused[mine], output.states[mine])
        trace.rows("draft logits", place.at([count - 1]), output.logits[i : i + 1])


def _not_finite(logits: Tensor) -> list[bool]:
    """Per row, whether it holds a NaN or an infinity: sums carry both, so one reduction finds them."""
    return (~logits.sum(-1).isfinite()).tolist()


def _failed(item: Work, first_row: int) -> Taken:
    """A sequence whose logits are not finite ends with an error; nothing of it is kept."""
    sequence = item.sequence
    sequence.finish_reason = "error"
    sequence.error = (
        f"the model's logits behind position {sequence.committed} are not finite (NaN or infinity): the weights or the "
        "prompt's states overflow; try another dtype or check the checkpoint"
    )
    return Taken(sequence, first_row, (), (), "")


def _logprobs(logits: Tensor, tokens: Items[int], top: int) -> tuple[TokenLogprob, ...]:
    found = logprobs(logits, torch.tensor(tokens, device=logits.device), top)
    tops = zip(found.top_ids.tolist(), found.top.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, (ids, values) in zip(tokens, found.chosen.tolist(), tops, strict=True)
    )


def _commit(item: Taken, captured: Tensor) -> Commit:
    """The drafter's rows for what was kept: row t carries the token at t + 1, known also inside a prompt."""
    sequence, count = item.sequence, len(item.path)
    start = sequence.committed - count
    if item.path == tuple(range(count)):
        states = captured[item.first_row : item.first_row + count]
    else:
        states = captured.index_select(0, staged([item.first_row + row for row in item.path], captured.device))
    return Commit(sequence.slots, start, tuple(sequence.tokens[start + 1 : start + count + 1]), states)


def _root(sequence: Sequence) -> Root:
    return Root(sequence.tokens[-1], sequence.slots, sequence.committed, sequence.params.temperature, sequence.seed)

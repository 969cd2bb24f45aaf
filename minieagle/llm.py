"""The Python API: load a model (and a drafter), then generate, chat or stream.

A prompt is a string (continued as it is), a list of token ids, or a list of chat messages (rendered by the model's chat
template). Lists of prompts run in one continuous batch. `spec=False` turns speculation off, which changes nothing but
the speed.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, cast, overload

import torch

from minieagle.arguments import checked_options
from minieagle.dist.group import alone
from minieagle.dist.ranks import Ranks
from minieagle.engine import Engine, EngineConfig, Output, Request, TokenLogprob
from minieagle.errors import MinieagleError, ModelError, RequestError
from minieagle.models.acceleration import accelerate, check_acceleration
from minieagle.models.agreement import check_agreement
from minieagle.models.checkpoint import Progress
from minieagle.models.config import read_json, target_config
from minieagle.models.deepseek import Target
from minieagle.models.eagle3 import Drafter
from minieagle.models.lockstep import Lead, follow
from minieagle.models.selfcheck import row_difference
from minieagle.models.shards import Shards
from minieagle.models.target_weights import load_target
from minieagle.sampling import SamplingParams
from minieagle.sequence import SpecStats
from minieagle.spec.boundary import Convention
from minieagle.spec.fingerprint import tokenizer_fingerprint
from minieagle.spec.tree import Shape, ShapeError, TreeShape, parse_shape
from minieagle.spec.wiring import check_tokenizer, load_wired, read_wiring
from minieagle.tokenizer import Tokenizer
from minieagle.tracing import open_trace

_log = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 200_000_000
MAX_STEPS = 32

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Result:
    """One finished request. finish_reason: "stop", "length" or "error" (then `error` says why and the text is what came
    before). stats: the request's speculation statistics."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    stats: SpecStats
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


def embedded(name: str) -> Path:
    """The directory of a model that ships with the package: "target" or "drafter"."""
    return Path(str(files("minieagle") / "assets" / name))


def load_engine(
    model: str | Path | None = None,
    *,
    drafter: str | Path | None = None,
    spec: bool = True,
    tree: str | Shape | None = None,
    num_steps: int | None = None,
    topk: int | None = None,
    num_draft_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    capture_convention: Convention | None = None,
    boundaries: Sequence[int] | None = None,
    ranks: Ranks | None = None,
    reduction_slices: int | None = None,
    expert_parallel: bool = False,
    trace: str | Path | None = None,
    trace_steps: str | None = None,
    trace_layers: bool = False,
    exact: bool = True,
    cuda_graph: bool = False,
    **options: int | None,
) -> Engine:
    """An engine over a model directory (None: the embedded model with its drafter).

    drafter: a drafter directory; spec=False loads none. capture_convention ("in" or "out"), boundaries: what the user
    says of the states that the drafter reads, where its files don't (spec/wiring.py). tree: what to draft, as
    "chain:5", "dynamic:4,4,16" (num_steps, topk, num_draft_tokens), "static:0,1,0.0" or a Shape; or the three numbers
    by name, all or none. ranks: the ranks over which the model is cut (dist/job.py), on rank 0 only: the others call
    `obey` with the same arguments. reduction_slices: pieces of every sum over ranks, None for as many as ranks; a fixed
    number such as 8 makes 1, 2, 4 and 8 ranks agree bit for bit (models/shards.py). expert_parallel: a rank holds whole
    routed experts, not a piece of each. trace: a file for the stages of trace_steps ("0-3,10"; the first 16 by
    default), with trace_layers every boundary. exact, cuda_graph: what a GPU may do beyond the default
    (models/acceleration.py). options: the other fields of EngineConfig, None for the default. Raises ModelError,
    ConfigError, CheckpointError, BoundaryError or ShardError for directories that can't be used, ShapeError for trees,
    TraceError for traces.
    """
    shape = _shape(tree, num_steps, topk, num_draft_tokens)
    if shape is not None and shape.num_steps > MAX_STEPS:
        raise ShapeError(f"num_steps={shape.num_steps} must be at most {MAX_STEPS}: deeper drafts are never accepted")
    directory, drafter = _directories(model, drafter, spec)
    if shape is not None and drafter is None:
        raise ModelError(f"tree {shape} needs a drafter: pass drafter=DIRECTORY")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    config = EngineConfig(**given) if shape is None else EngineConfig(shape=shape, **given)
    tracing = open_trace(trace, trace_steps, trace_layers, ranks)  # refused before minutes of loading
    tokenizer = Tokenizer(directory)
    target, loaded = _load(
        directory,
        drafter,
        dtype=dtype,
        device=device,
        exact=exact,
        cuda_graph=cuda_graph,
        progress=progress,
        convention=capture_convention,
        boundaries=boundaries,
        shards=_shards(ranks, reduction_slices, expert_parallel),
        config=config,
    )
    if ranks is not None and ranks.size > 1:
        check_agreement(ranks, target, loaded)
        target.lead = lead = Lead(ranks)
        if loaded is not None:
            loaded.lead = lead
    difference = row_difference(target) if drafter is not None else 0.0
    if difference:
        _log.warning(
            "on this processor a row's logits change by up to %.3g with the rows beside it: speculation stays right up "
            "to near-ties, but is not bit-equal to plain decoding here",
            difference,
        )
    if loaded is not None:
        _check_shape(config.shape, loaded.config.draft_vocab_size)
    return Engine(target, tokenizer, drafter=loaded, config=config, trace=tracing)


def obey(
    ranks: Ranks,
    model: str | Path | None = None,
    *,
    drafter: str | Path | None = None,
    spec: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    capture_convention: Convention | None = None,
    boundaries: Sequence[int] | None = None,
    reduction_slices: int | None = None,
    expert_parallel: bool = False,
    exact: bool = True,
    cuda_graph: bool = False,
    trace: str | Path | None = None,
    trace_steps: str | None = None,
    trace_layers: bool = False,
    **_: object,
) -> None:
    """The life of a rank that doesn't lead: load its pieces, do what rank 0 does, return when rank 0 stops. Arguments
    as load_engine's; those that only concern decisions are rank 0's."""
    directory, drafter = _directories(model, drafter, spec)
    shards = _shards(ranks, reduction_slices, expert_parallel)
    target, loaded = _load(
        directory,
        drafter,
        dtype=dtype,
        device=device,
        exact=exact,
        cuda_graph=cuda_graph,
        convention=capture_convention,
        boundaries=boundaries,
        shards=shards,
    )
    check_agreement(ranks, target, loaded)
    tracing = open_trace(trace, trace_steps, trace_layers, ranks)
    if tracing is None:
        follow(ranks, target, loaded)
        return
    read = () if loaded is None else loaded.config.boundaries
    follow(ranks, target, loaded, lambda said, seen: tracing.follow(said, seen, read, target.config.num_hidden_layers))


def _directories(model: str | Path | None, drafter: str | Path | None, spec: bool) -> tuple[Path, Path | None]:
    """Where target and drafter lie; no drafter without speculation."""
    if drafter is not None and not spec:
        raise ModelError(f"drafter={str(drafter)!r} with spec=False: pass one or the other")
    if model is None and drafter is None and spec:
        drafter = embedded("drafter")
    directory = embedded("target") if model is None else Path(model)
    return directory, None if drafter is None else Path(drafter)


def _shards(ranks: Ranks | None, reduction_slices: int | None, expert_parallel: bool) -> Shards:
    if ranks is None:
        ranks = Ranks(alone())
    return Shards(ranks, ranks.size if reduction_slices is None else reduction_slices, expert_parallel)


def _load(
    directory: Path,
    drafter: Path | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    exact: bool,
    cuda_graph: bool,
    convention: Convention | None,
    boundaries: Sequence[int] | None,
    shards: Shards,
    config: EngineConfig | None = None,
    progress: Progress | None = None,
) -> tuple[Target, Drafter | None]:
    """This rank's pieces of both models. What a drafter's files and rank 0's sizes (config) say is checked before the
    target is read, which may take minutes."""
    if drafter is None and (convention is not None or boundaries is not None):
        raise ModelError("capture_convention and boundaries describe a drafter: pass drafter=DIRECTORY too")
    place = torch.device(device) if device is not None else shards.ranks.device
    check_acceleration(place, exact=exact, cuda_graph=cuda_graph)
    described = target_config(read_json(directory / "config.json"))
    limit = described.max_position_embeddings
    context = limit if config is None else config.context(limit)
    wiring = None
    if drafter is not None:
        wiring = read_wiring(drafter, described, convention=convention, boundaries=boundaries)
        check_tokenizer(wiring, tokenizer_fingerprint(directory))
    target = load_target(directory, dtype=dtype, device=place, progress=progress, shards=shards)
    loaded = None
    if drafter is not None and wiring is not None:
        loaded = load_wired(drafter, target, wiring, dtype=dtype, max_positions=context + MAX_STEPS)
    accelerate(target, loaded, exact=exact, cuda_graph=cuda_graph)
    return target, loaded


def _shape(
    tree: str | Shape | None, num_steps: int | None, topk: int | None, num_draft_tokens: int | None
) -> Shape | None:
    """The tree that was asked for in one of the two ways; None when neither was used."""
    trio = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": num_draft_tokens}
    given = {name: value for name, value in trio.items() if value is not None}
    if tree is not None and given:
        raise ShapeError(f"tree={str(tree)!r} and {given}: describe the tree in one way, not two")
    if given and len(given) < len(trio):
        missing = sorted(set(trio) - set(given))
        raise ShapeError(f"{given} leaves {missing} open: give all three, or tree='chain:5'")
    if given:
        return TreeShape(**given)
    return parse_shape(tree) if isinstance(tree, str) else tree


def set_threads(threads: int | None, model: str | Path | None) -> None:
    """Fix PyTorch's CPU threads for this process; the API itself leaves them alone. None: one for a model whose files
    are below SMALL_MODEL_BYTES, where handing a 10 us product to a second core costs more than it saves; otherwise
    PyTorch's own choice."""
    most = 4 * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= most:
        raise ModelError(f"threads={threads} must be in 1..{most}, four times this machine's cores")
    directory = embedded("target") if model is None else Path(model)
    weights = (*directory.glob("*.safetensors"), *directory.glob("*/*.safetensors"))  # a rank's may lie in a folder
    size = sum(path.stat().st_size for path in weights if path.is_file())
    torch.set_num_threads(threads or (1 if size < SMALL_MODEL_BYTES else torch.get_num_threads()))


def _check_shape(shape: Shape, draft_vocab_size: int) -> None:
    if shape.topk > draft_vocab_size:
        raise ShapeError(f"topk={shape.topk} is more than the drafter's {draft_vocab_size} tokens: lower it")


class LLM:
    """A loaded model. `LLM()` is the embedded one; `LLM(directory, drafter=directory)` any other.

    Options are those of `load_engine`; dtype may also be "bfloat16" or "float32". Not for several threads at once: one
    engine has one owner, and a second thread gets an error while the first one's requests run.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Raises ModelError for an option that is unknown or of the wrong type, and what load_engine raises."""
        self.engine = load_engine(**checked_options(model=model, **options))
        self.tokenizer = self.engine.tokenizer
        self._lock = Lock()
        self._owner = 0
        self._inboxes: dict[int, deque[Output]] = {}

    @overload  # a string is a sequence of strings too: this one is tried first
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self,
        prompts: str | Sequence[int] | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        spec: bool | None = None,
        **sampling: Any,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        spec: bool | None = None,
        **sampling: Any,
    ) -> list[Result]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        spec: bool | None = None,
        **sampling: Any,
    ) -> Result | list[Result]:
        """Complete one prompt (returns a Result) or a list of prompts (a list of Results, in order).

        params, or its fields as keywords: temperature, max_tokens, seed, .... spec: None speculates when there is a
        drafter. A prompt that can't run raises RequestError when it is alone; in a list it yields a Result with
        finish_reason "error", and costs the others nothing.
        """
        options = self._params(params, sampling), self._spec(spec)
        if _is_single(prompts):
            prompt = cast(Prompt, prompts)
            return self._result(prompt, self._add(prompt, *options))
        items = cast(Sequence[Prompt], prompts)
        added: list[int | Result] = []
        try:
            for item in items:
                added.append(self._try_add(item, *options))
            return [
                self._result(item, entry) if isinstance(entry, int) else entry
                for item, entry in zip(items, added, strict=True)
            ]
        finally:  # an interrupt must not leave the others running
            for entry in added:
                if isinstance(entry, int):
                    self._forget(entry)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        spec: bool | None = None,
        **sampling: Any,
    ) -> Result:
        """Answer a conversation: messages are {"role": ..., "content": ...}, rendered by the model's chat template."""
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
        if not is_list or not messages or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError(
                f"messages={messages!r:.80} must be a list of at least one {{'role': 'user', 'content': 'text'}}",
                param="messages",
            )
        return self.generate(messages, params, spec=spec, **sampling)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, spec: bool | None = None, **sampling: Any
    ) -> Generator[Output]:
        """Outputs of one prompt as they come: text pieces, the last one with finish_reason and stats. Closing the
        iterator aborts the request."""
        yield from self._outputs(self._add(prompt, self._params(params, sampling), self._spec(spec)))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt in any of its three forms."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt, max_context_tokens=self.engine.max_context_tokens))
        _check_sequence(prompt)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return tuple(prompt)  # type: ignore[arg-type]
        messages = cast(Sequence[Message], prompt)
        return tuple(self.tokenizer.encode_chat(messages, max_context_tokens=self.engine.max_context_tokens))

    def _params(self, params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError(f"params={params!r:.80} must be a SamplingParams, or pass its fields by name")
        if params is not None and sampling:
            raise RequestError(f"pass params or its fields, not both: got params and {sorted(sampling)}")
        unknown = sorted(set(sampling) - set(SamplingParams.__dataclass_fields__))
        if unknown:
            raise RequestError(
                f"unknown option {unknown[0]!r:.80}: known are {sorted(SamplingParams.__dataclass_fields__)}"
            )
        return params if params is not None else SamplingParams(**sampling)

    def _spec(self, spec: bool | None) -> bool:
        if spec is not None and not isinstance(spec, bool):
            raise RequestError(f"spec={spec!r:.80} must be True, False or None")
        if spec and self.engine.drafter is None:
            raise RequestError("spec=True needs a drafter: load the model with drafter=DIRECTORY, or pass spec=False")
        return self.engine.drafter is not None if spec is None else spec

    def _add(self, prompt: Prompt, params: SamplingParams, spec: bool) -> int:
        request = Request(self.encode(prompt), params, spec)
        with self._lock:
            if self._inboxes and self._owner != get_ident():
                raise MinieagleError(
                    "another thread's requests run on this LLM: wait for them, or pass all prompts in one list"
                )
            self._owner = get_ident()
            request_id = self.engine.add(request)
            self._inboxes[request_id] = deque()
        return request_id

    def _try_add(self, prompt: Prompt, params: SamplingParams, spec: bool) -> int | Result:
        """Its id, or the Result of a prompt that can't run."""
        try:
            return self._add(prompt, params, spec)
        except RequestError as error:
            return Result("", (), (), "error", SpecStats(), error=str(error))

    def _outputs(self, request_id: int) -> Generator[Output]:
        """One request's outputs. Whoever waits turns the engine for all: other requests' outputs go to their inbox."""
        inbox = self._inboxes[request_id]
        try:
            while True:
                while not inbox:
                    for output in self.engine.step():
                        self._inboxes[output.request_id].append(output)
                yield inbox[0]
                if inbox.popleft().finish_reason is not None:
                    return
        finally:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        self._inboxes.pop(request_id, None)
        self.engine.abort(request_id)

    def _result(self, prompt: Prompt, request_id: int) -> Result:
        outputs = list(self._outputs(request_id))
        last = outputs[-1]
        assert last.finish_reason is not None and last.stats is not None, "a request ends with a reason and its counts"
        found = [entry for output in outputs for entry in output.logprobs or ()]
        return Result(
            text="".join(output.text for output in outputs),
            token_ids=tuple(token for output in outputs for token in output.token_ids),
            prompt_token_ids=self.encode(prompt),
            finish_reason=last.finish_reason,
            stats=last.stats,
            logprobs=tuple(found) if any(output.logprobs is not None for output in outputs) else None,
            error=last.error,
        )


def _is_single(prompts: Any) -> bool:
    """Whether this is one prompt (a string, token ids, chat messages) rather than a list of them; [] is no prompts."""
    if isinstance(prompts, str):
        return True
    _check_sequence(prompts)
    return len(prompts) > 0 and isinstance(prompts[0], int | Mapping)


def _check_sequence(prompt: Any) -> None:
    """Bytes would pass for token ids."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(
            f"a prompt is a string, token ids or chat messages, got {type(prompt).__name__}", param="prompt"
        )


@cache
def _embedded_llm() -> LLM:
    return LLM()


@overload
def generate(  # pyright: ignore[reportOverlappingOverload]
    prompts: str | Sequence[int] | Sequence[Message],
    params: SamplingParams | None = None,
    *,
    spec: bool = True,
    **sampling: Any,
) -> Result: ...


@overload
def generate(
    prompts: Sequence[Prompt], params: SamplingParams | None = None, *, spec: bool = True, **sampling: Any
) -> list[Result]: ...


def generate(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, *, spec: bool = True, **sampling: Any
) -> Result | list[Result]:
    """Complete with the embedded model, loaded on first use: see LLM.generate."""
    return _embedded_llm().generate(cast(Any, prompts), params, spec=spec, **sampling)

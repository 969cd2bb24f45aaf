"""Trace: what each stage of a step computed, one JSON line per stage and row, so that two runs can be compared.

The one idea: a line is keyed by what does not depend on how a run was cut into steps: the request, the stage and the
absolute position. A row's bits depend neither on the rows beside it nor on where its keys came from, so a prompt in
chunks of 7 and of 512, a plain run and a tree, a training pass and the server write equal lines, and the first unequal
one names the stage that is at fault (minieagle/tracing.py compares). Rows of a tree that were not accepted have
`kept` false and are not compared. Stages, in the order a step runs them:

    embedding        boundary 0                            capture K       the K-th state the drafter reads
    boundary B       every boundary, where asked for       verify logits   where the step needs them
    emitted token    what the row's logits gave            accepted path   one line a tree: the nodes accepted
    cache keep       the row of all layers' cache, after the accepted rows moved into place
    fusion input     the captured states side by side      fusion output   the state that the drafter starts from
    drafter output   what its layer hands on               draft logits    of the last row that was committed
    tree             one line a tree: its tokens, then its parents

Values are not stored, but their norm, the first few, and a hash of their bytes. Deferred sums are seen here too: ranks
that captured before the reduction hold unequal rows.
"""

# torch annotates some members only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from minieagle.models.eagle3 import Drafter
from minieagle.models.rows import Rows, Span
from minieagle.spec.observe import Source, observe_texts

Phase = Literal["prefill", "chunk", "decode", "verify", "extend"]
PHASES: tuple[Phase, ...] = ("prefill", "chunk", "decode", "verify", "extend")
NUM_FIRST = 8
"""Values of a row that a line shows; enough to tell a shift from a scale from noise."""
DEFAULT_STEPS = "0-15"
LOGIT_ROWS = 64
"""Logits that `trace_text` holds at once: 42 MB with a vocabulary of 163,840."""


class TraceError(ValueError):
    """A trace that can't be written, read or compared: names the file or value and the remedy."""


@dataclass(frozen=True)
class Steps:
    """Which steps are traced: ranges of step numbers, both ends included, None = to the end."""

    ranges: tuple[tuple[int, int | None], ...]

    @staticmethod
    def parse(text: str) -> Steps:
        """Read "0-3,10" or "5-" (from step 5 on). Raises TraceError."""
        return Steps(tuple(_range(part.strip(), text) for part in text.split(",")))

    def __contains__(self, step: int) -> bool:
        return any(first <= step and (last is None or step <= last) for first, last in self.ranges)


def _range(part: str, text: str) -> tuple[int, int | None]:
    first, dash, last = part.partition("-")
    if not first.isdecimal() or not (last.isdecimal() or (dash and not last) or part == first):
        raise TraceError(f"trace steps {text!r}: {part!r} is no step; write numbers and ranges, such as 0-3,10 or 5-")
    if not dash:
        return int(first), int(first)
    if last and int(last) < int(first):
        raise TraceError(f"trace steps {text!r}: {part!r} ends before it begins")
    return int(first), int(last) if last else None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One stage of one row (or of one tree, whose position is its root's).

    step: the engine's count; row: the row's place in its request's part of the step; ranks: who wrote it; kept: whether
    the row was committed; shape, dtype, norm, first, hash: of the row's values; boundary: which state a capture is;
    tree: the shape that drafted it; equal: False when the ranks disagree (each version is then a line).
    """

    step: int
    phase: str
    request: int
    ranks: tuple[int, ...]
    stage: str
    position: int
    row: int
    kept: bool
    shape: tuple[int, ...]
    dtype: str
    norm: float | str
    first: tuple[float | str, ...]
    hash: str
    boundary: int | None = None
    tree: str | None = None
    equal: bool = True

    def to_json(self) -> str:
        """One line; what is None or as usual is left out. Not-finite numbers are strings, which JSON lacks."""
        shown = asdict(self)
        for name, usual in (("boundary", None), ("tree", None), ("equal", True)):
            if shown[name] == usual:
                del shown[name]
        return json.dumps(shown)

    @staticmethod
    def from_json(text: str) -> Line:
        """Raises TraceError when it is no line of a trace."""
        try:
            values: Any = json.loads(text)
            lists = {name: tuple(values[name]) for name in ("ranks", "shape", "first")}
            line = Line(**(values | lists))
        except (ValueError, TypeError, KeyError) as error:
            raise TraceError(f"{text[:60]!r} is no line of a trace: {error}") from None
        wrong = [field.name for field in fields(Line) if not _is_field(field.name, getattr(line, field.name))]
        if wrong:
            raise TraceError(f"{text[:60]!r} is no line of a trace: {wrong[0]} is {getattr(line, wrong[0])!r}")
        return line


_INTEGERS, _TEXTS = {"step", "request", "position", "row"}, {"phase", "stage", "dtype", "hash"}


def _is_field(name: str, value: object) -> bool:
    """Whether a value read from JSON has the type that comparing relies on."""
    if name in ("ranks", "shape"):
        return all(type(item) is int for item in cast("tuple[object, ...]", value))
    if name == "first":
        return all(_is_number(item) for item in cast("tuple[object, ...]", value))
    if name == "norm":
        return _is_number(value)
    return type(value) is int if name in _INTEGERS else isinstance(value, str) if name in _TEXTS else True


def _is_number(value: object) -> bool:
    return type(value) in (int, float) or value in ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Place:
    """Rows of one request in one step: their numbers there, absolute positions, and whether they were kept."""

    request: int
    phase: Phase
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    kept: tuple[bool, ...]

    @staticmethod
    def chain(request: int, phase: Phase, start: int, num_rows: int) -> Place:
        """Rows start .. start + num_rows, all kept."""
        rows = tuple(range(num_rows))
        return Place(request, phase, rows, tuple(start + row for row in rows), (True,) * num_rows)

    def at(self, indices: Iterable[int]) -> Place:
        """Some of the rows, in the order given."""
        chosen = tuple(indices)
        rows, positions = tuple(self.rows[i] for i in chosen), tuple(self.positions[i] for i in chosen)
        return Place(self.request, self.phase, rows, positions, tuple(self.kept[i] for i in chosen))


def encode_places(step: int, items: Sequence[tuple[int, Place]]) -> list[int]:
    """A step's requests as integers, for the ranks that trace the same forward: each its first row of the forward and
    where its rows stand."""
    numbers = [step]
    for first_row, place in items:
        numbers += [first_row, place.request, PHASES.index(place.phase), len(place.rows)]
        numbers += [*place.rows, *place.positions, *place.kept]
    return numbers


def decode_places(numbers: Sequence[int]) -> tuple[int, list[tuple[int, Place]]]:
    """What `encode_places` wrote."""
    items: list[tuple[int, Place]] = []
    at = 1
    while at < len(numbers):
        first_row, request, phase, count = numbers[at : at + 4]
        rows, positions, kept = (tuple(numbers[at + 4 + i * count : at + 4 + (i + 1) * count]) for i in range(3))
        items.append((first_row, Place(request, PHASES[phase], rows, positions, tuple(map(bool, kept)))))
        at += 4 + 3 * count
    return numbers[0], items


class Trace:
    """Writes the lines of one rank. Mutable: `begin` counts steps, the others append to the file at once, so that a
    crash leaves what came before it. Whoever has states of its own (a trainer in another framework) may call `rows`.

    path: the file; several ranks write path.rank0, path.rank1, ..., each with its own Trace. steps: which to trace;
    layers: every boundary, not only the embedding and the drafter's. Raises TraceError for a file that is no trace.
    """

    def __init__(
        self, path: str | Path, *, steps: Steps | None = None, layers: bool = False, rank: int | None = None
    ) -> None:
        self.path = Path(path if rank is None else f"{path}.rank{rank}")
        self.steps = steps or Steps.parse(DEFAULT_STEPS)
        self.layers, self.rank, self.step = layers, rank or 0, -1
        _clear(self.path)

    def begin(self) -> None:
        """A step begins; `due` says whether it is traced."""
        self.step += 1

    @property
    def due(self) -> bool:
        return self.step in self.steps

    def extra(self, num_layers: int) -> tuple[int, ...]:
        """Boundaries to capture behind the drafter's own."""
        return tuple(range(num_layers + 1)) if self.layers else (0,)

    def rows(
        self, stage: str, place: Place, values: Tensor, *, boundary: int | None = None, tree: str | None = None
    ) -> None:
        """Append a line for each row of values [n, ...], any dtype. Costs a copy to the host and a hash."""
        if not place.rows:
            return
        flat = values.detach().flatten(1).cpu().contiguous()
        whole = not flat.is_floating_point()  # tokens, parents, paths: short, and read by people
        norms = cast("list[float]", flat.double().norm(dim=1).tolist())
        firsts = cast("list[list[float]]", (flat if whole else flat[:, :NUM_FIRST]).tolist())
        hashes = [blake2b(row.tobytes(), digest_size=8).hexdigest() for row in flat.view(torch.uint8).numpy()]
        with self.path.open("a", encoding="utf-8") as file:
            for i, row in enumerate(place.rows):
                line = Line(
                    step=self.step,
                    phase=place.phase,
                    request=place.request,
                    ranks=(self.rank,),
                    stage=stage,
                    position=place.positions[i],
                    row=row,
                    kept=place.kept[i],
                    shape=tuple(values.shape[1:]),
                    dtype=str(values.dtype).removeprefix("torch."),
                    norm=_number(norms[i]),
                    first=tuple(map(_number, firsts[i])),
                    hash=hashes[i],
                    boundary=boundary,
                    tree=tree,
                )
                file.write(line.to_json() + "\n")

    def states(self, place: Place, captured: Tensor, boundaries: Sequence[int], num_layers: int) -> None:
        """The target's states: captured [n, len(boundaries) + len(extra), hidden], the drafter's own first."""
        named = [(b, f"capture {k}", b) for k, b in enumerate(boundaries)]
        named += [(b, f"boundary {b}" if b else "embedding", None) for b in self.extra(num_layers)]
        for i in sorted(range(len(named)), key=lambda i: named[i][0]):
            self.rows(named[i][1], place, captured[:, i], boundary=named[i][2])

    def follow(self, numbers: Sequence[int], captured: Tensor, boundaries: Sequence[int], num_layers: int) -> None:
        """The states of a forward that rank 0 traces and described by `encode_places`, on another rank."""
        self.step, items = decode_places(numbers)
        for first_row, place in items:
            self.states(place, captured[first_row : first_row + len(place.rows)], boundaries, num_layers)

    def drafted(self, place: Place, captured: Tensor, fused: Tensor, states: Tensor) -> None:
        """The drafter's rows: captured [n, taps, target hidden], fused [n, D], and states [n, D] that its layer hands
        on, post-norm where its config says norm_output."""
        self.rows("fusion input", place, captured)
        self.rows("fusion output", place, fused)
        self.rows("drafter output", place, states)

    def integers(self, stage: str, place: Place, values: Sequence[Sequence[int]], *, tree: str) -> None:
        """One line of a tree whose root is the only row of `place`: lists of equal length."""
        self.rows(stage, place, torch.tensor([values], dtype=torch.int64), tree=tree)


def _clear(path: Path) -> None:
    """An empty file, in place of an earlier trace but of nothing else."""
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if not file.read(16).startswith(b'{"step": '):
                raise TraceError(f"{path} exists and is no trace: name another file")
    path.write_bytes(b"")


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


@torch.inference_mode()
def trace_text(source: Source, drafter: Drafter, tokens: Sequence[int], trace: Trace, *, request: int = 0) -> None:
    """Trace a teacher-forced pass over a text by the functions that training and the doctor use (observe.py), with the
    target in memory or streamed: all rows through the target, then rows 0 .. len - 2 through the drafter with the
    tokens behind them. Compares with an engine's trace of the same tokens, whose request number `request` is.

    Raises TraceError for fewer than 2 tokens, TextError for tokens that the target can't run.
    """
    if len(tokens) < 2:
        raise TraceError(f"a text of {len(tokens)} tokens has no row to draft from: trace at least 2")
    trace.begin()
    boundaries, num_layers = drafter.config.boundaries, source.config.num_hidden_layers
    (seen,) = observe_texts(source, [tokens], (*boundaries, *trace.extra(num_layers), num_layers))
    place = Place.chain(request, "prefill", 0, len(tokens))
    trace.states(place, seen.captured[:, :-1], boundaries, num_layers)
    for rows in torch.arange(len(tokens)).split(LOGIT_ROWS):
        trace.rows("verify logits", place.at(rows.tolist()), source.head(seen.captured[rows, -1]))
    captured, num_rows = seen.captured[:-1, : len(boundaries)], len(tokens) - 1
    fused = drafter.fuse(captured)
    slots = torch.arange(1, 1 + num_rows, device=source.device)
    drafted = drafter(Rows.of(seen.tokens[1:], [Span(slots, 0, num_rows)]), fused, drafter.new_cache(1 + num_rows))
    place = Place.chain(request, "extend", 0, num_rows)
    trace.drafted(place, captured, fused, drafted.states)
    trace.rows("draft logits", place, drafted.logits)

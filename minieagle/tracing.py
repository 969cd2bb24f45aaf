"""`minieagle trace`: compare two traces, or fold the ranks of one.

The one idea: lines are matched by request, stage and position (spec/stages.py says why these suffice), and the order of
the first file, which is the order in which its run computed, decides which difference comes first: everything behind it
may be a consequence. Lines that only one trace has are counted and no difference, since a run in chunks wants fewer
logits than a training pass, and a plain run drafts nothing; a tree and its accepted path are compared with those of the
same shape.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minieagle.dist.ranks import Ranks
from minieagle.models.files import FileError, read_plain
from minieagle.spec.stages import DEFAULT_STEPS, Line, Steps, Trace, TraceError

MAX_TRACE_BYTES = 1 << 30  # a step of one request is some 20 kB

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Difference:
    """What two traces have in common. compared, unequal: lines by stage; only_a, only_b: keys that the other lacks,
    by stage; num_ranks: of either; first_a, first_b: the lines of both at the first unequal key, several of one trace
    where its ranks disagree; empty when all are equal."""

    compared: Counter[str]
    unequal: Counter[str]
    only_a: Counter[str]
    only_b: Counter[str]
    num_ranks: tuple[int, int]
    first_a: tuple[Line, ...] = ()
    first_b: tuple[Line, ...] = ()


def fold(lines_by_rank: Mapping[int, Sequence[Line]]) -> list[Line]:
    """Lines of the ranks of one run, in the order of the first rank that has them: equal ones become one line with all
    its ranks; where ranks disagree, or some lack the line of a stage that they trace, each version stays, with
    equal=False. (Rank 0 alone has logits, trees and paths.)"""
    tracing: dict[str, set[int]] = {}
    for rank, lines in lines_by_rank.items():
        for line in lines:
            tracing.setdefault(line.stage, set()).add(rank)
    versions: dict[Key, dict[Key, list[Line]]] = {}
    for rank in sorted(lines_by_rank):
        for line in lines_by_rank[rank]:
            place = (line.step, line.phase, line.request, line.stage, line.position, line.row, line.tree)
            versions.setdefault(place, {}).setdefault(_value(line), []).append(replace(line, ranks=(rank,)))
    folded: list[Line] = []
    for found in versions.values():
        for same in found.values():
            ranks = tuple(line.ranks[0] for line in same)
            folded.append(replace(same[0], ranks=ranks, equal=set(ranks) == tracing[same[0].stage]))
    return folded


def diff(a: Iterable[Line], b: Iterable[Line], *, rtol: float = 0.0) -> Difference:
    """Compare the kept lines that both traces have. rtol 0: by the hash of their bytes; above 0: by norm and first
    values, which may differ by this part of the row's size (for runs whose sums are rounded in another order).

    Raises TraceError when they share no line.
    """
    ours, theirs = _by_key(a), _by_key(b)
    both = [key for key in ours if key in theirs]
    if not both:
        raise TraceError(
            f"the traces share no line: requests {_requests(ours)} and {_requests(theirs)}; trace the same requests "
            "over the same positions"
        )
    compared, unequal = Counter[str](), Counter[str]()
    first: Key | None = None
    for key in both:
        stage = ours[key][0].stage
        compared[stage] += 1
        if not _agree([*ours[key], *theirs[key]], rtol):
            unequal[stage] += 1
            first = first or key
    alone = _only(ours, theirs), _only(theirs, ours)
    firsts = (tuple(ours[first]), tuple(theirs[first])) if first else ((), ())
    return Difference(compared, unequal, *alone, (_num_ranks(ours), _num_ranks(theirs)), *firsts)


def _only(found: Mapping[Key, Sequence[Line]], other: Mapping[Key, Sequence[Line]]) -> Counter[str]:
    return Counter(lines[0].stage for key, lines in found.items() if key not in other)


def _num_ranks(found: Mapping[Key, Sequence[Line]]) -> int:
    return len({rank for lines in found.values() for line in lines for rank in line.ranks})


def _by_key(lines: Iterable[Line]) -> dict[Key, list[Line]]:
    """Kept lines by what does not depend on the steps; one line a key unless ranks disagree."""
    found: dict[Key, list[Line]] = {}
    for line in lines:
        if line.kept:
            found.setdefault((line.request, line.stage, line.position, line.tree), []).append(line)
    return found


def _requests(found: Mapping[Key, Sequence[Line]]) -> list[int]:
    return sorted({lines[0].request for lines in found.values()})


def _value(line: Line) -> Key:
    return line.boundary, line.kept, line.shape, line.dtype, line.hash


def _agree(lines: Sequence[Line], rtol: float) -> bool:
    """Whether all are equal, the ranks within each trace too; within rtol, ranks may differ as traces may."""
    return all(_same(lines[0], line, rtol) for line in lines[1:]) and (rtol > 0 or all(line.equal for line in lines))


def _same(a: Line, b: Line, rtol: float) -> bool:
    if rtol == 0 or _value(a) == _value(b):
        return _value(a) == _value(b)
    if (a.boundary, a.shape) != (b.boundary, b.shape) or "int64" in (a.dtype, b.dtype):
        return False
    norms = float(a.norm), float(b.norm)
    size = max(norms) / math.sqrt(max(1, math.prod(a.shape)))  # of one value, root mean square
    pairs = zip(map(float, a.first), map(float, b.first), strict=True)
    return abs(norms[0] - norms[1]) <= rtol * max(norms) and all(abs(x - y) <= rtol * size for x, y in pairs)


def read(path: Path) -> list[Line]:
    """The lines of a trace, or of FILE.rank0, FILE.rank1, ... folded. Raises TraceError."""
    if path.exists():
        return _read_file(path)
    ranks = {_rank(file): _read_file(file) for file in path.parent.glob(f"{path.name}.rank*")}
    if not ranks:
        raise TraceError(f"{path} does not exist, nor does {path.name}.rank0: name a file that --trace wrote")
    return fold(ranks)


def _rank(file: Path) -> int:
    number = file.name.rpartition(".rank")[2]
    if not number.isdecimal():
        raise TraceError(f"{file} is no rank's trace: move it away")
    return int(number)


def _read_file(path: Path) -> list[Line]:
    try:
        return [Line.from_json(text) for text in read_plain(path, MAX_TRACE_BYTES).decode("utf-8").splitlines()]
    except (UnicodeDecodeError, FileError, TraceError) as error:
        raise TraceError(f"{path}: {error}") from None


def report(difference: Difference) -> str:
    """What a person reads: the first parting, both lines of it, the lines compared by stage, and those that only one
    trace has."""
    stages = [
        f"  {stage}: {num - difference.unequal[stage]} of {num} equal" for stage, num in difference.compared.items()
    ]
    stages += [
        f"only {name} has {alone.total()} lines: {', '.join(f'{num} {stage}' for stage, num in alone.items())}"
        for name, alone in (("A", difference.only_a), ("B", difference.only_b))
        if alone
    ]
    if not difference.first_a:
        return "\n".join([f"{difference.compared.total()} lines compared, all equal", *stages])
    first = difference.first_a[0]
    name = first.stage if first.boundary is None else f"{first.stage} (boundary {first.boundary})"
    head = f"the traces part at {name} of request {first.request}, position {first.position}"
    lines = [f"A {line.to_json()}" for line in difference.first_a] + [
        f"B {line.to_json()}" for line in difference.first_b
    ]
    return "\n".join([head, *lines, *stages, *_sums(difference.num_ranks)])


def _sums(num_ranks: tuple[int, int]) -> list[str]:
    if num_ranks[0] == num_ranks[1]:
        return []
    return [
        f"A is of {num_ranks[0]} ranks, B of {num_ranks[1]}: their sums are rounded alike only when both ran with the "
        "same --reduction-slices; else compare with --rtol"
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `minieagle trace`."""
    actions = parser.add_subparsers(dest="action", required=True)
    summary = "the first stage at which two traces part; exit status 0 equal, 1 not"
    compare = actions.add_parser("diff", help=summary, description=summary, allow_abbrev=False)
    compare.add_argument("a", type=Path, metavar="A", help="a trace; its order decides what comes first")
    compare.add_argument("b", type=Path, metavar="B", help="another, of the same requests")
    compare.add_argument("--rtol", type=float, default=0.0, help="relative difference let through (default: none)")
    compare.add_argument("--json", action="store_true", help="print the result as JSON")
    summary = "one line where the ranks of a trace agree; exit status 0 all equal, 1 not"
    folding = actions.add_parser("fold", help=summary, description=summary, allow_abbrev=False)
    folding.add_argument("a", type=Path, metavar="FILE", help="the name that --trace was given, without .rankN")


def run(options: argparse.Namespace) -> int:
    """`minieagle trace diff A B` and `minieagle trace fold FILE`."""
    if options.action == "fold":
        lines = read(options.a)
        if len({rank for line in lines for rank in line.ranks}) < 2:
            print(f"{options.a} has the lines of one rank: there is nothing to fold", file=sys.stderr)
        sys.stdout.writelines(line.to_json() + "\n" for line in lines)
        return 0 if all(line.equal for line in lines) else 1
    if not 0 <= options.rtol < 1:
        raise TraceError(f"--rtol {options.rtol} must be at least 0 and below 1")
    difference = diff(read(options.a), read(options.b), rtol=options.rtol)
    print(_json(difference) if options.json else report(difference))
    return 1 if difference.first_a else 0


def _json(difference: Difference) -> str:
    firsts = {"a": difference.first_a, "b": difference.first_b}
    shown = {name: [json.loads(line.to_json()) for line in lines] for name, lines in firsts.items()}
    counts = {name: getattr(difference, name) for name in ("compared", "unequal", "only_a", "only_b", "num_ranks")}
    return json.dumps(counts | {"first": shown})


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that runs an engine: what load_engine takes as trace, trace_steps, trace_layers."""
    add = parser.add_argument_group("trace").add_argument
    add("--trace", metavar="FILE", help="write what each stage of the traced steps computed, one JSON line a row")
    add("--trace-steps", metavar="STEPS", help=f"such as 0-3,10 or 5- (default: {DEFAULT_STEPS})")
    add("--trace-layers", action="store_true", help="trace every boundary, not only those that the drafter reads")


def open_trace(path: str | Path | None, steps: str | None, layers: bool, ranks: Ranks | None = None) -> Trace | None:
    """The trace that the three options ask for; each of several ranks has its own. Raises TraceError."""
    if path is None:
        if steps is not None or layers:
            raise TraceError("trace_steps and trace_layers need a file: pass trace=FILE")
        return None
    rank = ranks.rank if ranks is not None and ranks.size > 1 else None
    return Trace(path, steps=None if steps is None else Steps.parse(steps), layers=layers, rank=rank)

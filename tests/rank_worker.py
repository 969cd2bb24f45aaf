"""Groups of ranks for the tests: real processes that are connected by gloo and do what JSON lines tell them.

The one idea: importing torch costs a second of processor time, so it is imported once, by a process that then forks
every rank of every group before torch has made a thread. A line on standard input goes to all ranks of one group; each
answers with an object, and a line with the list of them comes out on standard output.

`python -m tests.rank_worker` is that process; `Groups` is the tests' side of it. A line that asks for a fault starts a
group of its own. `python -m tests.rank_worker suffer ...` is a rank that torchrun starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor

from minieagle.dist.group import from_environment
from minieagle.dist.job import job
from minieagle.dist.ranks import Ranks
from minieagle.engine import Engine, EngineConfig, Request
from minieagle.llm import embedded
from minieagle.models import deepseek, eagle3, lockstep
from minieagle.models.cache import PagedCache
from minieagle.models.deepseek import Target, TargetOutput
from minieagle.models.drafter_weights import load_drafter
from minieagle.models.eagle3 import Drafter
from minieagle.models.layers import Linear
from minieagle.models.lockstep import Lead, Reader, follow
from minieagle.models.rows import Rows, Span
from minieagle.models.shards import Shards
from minieagle.models.target_weights import load_target
from minieagle.sampling import SamplingParams
from minieagle.spec.tree import parse_shape
from minieagle.tokenizer import Tokenizer

Json = dict[str, Any]
Reply = Callable[[Json], Json]

ROOT = Path(__file__).resolve().parent.parent


class NoText:
    """A tokenizer for models that have none: no token ends a text or has one."""

    stop_ids: tuple[int, ...] = ()

    def token_bytes(self, token_id: int) -> bytes:
        return b""


# ---- what a rank does


def forward(ranks: Ranks, case: Json) -> Json:
    """All rows at once through the target: every boundary and, on rank 0, the logits, written to `out`."""
    target = load_target(Path(case["model"]), shards=Shards(ranks, case["slices"], case.get("expert_parallel", False)))
    with mutated(case.get("mutant"), ranks, target):
        out = run_rows(target, case["tokens"])
    files = {"captured": out.captured} | ({"logits": out.logits} if ranks.leads else {})
    save_file({name: t.clone() for name, t in files.items()}, f"{case['out']}.{ranks.rank}.safetensors")
    return {"bytes": held_bytes(target), "meta": sum(p.is_meta for p in target.parameters())}


def run_rows(target: Target, tokens: list[int]) -> TargetOutput:
    count = len(tokens)
    rows = Rows.of(torch.tensor(tokens), [Span(torch.arange(1, count + 1), 0, count)])
    return target(rows, target.new_cache(count + 1), boundaries=range(target.config.num_hidden_layers + 1))


def held_bytes(target: Target) -> int:
    """Bytes of all weights as they are held, packed products and INT4 codes included; rotary tables are computed."""
    seen: dict[int, int] = {}
    for module in target.modules():
        if module is target.rotary:
            continue
        for value in vars(module).values():
            tensors = [value, *value.values()] if isinstance(value, dict) else [value]
            seen |= {id(t): t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)}
    return sum(seen.values())


def generate(ranks: Ranks, case: Json) -> Json:
    """Requests through an engine on rank 0, each a list of prompt ids; the others follow. Every rank tells the digests
    of its caches, which nothing but the same operations in the same order makes equal."""
    shards = Shards(ranks, case["slices"])
    target = load_target(Path(case["model"]), shards=shards)
    drafter = load_drafter(Path(case["drafter"]), target, max_positions=512) if case.get("drafter") else None
    with recorded() as caches, mutated(case.get("mutant"), ranks, target):
        if not ranks.leads:
            follow(ranks, target, drafter)
            return {"caches": digests(caches)}
        lead = say(ranks, target, drafter)
        runs = [answers(target, drafter, case, run) for run in case["runs"]]
        if lead is not None:
            lead.stop()
        ranks.farewell = None
        return {"runs": runs, "caches": digests(caches), "num_moved": sum(cache.num_moved for cache in caches)}


def say(ranks: Ranks, target: Target, drafter: Drafter | None) -> Lead | None:
    if ranks.size == 1:
        return None
    target.lead = lead = Lead(ranks)
    if drafter is not None:
        drafter.lead = lead
    return lead


def answers(target: Target, drafter: Drafter | None, case: Json, run: Json) -> list[list[int]]:
    tokenizer = cast(Tokenizer, NoText())
    sizes = {"max_seqs": 2, "max_context_tokens": 128, "page_size": 4, "prefill_chunk": case.get("chunk", 7)}
    engine = Engine(
        target, tokenizer, drafter=drafter, config=EngineConfig(shape=parse_shape(run.get("tree", "chain:2")), **sizes)
    )
    found: dict[int, list[int]] = {}
    for index, prompt in enumerate(case["prompts"]):
        params = SamplingParams(temperature=run["temperature"], seed=index, max_tokens=case["max_tokens"])
        found[engine.add(Request(tuple(prompt), params, run["spec"]))] = []
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    return list(found.values())


def digests(caches: Sequence[PagedCache]) -> list[str]:
    return [hashlib.sha256(cache.data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] for cache in caches]


class NotedCache(PagedCache):
    """Counts the rows that `keep` moves, and is kept in a list of all."""

    made: ClassVar[list[NotedCache]] = []

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.num_moved = 0
        self.made.append(self)

    def keep(self, source: Tensor, target: Tensor) -> None:
        super().keep(source, target)
        self.num_moved += len(source)


@contextmanager
def recorded() -> Iterator[list[NotedCache]]:
    """The caches that are made meanwhile, in order."""
    NotedCache.made = []
    with patch.object(deepseek, "PagedCache", NotedCache), patch.object(eagle3, "PagedCache", NotedCache):
        yield NotedCache.made


# ---- faults of the code, each of which a test has to notice


def skip_a_sum(ranks: Ranks, target: Target) -> AbstractContextManager[object]:
    """The last layer's outputs are left as this rank's own part: a partial capture."""
    return patch.object(target.layers[-1], "add", lambda partial: partial[:, : target.config.hidden_size])


def own_logits(ranks: Ranks, target: Target) -> AbstractContextManager[object]:
    """A follower sees garbage in place of logits."""
    kept = target.forward

    def forward(*arguments: Any, **options: Any) -> TargetOutput:
        out = kept(*arguments, **options)
        return out if ranks.leads else TargetOutput(torch.randn_like(out.logits), out.captured)

    return patch.object(target, "forward", forward)


def one_ulp(ranks: Ranks, target: Target) -> AbstractContextManager[object]:
    """The last rank's columns of the logits are the next higher floats."""
    kept = target.lm_head

    def raised(x: Tensor) -> Tensor:
        out = kept(x)
        return torch.nextafter(out, torch.full_like(out, torch.inf)) if ranks.rank == ranks.size - 1 else out

    return patch.dict(target._modules, {"lm_head": cast(Linear, raised)})


def handle_among_slots(ranks: Ranks, target: Target) -> AbstractContextManager[object]:
    """Followers take a sequence's handle for the first of its slots."""
    kept = lockstep.decode_rows

    def decode_rows(reader: Reader, slots: dict[int, Tensor], device: torch.device) -> Rows:
        moved = {handle: torch.cat((torch.tensor([handle]), own))[: len(own)] for handle, own in slots.items()}
        return kept(reader, moved, device)

    return patch.object(lockstep, "decode_rows", decode_rows)


MUTANTS: dict[str | None, Callable[[Ranks, Target], AbstractContextManager[object]]] = {
    None: lambda ranks, target: nullcontext(),
    "skip a sum": skip_a_sum,
    "own logits": own_logits,
    "one ulp": one_ulp,
    "handle among slots": handle_among_slots,
}


def mutated(name: str | None, ranks: Ranks, target: Target) -> AbstractContextManager[object]:
    return MUTANTS[name](ranks, target)


def announce(ranks: Ranks, case: Json) -> Json:
    """A list of that length from rank 0."""
    if not ranks.leads:
        return {"heard": ranks.listen()}
    ranks.announce([(7 * index) % 1000 - 500 for index in range(case["length"])])
    return {}


TASKS: dict[str, Callable[[Ranks, Json], Json]] = {"forward": forward, "generate": generate, "announce": announce}


# ---- faults of the machine: one group for each


def no_memory() -> None:
    raise MemoryError("no room for 3 tensors")


IDLE_S = 1.0
"""Seconds after loading at which a follower is taken to be idle."""

FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1000),
    "memory": no_memory,
    "ctrl-c": lambda: os.kill(os.getpid(), signal.SIGINT),
    "none": lambda: None,
}


def suffer(case: Json) -> None:
    """A short life: load, prefill, decode, idle; `rank` suffers `fault` at `stage`."""
    with job(from_environment(), hang_timeout_s=case.get("timeout_s", 8.0)) as ranks:
        print(f"process {ranks.rank} {os.getpid()}", flush=True)
        mine = ranks.rank == case["rank"]

        def reached(stage: str) -> None:
            if mine and case["stage"] == stage:
                print(f"fault {time.time()}", flush=True)
                FAULTS[case["fault"]]()

        reached("load")
        target = load_target(embedded("target"), shards=Shards(ranks, ranks.size))
        within(target, reached)
        if ranks.leads:
            act(ranks, target, reached, idle_s=case.get("idle_s", 0.0))
        else:
            if mine and case["stage"] == "idle":
                timer = threading.Timer(IDLE_S, reached, ["idle"])
                timer.daemon = True
                timer.start()
            follow(ranks, target, None)
    print("parted", flush=True)


def within(target: Target, reached: Callable[[str], None]) -> None:
    """Faults of a forward come in the middle of it, where the others wait for this rank."""
    count, kept = 0, target.head

    def head(h: Tensor) -> Tensor:
        nonlocal count
        count += 1
        reached("prefill" if count == 1 else "decode" if count == 3 else "")
        return kept(h)

    target.head = head  # type: ignore[method-assign]


def act(ranks: Ranks, target: Target, reached: Callable[[str], None], *, idle_s: float) -> None:
    target.lead = Lead(ranks)
    slots, cache = torch.arange(1, 40), target.new_cache(40)
    committed = 0
    for count in (16, 1, 1, 1):
        target(Rows.of(torch.arange(count), [Span(slots, committed, count)]), cache)
        committed += count
    reached("idle")
    time.sleep(idle_s)


# ---- the forking process


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank of one host."""
    ours = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in ours.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def fork(task: Callable[[], None], variables: dict[str, str], stderr: int | None = None) -> int:
    """A child that runs task with variables in its environment; what it prints goes to stderr."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ.update(variables)
        os.dup2(2 if stderr is None else stderr, 1)
        if stderr is not None:
            os.dup2(stderr, 2)
        task()
        status = 0
    except (Exception, KeyboardInterrupt) as error:
        print(f"rank {variables['RANK']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        sys.stdout.flush()
        os._exit(status)


def serve_lines(commands: int, replies: int) -> None:
    """A rank's life: a line in, a line out, until the lines end."""
    with job(from_environment(), hang_timeout_s=60.0) as ranks, os.fdopen(commands) as lines:
        ranks.activity.rest()
        for line in lines:
            case = json.loads(line)
            ranks.activity.work()
            try:
                reply = TASKS[case["task"]](ranks, case)
            except ValueError as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            ranks.activity.rest()
            os.write(replies, (json.dumps(reply | {"rank": ranks.rank}) + "\n").encode())


class ForkedGroup:
    """The ranks of one size, and the pipes to them."""

    def __init__(self, size: int) -> None:
        read, reply = os.pipe()
        port, self.size = free_port(), size
        self.commands: list[int] = []
        for rank in range(size):
            command, write = os.pipe()
            fork(partial(self._serve, command, write, reply), environment(rank, size, port))
            os.close(command)
            self.commands.append(write)
        os.close(reply)
        self.replies = os.fdopen(read)

    def _serve(self, command: int, write: int, reply: int) -> None:
        """In the child: only the parent may keep the writing ends, else lines never end."""
        for other in [*self.commands, write]:
            os.close(other)
        serve_lines(command, reply)

    def close(self) -> None:
        for command in self.commands:
            os.close(command)
        while self.replies.readline():
            pass

    def ask(self, line: str) -> list[Json]:
        for command in self.commands:
            os.write(command, line.encode())
        found = [json.loads(self.replies.readline() or "{}") for _ in range(self.size)]
        return sorted(found, key=lambda reply: reply.get("rank", 0))


def watch_job(case: Json) -> Json:
    """Run one group to its end: the statuses of its ranks, what they printed, and the seconds from the fault on."""
    port, size = free_port(), case["size"]
    with tempfile.TemporaryFile("w+") as said:
        task = lambda: suffer(case)  # noqa: E731
        ranks = {fork(task, environment(rank, size, port), said.fileno()): rank for rank in range(size)}
        statuses: dict[int, int] = {}
        give_up = time.monotonic() + case.get("patience_s", 120.0)
        while len(statuses) < size and time.monotonic() < give_up:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child in ranks:
                statuses[ranks[child]] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        for child, rank in ranks.items():
            if rank not in statuses:
                os.kill(child, signal.SIGKILL)
        ended = time.time()
        said.seek(0)
        text = said.read()
    started = [float(line.split()[1]) for line in text.splitlines() if line.startswith("fault ")]
    seconds = ended - started[0] if started else None
    return {"statuses": [statuses.get(rank) for rank in range(size)], "said": text, "seconds": seconds}


def serve_forks() -> None:
    torch.set_num_threads(1)
    groups: dict[int, ForkedGroup] = {}
    for line in sys.stdin:
        case = json.loads(line)
        if case["task"] == "fault":
            print(json.dumps(watch_job(case)), flush=True)
            continue
        if case["size"] not in groups:
            groups[case["size"]] = ForkedGroup(case["size"])
        print(json.dumps(groups[case["size"]].ask(line)), flush=True)
    for group in reversed(groups.values()):  # a later group's ranks hold copies of an earlier group's pipes
        group.close()


# ---- the tests' side


class Groups:
    """The forking process as the tests see it. Mutable; `close` ends it with all of its ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def ask(self, **case: Any) -> Any:
        """The ranks' answers in the order of ranks, or a fault's outcome."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the forking process has ended"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def suffer_under_a_launcher(arguments: list[str]) -> None:
    """suffer FAULT RANK STAGE IDLE_S, as torchrun starts it."""
    fault, rank, stage, idle_s = arguments
    torch.set_num_threads(1)
    suffer({"fault": fault, "rank": int(rank), "stage": stage, "idle_s": float(idle_s)})


if __name__ == "__main__":
    if sys.argv[1:2] == ["suffer"]:
        suffer_under_a_launcher(sys.argv[2:])
    else:
        serve_forks()

"""Life and death of a job: whatever happens to one rank, all ranks end, with a status and words that tell why.

Real processes, two or three of them; bench/ranks.py has more, and measures. Nothing here asserts a time: a job that
does not end is given up after minutes, and its ranks then have no status of their own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from minieagle.dist.group import Group, GroupError
from minieagle.dist.job import job
from minieagle.dist.ranks import ANNOUNCED, RankLost, Ranks, _in_company, _listen_on_loopback
from tests.rank_worker import ROOT, Groups

PATIENCE_S = 180


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    started = Groups()
    yield started
    started.close()


def suffered(groups: Groups, fault: str, stage: str, rank: int, *, size: int = 2, **case: Any) -> tuple[Any, str]:
    found = groups.ask(task="fault", size=size, rank=rank, fault=fault, stage=stage, **case)
    return found["statuses"], found["said"]


def check_all_ended(statuses: list[int | None], lost: int, status: int) -> None:
    """The rank that suffered has its status, all others 1."""
    assert statuses[lost] == status
    assert all(found == 1 for rank, found in enumerate(statuses) if rank != lost)


def test_ranks_part_in_order(groups: Groups) -> None:
    statuses, said = suffered(groups, "none", "decode", 0, size=4)
    assert statuses == [0, 0, 0, 0] and said.count("parted") == 4 and "minieagle" not in said


@pytest.mark.parametrize(("stage", "rank"), [("load", 1), ("prefill", 0), ("decode", 1), ("idle", 0), ("idle", 1)])
def test_a_killed_rank_ends_the_job(groups: Groups, stage: str, rank: int) -> None:
    statuses, said = suffered(groups, "kill", stage, rank, idle_s=PATIENCE_S)
    check_all_ended(statuses, rank, -signal.SIGKILL)
    assert f"rank {rank} is dead" in said and "gloo" not in said


def test_all_name_the_one_that_died_whoever_they_were_connected_to(groups: Groups) -> None:
    statuses, said = suffered(groups, "kill", "decode", 2, size=4)
    check_all_ended(statuses, 2, -signal.SIGKILL)
    assert said.count("rank 2 is dead") == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_is_named_with_its_words(groups: Groups, rank: int) -> None:
    statuses, said = suffered(groups, "memory", "load", rank)
    check_all_ended(statuses, rank, 1)
    assert f"minieagle rank {rank}: MemoryError: no room for 3 tensors" in said
    assert f"minieagle rank {1 - rank}: rank {rank} failed: MemoryError: no room for 3 tensors; the job ends" in said
    assert "Traceback" not in said


def test_an_error_between_collectives_is_named_by_all(groups: Groups) -> None:
    """Rank 0 only loses the connection, and says what rank 1 said."""
    statuses, said = suffered(groups, "memory", "decode", 1)
    check_all_ended(statuses, 1, 1)
    assert "minieagle rank 0: rank 1 failed: MemoryError: no room for 3 tensors; the job ends" in said


@pytest.mark.parametrize(("fault", "rank"), [("sleep", 1), ("sleep", 0), ("stop", 1), ("stop", 0)])
def test_a_rank_that_hangs_ends_the_job(groups: Groups, fault: str, rank: int) -> None:
    statuses, said = suffered(groups, fault, "decode", rank, timeout_s=3.0)
    check_all_ended(statuses, rank, 1 if fault == "sleep" else -signal.SIGKILL)
    assert (f"rank {rank} has made no progress" if fault == "sleep" else f"rank {rank} ") in said


@pytest.mark.parametrize("stage", ["decode", "idle"])
def test_ctrl_c_at_rank_0_lets_the_others_go_in_order(groups: Groups, stage: str) -> None:
    statuses, said = suffered(groups, "ctrl-c", stage, 0, idle_s=PATIENCE_S)
    assert statuses == [1, 0] and said.count("parted") == 1 and "minieagle" not in said


def test_rank_0_may_wait_for_its_user(groups: Groups) -> None:
    """Longer than the time after which a rank that others wait for is stuck."""
    statuses, said = suffered(groups, "none", "idle", 0, timeout_s=3.0, idle_s=6.0)
    assert statuses == [0, 0] and "minieagle" not in said


def test_two_jobs_on_one_host_do_not_collide(groups: Groups) -> None:
    """One goes on while another one dies beside it."""
    for _ in range(2):
        replies = groups.ask(task="announce", size=2, length=3)
        assert "heard" in replies[1]
        check_all_ended(suffered(groups, "kill", "load", 1)[0], 1, -signal.SIGKILL)


@pytest.mark.parametrize("timeout_s", [-1.0, 0.5, 2.9])
def test_less_patience_than_three_beats_is_refused(timeout_s: float) -> None:
    """A single late beat would end the job."""
    group = Group(0, 2, torch.device("cpu"))
    with (
        pytest.raises(GroupError, match=f"hang timeout={timeout_s:g} s must be at least 3 s"),
        job(group, hang_timeout_s=timeout_s),
    ):
        pass


# ---- the connection


def test_words_of_a_library_about_sockets_become_ours() -> None:
    with pytest.raises(RankLost, match="^the connection to another rank is lost$"), _in_company():
        raise RuntimeError("[pair.cc:547] Connection closed by peer")


def test_a_gpu_without_memory_is_no_lost_connection() -> None:
    with pytest.raises(torch.OutOfMemoryError), _in_company():
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("local", "own"), [("2", None), ("4", None), ("4", "eth7")])
def test_gloo_listens_on_loopback_where_all_ranks_are_here(
    monkeypatch: pytest.MonkeyPatch, local: str, own: str | None
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if own is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", own)
    _listen_on_loopback(os.environ | {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": "4"})
    expected = own or ("lo" if local == "4" else None)
    assert os.environ.get("GLOO_SOCKET_IFNAME", "").rstrip("0") == (expected or "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_one_rank_needs_nobody() -> None:
    ranks, x = Ranks(Group(0, 1, torch.device("cpu"))), torch.arange(6).view(2, 3)
    gathered = ranks.gather_to_lead(x)
    assert gathered is not None and torch.equal(gathered[0], x) and torch.equal(ranks.gather(x)[0], x)
    ranks.share(x)
    ranks.announce([1, 2])
    ranks.close()


@pytest.mark.parametrize("length", [0, 1, ANNOUNCED - 1, ANNOUNCED, ANNOUNCED + 1, 3 * ANNOUNCED])
def test_announcements_of_any_length_arrive(groups: Groups, length: int) -> None:
    replies = groups.ask(task="announce", size=2, length=length)
    assert replies[1]["heard"] == [(7 * index) % 1000 - 500 for index in range(length)]


# ---- under torchrun


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]


@contextmanager
def torchrun(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A job under torchrun; what it says goes to a file of tmp_path."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(command(*arguments), cwd=ROOT, stdout=said, stderr=said, text=True, env=variables)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(tmp_path: Path, pattern: str, count: int = 1) -> list[str]:
    """What the job says that matches, once it has been said `count` times."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        found = re.findall(pattern, (tmp_path / "said").read_text())
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{pattern} was not said {count} times in {PATIENCE_S} s: {(tmp_path / 'said').read_text()}")


def wait_until_gone(numbers: list[str]) -> bool:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        if not any(alive(int(number)) for number in numbers):
            return True
        time.sleep(0.05)
    return False


def alive(number: int) -> bool:
    """Whether a process runs: one that nobody waited for has ended too."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="processes are looked up in /proc")


@needs_proc
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path) -> None:
    with torchrun(tmp_path, "-m", "tests.rank_worker", "suffer", "none", "0", "idle", str(PATIENCE_S)) as launcher:
        numbers = wait_for(tmp_path, r"process \d (\d+)", 2)
        launcher.kill()
        assert wait_until_gone(numbers)


def listening(number: int) -> set[str]:
    """Local addresses, in hexadecimal, that a process listens on."""
    inodes = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{number}/fd")}
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{number}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@needs_proc
def test_a_server_of_two_ranks_drains_and_listens_on_loopback_only(tmp_path: Path) -> None:
    """At SIGTERM, which the launcher hands to all ranks, the open stream ends as it would have and all ranks leave."""
    with torchrun(tmp_path, "minieagle/serve.py", "--port", "0") as launcher:
        address = wait_for(tmp_path, r"http://127\.0\.0\.1:\d+")[0]
        numbers = children(launcher.pid)
        assert len(numbers) == 2 and set.union(*map(listening, numbers)) <= LOOPBACK
        body = {"model": "minieagle-demo", "prompt": "How do", "max_tokens": 48, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            launcher.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2].replace(" ", "")
        launcher.wait(PATIENCE_S)
        assert wait_until_gone([str(number) for number in numbers])
    assert "rank 1" not in (tmp_path / "said").read_text()


def children(number: int) -> list[int]:
    """Processes that another one started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return [child for child, parent in parents.items() if parent == number]

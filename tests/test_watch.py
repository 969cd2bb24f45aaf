"""The watch on its own: a store of fakes and clocks that the tests move. Which of the others' states end the job, in
whose name, and which don't."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minieagle.dist import watch
from minieagle.dist.activity import Activity
from minieagle.dist.watch import BEAT_S, HANG_TIMEOUT_S, Clock, Peer, Still, Watch

ELSEWHERE = "4711 another host"


class FakeStore:
    """A dictionary of the rendezvous store's kind. Mutable: the tests write what other ranks would."""

    def __init__(self, processes: dict[int, str]) -> None:
        self.values = {f"process/{rank}": process for rank, process in processes.items()}
        self.values |= {f"beat/{rank}": "1 here" for rank in processes}
        self.is_gone = False

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        if self.is_gone or key not in self.values:
            raise RuntimeError("timed out")
        return self.values[key].encode()

    def set_timeout(self, timeout: timedelta, /) -> None:
        pass


class Scene:
    """Rank 0's watch among ranks 1 and 2; time passes in beats, in which the others beat unless told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, process: str = ELSEWHERE) -> None:
        self.now_s, self.count = 100.0, 1
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(watch.time, "sleep", lambda pause_s: None)
        self.store, self.activity = FakeStore({1: process, 2: ELSEWHERE}), Activity()
        self.activity.rest()
        self.watch = Watch(self.store, rank=0, size=3, activity=self.activity)

    def pass_beats(self, num: int, *, silent: tuple[int, ...] = (), pause_s: float = BEAT_S) -> str | None:
        """The first fault that the watch sees within `num` looks, pause_s apart."""
        for _ in range(num):
            self.now_s, self.count = self.now_s + pause_s, self.count + 1
            for rank in {1, 2} - set(silent):
                if " here" in self.store.values[f"beat/{rank}"]:
                    self.store.values[f"beat/{rank}"] = f"{self.count} here"
            if (fault := self.watch._look()) is not None:
                return fault
        return None

    def pass_s(self, pause_s: float) -> bool:
        """Time passes, and nobody looks; whether the watch was stopped meanwhile."""
        self.now_s += pause_s
        return self.watch._stopped


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_ranks_that_beat_are_left_alone_for_days(scene: Scene) -> None:
    assert scene.pass_beats(500) is None


@pytest.mark.parametrize("rank", [1, 2])
def test_a_silent_rank_is_named(scene: Scene, rank: int) -> None:
    assert scene.pass_beats(20, silent=(rank,)) == (
        f"rank {rank} has given no sign of life for 9 s: it is stopped, or its host is lost"
    )


def test_silence_up_to_the_timeout_is_borne(scene: Scene) -> None:
    for _ in range(5):
        assert scene.pass_beats(int(HANG_TIMEOUT_S) - 1, silent=(1,)) is None
        assert scene.pass_beats(1) is None


def test_a_failed_ranks_own_words_are_passed_on(scene: Scene) -> None:
    scene.store.values["beat/2"] = "7 ended rank 2 failed: MemoryError: no room"
    assert scene.pass_beats(1) == "rank 2 failed: MemoryError: no room"


def test_the_cause_is_said_in_the_same_words_by_whoever_ends_of_it(scene: Scene) -> None:
    """Rank 1 ended because of rank 2, which nobody else has seen fail."""
    scene.store.values["beat/1"] = "7 ended rank 2 is dead: its process was killed or crashed"
    fault = scene.pass_beats(1)
    assert fault is not None
    scene.watch.fail(fault)
    assert scene.store.values["beat/0"].split(" ", 1)[1] == f"ended {fault}"


def test_the_first_end_that_is_published_stands(scene: Scene) -> None:
    scene.watch.fail("the cause")
    scene.watch.fail("what came of it")
    scene.watch._publish()
    assert scene.store.values["beat/0"].endswith("ended the cause")


def test_a_rank_that_left_in_order_may_be_silent(scene: Scene) -> None:
    scene.store.values["beat/1"] = "7 left"
    assert scene.pass_beats(50) is None
    assert not scene.watch.all_left()
    scene.store.values["beat/2"] = "9 left"
    assert scene.watch.all_left()


def ended_process() -> int:
    """The number of a process that has ended and was waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="processes are looked up in /proc")
def test_a_dead_process_of_this_host_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, f"{ended_process()} {watch._place()}")
    assert scene.pass_beats(1) == "rank 1 is dead: its process was killed or crashed"


def test_words_published_just_before_the_end_count_more_than_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, f"{ended_process()} {watch._place()}")
    scene.store.values["beat/1"] = "7 ended rank 1 failed: MemoryError: no room"
    assert scene.pass_beats(1) == "rank 1 failed: MemoryError: no room"


def test_a_process_number_of_another_host_says_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, f"{ended_process()} another host")
    assert scene.pass_beats(50) is None


def test_a_silent_rank_that_computes_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that holds the interpreter keeps beats away."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(watch, "_process", lambda process_id: ("R", next(ticks)))
    assert Scene(monkeypatch, f"4711 {watch._place()}").pass_beats(100, silent=(1,)) is None


def test_a_stopped_process_is_killed_before_its_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(watch.os, "kill", lambda *arguments: killed.append(arguments))
    monkeypatch.setattr(watch, "_process", lambda process_id: ("S", 77))
    assert "rank 1 has given no sign" in str(Scene(monkeypatch, f"4711 {watch._place()}").pass_beats(20, silent=(1,)))
    assert killed == [(4711, 9)]


# ---- time


@given(st.lists(st.integers(0, 10**6) | st.sampled_from([0.25, 0.5, 1.25]), max_size=20))
def test_the_clock_counts_what_it_could_look_at(pauses: list[float]) -> None:
    """Never backwards, never more than two beats a look, all of a shorter pause."""
    with pytest.MonkeyPatch.context() as patched:
        now = [0.0]
        patched.setattr(watch.time, "monotonic", lambda: now[0])
        clock = Clock()
        for pause in pauses:
            before, now[0] = clock.now_s, now[0] + pause
            assert clock.look() - before == pytest.approx(min(pause, 2 * BEAT_S))


def test_a_machine_that_slept_accuses_nobody(scene: Scene) -> None:
    """Everybody stood still: this rank too."""
    assert scene.pass_beats(3, silent=(1, 2), pause_s=3600.0) is None
    assert scene.pass_beats(5) is None


def test_a_busy_machine_gets_more_patience(scene: Scene) -> None:
    """Looks that come three times as late count twice."""
    assert scene.pass_beats(5, silent=(1,), pause_s=3 * BEAT_S) is None
    assert scene.pass_beats(1, silent=(1,), pause_s=3 * BEAT_S) is not None


@given(st.lists(st.integers(0, 1), min_size=1, max_size=30))
def test_still_counts_since_the_last_change(seen: list[int]) -> None:
    still = Still()
    for now, value in enumerate(seen):
        last_change = max(i for i in range(now + 1) if i == 0 or seen[i] != seen[i - 1])
        assert still.seconds(value, float(now)) == now - last_change


# ---- this rank itself


def quiet(monkeypatch: pytest.MonkeyPatch, cpu_s: float = 1.0, read: int = 0) -> None:
    monkeypatch.setattr(watch, "_speak", lambda say: None)
    monkeypatch.setattr(Activity, "cpu_s", lambda self: cpu_s)
    monkeypatch.setattr(watch, "_bytes_read", lambda: read)


def test_a_rank_that_makes_no_progress_names_itself(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    scene.activity.work()
    assert scene.pass_beats(20) == "rank 0 has made no progress for 9 s (its stack is above)"


def test_a_rank_that_waits_for_the_others_is_not_stuck(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    scene.activity.work()
    with scene.activity:
        assert scene.pass_beats(500) is None


def test_a_rank_that_rests_is_not_stuck(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for its user, for days."""
    quiet(monkeypatch)
    scene.activity.work()
    scene.activity.rest()
    assert scene.pass_beats(500) is None


@pytest.mark.parametrize("name", ["cpu_s", "_bytes_read"])
def test_a_rank_that_computes_or_reads_is_not_stuck(scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    quiet(monkeypatch)
    more = iter(range(10**6))
    where: Any = Activity if name == "cpu_s" else watch
    monkeypatch.setattr(where, name, lambda *_: next(more))
    scene.activity.work()
    assert scene.pass_beats(100) is None


def test_calls_within_a_rest_end_in_a_rest() -> None:
    activity = Activity()
    activity.rest()
    with activity:
        assert activity.waiting
    assert activity.waiting
    activity.work()
    with activity:
        assert activity.waiting
    assert not activity.waiting


def test_ctrl_c_waits_for_the_end_of_an_operation() -> None:
    activity = Activity()
    with pytest.raises(KeyboardInterrupt):  # while loading
        activity.interrupt()
    activity.work()
    activity.interrupt()
    with activity:
        pass
    with pytest.raises(KeyboardInterrupt):
        activity.rest()
    assert activity.waiting
    activity.rest()  # once
    with pytest.raises(KeyboardInterrupt):  # between operations
        activity.interrupt()


def test_work_is_measured_on_the_thread_that_works() -> None:
    activity = Activity()
    thread = threading.Thread(target=activity.work)
    thread.start()
    thread.join()
    assert activity.thread is thread and activity.cpu_s() == 0.0


def test_an_orphan_ends(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.os, "getppid", lambda: 1)
    assert scene.pass_beats(1) == "the process that started this rank is gone"


def test_a_rank_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        Watch(FakeStore({1: ELSEWHERE}), rank=0, size=3, activity=Activity())


class Ended(Exception):
    """In place of the process's end."""


def test_without_the_store_the_job_ends(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def end(words: str, tell: object) -> None:
        said.append(words)
        raise Ended

    monkeypatch.setattr(watch, "end", end)
    scene.store.is_gone = True
    with pytest.raises(Ended):
        scene.watch._keep_looking()
    assert said == ["minieagle rank 0: the rendezvous store is gone (RuntimeError); the job ends"]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (None, "rank 1 is dead: its process was killed or crashed"),
        (("T", 5), "rank 1 is stopped"),
        (("S", 5), "the rendezvous store doesn't answer: the launcher or its host is lost"),
    ],
)
def test_a_store_that_never_answers_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, seen: tuple[str, int] | None, words: str
) -> None:
    """It lies in a stopped process, and the look at it never comes back."""
    scene, said, killed = Scene(monkeypatch, f"4711 {watch._place()}"), list[str](), list[int]()
    monkeypatch.setattr(watch, "_process", lambda process_id: seen)
    monkeypatch.setattr(watch.os, "kill", lambda number, _: killed.append(number))
    monkeypatch.setattr(Watch, "_keep_looking", lambda self: None)
    monkeypatch.setattr(watch, "end", lambda text, tell: (said.append(text), scene.watch.stop()))
    monkeypatch.setattr(scene.watch, "join", lambda timeout: None)
    monkeypatch.setattr(scene.watch._over, "wait", lambda pause_s: scene.pass_s(pause_s))
    scene.watch.run()
    assert said == [f"minieagle rank 0: {words}; the job ends"] and killed == ([4711] if "stopped" in words else [])


def test_a_watch_that_was_stopped_sees_nothing_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "end", lambda words, tell: pytest.fail(words))
    scene.watch.start()
    scene.watch.stop()
    scene.store.is_gone = True
    assert not scene.watch.is_alive()
    scene.watch.leave()  # the store has gone with rank 0: no error


def test_one_who_does_not_listen_does_not_keep_a_rank_alive() -> None:
    """Standard error is a pipe that is full and that nobody reads."""
    fill = "import fcntl, os; fcntl.fcntl(2, fcntl.F_SETFL, os.O_NONBLOCK)\ntry:\n while os.write(2, b'x' * 4096): pass"
    code = f"{fill}\nexcept BlockingIOError: fcntl.fcntl(2, fcntl.F_SETFL, 0)\n"
    code += "from minieagle.dist.watch import end\nend('words')"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert process.wait(120) == 1
    assert process.stderr is not None
    process.stderr.close()


def test_a_peer_reads_its_process() -> None:
    assert Peer(ELSEWHERE).process_id is None and Peer(ELSEWHERE).look() == ("", 0)
    own = Peer(f"{os.getpid()} {watch._place()}")
    assert own.process_id == os.getpid() and own.look() is not None

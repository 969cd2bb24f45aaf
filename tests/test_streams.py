"""A command whose standard streams are closed, full or unread ends without a traceback."""

import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from minieagle.streams import run_command

SCRIPT = """
import os, sys
from minieagle.streams import run_command

def command():
    first = os.open("/dev/zero", os.O_RDONLY)
    sys.stdin.read()
    print("out", first > 2)
    for _ in range(int(sys.argv[1])):
        print("x" * 99999, flush=True)
    print("err", file=sys.stderr)
    return 3

sys.exit(run_command("x", command))
"""


@pytest.mark.parametrize(
    ("shell", "status"),
    [('"$@" 0 <&- >&- 2>&-; echo $?', "3"), ('"$@" 9 </dev/null | head -c 1 >/dev/null; echo ${PIPESTATUS[0]}', "141")],
)
def test_closed_streams_are_null_and_a_broken_pipe_ends_quietly(shell: str, status: str) -> None:
    command = ["bash", "-c", shell, "bash", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.stderr) == (status, "")


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ValueError("tree=5"), 2, "minieagle x: tree=5\n"),
        (OSError(28, "No space left"), 2, "minieagle x: [Errno 28] No space left\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_ends_have_their_status(
    error: BaseException, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("x", raising(error)) == status
    assert capsys.readouterr().err == told


def test_rich_s_way_to_end_on_a_broken_pipe_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> int:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            Console().on_broken_pipe()
        return 0

    monkeypatch.setattr("os.dup2", lambda *_: None)
    assert run_command("x", command) == 141
    with pytest.raises(SystemExit, match="5"):
        run_command("x", raising(SystemExit(5)))

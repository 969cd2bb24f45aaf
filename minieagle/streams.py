"""The standard streams of a command, which may be closed, full, or a pipe that nobody reads any more.

The one idea: whoever closed a stream doesn't want what goes there; that is no fault, and no traceback. A pipe whose
reader has left ends the command, as it ends every Unix filter: with 141, which a shell reports for SIGPIPE.
"""

import os
import sys
from collections.abc import Callable
from typing import Final

BROKEN_PIPE: Final = 128 + 13
INTERRUPTED: Final = 128 + 2


def run_command(name: str, command: Callable[[], int]) -> int:
    """The exit status of a command: its own, 2 with the cause told for what its user can mend, 130 when interrupted,
    141 when its output is read no more."""
    _open_closed()
    try:
        status = command()
        sys.stdout.flush()  # here, where a fault can still be told
        return status
    except BrokenPipeError:
        return _broken_pipe()
    except (ValueError, OSError) as error:  # whichever folder named it
        print(f"minieagle {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # how rich ends a program then
            return _broken_pipe()
        raise


def _open_closed() -> None:
    """The null device for streams that are closed: otherwise the next files that are opened would take their numbers,
    and a library's message would go into one of them."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _broken_pipe() -> int:
    """What is still to be written at exit goes nowhere, without a word."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        try:
            (sys.stdout if number == 1 else sys.stderr).flush()
        except OSError:
            os.dup2(null, number)
    os.close(null)
    return BROKEN_PIPE

"""What every bench prints around its figures: its own command line, the machine, tables, and what each figure means.

The one idea: a figure without its machine and its definition is no figure. Tables are rich on a terminal and Markdown
in a pipe, so that a saved report can be read and pasted as it is.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

TOKENS_PER_STEP = "tokens per step: emitted tokens / target forwards of the decode phase, the bonus token included"
ACCEPTANCE = (
    "acceptance by depth: share of steps whose accepted path reaches depth 1, 2, ... (survival, not conditional)"
)
REPEATED = "repeated 4-grams: share of 4-token windows of a text that occur earlier in it (loops inflate acceptance)"
IDLE_LOAD = 0.5
"""Load average (processes, over a minute) above which some other process is taken to be busy."""


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine_line(load_before: float) -> str:
    """Processor, cores, torch, threads and load average, in one line."""
    return (
        f"{cpu_model()}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"load average {load_before:.2f} before and {os.getloadavg()[0]:.2f} after"
    )


def peak_memory_bytes() -> int:
    """The most resident memory this process has had, loading included."""
    # VmHWM, not getrusage: the latter carries the parent's peak over into a child
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@dataclass(frozen=True)
class Report:
    """One run of a bench: `begin` it first, so that the load average is the others', then print tables and notes."""

    command: str
    load_before: float
    console: Console

    @staticmethod
    def begin(bench: str, argv: Sequence[str]) -> Report:
        console = Console() if sys.stdout.isatty() else Console(width=200, no_color=True, highlight=False)
        report = Report(shlex.join(["python", f"bench/{bench}.py", *argv]), os.getloadavg()[0], console)
        if report.load_before > IDLE_LOAD:
            report.say(
                f"warning: load average {report.load_before:.2f} before the start: another process is busy, or was "
                "within the last minute; times are not to be trusted, counts are"
            )
        return report

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """One table; the first column is text, the others are figures."""
        table = Table(box=box.ROUNDED if self.console.is_terminal else box.MARKDOWN)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self.say(f"\n{title}")
        self.console.print(table, markup=False)

    def notes(self, lines: Sequence[str]) -> None:
        """What the figures mean, then the command line and the machine that they were taken on."""
        self.say("")
        for line in lines:
            self.say(f"- {line}")
        self.say(f"\ncommand: {self.command}\nmachine: {machine_line(self.load_before)}")


def new_parser(bench: str, doc: str) -> argparse.ArgumentParser:
    """A parser described by the first paragraph of the bench's own text."""
    first = doc.split("\n\n")[0].replace("\n", " ")
    return argparse.ArgumentParser(prog=f"bench/{bench}.py", description=first, allow_abbrev=False)


def add_model_options(parser: argparse.ArgumentParser, *, drafter: bool = True) -> None:
    """--model, --threads and, for those that speculate, --drafter."""
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model directory (default: the embedded model)")
    if drafter:
        parser.add_argument(
            "--drafter", type=Path, metavar="DIR", help="its drafter (the embedded model brings its own)"
        )
    parser.add_argument("--threads", type=int, metavar="N", help="threads torch uses (default: torch's own choice)")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def depths(shares: Sequence[float]) -> str:
    """Acceptance by depth in one cell."""
    return " ".join(f"{share:.2f}" for share in shares) or "-"

"""`minieagle convert-drafter SRC DST --to READER`: a drafter in the words and names of another engine, and back.

The work is spec/convert.py's. The target's weights are not read, only its config.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from minieagle.models.config import TargetConfig, read_json, target_config
from minieagle.options import add_wiring_options
from minieagle.spec.boundary import IDS
from minieagle.spec.convert import READERS, Verifier, convert_drafter


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `convert-drafter`."""
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="the drafter's directory, in any published format")
    add("destination", type=Path, metavar="DST", help="a new directory")
    add("--to", required=True, choices=READERS, help="who shall read it")
    add(
        "--model",
        "--model-path",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of its target; only config.json is read",
    )
    add("--verifier", metavar="NAME", help="the target's name, for speculators (default: its directory's)")
    add_wiring_options(parser)


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was written and proved; raises ValueError subclasses for what can't be done."""
    raw = read_json(options.model / "config.json")
    target: TargetConfig = target_config(raw)
    architectures = raw.get("architectures")
    verifier = Verifier(
        options.verifier or options.model.resolve().name,
        tuple(map(str, architectures)) if isinstance(architectures, list) else (),
    )
    wiring = convert_drafter(
        options.source,
        options.destination,
        options.to,
        target,
        verifier=verifier,
        convention=options.capture_convention,
        boundaries=options.boundaries,
    )
    _report(options.destination, options.to, wiring.config.boundaries)
    return 0


def _report(destination: Path, to: str, boundaries: tuple[int, ...]) -> None:
    config = read_json(destination / "config.json")
    nested = config.get("eagle_config") or {}
    ids = nested.get(IDS) or config.get(IDS)
    listed = f", listed as {ids}" if ids is not None else ""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{destination} written for {to}; it reads boundaries {list(boundaries)}{listed}")
    console.print("read back with the same wiring; drafts the same logits bit for bit")

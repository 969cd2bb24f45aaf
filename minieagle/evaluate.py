"""`minieagle eval`: how well a drafter predicts its target, from one pass of the target over given texts.

The one idea: teacher-forced, so the target never decodes. It is run once over all texts, from memory or streamed from
disk, and everything else is the drafter's. On a text that the target itself wrote greedily the score is exact: the
tokens per step that a greedy chain has in use (spec/walk.py). On any other text it is the agreement by depth, and the
report says which of the two a text got.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from minieagle.errors import ModelError
from minieagle.models.checkpoint import Progress
from minieagle.models.config import read_json, target_config
from minieagle.models.deepseek import Target
from minieagle.models.eagle3 import Drafter
from minieagle.passages import Passage, read_passages, written
from minieagle.source import add_source_options, model_directory, open_pair, reading
from minieagle.spec.observe import Source, check_texts, observe_texts
from minieagle.spec.walk import MAX_STEPS, Agreement, Walk, score, total, total_agreement
from minieagle.tokenizer import Tokenizer

WALK_NOTE = (
    "tokens per step: emitted tokens / target forwards of the decode phase, the bonus token included, as in use; "
    "acceptance by depth: share of these steps whose accepted path reaches depth 1, 2, ... (survival)"
)
AGREEMENT_NOTE = (
    "agreement by depth: share of positions where the token drafted at depth 1, 2, ... is the target's greedy choice, "
    "the drafter having been fed the text's own tokens up to there (not conditional on lesser depths). These texts are "
    "not the target's own greedy writing, so there are no steps to count"
)


@dataclass(frozen=True)
class Evaluation:
    """The passages and their scores, in the same order."""

    passages: tuple[Passage, ...]
    scores: tuple[Walk | Agreement, ...]

    @property
    def walks(self) -> list[Walk]:
        """Of the passages that the target itself wrote greedily."""
        return [score for score in self.scores if isinstance(score, Walk)]

    @property
    def agreements(self) -> list[Agreement]:
        """Of the other passages."""
        return [score for score in self.scores if isinstance(score, Agreement)]

    def table(self) -> Table:
        scores = ["tokens per step", "acceptance by depth"] * bool(self.walks)
        scores += ["agreement by depth"] * bool(self.agreements)
        table = Table("texts", "number", "scored tokens", *scores)
        if self.walks:
            walk = total(self.walks)
            acceptance = [reached / max(1, walk.num_steps) for reached in walk.reached]
            figures = [str(walk.num_tokens), f"{walk.tokens_per_step:.3f}", _depths(acceptance)]
            table.add_row("the target's own, greedy", str(len(self.walks)), *figures)
        if self.agreements:
            agreement = total_agreement(self.agreements)
            figures = [str(agreement.counts[0]), *["-", "-"] * bool(self.walks), _depths(agreement.rates)]
            table.add_row("others", str(len(self.agreements)), *figures)
        return table

    def notes(self) -> list[str]:
        """What each printed number means."""
        return [WALK_NOTE] * bool(self.walks) + [AGREEMENT_NOTE] * bool(self.agreements)

    def to_json(self) -> dict[str, Any]:
        """All counts, in all and by passage."""
        report: dict[str, Any] = {"meaning": self.notes()}
        if self.walks:
            walk = total(self.walks)
            report["walk"] = vars(walk) | {"tokens_per_step": walk.tokens_per_step}
        if self.agreements:
            agreement = total_agreement(self.agreements)
            report["agreement"] = vars(agreement) | {"rates": agreement.rates}
        report["texts"] = [
            {"origin": text.origin, "tokens": len(text.tokens), "prompt_len": text.prompt_len} | _counts(score)
            for text, score in zip(self.passages, self.scores, strict=True)
        ]
        return report


def _counts(score: Walk | Agreement) -> dict[str, Any]:
    return {"greedy": isinstance(score, Walk), **vars(score)}


def _depths(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.3f}" for share in shares)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `minieagle eval`."""
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="what to score: plain text, or .jsonl with token ids as `train` writes it (default: the target writes)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=1024, metavar="N", help="plain text is cut into pieces of N tokens"
    )
    parser.add_argument("--num-steps", type=int, default=5, metavar="N", help="length of the chain (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_source_options(parser)


def run(options: argparse.Namespace) -> int:
    """`minieagle eval`; returns the exit status."""
    _check(options)
    console = Console(stderr=True)
    tokenizer = Tokenizer(model_directory(options))
    passages: list[Passage] = []
    for path in options.text or ():
        passages += read_passages(path, tokenizer, options.max_tokens)
    if options.text:  # refused before minutes of loading
        config = target_config(read_json(model_directory(options) / "config.json"))
        check_texts([passage.tokens for passage in passages], config, config.max_position_embeddings)
    source, drafter, _ = open_pair(options, console)
    if not options.text:
        assert isinstance(source, Target), "checked above"
        passages = written(source, tokenizer, options.max_tokens)
    with reading("reading layers", console) as progress:
        found = evaluate(source, drafter, passages, options.num_steps, progress=progress)
    _print(found, as_json=options.json)
    return 0


def _check(options: argparse.Namespace) -> None:
    if not 1 <= options.num_steps <= MAX_STEPS:
        raise ModelError(f"--num-steps {options.num_steps} must be in 1..{MAX_STEPS}")
    if options.max_tokens < 2:
        raise ModelError(f"--max-tokens {options.max_tokens} must be at least 2: a root and a token to draft")
    if options.stream_layers and not options.text:
        raise ModelError("--stream-layers needs --text FILE: a target that is read from disk can't write texts itself")


def evaluate(
    source: Source,
    drafter: Drafter,
    passages: Sequence[Passage],
    num_steps: int,
    *,
    progress: Progress | None = None,
) -> Evaluation:
    """Run the target once over the passages and score the drafter on each. progress: of a streamed target's bytes.
    Raises TextError for passages that the target can't be run over."""
    texts = [passage.tokens for passage in passages]
    seen = observe_texts(source, texts, drafter.config.boundaries, progress=progress)
    scores = [score(drafter, text, passage.prompt_len, num_steps) for text, passage in zip(seen, passages, strict=True)]
    return Evaluation(tuple(passages), tuple(scores))


def _print(found: Evaluation, *, as_json: bool) -> None:
    if as_json:
        json.dump(found.to_json(), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    out = Console()
    out.print(found.table())
    for note in found.notes():
        out.print(f"- {note}", markup=False)

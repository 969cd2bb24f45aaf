"""Tokens per step by category of prompt: chain and dynamic trees, greedy and sampled, in batches.

    python bench/acceptance.py --prompts FILE.jsonl
    python bench/acceptance.py --prompts FILE.jsonl --num-prompts 40 --trees dynamic:4,4,16 dynamic:6,8,24

Counts, not times: a busy machine does no harm. Each setting runs every prompt to the model's own stop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench.prompts import BenchPrompt, encode, read_prompts
from bench.report import ACCEPTANCE, REPEATED, TOKENS_PER_STEP, Report, add_model_options, depths, new_parser, percent
from bench.runs import Run, check_room, load, repeated_4grams, run_all, total_stats, variant
from minieagle.engine import Engine
from minieagle.errors import ModelError
from minieagle.sampling import SamplingParams
from minieagle.spec.tree import Shape, parse_shape
from minieagle.spec.walk import total, walk

ALL = "all"
COLUMNS = ("setting", "prompts", "texts", "tokens", "tokens per step", "acceptance by depth", "repeated 4-grams")
NOTES = (
    TOKENS_PER_STEP + ", over all steps of the row (not a mean of means)",
    ACCEPTANCE,
    REPEATED,
    "texts end at the model's own stop or at --max-tokens",
)


@dataclass(frozen=True)
class Setting:
    """What one pass over the prompts measures."""

    shape: Shape
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.shape}, {'greedy' if self.temperature == 0 else f'temperature {self.temperature:g}'}"


def parser() -> argparse.ArgumentParser:
    options = new_parser("acceptance", __doc__ or "")
    add_model_options(options)
    options.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL of prompts (default: a few of its own)")
    options.add_argument(
        "--num-prompts", type=int, metavar="N", help="prompts taken, spread over the file (default: all)"
    )
    options.add_argument("--max-tokens", type=int, default=256, metavar="N", help="new tokens a prompt (default: 256)")
    options.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    options.add_argument("--chain", type=int, default=5, metavar="STEPS", help="the chain's length (default: 5)")
    options.add_argument(
        "--trees", nargs="+", default=["dynamic:4,4,16"], metavar="SHAPE", help="default: dynamic:4,4,16"
    )
    options.add_argument("--temperature", type=float, default=0.7, help="of the sampled settings (default: 0.7)")
    options.add_argument("--batch", type=int, default=8, metavar="N", help="requests at a time (default: 8)")
    return options


def measure(
    loaded: Engine, settings: Sequence[Setting], prompts: Sequence[tuple[int, ...]], options: argparse.Namespace
) -> list[list[Run]]:
    """The runs of each setting, in the prompts' order."""
    found = []
    with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
        for setting in settings:
            task = progress.add_task(setting.name, total=len(prompts))
            params = [
                SamplingParams(
                    temperature=setting.temperature,
                    seed=i,
                    max_tokens=options.max_tokens,
                    ignore_eos=options.ignore_eos,
                )
                for i in range(len(prompts))
            ]
            engine = variant(loaded, setting.shape, max_seqs=options.batch)
            found.append(
                run_all(engine, prompts, params, lambda done, task=task: progress.update(task, completed=done))
            )
    return found


def rows(setting: Setting, runs: Sequence[Run], prompts: Sequence[BenchPrompt]) -> list[list[str]]:
    """One line for each category, and one for all of them if there are several."""
    categories = sorted({prompt.category for prompt in prompts})
    found = []
    for category in categories + [ALL] * (len(categories) > 1):
        mine = [run for run, prompt in zip(runs, prompts, strict=True) if category in (ALL, prompt.category)]
        stats = total_stats(mine)
        texts = [run.token_ids for run in mine]
        figures = [f"{stats.tokens_per_step:.3f}", depths(stats.acceptance_by_depth), percent(repeated_4grams(texts))]
        found.append([setting.name, category, str(len(mine)), str(sum(map(len, texts))), *figures])
    return found


def ratios(
    settings: Sequence[Setting], found: Sequence[Sequence[Run]], prompts: Sequence[BenchPrompt]
) -> list[list[str]]:
    """Tree over chain at the same temperature, sampled over greedy with the same tree: dialogue, and all prompts."""
    taus = {}
    for setting, runs in zip(settings, found, strict=True):
        for part in ("dialogue", ALL):
            mine = [run for run, prompt in zip(runs, prompts, strict=True) if part in (ALL, prompt.category)]
            taus[setting, part] = total_stats(mine).tokens_per_step
    chain = settings[0].shape
    pairs = [(s, Setting(chain, s.temperature)) for s in settings if s.shape != chain]
    pairs += [(s, Setting(s.shape, 0.0)) for s in settings if s.temperature > 0]

    def ratio(over: Setting, under: Setting, part: str) -> str:
        return f"{taus[over, part] / taus[under, part]:.3f}" if taus[under, part] else "-"

    return [[f"{a.name} / {b.name}", ratio(a, b, "dialogue"), ratio(a, b, ALL)] for a, b in pairs]


def walked(loaded: Engine, num_steps: int, runs: Sequence[Run], prompts: Sequence[tuple[int, ...]]) -> list[str]:
    """The greedy chain's texts scored offline (spec/walk.py), beside what the engine counted while it wrote them."""
    assert loaded.drafter is not None, "acceptance is the drafter's"
    offline = total(
        [
            walk(loaded.target, loaded.drafter, (*prompt, *run.token_ids), len(prompt), num_steps)
            for run, prompt in zip(runs, prompts, strict=True)
        ]
    )
    online = total_stats(runs)
    same = (offline.num_steps, offline.num_tokens) == (online.num_steps, online.num_tokens)
    counts = [f"{online.num_tokens} / {online.num_steps}", f"{offline.num_tokens} / {offline.num_steps}"]
    return [*counts, f"{online.tokens_per_step:.4f}", f"{offline.tokens_per_step:.4f}", "yes" if same else "NO"]


def bench(options: argparse.Namespace, report: Report) -> None:
    if options.temperature <= 0:
        raise ModelError(f"--temperature {options.temperature:g} must be above 0: greedy is measured anyway")
    shapes = [parse_shape(f"chain:{options.chain}"), *map(parse_shape, options.trees)]
    if options.model is not None and options.drafter is None:
        raise ModelError(f"--model {options.model} needs --drafter: acceptance is the drafter's")
    settings = [Setting(shape, heat) for heat in (0.0, options.temperature) for shape in shapes]
    prompts = read_prompts(options.prompts, options.num_prompts)
    loaded = load(options.model, options.drafter, shapes, options.threads)
    ids = encode(loaded.tokenizer, prompts)
    check_room(loaded.max_context_tokens, ids, options.max_tokens)
    found = measure(loaded, settings, ids, options)
    lines = [line for setting, runs in zip(settings, found, strict=True) for line in rows(setting, runs, prompts)]
    report.table(f"{len(prompts)} prompts, batches of {options.batch}", COLUMNS, lines)
    title = "Ratios of tokens per step"
    report.table(title, ("ratio", "dialogue", "all prompts"), ratios(settings, found, prompts))
    columns = ("tokens / steps online", "tokens / steps offline", "online", "offline walk", "equal")
    title = f"{settings[0].name}: tokens per step in use and by the offline walk"
    report.table(title, columns, [walked(loaded, options.chain, found[0], ids)])
    report.notes(NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(arguments)
    try:
        bench(options, Report.begin("acceptance", arguments))
    except ValueError as error:  # the user's to mend
        print(f"bench/acceptance.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

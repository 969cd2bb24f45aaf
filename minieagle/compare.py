"""The same prompts without and with speculation, one after the other, in one process: what `minieagle demo` and
`minieagle bench` show.

Runs alternate prompt by prompt, so that a machine whose speed drifts is fair to both; the speed ratio is the median
over prompts of plain seconds per token by speculative seconds per token, of which the text is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.table import Table

from minieagle.llm import LLM, Prompt
from minieagle.sampling import SamplingParams
from minieagle.sequence import SpecStats


@dataclass(frozen=True)
class Run:
    """One prompt, one way. seconds: from the request to its end."""

    token_ids: tuple[int, ...]
    text: str
    seconds: float
    stats: SpecStats

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / len(self.token_ids)


def run(llm: LLM, prompt: Prompt, params: SamplingParams, *, spec: bool, show: Callable[[str], None]) -> Run:
    """Stream one prompt; `show` gets each piece of text."""
    start = time.perf_counter()
    tokens: list[int] = []
    pieces: list[str] = []
    stats = SpecStats()
    for output in llm.stream(prompt, params, spec=spec):
        tokens += output.token_ids
        pieces.append(output.text)
        stats = output.stats or stats
        show(output.text)
    return Run(tuple(tokens), "".join(pieces), time.perf_counter() - start, stats)


@dataclass(frozen=True)
class Comparison:
    """Pairs (plain, speculative) of the same prompts."""

    pairs: tuple[tuple[Run, Run], ...]

    @property
    def num_same(self) -> int:
        return sum(plain.token_ids == spec.token_ids for plain, spec in self.pairs)

    @property
    def speed_ratio(self) -> float:
        return median(plain.seconds_per_token / spec.seconds_per_token for plain, spec in self.pairs)

    @property
    def stats(self) -> SpecStats:
        total = SpecStats()
        for _, spec in self.pairs:
            total.add(spec.stats)
        return total

    def tokens_per_second(self, index: int) -> float:
        """Of the plain runs (0) or the speculative ones (1): all tokens by all seconds, prefill included."""
        runs = [pair[index] for pair in self.pairs]
        return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)

    def table(self) -> Table:
        """What a user wants to know, with the definition of each number."""
        stats = self.stats
        table = Table("", "value", "meaning", show_edge=False)
        table.add_row("same text", f"{self.num_same} of {len(self.pairs)}", "token ids without and with speculation")
        table.add_row(
            "tokens per step",
            f"{stats.tokens_per_step:.2f}",
            "emitted / target forwards while decoding, bonus token included",
        )
        by_depth = "  ".join(f"{rate:.2f}" for rate in stats.acceptance_by_depth)
        table.add_row("acceptance by depth", by_depth, "share of steps whose accepted path reaches depth 1, 2, ...")
        table.add_row("plain", f"{self.tokens_per_second(0):.0f} tok/s", "prompt included")
        table.add_row("speculative", f"{self.tokens_per_second(1):.0f} tok/s", "prompt included")
        table.add_row("speed ratio", f"{self.speed_ratio:.2f}x", "median over prompts, runs interleaved")
        return table


def compare(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, *, show: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Run, Run]]:
    """Yields (plain, speculative) per prompt, after a short warm-up of each; odd prompts run speculative first."""
    if params.seed is None:  # both ways must draw from the same noise
        params = replace(params, seed=0)
    warm_up = SamplingParams(max_tokens=8)
    for spec in (False, True):
        run(llm, prompts[0], warm_up, spec=spec, show=lambda text: None)
    for index, prompt in enumerate(prompts):
        order = (False, True) if index % 2 == 0 else (True, False)
        done = {spec: run(llm, prompt, params, spec=spec, show=show if spec else lambda text: None) for spec in order}
        yield done[False], done[True]

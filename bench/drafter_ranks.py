"""A drafter over several ranks, whole on rank 0 or cut: what a draft step costs either way, and the bytes of a rank.

    python bench/drafter_ranks.py
    python bench/drafter_ranks.py --ranks 2 --vocabulary 32768

The drafter has the sizes of the published latent-attention drafter for Kimi-K2.5 (7168 wide, 3.7 GB) and random
weights. Whole means that rank 0 drafts by itself and nothing is announced; cut is what minieagle does: feed-forward and
vocabulary in pieces, attention and fusion whole on every rank. Both are timed in turns in one job, a rank a thread on a
CPU and a device on GPUs. More ranks than cores would say nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench.ranks import ROOT, torchrun
from bench.report import Report, new_parser
from minieagle.dist.group import from_environment
from minieagle.dist.job import job
from minieagle.dist.ranks import Ranks
from minieagle.llm import set_threads
from minieagle.models.deepseek import Target
from minieagle.models.drafter_config import DrafterConfig, LatentSizes
from minieagle.models.eagle3 import Drafter
from minieagle.models.layers import Linear
from minieagle.models.lockstep import Lead, follow
from minieagle.models.mla import LatentAttention
from minieagle.models.rope import RotaryTable
from minieagle.models.rows import Rows, Span
from minieagle.models.shards import WHOLE, Shards

VOCABULARIES = (163840, 32768)
ROWS = (1, 8)
CONTEXT = 64
ROUNDS = 7
PARTS = ("fusion", "attention", "feed-forward", "vocabulary")
NOTES = (
    f"a draft step: the announcement, one forward of so many rows behind {CONTEXT} others, their logits on rank 0; "
    f"median of {ROUNDS}, in turns",
    "collectives: what the cut adds, by themselves: the embedding's rows, one sum, the logits' pieces",
    "bytes: of the products, bfloat16; the fusion is read once a verify step, the rest at every draft step",
)


def config_of(vocabulary: int) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=7168,
        target_hidden_size=7168,
        intermediate_size=18432,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        vocab_size=VOCABULARIES[0],
        draft_vocab_size=vocabulary,
        boundaries=(2, 30, 58),
        max_position_embeddings=4096,
        rope_style="interleaved",
        latent=LatentSizes(
            q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
    )


# ---- a rank


def random_drafter(config: DrafterConfig, shards: Shards) -> Drafter:
    """This rank's pieces at random; what the numbers are changes no time. The embedding, which is not what is measured
    and would be 2.3 GB, is one row in memory."""
    device = shards.ranks.device
    with torch.device("meta"):
        drafter = Drafter(config, shards)
    for module in drafter.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(_random(parameter, device), requires_grad=False))
        if isinstance(module, Linear):
            module.pack()
    rows = shards.local(config.vocab_size, "vocab_size", summed=False)
    drafter.embed_tokens = torch.randn(1, config.hidden_size, device=device).bfloat16().expand(rows, -1)
    drafter.target_ids = torch.arange(config.draft_vocab_size, device=device)
    drafter.rotary = RotaryTable(config.rotary_dim, config.rope_theta, 256, None).to(device)
    return drafter


def _random(like: Tensor, device: torch.device) -> Tensor:
    """bfloat16 of that shape, every row the same: a gigabyte of random numbers would take longer than the bench."""
    row = torch.randn(like.shape[-1], device=device) * like.shape[-1] ** -0.5
    return row.bfloat16().expand(like.shape).contiguous()


def part_bytes(drafter: Drafter) -> list[int]:
    """Bytes of PARTS that this rank holds."""
    layer = drafter.midlayer
    attention = [layer.attention.w_uk, layer.attention.w_uv] if isinstance(layer.attention, LatentAttention) else []
    linears = [[drafter.fc], _linears(layer.attention), _linears(layer.mlp), [drafter.lm_head]]
    found = [sum(linear.dense_weight().nbytes for linear in part) for part in linears]
    found[1] += sum(fold.nbytes for fold in attention)
    return found


def _linears(module: nn.Module) -> list[Linear]:
    return [part for part in module.modules() if isinstance(part, Linear)]


class Step:
    """A draft step of some rows, repeatable: it writes the same rows of its cache each time."""

    def __init__(self, drafter: Drafter, num_rows: int) -> None:
        self.drafter = drafter
        self.cache = drafter.new_cache(CONTEXT + num_rows + 1)
        device = drafter.target_ids.device
        slots = torch.arange(1, CONTEXT + num_rows + 1, device=device)
        self.rows = Rows.of(torch.zeros(num_rows, dtype=torch.int64, device=device), [Span(slots, CONTEXT, num_rows)])
        self.states = torch.randn(num_rows, drafter.config.hidden_size, device=device).bfloat16()
        self.wanted = torch.arange(num_rows, device=device)

    def seconds(self) -> float:
        started = time.perf_counter()
        self.drafter(self.rows, self.states, self.cache, logit_rows=self.wanted).logits.cpu()
        return time.perf_counter() - started


def work(options: argparse.Namespace) -> None:
    """What every process of a job does; rank 0 writes what it measured."""
    config = config_of(options.vocabulary[0])
    with job(from_environment()) as ranks, torch.inference_mode():
        set_threads(1, None)
        cut = random_drafter(config, Shards(ranks, ranks.size))
        if not ranks.leads:
            exchange(ranks, cut)
            follow(ranks, cast(Target, None), cut)  # which is never asked
            return
        whole = random_drafter(config, WHOLE)
        between = exchange(ranks, cut)
        cut.lead = Lead(ranks)
        times = [list(pair) for pair in timed(whole, cut)]
        cut.lead.stop()
        found = {"bytes": [part_bytes(whole), part_bytes(cut)], "times": times, "collectives": between}
        options.worker.write_text(json.dumps(found))


def timed(whole: Drafter, cut: Drafter) -> Iterator[tuple[float, float]]:
    """Median seconds of a step, whole and cut, for each of ROWS."""
    for num_rows in ROWS:
        steps = [Step(drafter, num_rows) for drafter in (whole, cut)]
        turns = [[step.seconds() for step in steps] for _ in range(1 + ROUNDS)][1:]
        yield median(turn[0] for turn in turns), median(turn[1] for turn in turns)


def exchange(ranks: Ranks, cut: Drafter) -> list[float]:
    """Median seconds of a step's collectives alone, for each of ROWS. All ranks at once."""
    found: list[float] = []
    for num_rows in ROWS:
        hidden = torch.zeros(num_rows, cut.config.hidden_size, dtype=torch.bfloat16, device=ranks.device)
        width = cut.config.draft_vocab_size // ranks.size
        logits = torch.zeros(num_rows, width, dtype=torch.bfloat16, device=ranks.device)
        times = []
        for _ in range(5 * ROUNDS):
            started = time.perf_counter()
            ranks.gather(hidden)
            cut.shards.join_columns(logits)
            cut.shards.sum(hidden).cpu()  # waits for a GPU
            times.append(time.perf_counter() - started)
        found.append(median(times))
    return found


# ---- the table


def measure(ranks: int, vocabulary: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        arguments = [f"--worker={path}", f"--vocabulary={vocabulary}"]
        subprocess.run(torchrun(ranks, __file__, *arguments), check=True, cwd=ROOT)
        return json.loads(path.read_text())


def bench(options: argparse.Namespace, report: Report) -> None:
    times: list[list[str]] = []
    sizes: list[list[str]] = []
    for vocabulary in options.vocabulary:
        found = measure(options.ranks, vocabulary)
        for num_rows, (whole, cut), between in zip(ROWS, found["times"], found["collectives"], strict=True):
            cells = [f"{1e3 * seconds:.1f} ms" for seconds in (whole, cut, between)]
            times.append([f"{vocabulary}", str(num_rows), *cells, f"{whole / cut:.2f}"])
        for name, mine in zip(("whole", f"cut over {options.ranks}"), found["bytes"], strict=True):
            sizes.append(
                [f"{vocabulary}", name, *[f"{part / 1e6:.0f} MB" for part in mine], f"{sum(mine) / 1e9:.2f} GB"]
            )
    columns = ("draft vocabulary", "rows", "whole on rank 0", f"cut over {options.ranks}", "of it collectives", "gain")
    report.table("a draft step", columns, times)
    report.table("bytes on a rank", ("draft vocabulary", "drafter", *PARTS, "all"), sizes)
    report.notes(NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = new_parser("drafter_ranks", __doc__ or "")
    add = options.add_argument
    add("--ranks", type=int, default=2, choices=(2, 4, 8), help="how many (default: %(default)s)")
    add("--vocabulary", type=int, nargs="*", default=list(VOCABULARIES), metavar="N", help="sizes to draft over")
    add("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    asked = options.parse_args(arguments)
    if asked.worker is not None:
        work(asked)
        return 0
    bench(asked, Report.begin("drafter_ranks", arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())

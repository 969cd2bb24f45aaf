"""Whether the GPU path is right on this machine's first GPU, bit for bit where that is promised, and how fast it is.

    python bench/gpu_check.py
    python bench/gpu_check.py --max-tokens 64 --no-speeds

Everything runs on the embedded model, against the CPU where the CPU is the reference, and on layers of Kimi-K2.5's
widths where the embedded ones say nothing. Exit status: 0 all right, 1 a check failed, 2 no GPU here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench.limits import Footprint, begin_decoding, decode_steps
from bench.prompts import encode, read_prompts
from bench.report import Report, new_parser, percent
from bench.runs import Run, run_all, variant
from minieagle.engine import Engine
from minieagle.llm import embedded, load_engine
from minieagle.models.attention import AttentionPlan
from minieagle.models.deepseek import Block, Target
from minieagle.models.flash_mla import HAS_FLASHINFER, WIDTHS, FlashInferPrefix, FlashPlan
from minieagle.models.graphs import Record, VerifyGraphs, record_cuda
from minieagle.models.int4 import Int4Linear, dequantize, pack, quantize
from minieagle.models.moe import Expert, MixtureOfExperts
from minieagle.models.rows import Rows, Span
from minieagle.models.selfcheck import row_difference
from minieagle.models.target_weights import load_target
from minieagle.sampling import SamplingParams
from minieagle.spec.tree import Shape, Tree, parse_shape

SHAPES = ("chain:5", "dynamic:4,4,16")
TEMPERATURES = (0.0, 0.8)
NUM_PROMPTS = 3
SLACK = 2.0
"""The GPU may be this many times as far from float32 as the CPU's bfloat16 is."""
REPEATS = 20
NOTES = (
    "logits: root mean square distance from the same model in float32 on the CPU, the GPU's against the CPU's",
    "row invariance: models/selfcheck.py, the largest difference in a logit between two ways to batch the same rows",
    "same tokens and logprobs: bit for bit, plain against speculative, or recorded steps against others",
    "bandwidth: reading a large buffer once; share: bytes that must be read / time / bandwidth",
    "times: medians of events on the GPU; layers have Kimi-K2.5's widths, unsharded",
)


@dataclass(frozen=True)
class Finding:
    """What one check found; passed None: it could not be made here."""

    name: str
    passed: bool | None
    detail: str

    @property
    def row(self) -> list[str]:
        return [self.name, {True: "ok", False: "FAILED", None: "not made"}[self.passed], self.detail]


# ---- right


def all_logits(target: Target, tokens: Sequence[int]) -> Tensor:
    """[T, vocab] on the CPU."""
    ids, slots = (torch.tensor(list(n), device=target.device) for n in (tokens, range(1, len(tokens) + 1)))
    return target(Rows.of(ids, [Span(slots, 0, len(tokens))]), target.new_cache(len(tokens) + 1)).logits.cpu()


def check_logits(target: Target, tokens: Sequence[int]) -> Finding:
    """Against the same weights on the CPU: as close to float32 as bfloat16 is there."""
    exact = all_logits(load_target(embedded("target"), dtype=torch.float32), tokens)
    allowed, found = (
        float((all_logits(one, tokens) - exact).square().mean().sqrt())
        for one in (load_target(embedded("target")), target)
    )
    return Finding("logits", found <= SLACK * allowed, f"{found:.4f} from float32, the CPU {allowed:.4f}")


def check_greedy(target: Target, here: Run, reference: Run, prompt: Sequence[int]) -> Finding:
    """The CPU's greedy text; where it differs, the CPU's own choice must have been a near-tie."""
    pairs = zip(here.token_ids, reference.token_ids, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(here.token_ids))
    if same == len(here.token_ids):
        return Finding("greedy text", True, f"{same} tokens as on the CPU")
    context = [*prompt, *reference.token_ids[:same]]
    last = all_logits(load_target(embedded("target"), dtype=torch.float32), context)[-1]
    margin = abs(float(last[here.token_ids[same]] - last[reference.token_ids[same]]))
    noise = float((all_logits(target, context)[-1] - last).abs().max())
    return Finding("greedy text", margin <= 2 * noise, f"{same} tokens as on the CPU, then a margin of {margin:.4f}")


def check_row_invariance(target: Target) -> Finding:
    difference = row_difference(target)
    return Finding("row invariance", difference == 0, f"largest difference {difference:.3g}")


def differences(first: Sequence[Run], second: Sequence[Run]) -> int:
    """Requests whose tokens or logprobs are not the same bits."""
    return sum((a.token_ids, a.logprobs) != (b.token_ids, b.logprobs) for a, b in zip(first, second, strict=True))


def sampled(
    loaded: Engine, shape: Shape | None, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> list[Run]:
    return run_all(variant(loaded, shape, max_seqs=len(prompts)), prompts, [params] * len(prompts))


def check_speculation(loaded: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Iterator[Finding]:
    """Plain and speculative decoding, chain and tree, greedy and sampled."""
    for heat in TEMPERATURES:
        params = SamplingParams(temperature=heat, seed=7, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
        plain = sampled(loaded, None, prompts, params)
        for name in SHAPES:
            wrong = differences(plain, sampled(loaded, parse_shape(name), prompts, params))
            title = f"speculation, {name}, temperature {heat}"
            yield Finding(title, wrong == 0, f"{len(prompts) - wrong} of {len(prompts)} prompts the same")


@contextmanager
def recorded(target: Target, record: Record) -> Iterator[None]:
    """Decode and verify steps replayed from graphs."""
    target.graphs = VerifyGraphs(record)
    try:
        yield
    finally:
        target.graphs = None


def check_graphs(
    loaded: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int, record: Record = record_cuda
) -> Finding:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
    shape = parse_shape(SHAPES[1])
    plain = sampled(loaded, shape, prompts, params)
    with recorded(loaded.target, record):
        wrong = differences(plain, sampled(loaded, shape, prompts, params))
    return Finding("CUDA graphs", wrong == 0, f"{len(prompts) - wrong} of {len(prompts)} prompts the same")


def mixtures(target: Target) -> list[MixtureOfExperts]:
    blocks = [block for block in target.layers if isinstance(block, Block)]
    return [block.feed_forward for block in blocks if isinstance(block.feed_forward, MixtureOfExperts)]


def check_experts(target: Target) -> Finding:
    """The first mixture's grouped product against its dequantised weights in float64."""
    mixture = mixtures(target)[0]
    if mixture.grouped is None:
        return Finding("INT4 experts", None if target.device.type == "cpu" else False, "not grouped on this device")
    x = torch.randn(9, target.config.hidden_size, device=target.device).to(target.dtype)
    ids, _ = mixture.router(x)
    got = mixture.grouped(x, ids).double()
    chosen = zip(x, ids.tolist(), strict=True)
    wanted = torch.stack([torch.stack([in_float64(mixture, e, row) for e in own]) for row, own in chosen])
    error = float((got - wanted).abs().max() / wanted.abs().max())
    return Finding("INT4 experts", error < 2.0**-6, f"largest error {error:.2g} of the largest output")


def in_float64(mixture: MixtureOfExperts, index: int, x: Tensor) -> Tensor:
    """One expert's output [D] for one row."""
    expert = mixture.experts[index]
    assert isinstance(expert, Expert) and isinstance(expert.gate_up, Int4Linear) and isinstance(expert.down, Int4Linear)
    first, second = (dequantize(p.codes, p.scale, torch.float32).double() for p in (expert.gate_up, expert.down))
    gate, up = (first @ x.double()).chunk(2)
    return second @ (torch.nn.functional.silu(gate) * up)


def check_library_int4(device: torch.device) -> Finding:
    """PyTorch's INT4 product, which serves experts that the grouped kernel doesn't take: against float64, and a row by
    itself against the same row among others."""
    codes, scale = quantize(torch.randn(512, 1024).bfloat16(), 32)
    packed = pack(codes)
    linear = Int4Linear(packed.to(device), scale.to(device), torch.bfloat16)
    linear.pack()
    x = torch.randn(33, 1024).bfloat16()
    got = linear(x.to(device))
    alone = torch.cat([linear(row) for row in x.to(device).split(1)])
    wanted = x.double() @ dequantize(packed, scale, torch.float32).double().t()
    error = float((got.cpu().double() - wanted).abs().max() / wanted.abs().max())
    good = linear.native and error < 2.0**-6 and torch.equal(got, alone)
    rows = "the same" if torch.equal(got, alone) else "DIFFERENT"
    return Finding(
        "PyTorch's INT4 product", good, f"largest error {error:.2g} of the largest output, rows {rows} alone"
    )


def check_flashinfer(device: torch.device, num_heads: int = 16, context: int = 300) -> Finding:
    """flashinfer's prefix merged with our tree part, against our attention, on random rows of its widths."""
    if not HAS_FLASHINFER:
        return Finding("flashinfer", None, "not installed (extra `gpu`)")
    rank, rope = WIDTHS
    draw = torch.Generator(device).manual_seed(0)
    cache = torch.randn(context + 9, 1, rope + rank, device=device, generator=draw).bfloat16()
    tree = Tree((0,) * 8, (-1, 0, 0, 1, 1, 2, 3, 6)).ancestors.to(device)
    rows = Rows.of(torch.zeros(8, dtype=torch.int64, device=device), [
        Span(torch.arange(1, context + 9, device=device), context, 8, tree)
    ])  # fmt: skip
    q = torch.randn(8, num_heads, rope + rank, device=device, generator=draw).bfloat16().float() * 0.05
    prefix = FlashInferPrefix(device, num_heads, rank, rope, torch.bfloat16)
    merged, ours = (
        plan.attend(q, cache, key_width=rope + rank, value_start=rope)
        for plan in (FlashPlan.of(rows, prefix), AttentionPlan.of(rows))
    )
    error = float((merged - ours).abs().max() / ours.abs().max())
    return Finding("flashinfer", error < 2.0**-6, f"largest error {error:.2g} of the largest output")


def findings(device: torch.device, max_tokens: int) -> Iterator[Finding]:
    """Every check, as it is done."""
    loaded, reference = (
        load_engine(tree=parse_shape(SHAPES[1]), device=place) for place in (device, torch.device("cpu"))
    )
    prompts = encode(loaded.tokenizer, read_prompts(None, NUM_PROMPTS))
    greedy = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with torch.inference_mode():
        yield check_logits(loaded.target, prompts[0])
        here, there = (sampled(one, None, prompts[:1], greedy)[0] for one in (loaded, reference))
        yield check_greedy(loaded.target, here, there, prompts[0])
        yield check_row_invariance(loaded.target)
        yield from check_speculation(loaded, prompts, max_tokens)
        yield check_experts(loaded.target)
        yield check_library_int4(device)
        yield check_flashinfer(device)
        yield check_graphs(loaded, prompts, max_tokens)


# ---- fast


def gpu_seconds(run: Callable[[], object]) -> float:
    """Median time of one run on the GPU, after one that compiles."""
    run()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def bandwidth(device: torch.device, num_bytes: int = 4 * 2**30) -> float:
    """Bytes a second of one read of a buffer far larger than the caches."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return buffer.nbytes / gpu_seconds(buffer.sum)


Timed = tuple[str, int, Callable[[], object]]
"""What runs, the bytes it must read, and it."""


def layers(device: torch.device) -> Iterator[Timed]:
    """Products and attention of Kimi-K2.5's widths, at 1 and 16 rows."""
    # Triton comes with CUDA builds of torch only
    from minieagle.models.grouped_int4 import Tiles, grouped_product
    from minieagle.models.tiled_linear import tiled_linear

    width, num_heads, context = 7168, 64, 4096
    weight = torch.randn(18432, width, device=device).bfloat16()
    codes, scale = quantize(torch.randn(4096, width, device=device).bfloat16(), 32)
    packed, scales = pack(codes).repeat(32, 1, 1), scale.repeat(32, 1, 1)
    one = Int4Linear(packed[0], scales[0], torch.bfloat16)
    one.pack()
    cache = torch.randn(context + 17, 1, 576, device=device).bfloat16()
    for count in (1, 16):
        x = torch.randn(count, width, device=device).bfloat16()
        yield f"tiled linear 7168 -> 18432, {count} rows", weight.nbytes, lambda x=x: tiled_linear(x, weight)
        yield f"library's linear, {count} rows", weight.nbytes, lambda x=x: torch.nn.functional.linear(x, weight)
        ids = torch.rand(count, 32, device=device).topk(8).indices
        used = ids.unique().numel() * (packed[0].nbytes + scales[0].nbytes)
        tiles = Tiles.of(ids, 32)
        yield (
            f"INT4 experts 7168 -> 4096, 8 of 32, {count} rows",
            used,
            lambda x=x, tiles=tiles: grouped_product(x, packed, scales, tiles, num_pairs=8 * x.shape[0], pairs_a_row=8),
        )
        yield f"PyTorch's INT4 product 7168 -> 4096, {count} rows", one.nbytes, lambda x=x: one(x)
        slots = torch.arange(1, context + 17, device=device)
        plan = AttentionPlan.of(Rows.of(slots[:count], [Span(slots, context, count)]))
        q = torch.randn(count, num_heads, 576, device=device) * 0.05
        yield (
            f"attention, 64 heads, context 4096, {count} rows",
            cache.nbytes,
            lambda q=q, plan=plan: plan.attend(q, cache, key_width=576, value_start=64),
        )


def decode_seconds(loaded: Engine, prompt: tuple[int, ...], num_steps: int) -> float:
    """Median time of a plain decode step, by the host's clock."""
    engine = variant(loaded, None)
    begin_decoding(engine, prompt, num_steps)
    return median(decode_steps(engine))


def speed_rows(device: torch.device, num_steps: int) -> Iterator[list[str]]:
    """Name, milliseconds, GB/s, share of the bandwidth."""
    streamed = bandwidth(device)
    yield ["reading a large buffer", "", f"{streamed / 1e9:.0f}", "100.0 %"]

    def row(name: str, num_bytes: float, seconds: float) -> list[str]:
        speed = num_bytes / seconds
        return [name, f"{1e3 * seconds:.3f}", f"{speed / 1e9:.0f}", percent(speed / streamed)]

    for name, num_bytes, run in layers(device):
        yield row(name, num_bytes, gpu_seconds(run))
    loaded = load_engine(device=device)
    prompt = encode(loaded.tokenizer, read_prompts(None, 1))[0]
    read = Footprint.of(loaded.target).read(context=len(prompt))
    yield row("embedded model, plain step", read, decode_seconds(loaded, prompt, num_steps))
    with recorded(loaded.target, record_cuda):
        yield row("embedded model, plain step, CUDA graph", read, decode_seconds(loaded, prompt, num_steps))


def parser() -> argparse.ArgumentParser:
    options = new_parser("gpu_check", __doc__ or "")
    options.add_argument("--max-tokens", type=int, default=48, metavar="N", help="tokens of each text (default: 48)")
    options.add_argument("--no-speeds", action="store_true", help="only check that it is right")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(arguments)
    if options.max_tokens < 1:
        print(f"bench/gpu_check.py: --max-tokens {options.max_tokens} must be at least 1", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench/gpu_check.py: torch sees no GPU here, so nothing was checked", file=sys.stderr)
        return 2
    report, device = Report.begin("gpu_check", arguments), torch.device("cuda", 0)
    report.say(f"GPU: {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}")
    found = list(findings(device, options.max_tokens))
    report.table("Right", ("check", "result", "detail"), [finding.row for finding in found])
    if not options.no_speeds:
        with torch.inference_mode():
            report.table("Fast", ("what", "ms", "GB/s", "share"), list(speed_rows(device, 32)))
    report.notes(NOTES)
    return 1 if any(finding.passed is False for finding in found) else 0


if __name__ == "__main__":
    sys.exit(main())

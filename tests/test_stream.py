"""A streamed target says what a resident one says, bit for bit, reads each byte once, and holds one layer's bytes."""

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench.synthetic import write_target
from minieagle.models import readahead
from minieagle.models.checkpoint import CheckpointError
from minieagle.models.deepseek import Target
from minieagle.models.headers import Stored, read_header, read_headers
from minieagle.models.readahead import ReadAhead
from minieagle.models.rows import Rows, Span
from minieagle.models.stream import EMBEDDING, StreamedTarget
from minieagle.models.target_weights import load_target
from minieagle.quantize import quantize_directory
from minieagle.spec import observe
from minieagle.spec.observe import Observed, TextError, observe_texts
from tests.oracles import save_target
from tests.strategies import SEEDS, target_configs, tokens

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=4)
KINDS = st.sampled_from(["plain", "int4"])
FIELDS = tuple(Observed.__dataclass_fields__)


def texts_of(lengths: list[int], seed: int) -> list[list[int]]:
    return [tokens(length, seed + i).tolist() for i, length in enumerate(lengths)]


def same(one: list[Observed], other: list[Observed]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in FIELDS)


@cache
def folder() -> Path:
    """A directory with the TINY model, plain (bf16) and INT4, that lives as long as the tests."""
    directory = tempfile.TemporaryDirectory()
    weakref.finalize(folder, directory.cleanup)
    plain = save_target(Path(directory.name) / "plain", dtype=torch.bfloat16)
    quantize_directory(plain, Path(directory.name) / "int4")
    return Path(directory.name)


@cache
def resident(kind: str) -> Target:
    return load_target(folder() / kind)


def seen(source: Target | StreamedTarget, texts: list[list[int]], **options: Any) -> list[Observed]:
    boundaries = options.pop("boundaries", (3, 0, 1))
    return observe_texts(source, texts, boundaries, top_k=3, chosen_ids=torch.tensor([7, 2]), **options)


def forward(target: Target, text: list[int], boundaries: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """States and log-probabilities of one text alone, by the forward that serves."""
    span = Span(torch.arange(1, 1 + len(text)), 0, len(text))
    out = target(Rows.of(torch.tensor(text), [span]), target.new_cache(1 + len(text)), boundaries=boundaries)
    return out.captured, out.logits.log_softmax(-1)


# ---- the same bits


@settings(max_examples=8)
@given(target_configs(), st.sampled_from([torch.float32, torch.bfloat16]), LENGTHS, SEEDS)
def test_streamed_equals_resident(config: dict[str, Any], dtype: torch.dtype, lengths: list[int], seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = save_target(Path(directory), seed % 7, dtype=dtype, **config)
        boundaries = tuple(range(config["num_hidden_layers"] + 1))
        texts = texts_of(lengths, seed)
        pair = [seen(s, texts, boundaries=boundaries) for s in (load_target(path), StreamedTarget(path))]
    assert same(*pair)


@given(KINDS, LENGTHS, SEEDS, st.permutations(range(4)).map(lambda order: tuple(order[:2])))
def test_observed_is_what_the_forward_says(
    kind: str, lengths: list[int], seed: int, boundaries: tuple[int, ...]
) -> None:
    texts = texts_of(lengths, seed)
    for text, mine in zip(texts, seen(resident(kind), texts, boundaries=boundaries), strict=True):
        captured, logprobs = forward(resident(kind), text, boundaries)
        assert torch.equal(mine.captured, captured) and mine.tokens.tolist() == text
        assert torch.equal(mine.best, logprobs.argmax(-1)) and torch.equal(mine.best_logprob, logprobs.amax(-1))
        assert torch.equal(mine.text_logprob, logprobs[:-1].gather(1, mine.tokens[1:, None])[:, 0])
        assert torch.equal(mine.top_logprobs, logprobs.topk(3).values)
        assert torch.equal(mine.top_logprobs, logprobs.gather(1, mine.top_ids))
        assert torch.equal(mine.chosen_logprobs, logprobs[:, [7, 2]])


@given(KINDS, LENGTHS, SEEDS, st.integers(1, 80), st.integers(1, 80), st.randoms(use_true_random=False))
def test_pieces_order_and_company_change_nothing(
    kind: str, lengths: list[int], seed: int, rows: int, head_rows: int, rng: random.Random
) -> None:
    texts = texts_of(lengths, seed)
    order = rng.sample(range(len(texts)), len(texts))
    whole = seen(StreamedTarget(folder() / kind), texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "PIECE_ROWS", rows)
        patch.setattr(observe, "LEAST_ROWS", min(rows, head_rows))
        patch.setattr(observe, "PIECE_LOGITS", head_rows * 96)
        cut = seen(StreamedTarget(folder() / kind), [texts[i] for i in order])
    assert same([whole[i] for i in order], cut)


@settings(max_examples=10)
@given(KINDS, st.integers(1, 5), st.integers(1, 3000), st.randoms(use_true_random=False))
def test_tensors_may_lie_in_any_file(kind: str, num_files: int, run_bytes: int, rng: random.Random) -> None:
    text = [tokens(20, 0).tolist()]
    found = load_file(folder() / kind / "model.safetensors")
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(num_files)]
    for name in rng.sample(sorted(found), len(found)):
        rng.choice(parts)[name] = found[name]
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(readahead, "RUN_BYTES", run_bytes)
        for i, part in enumerate(parts):
            save_file(part, Path(directory) / f"part{i}.safetensors")
        (Path(directory) / "config.json").write_bytes((folder() / kind / "config.json").read_bytes())
        assert same(seen(StreamedTarget(Path(directory)), text), seen(resident(kind), text))


def test_a_streamed_head_can_be_had_before_the_layers() -> None:
    streamed, text = StreamedTarget(folder() / "int4"), [tokens(9, 0).tolist()]
    weight = streamed.lm_head.dense_weight()
    assert torch.equal(weight, resident("int4").lm_head.dense_weight())
    assert torch.equal(streamed.norm.weight, resident("int4").norm.weight)
    assert same(seen(streamed, text), seen(resident("int4"), text))
    assert same(seen(streamed, text), seen(resident("int4"), text))  # a second pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_dtype_than_the_files(dtype: torch.dtype) -> None:
    text = [tokens(20, 0).tolist()]
    pair = [seen(load(folder() / "plain", dtype=dtype), text) for load in (load_target, StreamedTarget)]
    assert pair[0][0].captured.dtype == dtype and same(*pair)


# ---- reading


class Reads:
    """Counts what is read and how much of it is alive."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        self.alive = self.most_alive = 0
        self._read = readahead._read_range  # pyright: ignore[reportPrivateUsage]
        patch.setattr(readahead, "_read_range", self)

    def __call__(self, path: Path, start: int, nbytes: int) -> Any:
        self.ranges.append((path.name, start, start + nbytes))
        self.alive += nbytes
        self.most_alive = max(self.most_alive, self.alive)
        buffer = self._read(path, start, nbytes)
        weakref.finalize(buffer, self._gone, nbytes)
        return buffer

    def _gone(self, nbytes: int) -> None:
        self.alive -= nbytes


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_each_byte_is_read_once_and_in_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, streamed = Reads(monkeypatch), StreamedTarget(folder() / kind)
    assert reads.ranges == []
    seen(streamed, [tokens(9, 0).tolist()])
    header = read_headers(folder() / kind)[0]
    wanted = sorted((s.start, s.stop) for name, s in header.items() if name != EMBEDDING)
    covered = sorted((start, stop) for _, start, stop in reads.ranges)
    assert all(a[1] <= b[0] for a, b in zip(covered, covered[1:], strict=False))
    assert sum(stop - start for start, stop in covered) == sum(stop - start for start, stop in wanted)


@st.composite
def parts_of(draw: st.DrawFn) -> list[list[int]]:
    """Sizes of the tensors of each part, some of them empty."""
    return draw(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=6), min_size=1, max_size=6))


@given(parts_of(), st.integers(1, 400), st.randoms(use_true_random=False))
def test_read_ahead_hands_out_everything_within_its_budget(
    sizes: list[list[int]], run_bytes: int, rng: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        stored, content = shuffled_file(Path(directory) / "x.safetensors", sizes, rng)
        patch.setattr(readahead, "RUN_BYTES", run_bytes)
        reads, ahead = Reads(patch), ReadAhead(stored)
        for part in stored:
            for one in rng.sample(part, len(part)):
                assert bytes(ahead.take(one).tolist()) == content[one.start : one.stop]
        ahead.close()
    just_taken = max(run_bytes, *[size for part in sizes for size in part])  # a run lives as long as its last tensor
    assert reads.alive == 0 and reads.most_alive <= max(map(sum, sizes)) + just_taken


def test_several_empty_tensors_at_one_place(tmp_path: Path) -> None:
    stored, _ = shuffled_file(tmp_path / "x.safetensors", [[0, 0, 3], [0]], random.Random(0))
    ahead = ReadAhead(stored)
    assert [ahead.take(one).numel() for part in stored for one in part] == [0, 0, 3, 0]
    with pytest.raises(AssertionError, match="taken twice"):
        ahead.take(stored[0][2])
    ahead.close()


def shuffled_file(path: Path, sizes: list[list[int]], rng: random.Random) -> tuple[list[list[Stored]], bytes]:
    """A file with tensors of these sizes in any order; where each part's lie, and the whole content."""
    names = [f"{p}.{i}" for p, part in enumerate(sizes) for i in range(len(part))]
    flat = dict(zip(names, [size for part in sizes for size in part], strict=True))
    header, end = {}, 0
    for name in rng.sample(names, len(names)):
        header[name] = {"dtype": "U8", "shape": [flat[name]], "data_offsets": [end, end + flat[name]]}
        end += flat[name]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + rng.randbytes(end))
    found = read_header(path)
    return [[found[f"{p}.{i}"] for i in range(len(part))] for p, part in enumerate(sizes)], path.read_bytes()


def test_progress_rises_to_the_whole() -> None:
    calls: list[tuple[int, int]] = []
    seen(StreamedTarget(folder() / "int4"), [[1, 2]], progress=lambda done, total: calls.append((done, total)))
    done = [done for done, _ in calls]
    header = read_headers(folder() / "int4")[0]
    assert done == sorted(set(done)) and len({total for _, total in calls}) == 1
    assert calls[-1][0] == calls[-1][1] == sum(s.nbytes for name, s in header.items() if name != EMBEDDING)


def test_a_pass_that_is_given_up_leaves_no_thread() -> None:
    before = threading.active_count()
    layers = StreamedTarget(folder() / "plain").load_layers()
    next(layers)
    layers.close()
    assert threading.active_count() == before


# ---- what is refused


def copied(directory: Path, kind: str, **changes: torch.Tensor | None) -> Path:
    """The model with tensors added, replaced or, where None, left out."""
    found = load_file(folder() / kind / "model.safetensors") | changes
    save_file({n: t for n, t in found.items() if t is not None}, directory / "model.safetensors")
    (directory / "config.json").write_bytes((folder() / kind / "config.json").read_bytes())
    return directory


@pytest.mark.parametrize("name", ["extra", "model.norm.bias"])
def test_an_unknown_tensor_is_named_before_reading(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=name):
        StreamedTarget(copied(tmp_path, "plain", **{name: torch.zeros(1)}))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate.bias", "model.layers.0.extra.weight"])
def test_an_unknown_tensor_of_a_layer_is_named(name: str, tmp_path: Path) -> None:
    streamed = StreamedTarget(copied(tmp_path, "plain", **{name: torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=name):
        seen(streamed, [[1, 2, 3]])


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.o_proj.weight"])
@pytest.mark.parametrize("tensor", [None, torch.zeros(3, dtype=torch.bfloat16)])
def test_a_missing_or_misshapen_tensor_is_named(name: str, tensor: torch.Tensor | None, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=name):
        seen(StreamedTarget(copied(tmp_path, "plain", **{name: tensor})), [[1, 2, 3]])


def test_a_file_cut_short_after_its_header_was_read_is_an_error_not_a_hang(tmp_path: Path) -> None:
    stored, _ = shuffled_file(tmp_path / "x.safetensors", [[100], [100]], random.Random(0))
    os.truncate(tmp_path / "x.safetensors", stored[0][0].start + 5)
    ahead = ReadAhead(stored)
    with pytest.raises(CheckpointError, match="x.safetensors.*ends at byte"):
        [ahead.take(one) for part in stored for one in part]
    ahead.close()


@pytest.mark.parametrize(
    ("texts", "message"),
    [([], "no text"), ([[1], []], "text 1 has 0 tokens"), ([[1] * 513], "513 tokens.*512"), ([[1, 96]], "token id 96")],
)
def test_texts_that_cannot_be_run_are_refused_before_reading(
    texts: list[list[int]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    with pytest.raises(TextError, match=message):
        observe_texts(StreamedTarget(folder() / "plain"), texts, (1,))
    assert reads.ranges == []


# ---- memory

MEASURE = """
import sys
from pathlib import Path
import torch
from minieagle.models.stream import StreamedTarget
from minieagle.spec.observe import observe_texts

def peak(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
run = lambda path: observe_texts(StreamedTarget(Path(path)), [range(50)], (1,))
run(sys.argv[1])  # one of few layers first: library buffers are no part of the weights
open("/proc/self/clear_refs", "w").write("5")
before = peak("VmRSS")
run(sys.argv[2])
print(peak("VmHWM") - before)
"""
WIDTHS = {"vocab_size": 4096, "kv_lora_rank": 64, "num_attention_heads": 4, "hidden_size": 256}
EXPERTS = {"intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 32}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_a_pass_peaks_below_a_third_of_the_model(tmp_path: Path) -> None:
    for name, num_layers in (("small", 2), ("big", 24)):
        write_target(tmp_path / name, WIDTHS | EXPERTS | {"num_hidden_layers": num_layers}, 0)
    size = sum(path.stat().st_size for path in (tmp_path / "big").glob("*.safetensors"))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "big")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 0.3 * size, f"a pass over {size / 1e6:.0f} MB took {grown / 1e6:.0f} MB at its peak"

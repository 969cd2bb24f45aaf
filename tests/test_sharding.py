"""Each rank's pieces: cut while loading or cut before into files, the same bits; experts dealt out whole; memory.

Ranks here are threads of one process that meet at a barrier: what they compute is what connected ranks compute.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from minieagle import sharding, survey
from minieagle.dist.ranks import Ranks
from minieagle.dist.shard import ShardError
from minieagle.errors import ModelError
from minieagle.llm import embedded
from minieagle.models import readahead
from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import ConfigError
from minieagle.models.deepseek import Target
from minieagle.models.fp8 import dequantize, touched
from minieagle.models.headers import Stored, read_headers
from minieagle.models.layers import Linear
from minieagle.models.rank_files import folder
from minieagle.models.readahead import Prefetch
from minieagle.models.shards import WHOLE, Shards
from minieagle.models.stream import StreamedTarget
from minieagle.models.target_weights import load_target
from minieagle.quantize import quantize_directory
from minieagle.sharding import shard_directory
from tests.oracles import save_target
from tests.rank_worker import Groups, run_rows
from tests.strategies import SEEDS, Run, splits, tokens
from tests.test_published_targets import K25_TEXT, PUBLISHED, Published, in_int4, written

CPU = torch.device("cpu")


class Company:
    """Ranks that are threads: each puts its tensor on the board, waits for the others, and reads all."""

    def __init__(self, size: int) -> None:
        self.board: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, x: Tensor) -> Tensor:
        self.board[rank] = x
        self.barrier.wait(30)
        together = torch.stack(self.board)
        self.barrier.wait(30)
        return together


class Member:
    """One rank of a company; alone (for loading) where nobody else runs."""

    def __init__(self, rank: int, company: Company) -> None:
        self.rank, self.size, self.device, self.company = rank, len(company.board), CPU, company

    def gather(self, x: Tensor) -> Tensor:
        return self.company.exchange(self.rank, x)

    def gather_to_lead(self, x: Tensor) -> Tensor | None:
        together = self.company.exchange(self.rank, x)
        return together if self.rank == 0 else None


def members(size: int, slices: int = 0, *, expert_parallel: bool = False) -> list[Shards]:
    """The shards of every rank of a company."""
    company = Company(size)
    ranks = [cast(Ranks, Member(rank, company)) for rank in range(size)]
    return [Shards(rank, slices or size, expert_parallel) for rank in ranks]


def held(target: Target) -> dict[str, Tensor]:
    """Every tensor of a loaded model, packed ones and codes too."""
    found: dict[str, Tensor] = {}
    for name, module in target.named_modules():
        values = vars(module) | dict(module.named_parameters(recurse=False))
        found |= {f"{name}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
        if isinstance(module, Linear):
            found |= {f"{name}.packed": module.dense_weight()}
    return found


def same(one: Target, other: Target) -> bool:
    mine, theirs = held(one), held(other)
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine
    )


def logits(directory: Path, shards: list[Shards], ids: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Rank 0's, all ranks running side by side over the same chunks of one prompt."""
    targets = [load_target(directory, shards=mine) for mine in shards]
    with ThreadPoolExecutor(len(targets)) as pool:
        runs = [pool.submit(Run(t, len(ids)).chunks, ids, sizes or [len(ids)]) for t in targets]
        return runs[0].result(60).logits


PLACES: list[Path] = []
"""Directories to remove in the end."""


def new_place() -> Path:
    PLACES.append(Path(tempfile.mkdtemp(prefix="sharding-")))
    return PLACES[-1]


@cache
def small(kind: str) -> Path:
    """The TINY model, kept for this file's tests: float32, bf16, or bf16 with INT4 experts of 8 groups."""
    place = new_place()
    plain = save_target(place / "plain", dtype=torch.float32 if kind == "plain" else torch.bfloat16)
    if kind == "int4":
        quantize_directory(plain, place / "int4", group_size=8)
    return place / ("int4" if kind == "int4" else "plain")


@pytest.fixture(scope="module", autouse=True)
def _cleaned() -> Iterator[None]:
    yield
    for place in PLACES:
        shutil.rmtree(place)


# ---- pieces of FP8 weights


@given(SEEDS, st.integers(1, 40), st.integers(1, 40), st.integers(1, 17), st.integers(1, 17), st.data())
def test_a_piece_of_fp8_is_a_piece_of_the_whole(
    seed: int, rows: int, columns: int, tall: int, wide: int, data: st.DataObject
) -> None:
    """Wherever it begins in its first block and ends in its last."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    scale = 0.5 + torch.rand(-(-rows // tall), -(-columns // wide), generator=draw)
    dim = data.draw(st.integers(0, 1))
    start = data.draw(st.integers(0, weight.shape[dim] - 1))
    length = data.draw(st.integers(1, weight.shape[dim] - start))
    whole = dequantize(weight, scale, (tall, wide), torch.bfloat16).narrow(dim, start, length)
    first, part = (start, 0) if dim == 0 else (0, start), touched(scale, (tall, wide), dim, start, length)
    mine = dequantize(weight.narrow(dim, start, length), part, (tall, wide), torch.bfloat16, first=first)
    assert torch.equal(mine, whole)


def test_only_the_piece_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def counting(weight: Tensor, *arguments: Any, **options: Any) -> Tensor:
        nonlocal count
        count += weight.numel()
        return dequantize(weight, *arguments, **options)

    source = written(PUBLISHED["Kimi-K2"](), tmp_path)
    monkeypatch.setattr("minieagle.models.checkpoint.dequantize", counting)
    load_target(source)
    whole, count = count, 0
    for shards in members(2):
        load_target(source, shards=shards)
    shared = sum(s.nbytes for name, s in read_headers(source)[0].items() if re.search(r"(q_a|kv_a)_\w+\.weight$", name)
                 and "norm" not in name)  # fmt: skip
    assert count == whole + shared, "both ranks hold the low-rank products whole, and half of everything else"


# ---- cut into files, then loaded: the same bits

WIDER = K25_TEXT | {"moe_intermediate_size": 64}
MODELS: dict[str, Callable[[], Published]] = PUBLISHED | {
    "Kimi-K2-Thinking": lambda: in_int4(WIDER, nested=False),
    "Kimi-K2.5": lambda: in_int4(WIDER, nested=True),
}


@pytest.mark.parametrize(("size", "expert_parallel"), [(2, False), (4, True)], ids=["TP 2", "EP 4"])
@pytest.mark.parametrize("kind", MODELS)
def test_rank_files_load_as_their_source(kind: str, size: int, expert_parallel: bool, tmp_path: Path) -> None:
    source, cut = written(MODELS[kind](), tmp_path), tmp_path / "cut"
    shard_directory(source, cut, size, expert_parallel=expert_parallel)
    for shards in members(size, expert_parallel=expert_parallel):
        dtype = torch.float32 if shards.ranks.rank == 0 else None  # codes and scales are kept: no rounding on the way
        assert same(*[load_target(path, shards=shards, dtype=dtype) for path in (source, cut)])


@pytest.mark.parametrize(("size", "slices"), [(8, 8), (2, 8)])
def test_the_embedded_model_whatever_the_slices(size: int, slices: int, tmp_path: Path) -> None:
    shard_directory(embedded("target"), tmp_path / "cut", size)
    for rank in (0, size // 2):
        shards = members(size, slices)[rank]
        assert same(*[load_target(path, shards=shards) for path in (embedded("target"), tmp_path / "cut")])


def test_files_of_one_rank_are_a_whole_model(tmp_path: Path) -> None:
    shard_directory(small("int4"), tmp_path / "cut", 1)
    assert same(load_target(tmp_path / "cut"), load_target(small("int4")))


def test_files_hold_the_cut_pieces_and_no_more(tmp_path: Path) -> None:
    source, cut = written(MODELS["Kimi-K2.5"](), tmp_path), tmp_path / "cut"
    shard_directory(source, cut, 2)
    whole = {n.removeprefix("language_model."): s for n, s in read_headers(source)[0].items() if "language" in n}
    parts = [read_headers(cut / folder(rank, 2))[0] for rank in (0, 1)]
    assert parts[0].keys() == parts[1].keys() == whole.keys(), "vision left out, names without the wrapper's prefix"
    down = "model.layers.2.mlp.experts.7.down_proj.weight"
    assert [parts[1][f"{down}_{part}"].shape for part in ("packed", "scale", "shape")] == [(64, 4), (64, 1), (2,)]
    packed = [load_file(parts[rank][f"{down}_packed"].path)[f"{down}_packed"] for rank in (0, 1)]
    stored = load_file(whole[f"{down}_packed"].path)[f"language_model.{down}_packed"]
    assert torch.equal(torch.cat(packed, dim=1), stored)


def test_dealt_experts_lie_in_one_file_each(tmp_path: Path) -> None:
    shard_directory(small("plain"), tmp_path / "cut", 4, expert_parallel=True)
    numbers = [
        sorted({int(n) for name in read_headers(tmp_path / "cut" / folder(rank, 4))[0]
                for n in re.findall(r"experts\.(\d+)\.", name)})
        for rank in range(4)
    ]  # fmt: skip
    assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_stands_beside_the_weights_comes_along(tmp_path: Path) -> None:
    shard_directory(embedded("target"), tmp_path / "cut", 2)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        content = [(path / name).read_text() for path in (embedded("target"), tmp_path / "cut")]
        assert [json.loads(text) for text in content if name.endswith(".json")] or content[0] == content[1]
        assert not name.endswith(".json") or json.loads(content[0]) == json.loads(content[1])


# ---- refused


@pytest.mark.parametrize(
    ("made", "asked", "named"),
    [
        ((2, False), (4, False), "cut for 2 ranks, this is 4 ranks"),
        ((2, False), (1, False), "cut for 2 ranks, this is 1 rank:"),
        ((2, False), (2, True), "cut for 2 ranks, this is 2 ranks with expert_parallel"),
        ((4, True), (4, False), "cut for 4 ranks with expert_parallel, this is 4 ranks"),
    ],
)
def test_other_ranks_are_refused(made: tuple[int, bool], asked: tuple[int, bool], named: str, tmp_path: Path) -> None:
    shard_directory(small("plain"), tmp_path / "cut", made[0], expert_parallel=made[1])
    with pytest.raises(CheckpointError, match=named):
        load_target(tmp_path / "cut", shards=members(asked[0], expert_parallel=asked[1])[0])


def test_a_streamed_target_and_a_second_cut_are_refused(tmp_path: Path) -> None:
    shard_directory(small("plain"), tmp_path / "cut", 2)
    with pytest.raises(CheckpointError, match="cut for 2 ranks, this is 1 rank"):
        StreamedTarget(tmp_path / "cut")
    shard_directory(small("plain"), tmp_path / "one", 1)
    for made in ("cut", "one"):
        with pytest.raises(
            CheckpointError, match=r"is cut already \(shards.json\): pass the model that it was cut from"
        ):
            shard_directory(tmp_path / made, tmp_path / "again", 2)


def test_folders_of_two_runs_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shard_directory(small("plain"), tmp_path / name, 2)
    shutil.rmtree(tmp_path / "one" / folder(1, 2))
    shutil.copytree(tmp_path / "two" / folder(1, 2), tmp_path / "one" / folder(1, 2))
    load_target(tmp_path / "one", shards=members(2)[0])
    with pytest.raises(CheckpointError, match="two runs"):
        load_target(tmp_path / "one", shards=members(2)[1])


def test_pieces_of_another_rank_are_refused(tmp_path: Path) -> None:
    shard_directory(small("plain"), tmp_path / "cut", 2)
    first, second = (tmp_path / "cut" / folder(rank, 2) for rank in range(2))
    shutil.copy(first / "model-00001.safetensors", second)
    load_target(tmp_path / "cut", shards=members(2)[0])
    with pytest.raises(CheckpointError, match=r"model-00001.safetensors is of .*'rank': '0'.*, not of .*'rank': '1'"):
        load_target(tmp_path / "cut", shards=members(2)[1])
    shutil.rmtree(second)
    shutil.copytree(first, second)
    with pytest.raises(CheckpointError, match="rank-01-of-02 holds the pieces of rank 0: put rank 1's there"):
        load_target(tmp_path / "cut", shards=members(2)[1])


def test_inspecting_a_cut_model_says_what_it_is(tmp_path: Path) -> None:
    shard_directory(small("plain"), tmp_path / "cut", 2)
    parser = argparse.ArgumentParser()
    survey.add_options(parser)
    with pytest.raises(ModelError, match=r"is cut for ranks \(shards.json\): inspect the model that it was cut from"):
        survey.run(parser.parse_args([str(tmp_path / "cut")]))


@pytest.mark.parametrize(
    "content", ['{"num_ranks": 2}', '{"num_ranks": "2", "expert_parallel": false, "run": ""}', "[]"]
)
def test_a_damaged_description_is_refused(content: str, tmp_path: Path) -> None:
    shard_directory(small("plain"), tmp_path / "cut", 2)
    (tmp_path / "cut" / "shards.json").write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match="shards.json|num_ranks"):
        load_target(tmp_path / "cut", shards=members(2)[0])


@pytest.mark.parametrize("size", [0, 3, 5, 8, 9])
def test_what_cannot_divide_is_refused_before_anything_is_written(size: int, tmp_path: Path) -> None:
    """Four heads."""
    with pytest.raises(ShardError, match=f"tp={size}"):
        shard_directory(small("plain"), tmp_path / "cut", size)
    assert not [*tmp_path.iterdir()]


def test_groups_that_cannot_divide_are_refused(tmp_path: Path) -> None:
    """32 columns are one group of 32: they can't be cut, but whole experts can be dealt out."""
    source = written(PUBLISHED["Kimi-K2-Thinking"](), tmp_path)
    with pytest.raises(ShardError, match="32 columns of a routed expert in groups of 32"):
        shard_directory(source, tmp_path / "cut", 2)


def test_a_missing_tensor_is_named_before_anything_is_written(tmp_path: Path) -> None:
    made = PUBLISHED["DeepSeek-V3 in bf16"]()
    del made.tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    source = written(made, tmp_path)
    with pytest.raises(CheckpointError, match=r"up_proj.weight \(7 of 8 experts\)"):
        shard_directory(source, tmp_path / "cut", 2)
    assert not (tmp_path / "cut").exists()


def test_a_place_that_is_taken_or_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shutil.copytree(small("plain"), tmp_path / "source")
    for place, named in ((source, "not empty"), (source / "cut", "lies inside")):
        with pytest.raises(ModelError, match=named):
            shard_directory(source, place, 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=10**8))
    with pytest.raises(ModelError, match=r"0.1 GB free, the ranks' files take 0.1 GB: make room"):
        shard_directory(source, tmp_path / "cut", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_interrupted_cut_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, **options: Any) -> None:
        if "rank-01" in str(path):
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr("minieagle.models.tensor_file.save_file", full)
    with pytest.raises(ModelError, match="cut can't be written: .*No space left"):
        shard_directory(small("plain"), tmp_path / "cut", 2)
    assert not [*tmp_path.iterdir()]


def test_the_command_cuts_and_says_how_to_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    sharding.add_options(parser)
    arguments = [str(small("int4")), str(tmp_path / "cut"), "--tp", "2", "--expert-parallel"]
    assert sharding.run(parser.parse_args(arguments)) == 0
    assert "--nproc-per-node 2" in capsys.readouterr().err
    load_target(tmp_path / "cut", shards=members(2, expert_parallel=True)[1])


# ---- whole experts


@settings(max_examples=6)
@given(st.sampled_from(["bf16", "int4"]), splits(11), SEEDS)
def test_dealt_experts_give_the_same_bits_on_any_number_of_ranks(kind: str, sizes: list[int], seed: int) -> None:
    """In bf16: float32 products on a CPU round by their width."""
    ids = tokens(11, seed, 96)
    one = logits(small(kind), members(1, 4, expert_parallel=True), ids)
    for size in (2, 4):
        assert torch.equal(logits(small(kind), members(size, 4, expert_parallel=True), ids, sizes), one)


@settings(max_examples=4)
@given(st.sampled_from([1, 2, 4]), SEEDS)
def test_dealt_experts_mean_what_cut_ones_mean(size: int, seed: int) -> None:
    ids = tokens(9, seed, 96)
    whole = Run(load_target(small("plain")), 9).forward(ids).logits
    for expert_parallel in (True, False):
        got = logits(small("plain"), members(size, expert_parallel=expert_parallel), ids)
        torch.testing.assert_close(got, whole, atol=2e-4, rtol=0)


def test_the_embedded_model_with_dealt_experts() -> None:
    ids = tokens(24, 0, 1000)
    whole = logits(embedded("target"), [WHOLE], ids)
    dealt = [logits(embedded("target"), members(n, 8, expert_parallel=True), ids, [20, 1, 3]) for n in (1, 2, 8)]
    assert torch.equal(dealt[0], dealt[1]) and torch.equal(dealt[0], dealt[2])
    assert (dealt[0] - whole).abs().mean() < 0.02 * whole.std(), "bf16 rounding of other partial sums, no more"


def test_dealt_experts_over_connected_ranks(tmp_path: Path) -> None:
    """Processes this time, from the source and from files cut before."""
    ids = tokens(13, 5, 96)
    alone = run_rows(load_target(small("int4"), shards=Shards(slices=4, expert_parallel=True)), ids.tolist())
    shard_directory(small("int4"), tmp_path / "cut", 2, expert_parallel=True)
    with closing(Groups()) as groups:
        for model, size in ((small("int4"), 4), (tmp_path / "cut", 2)):
            case = {"task": "forward", "size": size, "slices": 4, "expert_parallel": True, "tokens": ids.tolist()}
            groups.ask(**case, model=str(model), out=str(tmp_path / "out"))
            assert torch.equal(load_file(tmp_path / "out.0.safetensors")["logits"], alone.logits)
            assert torch.equal(load_file(tmp_path / "out.1.safetensors")["captured"], alone.captured)


def test_one_rank_with_one_slice_is_the_plain_model() -> None:
    ids = tokens(9, 0, 96)
    assert torch.equal(*[logits(small("plain"), [s], ids) for s in (WHOLE, Shards(expert_parallel=True))])


def test_experts_that_cannot_be_dealt_out_are_refused(tmp_path: Path) -> None:
    source = save_target(tmp_path, n_routed_experts=6, n_group=1, topk_group=1)
    with pytest.raises(ShardError, match="n_routed_experts=6 can't be cut into 4 pieces"):
        load_target(source, shards=Shards(slices=4, expert_parallel=True))


def test_an_expert_too_many_is_noticed_by_every_rank(tmp_path: Path) -> None:
    source = shutil.copytree(small("plain"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.ones(64, 64)
    save_file(tensors, source / "model.safetensors")
    for shards in members(2, expert_parallel=True):
        with pytest.raises(CheckpointError, match=r"experts\.8\."):
            load_target(source, shards=shards)


# ---- reading ahead


def places(directory: Path) -> list[list[Stored]]:
    stored = sorted(read_headers(directory)[0].values(), key=lambda s: (s.path, s.start))
    return [stored[:7], stored[7:20], stored[20:]]


@pytest.mark.parametrize("most", [1 << 10, 1 << 20])
def test_ranks_read_ahead_every_byte_once(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[int, int]] = []
    read = readahead.os.preadv

    def noting(descriptor: int, buffers: list[memoryview], start: int) -> int:
        spans.append((start, start + len(buffers[0])))
        return read(descriptor, buffers, start)

    monkeypatch.setattr(readahead, "RUN_BYTES", 2 * most)
    monkeypatch.setattr(readahead, "SCRATCH_BYTES", most)
    monkeypatch.setattr(readahead.os, "preadv", noting)
    parts = places(small("int4"))
    for rank in range(3):
        ahead = Prefetch(parts, (rank, 3))
        ahead.advance()
        ahead._pool.shutdown()
    spans.sort()
    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]], "no gap and no overlap"
    assert (spans[0][0], spans[-1][1]) == (parts[0][0].start, parts[-1][-1].stop)


def test_reading_ahead_stays_two_parts_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(Prefetch, "_touch", lambda self, run: seen.append(run.start))
    parts = places(small("plain"))
    ahead = Prefetch(parts, (0, 1))
    ahead._pool.shutdown()
    assert parts[1][0].start <= max(seen) < parts[2][0].start


def test_a_rank_with_files_of_its_own_reads_all_of_them_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[tuple[int, int]] = []

    def noting(parts: list[list[Stored]], share: tuple[int, int]) -> Prefetch:
        shares.append(share)
        return Prefetch(parts, share)

    shard_directory(small("plain"), tmp_path / "cut", 2)
    monkeypatch.setattr("minieagle.models.target_weights.Prefetch", noting)
    for source in (small("plain"), tmp_path / "cut"):
        load_target(source, shards=members(2)[1])
    assert shares == [(1, 2), (0, 1)]


def test_what_cannot_be_read_ahead_is_the_readers_to_find(tmp_path: Path) -> None:
    gone = [part._replace(path=tmp_path / "gone") for part in places(small("plain"))[0]]
    Prefetch([gone], (0, 1)).close()


# ---- memory

LOAD = """
from minieagle.dist.group import Group
from minieagle.models.shards import Shards
from minieagle.models.target_weights import load_target
rank, size, expert_parallel = map(int, sys.argv[3:])
shards = Shards(Group(rank, size, torch.device("cpu")), size, bool(expert_parallel))
work = lambda path: load_target(path, shards=shards)
"""
CUT = """
from minieagle.sharding import shard_directory
work = lambda path: shard_directory(path, Path(sys.argv[3]) / path.name, 8)
"""
MEASURE = """
import sys
from pathlib import Path
import torch

def memory(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

{work}
work(Path(sys.argv[1]))  # a small model first: library buffers are no part of the weights
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
kept = work(Path(sys.argv[2]))
print(memory("VmHWM") - before)
"""
BIG = {
    "hidden_size": 512,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
}


def in_files(source: Path, target: Path) -> Path:
    """The same model in a file for each layer, as large models come."""
    target.mkdir()
    shutil.copyfile(source / "config.json", target / "config.json")
    tensors = load_file(source / "model.safetensors")
    layers = {name: (re.findall(r"layers\.(\d+)\.", name) or ["none"])[0] for name in tensors}
    for layer in set(layers.values()):
        save_file({n: t for n, t in tensors.items() if layers[n] == layer}, target / f"model-{layer}.safetensors")
    return target


@cache
def big(kind: str) -> tuple[Path, Path]:
    """A small and a large model."""
    place = new_place()
    for name, layers in (("small", 2), ("big", 10)):
        if kind == "plain":
            save_target(place / f"{name}-one", dtype=torch.bfloat16, **BIG, num_hidden_layers=layers)
        else:
            quantize_directory(big("plain")[0].with_name(f"{name}-one"), place / f"{name}-one")
        in_files(place / f"{name}-one", place / name)
    return place / "small", place / "big"


def rank_bytes_in(directory: Path, size: int, expert_parallel: bool) -> int:
    """The bytes of rank 1's files, cut for size."""
    with tempfile.TemporaryDirectory() as place:
        shard_directory(directory, Path(place) / "cut", size, expert_parallel=expert_parallel)
        return sum(p.stat().st_size for p in (Path(place) / "cut" / folder(1, size)).glob("*.safetensors"))


def peak(work: str, kind: str, *arguments: object) -> int:
    """The most memory that a process takes for the large model, after the small one."""
    command = [sys.executable, "-c", MEASURE.format(work=work), *map(str, (*big(kind), *arguments))]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def largest_file(kind: str) -> int:
    return max(path.stat().st_size for path in big(kind)[1].glob("*.safetensors"))


needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")


@needs_proc
@pytest.mark.parametrize(("kind", "expert_parallel"), [("plain", False), ("int4", False), ("int4", True)])
def test_a_rank_peaks_below_1_3_times_its_pieces_and_one_file(kind: str, expert_parallel: bool) -> None:
    mine, window = rank_bytes_in(big(kind)[1], 8, expert_parallel), largest_file(kind)
    grown = peak(LOAD, kind, 1, 8, int(expert_parallel))
    assert grown < 1.3 * mine + window, f"{mine / 1e6:.1f} MB and a file of {window / 1e6:.1f} took {grown / 1e6:.1f}"


@needs_proc
def test_cutting_peaks_at_about_one_layer(tmp_path: Path) -> None:
    grown, window = peak(CUT, "plain", tmp_path), largest_file("plain")
    assert grown < 1.5 * window, f"a layer of {window / 1e6:.1f} MB took {grown / 1e6:.1f}"

"""Weight files: what safetensors writes is read bit for bit, and what it would never write is refused by name.

Hostile files come from a writer of this file's own, since the library's writes none. Its headers are checked against
the library's reader, so that a refusal is never due to the writer.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as library_load
from safetensors.torch import save_file
from torch import Tensor

from minieagle.models.checkpoint import Checkpoint, CheckpointError
from minieagle.models.files import JSON_LIMIT_BYTES, MOST_VALUES, FileError, parse_json, read_plain
from minieagle.models.headers import DTYPES, INDEX, read_header, read_headers, read_index

Header = dict[str, Any]


def raw_file(header: Header | bytes, data: bytes, *, length: int | None = None, padding: int = 0) -> bytes:
    """A safetensors file of any header, which may state another length and be padded by spaces."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * padding
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(directory: Path, content: bytes, name: str = "model.safetensors") -> Path:
    (directory / name).write_bytes(content)
    return directory


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


# ---- what is read


@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=4)), max_size=5),
    st.integers(0, 9),
)
def test_every_type_and_shape_is_read_bit_for_bit_wherever_it_lies(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, list[int]]], padding: int
) -> None:
    """Padding moves the data off any alignment."""
    header: Header = {}
    data = b""
    for index, (kind, shape) in enumerate(kinds):
        size = torch.Size(shape).numel() * DTYPES[kind].itemsize
        header[f"t{index}"] = entry(kind, shape, (len(data), len(data) + size))
        data += bytes(byte % 2 if kind == "BOOL" else byte for byte in range(1, size + 1))
    content = raw_file(header, data, padding=padding)
    checkpoint = Checkpoint(write(tmp_path_factory.mktemp("c"), content))
    for index, (kind, shape) in enumerate(kinds):
        tensor = checkpoint.take(f"t{index}")
        assert tensor.data_ptr() % tensor.element_size() == 0, "vector loads need it"
        start, stop = header[f"t{index}"]["data_offsets"]
        assert (tensor.dtype, list(tensor.shape)) == (DTYPES[kind], shape) and bits(tensor) == list(data[start:stop])
    checkpoint.finish()


def test_what_the_library_writes_is_what_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b.c": torch.arange(7), "d": torch.randn(4, 2).bfloat16(), "e": torch.empty(0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert all(torch.equal(checkpoint.take(name), tensor) for name, tensor in tensors.items())


def test_the_writer_of_these_tests_writes_what_the_library_reads() -> None:
    content = raw_file({"a": entry(), "__metadata__": {"format": "pt"}}, bytes(24), padding=3)
    assert library_load(content)["a"].shape == (2, 3)


def test_tensors_outlive_the_maps_and_leave_no_file_open(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    before = len(os.listdir("/dev/fd"))
    checkpoint = Checkpoint(tmp_path)
    tensor = checkpoint.take("a")
    checkpoint.release()
    assert tensor.sum() == 1000 and checkpoint.take("b").sum() == 3
    checkpoint.release()
    del tensor
    assert len(os.listdir("/dev/fd")) == before


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"a": torch.ones(8)}, tmp_path / "model.safetensors")
    Checkpoint(tmp_path).take("a").zero_()
    assert Checkpoint(tmp_path).take("a").sum() == 8


def test_a_file_that_shrinks_meanwhile_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(10000)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors became shorter"):
        checkpoint.take("a")


def test_a_file_that_vanishes_meanwhile_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be mapped"):
        checkpoint.take("a")


# ---- headers that lie

LONG = "n" * 501
LIES: dict[str, tuple[Header | bytes, str]] = {
    "a hole": ({"a": entry(offsets=(0, 24)), "b": entry(offsets=(28, 52))}, "starts at byte"),
    "an overlap": ({"a": entry(offsets=(0, 24)), "b": entry(offsets=(20, 44))}, "starts at byte"),
    "bytes before the first": ({"a": entry(offsets=(4, 28))}, "starts at byte"),
    "beyond the end": ({"a": entry(shape=[1000], offsets=(0, 4000))}, "the file at"),
    "bytes behind the last": ({"a": entry(shape=[1], offsets=(0, 4))}, "the file at"),
    "backwards": ({"a": entry(offsets=(24, 0))}, "shape"),
    "negative offsets": ({"a": entry(offsets=(-24, 0))}, "shape"),
    "negative shape": ({"a": entry(shape=[-2, -3])}, "shape"),
    "fractional shape": ({"a": entry(shape=[2.0, 3])}, "shape"),
    "true as a size": ({"a": entry(shape=[True, 6])}, "shape"),
    "a size beyond 64 bits": ({"a": entry(shape=[2**70, 0], offsets=(0, 0))}, "shape"),
    "a product beyond 64 bits": ({"a": entry(shape=[2**40, 2**40, 0], offsets=(0, 0))}, "strides"),
    "a wrapping product": ({"a": entry(shape=[2**32, 2**32 + 1])}, "bytes it states"),
    "another size": ({"a": entry(shape=[2, 4])}, "bytes it states"),
    "too many dimensions": ({"a": entry(shape=[1] * 9 + [6])}, "shape"),
    "shape as an object": ({"a": entry(shape={})}, "shape"),
    "three offsets": ({"a": entry(offsets=(0, 24, 24))}, "data_offsets"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2, 3]}}, "data_offsets"),
    "a list for a tensor": ({"a": [1, 2]}, "data_offsets"),
    "null for a tensor": ({"a": None}, "data_offsets"),
    "an unknown type": ({"a": entry(dtype="F4")}, "'F4'"),
    "a list for a type": ({"a": entry(dtype=["F32"])}, "data_offsets"),
    "an escape in a name": ({"a\x1b[31m": entry()}, "name of a tensor"),
    "half a character in a name": ({"\ud800": entry()}, "name of a tensor"),
    "an endless name": ({LONG: entry()}, "name of a tensor"),
    "one name twice": (b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), "'a' is stated twice"),
    "one field twice": (b'{"a":{"dtype":"F32","dtype":"I32","shape":[6],"data_offsets":[0,24]}}', "stated twice"),
    "a list": (b"[]", "not an object"),
    "no JSON": (b"{'a'}", "JSON"),
    "no UTF-8": (b'{"\xff":1}', "JSON"),
    "deep nesting": (b"[" * 100_000, "nested too deeply"),
    "a number of 5,000 digits": (b'{"a":' + b"9" * 5000 + b"}", "JSON"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused_by_name(lie: str, tmp_path: Path) -> None:
    header, words = LIES[lie]
    with pytest.raises(CheckpointError, match=words) as refusal:
        Checkpoint(write(tmp_path, raw_file(header, bytes(24))))
    assert "model.safetensors" in str(refusal.value) and len(str(refusal.value)) < 1500


@pytest.mark.parametrize(
    "content",
    [b"", b"\x02", raw_file(b"{}", b"", length=1), raw_file(b"{}", b"", length=3), raw_file(b"{}", b"", length=2**63)],
)
def test_a_header_longer_than_its_file_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*cut short"):
        Checkpoint(write(tmp_path, content))


def test_a_header_of_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = write(tmp_path, raw_file(b"{}", b"", length=2**32)) / "model.safetensors"
    os.truncate(path, 2**33)
    with pytest.raises(CheckpointError, match=f"exceeds {JSON_LIMIT_BYTES}"):
        read_header(path)


# ---- the index


def indexed(directory: Path, weight_map: Any) -> Path:
    """Files one and two with tensors a and b, and an index."""
    for name, tensor in (("one", "a"), ("two", "b")):
        save_file({tensor: torch.ones(2)}, directory / f"{name}.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_an_index_that_agrees_is_followed(tmp_path: Path) -> None:
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    stored, unlisted = read_headers(indexed(tmp_path, weight_map))
    assert {name: tensor.path.name for name, tensor in stored.items()} == weight_map and unlisted == ()


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "two.safetensors", "b": "one.safetensors"}, "lists a in two.*it is in one"),
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "lists c in two.*no file has it"),
        ({"b": "one.safetensors", "c": "two.safetensors"}, "lists b in one.*it is in two"),
        ({"a": "one.safetensors", "b": "three.safetensors"}, "three.safetensors .1 files missing"),
        ({}, "no weight_map"),
        (["a"], "no weight_map"),
        (None, "no weight_map"),
        ({"a": 1}, "1 must be the bare name"),
        ({"a": ["one.safetensors"]}, "must be the bare name"),
    ],
)
def test_an_index_that_disagrees_is_refused(weight_map: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_headers(indexed(tmp_path, weight_map))


def test_a_tensor_that_the_index_leaves_out_is_named(tmp_path: Path) -> None:
    directory = indexed(tmp_path, {"a": "one.safetensors"})
    save_file({"a": torch.ones(2), "x": torch.ones(1)}, directory / "one.safetensors")
    with pytest.raises(CheckpointError, match="doesn't list x, which one.safetensors holds"):
        read_headers(directory)


def test_a_file_that_the_index_leaves_out_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as consolidated.safetensors, the same weights in another project's layout; here it can't even be read."""
    directory = indexed(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    (directory / "consolidated.safetensors").write_bytes(b"damaged")
    assert set(Checkpoint(directory).stored) == {"a", "b"}
    assert "consolidated.safetensors not listed" in caplog.text


OUTSIDE = ["../one", "/one", "sub/one", "..", ".", "", "sub\\one", "\0", ".hidden", "a\nb", "x" * 600]


@pytest.mark.parametrize("name", [*(f"{name}.safetensors" for name in OUTSIDE), *OUTSIDE, "one.bin"])
def test_an_index_can_only_name_files_beside_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "model" / "sub").mkdir(parents=True)
    for place in (tmp_path, tmp_path / "model" / "sub"):
        save_file({"a": torch.ones(2)}, place / "one.safetensors")
    with pytest.raises(CheckpointError, match="bare name"):
        read_headers(indexed(tmp_path / "model", {"a": name}))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"weight_map":{"a":"b","a":"c"}}'])
def test_an_unreadable_index_is_named(text: bytes, tmp_path: Path) -> None:
    indexed(tmp_path, {})
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match="index.json"):
        read_headers(tmp_path)


def test_no_index_is_no_error(tmp_path: Path) -> None:
    assert read_index(tmp_path / INDEX) is None


# ---- what is no plain file


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [pipe, device, loop, Path.mkdir])
@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_what_is_no_plain_file_is_refused_at_once(make: Any, name: str, tmp_path: Path) -> None:
    if name == INDEX:
        save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=name):
        read_headers(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to the superuser")
@pytest.mark.parametrize("name", ["model.safetensors", "."])
def test_what_may_not_be_read_is_named(name: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / name).chmod(0)
    try:
        with pytest.raises(CheckpointError, match="ermission denied"):
            read_headers(tmp_path)
    finally:
        (tmp_path / name).chmod(0o700)


def test_entries_may_be_links_as_in_a_cache_of_a_hub(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    indexed(blobs, {"a": "one.safetensors", "b": "two.safetensors"})
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert set(Checkpoint(snapshot).stored) == {"a", "b"}


# ---- bounds on JSON


@pytest.mark.parametrize("unit", ["[]", "{}", '{"a":1}', '"ab"', "999", "1.5", '{"a":[]}', "[999]"])
def test_the_costliest_texts_stay_below_a_gigabyte(unit: str) -> None:
    """Bytes for each value that is counted, times the most values."""
    text = ("[" + ",".join([unit] * 20_000) + "]").encode()
    assert _peak(text) / _num_counted(text) * MOST_VALUES < 7e8


def test_the_costliest_object_stays_below_a_gigabyte() -> None:
    text = ("{" + ",".join(f'"{index:05d}":{index + 1000}' for index in range(20_000)) + "}").encode()
    assert _peak(text) / _num_counted(text) * MOST_VALUES < 7e8


def _num_counted(text: bytes) -> int:
    return sum(text.count(mark) for mark in (b",", b"{", b"["))


def _peak(text: bytes) -> int:
    tracemalloc.start()
    try:
        kept = parse_json(text, "text")
        assert kept
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mark", [b",", b"[", b"{"])
def test_too_many_values_are_refused_unparsed(mark: bytes) -> None:
    with pytest.raises(FileError, match=f"more than {MOST_VALUES} values"):
        parse_json(mark * (MOST_VALUES + 1), "text")


def test_too_many_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(11))
    assert read_plain(tmp_path / "x", 11) == bytes(11)
    with pytest.raises(FileError, match="more than 10 bytes"):
        read_plain(tmp_path / "x", 10)

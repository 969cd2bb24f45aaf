"""INT4: the layout by worked examples, by Python integers and by the library that defined it; products against both."""

from unittest.mock import patch

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minieagle.models import int4
from minieagle.models.int4 import Int4Linear, dequantize, pack, quantize, unpack
from tests.int4_on_gpu import as_on_a_gpu, gpu_layout
from tests.oracles import dequantised, nibbles
from tests.strategies import SEEDS, splits

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WORKED = [
    -0.10400390625,
    -0.0908203125,
    -0.01300048828125,
    0,
    0.01300048828125,
    0.0260009765625,
    0.078125,
    0.0908203125,
]


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ([-8, -7, -1, 0, 1, 2, 6, 7], [-22444272]),
        ([*range(-8, 8)], [1985229328, -19088744]),
        ([*range(-8, 8)] * 2, [1985229328, -19088744] * 2),
    ],
)
def test_worked_words(codes: list[int], words: list[int]) -> None:
    assert pack(torch.tensor([codes])).tolist() == [words]
    assert unpack(torch.tensor([words], dtype=torch.int32)).tolist() == [codes]
    assert [code for word in words for code in nibbles(word)] == codes


def test_worked_weight() -> None:
    packed = pack(torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7]]))
    scale = torch.tensor([[0.013]], dtype=torch.bfloat16)
    assert dequantize(packed, scale, torch.bfloat16).tolist() == [WORKED]


def random_codes(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@given(st.integers(1, 9), st.integers(1, 9), SEEDS)
def test_packing_equals_the_library_and_goes_back(rows: int, words: int, seed: int) -> None:
    codes = random_codes(rows, 8 * words, seed)
    packed = pack(codes)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, pack_to_int32(codes.to(torch.int8), 4))
    assert torch.equal(unpack_from_int32(packed, 4, torch.Size(codes.shape)).to(torch.int32), codes)
    assert torch.equal(unpack(packed), codes)


def random_weight(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([8, 32]), DTYPES, SEEDS)
def test_quantising_is_off_by_half_a_step(rows: int, groups: int, size: int, dtype: torch.dtype, seed: int) -> None:
    """scale = amax / 7.5, so that -8 and +7 are both half a step from the largest value."""
    weight = random_weight(rows, groups * size, seed, dtype)
    codes, scale = quantize(weight, size)
    steps = scale.float().repeat_interleave(size, dim=1)
    assert scale.dtype == dtype and codes.abs().max() >= 7
    torch.testing.assert_close(
        scale.float(), weight.float().unflatten(1, (-1, size)).abs().amax(-1) / 7.5, atol=0, rtol=4e-3
    )
    assert bool(((codes * steps - weight.float()).abs() <= steps * 0.532).all())


@given(st.integers(1, 4), st.sampled_from([8, 32]), SEEDS)
def test_quantising_what_is_on_the_grid_changes_nothing(rows: int, size: int, seed: int) -> None:
    codes = random_codes(rows, 2 * size, seed)
    codes[:, ::size] = -8
    scale = 2.0 ** torch.randint(-6, 3, (rows, 2), generator=torch.Generator().manual_seed(seed))
    again, found = quantize((codes * scale.repeat_interleave(size, dim=1)) * (7.5 / 8), size)
    assert torch.equal(found, scale * (7.5 / 8) * (8 / 7.5))
    assert bool(((again - codes * (7.5 / 8)).abs() <= 0.5).all())


def test_a_group_of_zeros_stays_zero() -> None:
    codes, scale = quantize(torch.zeros(2, 16), 8)
    assert not codes.any() and not dequantize(pack(codes), scale, torch.float32).any()


def random_int4(rows: int, columns: int, size: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, scale = quantize(random_weight(rows, columns, seed, dtype), size)
    return pack(codes), scale


@given(st.integers(1, 5), st.sampled_from([8, 16, 32]), DTYPES, SEEDS)
def test_dequantising_rounds_once(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    packed, scale = random_int4(rows, 64, size, seed, dtype)
    assert torch.equal(dequantize(packed, scale, dtype), dequantised(packed, scale).to(dtype))


# ---- products

NATIVE = st.tuples(st.sampled_from([16, 32, 48, 80]), st.sampled_from([32, 64, 128]), st.just(32))
OTHER = st.sampled_from([(24, 64, 32), (16, 48, 16), (40, 64, 8), (7, 32, 32)])


def product(shape: tuple[int, int, int], num: int, seed: int, dtype: torch.dtype) -> tuple[Int4Linear, Tensor, Tensor]:
    """An INT4 product, its input, and the result in float64 with the weight unrounded."""
    rows, columns, size = shape
    packed, scale = random_int4(rows, columns, size, seed, dtype)
    x = random_weight(num, columns, seed + 1, dtype)
    return Int4Linear(packed, scale, dtype), x, x.double() @ dequantised(packed, scale).double().t()


@given(NATIVE, st.integers(1, 20), SEEDS)
def test_native_float32_product_is_exact_to_rounding(shape: tuple[int, int, int], num: int, seed: int) -> None:
    linear, x, wanted = product(shape, num, seed, torch.float32)
    assert linear.native
    torch.testing.assert_close(linear(x).double(), wanted, atol=1e-4, rtol=0)


@given(NATIVE, st.integers(1, 20), SEEDS)
def test_native_bfloat16_product_is_within_its_roundings(shape: tuple[int, int, int], num: int, seed: int) -> None:
    """One rounding of each weight and one of the result, 2^-9 each; sums are float32."""
    linear, x, wanted = product(shape, num, seed, torch.bfloat16)
    size = x.double().abs() @ dequantised(*random_int4(*shape, seed, torch.bfloat16)).double().abs().t()
    assert linear.native and linear(x).dtype == torch.bfloat16
    assert bool(((linear(x).double() - wanted).abs() <= 2.0**-8 * size).all())


@given(OTHER, st.integers(1, 20), DTYPES, SEEDS)
def test_other_shapes_take_the_reference_path(
    shape: tuple[int, int, int], num: int, dtype: torch.dtype, seed: int
) -> None:
    linear, x, wanted = product(shape, num, seed, dtype)
    assert not linear.native
    tolerance = 1e-4 if dtype == torch.float32 else 2.0**-6 * float(wanted.abs().max())
    torch.testing.assert_close(linear(x).double(), wanted, atol=tolerance, rtol=0)


@given(NATIVE, st.integers(1, 20), DTYPES, SEEDS)
def test_native_and_reference_agree(shape: tuple[int, int, int], num: int, dtype: torch.dtype, seed: int) -> None:
    linear, x, wanted = product(shape, num, seed, dtype)
    plain = Int4Linear(*random_int4(*shape, seed, dtype), dtype, native=False)
    assert linear.native and not plain.native
    tolerance = 1e-4 if dtype == torch.float32 else 2.0**-6 * float(wanted.abs().max())
    torch.testing.assert_close(linear(x).float(), plain(x).float(), atol=tolerance, rtol=0)


@given(NATIVE | OTHER, splits(40), DTYPES, SEEDS)
def test_rows_keep_their_bits_in_any_batch(
    shape: tuple[int, int, int], sizes: list[int], dtype: torch.dtype, seed: int
) -> None:
    linear, x, _ = product(shape, 40, seed, dtype)
    assert torch.equal(torch.cat([linear(part) for part in x.split(sizes)]), linear(x))


@given(NATIVE | OTHER, DTYPES, SEEDS)
def test_codes_stay_packed_in_memory(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    rows, columns, size = shape
    linear, _, _ = product(shape, 1, seed, dtype)
    zeros = 2 if linear.native else 1  # the native product stores a zero point beside every scale
    assert linear.nbytes == rows * columns // 2 + zeros * rows * columns // size * dtype.itemsize


def random_words(rows: int, words: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, words), generator=generator).to(torch.int32)


def converted(packed: Tensor) -> Tensor:
    out = torch.empty(packed.shape[0], packed.shape[1] * 4, dtype=torch.uint8)
    int4._convert(packed, out)
    return out


@pytest.mark.skipif(not int4._interleaves(), reason="this processor's INT4 layout has other blocks: torch converts")
@given(st.integers(1, 3), st.integers(1, 6), SEEDS)
def test_the_fast_layout_is_the_librarys(blocks: int, pairs: int, seed: int) -> None:
    packed = random_words(64 * blocks, 2 * pairs, seed)
    out = torch.empty(packed.shape[0], packed.shape[1] * 4, dtype=torch.uint8)
    int4._interleave(packed, out)
    assert torch.equal(out, converted(packed))


@given(st.lists(st.sampled_from([8, 16, 64, 128]), min_size=1, max_size=3), st.booleans(), DTYPES, SEEDS)
def test_parts_equal_the_whole(heights: list[int], fast: bool, dtype: torch.dtype, seed: int) -> None:
    """Also parts that are some columns of a wider tensor."""
    packed, scale = random_int4(sum(heights), 128, 32, seed, dtype)
    wide = random_words(sum(heights), 40, seed)
    wide[:, 8:24] = packed
    with patch.object(int4, "_interleaves", int4._interleaves if fast else lambda: False):
        whole, parts = (Int4Linear(words, scale, dtype) for words in (packed, wide[:, 8:24].split(heights)))
    assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.scale, parts.scale)
    assert parts.codes.is_contiguous() and parts.native == (sum(heights) % 16 == 0)


# ---- PyTorch's product on a GPU, by a fake of it


GPU = st.tuples(st.sampled_from([8, 24, 64]), st.sampled_from([32, 64, 96, 256]), st.just(32))


@given(GPU, st.integers(1, 20), SEEDS)
def test_the_gpu_product_gets_what_it_wants(shape: tuple[int, int, int], num: int, seed: int) -> None:
    with as_on_a_gpu():
        linear, x, wanted = product(shape, num, seed, torch.bfloat16)
        assert not linear.native, "the grouped kernel reads words"
        linear.pack()
        assert linear.native and linear.group_size == shape[2]
        once = linear.codes
        linear.pack()
    assert linear.codes is once and linear.nbytes == 4 * shape[0] * shape[1] // 8 + 4 * shape[0] * shape[1] // 32
    tolerance = 2.0**-6 * float(wanted.abs().max())
    torch.testing.assert_close(linear(x).double(), wanted, atol=tolerance, rtol=0)


@given(GPU, SEEDS)
def test_swapped_half_bytes_would_be_noticed(shape: tuple[int, int, int], seed: int) -> None:
    with as_on_a_gpu(layout=lambda halves, tiles: gpu_layout((halves << 4) | (halves >> 4), tiles)):
        linear, x, wanted = product(shape, 4, seed, torch.bfloat16)
        linear.pack()
    assert float((linear(x).double() - wanted).abs().max()) > 0.05 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((7, 32, 32), torch.bfloat16), ((16, 48, 16), torch.bfloat16), ((16, 64, 32), torch.float32)],
)
def test_what_the_gpu_product_does_not_take_stays_words(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    with as_on_a_gpu():
        linear, x, wanted = product(shape, 3, 0, dtype)
        linear.pack()
    assert not linear.native
    torch.testing.assert_close(linear(x).double(), wanted, atol=2.0**-6 * float(wanted.abs().max()), rtol=0)


def test_an_older_gpu_keeps_words() -> None:
    with as_on_a_gpu(takes=False):
        linear, _, _ = product((16, 64, 32), 3, 0, torch.bfloat16)
        linear.pack()
    assert not linear.native


@pytest.mark.parametrize("columns", [32, 64, 128, 384])
def test_the_shapes_are_those_that_torch_states(columns: int) -> None:
    """By its own rules for tensors without data."""
    with as_on_a_gpu(layout=int4._GPU_LAYOUT, product=int4._GPU_PRODUCT), FakeTensorMode():
        words = torch.empty(24, columns // 8, dtype=torch.int32)
        linear = Int4Linear(words, words.new_empty(24, columns // 32, dtype=torch.bfloat16), torch.bfloat16)
        linear.pack()
        assert linear.native and linear(words.new_empty(5, columns, dtype=torch.bfloat16)).shape == (5, 24)

"""The kernels of ops/blockwise against their references on a CPU, bit for bit."""

import pytest
import torch
from support import many_scales
from support.kernels import DEVICE, KERNEL, assert_all_same, check, to_device, with_cuda_sizes

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.blockwise import reference, triton

pytestmark = KERNEL

FORMATS = [E4M3, E5M2]
LAYOUTS = [(True, False), (False, True), (True, True)]
NAN, INF = float("nan"), float("inf")
EDGES = [0.0, -0.0, 2.0**-149, -(2.0**-130), 3e38, -1e-20, NAN, INF, -INF]
ODD_NAN = torch.tensor(0x7FE1, dtype=torch.int16).view(torch.bfloat16)
"""With a payload: an amax is the plain NaN whichever NaN its block holds."""


def by_format(function):
    return pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])(function)


def quantize_both(x, fmt, block_rows, layout, view=lambda x: x):
    """Bitwise, strides too."""
    arguments = (fmt.dtype, fmt.max, block_rows, *layout)
    expected = reference.quantize_blockwise(view(x), *arguments)
    got = triton.quantize_blockwise(view(x.to(DEVICE)), *arguments)
    assert [one.stride() for one in expected] == [one.stride() for one in got]
    assert_all_same(expected, got)


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@by_format
def test_layouts_equal_the_reference_bitwise(fmt, layout, block_rows):
    quantize_both(many_scales("per_tile", 128, 128).bfloat16(), fmt, block_rows, layout)


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("shape", with_cuda_sizes([(1, 1), (144, 129), (150, 16)], [(37, 1000), (8192, 4096)]))
def test_ragged_and_large_layouts_equal_the_reference_bitwise(shape, block_rows):
    quantize_both(many_scales("per_tile", *shape), E4M3, block_rows, (True, True))
    quantize_both(many_scales("per_row", *shape).bfloat16(), E5M2, block_rows, (True, False))
    if DEVICE == "cuda":
        quantize_both(many_scales("per_row", *shape).half(), E4M3, block_rows, (False, True))


@pytest.mark.parametrize("block_rows", with_cuda_sizes([1], [128]))
@pytest.mark.parametrize("view", [lambda x: x[:, 80:], lambda x: x.t(), lambda x: x[1::3, 3:]])
def test_rows_apart_and_transposed_views_equal_the_reference_bitwise(view, block_rows):
    quantize_both(many_scales("per_row", 64, 200).bfloat16(), E4M3, block_rows, (True, True), view)


@by_format
def test_words_of_two_equal_the_reference_bitwise(fmt):
    """Whole tiles of bf16, several of them, also of a wider matrix; in even and odd columns and all four rows of a word
    what is zero, tiny, huge or not finite, and every tie between two codes."""
    x = many_scales("per_tile", 256, 512).bfloat16()
    codes = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    codes = codes[codes.isfinite()]
    ties = (codes[1:] + codes[:-1]) / 2
    x[:128, :128] = torch.cat([ties, -ties])[torch.arange(128 * 128) % (2 * len(ties))].view(128, 128)
    x[:128, 0] = x[0, :128] = fmt.max
    for row, value in enumerate(EDGES):
        x[129 + row, 256 + 11 * row] = value
        x[150 + row, 128:256] = x[130:256, 400 + row] = value
    x[200, 384:] = x[128:, 511] = ODD_NAN
    for view in (lambda x: x, lambda x: x[128:, 128:384]):
        assert triton._has_pairs(view(x.to(DEVICE)))
        quantize_both(x, fmt, 1, (True, True), view)


@pytest.mark.parametrize(
    "view", [lambda x: x[:128, 1:129], lambda x: x[:128, :128], lambda x: x.flatten()[1 : 1 + 128 * 128].view(128, 128)]
)
def test_rows_that_are_no_words_of_two_equal_the_reference_bitwise(view):
    x = many_scales("per_row", 129, 131).bfloat16()
    assert not triton._has_pairs(view(x.to(DEVICE)))
    quantize_both(x, E4M3, 1, (True, True), view)


@by_format
def test_every_rounding_equals_the_reference_bitwise(fmt):
    """All codes, all ties between two, their neighbours; each row's amax, the largest code, keeps its scale at 1."""
    codes = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    codes = codes[codes.isfinite()]
    ties = (codes[1:] + codes[:-1]) / 2
    ties = torch.cat([codes, ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])
    values = torch.cat([ties, -ties])
    x = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    x = torch.cat([torch.full((len(x), 1), fmt.max), x], 1)
    quantize_both(x, fmt, 1, (True, True))
    quantize_both(x, fmt, 128, (False, True))


@pytest.mark.parametrize("exponent", with_cuda_sizes([0], range(-126, 128, 7)))
@by_format
def test_every_bf16_number_equals_the_reference_bitwise(fmt, exponent):
    """In blocks whose amax is each of many powers of two, so that every number meets every rounding."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    inside = values[values.isfinite() & (values.float().abs() <= 2.0**exponent)]
    inside = torch.nn.functional.pad(inside, (0, -len(inside) % 127)).view(-1, 127)
    x = torch.cat([torch.full((len(inside), 1), 2.0**exponent, dtype=torch.bfloat16), inside], 1)
    quantize_both(x, fmt, 1, (True, True))


@by_format
def test_extreme_and_non_finite_rows_and_columns_equal_the_reference_bitwise(fmt):
    x = many_scales("per_row", 128, 128)
    for row, value in enumerate(EDGES):
        x[2 * row, row] = value
        x[2 * row + 1] = value
    quantize_both(x, fmt, 1, (True, True))


@pytest.mark.parametrize("value", EDGES)
def test_a_square_block_of_an_extreme_value_equals_the_reference_bitwise(value):
    x = torch.zeros(4, 3)
    x[1] = value
    quantize_both(x, E4M3, 128, (True, True))


def transpose_both(x_fp8, scale_inv, fmt):
    args = x_fp8, scale_inv, fmt.max
    expected, got = reference.transpose_blockwise(*args), triton.transpose_blockwise(*to_device(*args))
    assert [one.stride() for one in expected] == [one.stride() for one in got]
    assert_all_same(expected, got)


@by_format
@pytest.mark.parametrize("family", ["per_row", "per_column"])
@pytest.mark.parametrize("shape", with_cuda_sizes([(144, 120)], [(256, 384), (37, 1000)]))
def test_transposed_codes_equal_the_reference_bitwise(shape, family, fmt):
    x = many_scales(family, *shape)
    x[7] = 0
    x[9] *= 1e-6
    x_fp8, scale_inv, _, _ = reference.quantize_blockwise(x, fmt.dtype, fmt.max, 1, True, False)
    transpose_both(x_fp8, scale_inv, fmt)
    transpose_both(x_fp8[:9, :3].contiguous(), scale_inv[:9, :1].contiguous(), fmt)


@by_format
def test_transposed_edges_equal_the_reference_bitwise(fmt):
    """All codes by all ratios down to 2**-40, the widest ratio, tiles of zeros, poisoned tiles."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[codes.view(fmt.dtype).float().isfinite()]
    x_fp8 = finite.repeat(41, 1).view(fmt.dtype)
    scale_inv = torch.exp2(-torch.arange(41.0))[:, None].repeat(1, 2)
    widest = torch.tensor([[2.0**-126], [2.0**119], [1.0]])
    transpose_both(x_fp8, scale_inv[:, : -(-x_fp8.shape[1] // 128)].contiguous(), fmt)
    transpose_both(x_fp8[:3, :100].contiguous(), widest, fmt)
    transpose_both(torch.zeros(130, 5).to(fmt.dtype), torch.full((130, 1), 0.25), fmt)
    transpose_both(codes.view(fmt.dtype)[None].repeat(2, 1), torch.tensor([[NAN, 1.0], [1.0, NAN]]), fmt)
    transpose_both(torch.zeros(2, 3).to(fmt.dtype), torch.tensor([[NAN], [1.0]]), fmt)


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amaxes_of_shards_equal_the_reference_bitwise(dtype, block_rows):
    shape = (130, 260)
    flat = many_scales("per_tile", *shape).to(dtype).flatten()
    flat[5], flat[40 * 260], flat[-1] = ODD_NAN.to(dtype), INF, -INF
    on_device = flat.to(DEVICE)
    for start, stop in ((0, flat.numel()), (33799, 33800), (129, 131), (16640, 33000)):
        rest = start, *shape, block_rows
        expected, got = reference.block_amax(flat[start:stop], *rest), triton.block_amax(on_device[start:stop], *rest)
        assert_all_same(expected, got)
    check(reference, triton, "block_amax", many_scales("per_row", 256, 128).to(dtype), 0, 256, 128, block_rows)


@pytest.mark.parametrize("shape", [(32, 256), (1, 1), (33, 129), (5, 1000)], ids=str)
def test_dequantized_shapes_equal_the_reference_bitwise(shape):
    codes = many_scales("per_tile", *shape).clamp(-448, 448).to(E4M3.dtype)
    scale_inv = torch.exp2(many_scales("per_row", shape[0], -(-shape[1] // 128)).clamp(-60, 60).round())
    check(reference, triton, "dequantize_groupwise", codes, scale_inv)
    check(reference, triton, "dequantize_groupwise", codes, scale_inv.t().contiguous().t())


def test_all_codes_by_all_scales_equal_the_reference_bitwise():
    """Also NaN as code and as scale, products that are subnormal in bf16, zero and infinite."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3.dtype).repeat(64, 1)
    scale_inv = torch.exp2(torch.linspace(-126, 127, 63).round())
    scale_inv = torch.cat([scale_inv, torch.tensor([NAN])])[:, None].repeat(1, 2)
    check(reference, triton, "dequantize_groupwise", codes, scale_inv)

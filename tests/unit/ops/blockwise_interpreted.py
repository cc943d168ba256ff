"""The blockwise kernels in Triton's interpreter against the reference. test_interpreted.py runs this file."""

import pytest
import torch
from support import many_scales
from support.producers import assert_same as assert_same_but_nans

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.blockwise import reference, triton
from fp8_ds.testing import assert_bitwise

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of NaN

FORMATS = [E4M3, E5M2]
LAYOUTS = [(True, False), (False, True), (True, True)]
EDGES = [0.0, -0.0, 2.0**-149, -(2.0**-130), 3e38, -1e-20, float("nan"), float("inf"), float("-inf")]
ODD_NAN = torch.tensor(0x7FE1, dtype=torch.int16).view(torch.bfloat16)
"""With a payload: an amax is the plain NaN whichever NaN its block holds."""


def assert_same(expected, got):
    """Bitwise, strides too; which NaN a code is, is not promised."""
    for a, b in zip(expected, got, strict=True):
        assert a.stride() == b.stride()
        if a.dtype in (E4M3.dtype, E5M2.dtype):
            is_nan = a.float().isnan()
            assert torch.equal(is_nan, b.float().isnan())
            a, b = (torch.where(is_nan, 0, codes.view(torch.uint8)) for codes in (a, b))
        assert_bitwise(a, b)


def quantize_both(x, fmt, block_rows, layout):
    arguments = (x, fmt.dtype, fmt.max, block_rows, *layout)
    assert_same(reference.quantize_blockwise(*arguments), triton.quantize_blockwise(*arguments))


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
def test_layouts_equal_the_reference_bitwise(fmt, block_rows):
    x = many_scales("per_tile", 128, 128).bfloat16()
    for layout in LAYOUTS:
        quantize_both(x, fmt, block_rows, layout)


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("shape", [(1, 1), (144, 129), (150, 16)])
def test_ragged_layouts_equal_the_reference_bitwise(shape, block_rows):
    quantize_both(many_scales("per_tile", *shape), E4M3, block_rows, (True, True))
    quantize_both(many_scales("per_row", *shape).bfloat16(), E5M2, block_rows, (True, False))


def test_rows_apart_and_transposed_views_equal_the_reference_bitwise():
    x = many_scales("per_row", 64, 200).bfloat16()
    quantize_both(x[:, 80:], E4M3, 1, (True, True))
    quantize_both(x.t(), E4M3, 1, (True, True))


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
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
    for part in (x, x[128:, 128:384]):
        assert triton._has_pairs(part)
        quantize_both(part, fmt, 1, (True, True))


@pytest.mark.parametrize(
    "view", [lambda x: x[:128, 1:129], lambda x: x[:128, :128], lambda x: x.flatten()[1 : 1 + 128 * 128].view(128, 128)]
)
def test_rows_that_are_no_words_of_two_equal_the_reference_bitwise(view):
    x = view(many_scales("per_row", 129, 131).bfloat16())
    assert not triton._has_pairs(x)
    quantize_both(x, E4M3, 1, (True, True))


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
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


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
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


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("family", ["per_row", "per_column"])
def test_transposed_codes_equal_the_reference_bitwise(family, fmt):
    x = many_scales(family, 144, 120)
    x[7] = 0
    x[9] *= 1e-6
    x_fp8, scale_inv, _, _ = reference.quantize_blockwise(x, fmt.dtype, fmt.max, 1, True, False)
    whole = (x_fp8, scale_inv, fmt.max)
    assert_same(reference.transpose_blockwise(*whole), triton.transpose_blockwise(*whole))
    corner = (x_fp8[:9, :3], scale_inv[:9, :1].contiguous(), fmt.max)
    assert_same(reference.transpose_blockwise(*corner), triton.transpose_blockwise(*corner))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of signalling NaN
@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
def test_transposed_edges_equal_the_reference_bitwise(fmt):
    """All codes by all ratios down to 2**-40, the widest ratio, tiles of zeros, poisoned tiles, nothing at all."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[codes.view(fmt.dtype).float().isfinite()]
    x_fp8 = finite.repeat(41, 1).view(fmt.dtype)
    scale_inv = torch.exp2(-torch.arange(41.0))[:, None].repeat(1, 2)
    widest = torch.tensor([[2.0**-126], [2.0**119], [1.0]])
    cases = [
        (x_fp8, scale_inv[:, : -(-x_fp8.shape[1] // 128)].contiguous()),
        (x_fp8[:3, :100].contiguous(), widest),
        (torch.zeros(130, 5).to(fmt.dtype), torch.full((130, 1), 0.25)),
        (codes.view(fmt.dtype)[None].repeat(2, 1), torch.tensor([[float("nan"), 1.0], [1.0, float("nan")]])),
        (torch.zeros(2, 3).to(fmt.dtype), torch.tensor([[float("nan")], [1.0]])),
    ]
    for case in cases:
        expected = reference.transpose_blockwise(*case, fmt.max)
        assert_same(expected, triton.transpose_blockwise(*case, fmt.max))


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amaxes_of_shards_equal_the_reference_bitwise(dtype, block_rows):
    shape = (130, 260)
    flat = many_scales("per_tile", *shape).to(dtype).flatten()
    flat[5], flat[40 * 260], flat[-1] = ODD_NAN.to(dtype), float("inf"), float("-inf")
    for start, stop in ((0, flat.numel()), (33799, 33800), (129, 131), (16640, 33000)):
        arguments = (flat[start:stop], start, *shape, block_rows)
        assert_same([reference.block_amax(*arguments)], [triton.block_amax(*arguments)])
    arguments = (many_scales("per_row", 256, 128).to(dtype), 0, 256, 128, block_rows)
    assert_same([reference.block_amax(*arguments)], [triton.block_amax(*arguments)])


def dequantize_both(x_fp8, scale_inv):
    assert_same_but_nans(
        reference.dequantize_groupwise(x_fp8, scale_inv), triton.dequantize_groupwise(x_fp8.contiguous(), scale_inv)
    )


@pytest.mark.parametrize("shape", [(32, 256), (1, 1), (33, 129), (5, 1000)], ids=str)
def test_shapes_equal_the_reference_bitwise(shape):
    codes = many_scales("per_tile", *shape).clamp(-448, 448).to(E4M3.dtype)
    scale_inv = torch.exp2(many_scales("per_row", shape[0], -(-shape[1] // 128)).clamp(-60, 60).round())
    dequantize_both(codes, scale_inv)
    dequantize_both(codes, scale_inv.t().contiguous().t())


def test_all_codes_by_all_scales_equal_the_reference_bitwise():
    """Also NaN as code and as scale, products that are subnormal in bf16, zero and infinite."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3.dtype).repeat(64, 1)
    scale_inv = torch.exp2(torch.linspace(-126, 127, 63).round())
    scale_inv = torch.cat([scale_inv, torch.tensor([float("nan")])])[:, None].repeat(1, 2)
    dequantize_both(codes, scale_inv)

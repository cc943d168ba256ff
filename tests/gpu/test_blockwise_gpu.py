"""The blockwise kernels on CUDA against the reference on CPU copies, bit for bit, and torch's blockwise GEMM."""

import pytest
import torch
from support import MANY_SCALES, many_scales

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.blockwise import block_amax, quantize_blockwise, reference, shard_block_amax, transpose_blockwise
from fp8_ds.ops.gemm.blockwise import scaled_mm_blockwise
from fp8_ds.testing import assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

FORMATS = [E4M3, E5M2]
LAYOUTS = ["row", "col", "both"]
ROWS, SQUARES = (1, 128), (128, 128)
SHAPES = [(1, 1), (128, 128), (256, 384), (16, 144), (130, 257), (4, 1000), (1000, 4), (2000, 96), (1024, 1040)]
PRODUCTS = [(128, 512, 256), (256, 640, 384), (130, 257, 140), (1, 1, 1), (17, 130, 33), (512, 4096, 1024), (16, 0, 8)]
EDGES = [0.0, -0.0, 2.0**-149, -(2.0**-130), 3e38, -1e-20, float("nan"), float("inf"), float("-inf")]
ODD_NAN = torch.tensor(0x7FE1, dtype=torch.int16).view(torch.bfloat16)
"""With a payload: an amax is the plain NaN whichever NaN its block holds."""


def assert_same(expected, got):
    """Bitwise, strides too; which NaN a code is, is not promised."""
    for a, b in zip(expected, got, strict=True):
        if a is None:
            assert b is None
            continue
        assert a.stride() == b.stride() and b.is_cuda
        b = b.cpu()
        if a.dtype in (E4M3.dtype, E5M2.dtype):
            is_nan = a.float().isnan()
            assert torch.equal(is_nan, b.float().isnan())
            a, b = (torch.where(is_nan, 0, codes.view(torch.uint8)) for codes in (a, b))
        assert_bitwise(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [ROWS, SQUARES])
@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layouts_equal_the_cpu_reference_bitwise(dtype, fmt, block, layout):
    for shape in SHAPES:
        x = many_scales("per_tile", *shape).to(dtype)
        assert_same(quantize_blockwise(x, fmt, block, layout), quantize_blockwise(x.cuda(), fmt, block, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [ROWS, SQUARES])
def test_a_large_activation_equals_the_cpu_reference_bitwise(block, layout):
    x = many_scales("per_row", 8192, 4096).bfloat16()
    assert_same(quantize_blockwise(x, E4M3, block, layout), quantize_blockwise(x.cuda(), E4M3, block, layout))


@pytest.mark.parametrize("block", [ROWS, SQUARES])
def test_rows_apart_misaligned_and_transposed_views_equal_the_cpu_reference_bitwise(block):
    x = many_scales("per_row", 300, 700).bfloat16()
    for view in (lambda t: t[:, 100:], lambda t: t[1:, 1:], lambda t: t[::3, 16:400], lambda t: t.t()):
        got = quantize_blockwise(view(x.cuda()), E4M3, block, "both")
        assert_same(quantize_blockwise(view(x), E4M3, block, "both"), got)


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
def test_words_of_two_equal_the_cpu_reference_bitwise(fmt):
    """Whole tiles of bf16, also of a wider matrix: every number; in even and odd columns and all four rows of a word
    what is zero, tiny, huge or not finite."""
    from fp8_ds.ops.blockwise import triton  # the package is missing where there is no GPU

    x = many_scales("per_tile", 1024, 640).bfloat16()
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x[:512, :128] = every.view(512, 128)
    x[:512, 128:256] = every.where(every.abs() <= 1000.0, 1000.0).view(512, 128).flip(1)
    for row, value in enumerate([*EDGES, ODD_NAN]):
        x[513 + row, 256 + 11 * row] = value
        x[530 + row, 128:256] = x[640:, 400 + row] = value
    for view in (lambda t: t, lambda t: t[128:, 128:512], lambda t: t[:512:4, 2:130]):
        assert triton._has_pairs(view(x.cuda()))
        assert_same(
            quantize_blockwise(view(x), fmt, ROWS, "both"), quantize_blockwise(view(x.cuda()), fmt, ROWS, "both")
        )
    for view in (lambda t: t[:128, 1:129], lambda t: t.flatten()[1 : 1 + 512 * 640].view(512, 640)):
        assert not triton._has_pairs(view(x.cuda()))
        assert_same(
            quantize_blockwise(view(x), fmt, ROWS, "both"), quantize_blockwise(view(x.cuda()), fmt, ROWS, "both")
        )


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
def test_every_bf16_value_equals_the_cpu_reference_bitwise(fmt):
    """In blocks whose amax is each of many powers of two, so that every value meets every rounding."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    for exponent in range(-126, 128, 7):
        inside = values[values.float().abs() <= 2.0**exponent]
        inside = torch.nn.functional.pad(inside, (0, -len(inside) % 127)).view(-1, 127)
        x = torch.cat([torch.full((len(inside), 1), 2.0**exponent, dtype=torch.bfloat16), inside], 1)
        assert_same(quantize_blockwise(x, fmt, ROWS, "both"), quantize_blockwise(x.cuda(), fmt, ROWS, "both"))


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
def test_every_tie_and_its_neighbours_equal_the_cpu_reference_bitwise(fmt):
    codes = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    codes = codes[codes.isfinite()]
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])
    values = torch.cat([values, -values])
    x = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    x = torch.cat([torch.full((len(x), 1), fmt.max), x], 1)
    for block in (ROWS, SQUARES):
        assert_same(quantize_blockwise(x, fmt, block, "both"), quantize_blockwise(x.cuda(), fmt, block, "both"))


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("block", [ROWS, SQUARES])
def test_extreme_and_non_finite_blocks_equal_the_cpu_reference_bitwise(block, fmt):
    x = many_scales("per_row", 128 * len(EDGES), 256)
    for row, value in enumerate(EDGES):
        x[2 * row, row] = value
        x[2 * row + 1] = value
        x[128 * row + 77, 200] = value
    assert_same(quantize_blockwise(x, fmt, block, "both"), quantize_blockwise(x.cuda(), fmt, block, "both"))


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("family", MANY_SCALES)
def test_transposed_codes_equal_the_cpu_reference_bitwise(family, fmt):
    for shape in SHAPES:
        x = many_scales(family, *shape)
        x[shape[0] // 2] = 0
        x[shape[0] // 3] *= 1e-6
        row = quantize_blockwise(x, fmt, ROWS, "row")
        on_cuda = (row.x_fp8.cuda(), quantize_blockwise(x.cuda(), fmt, ROWS, "row").scale_inv)
        assert_same(transpose_blockwise(row.x_fp8, row.scale_inv), transpose_blockwise(*on_cuda))


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3", "e5m2"])
def test_transposed_edges_equal_the_cpu_reference_bitwise(fmt):
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[codes.view(fmt.dtype).float().isfinite()]
    ratios = torch.exp2(-torch.arange(41.0))[:, None].repeat(1, 2)
    nan = float("nan")
    cases = [
        (finite.repeat(41, 1).view(fmt.dtype), ratios[:, : -(-len(finite) // 128)].contiguous()),
        (finite[None, :100].repeat(3, 1).view(fmt.dtype), torch.tensor([[2.0**-126], [2.0**119], [1.0]])),
        (torch.zeros(130, 5).to(fmt.dtype), torch.full((130, 1), 0.25)),
        (codes.view(fmt.dtype)[None].repeat(2, 1), torch.tensor([[nan, 1.0], [1.0, nan]])),
        (torch.zeros(2, 3).to(fmt.dtype), torch.tensor([[nan], [1.0]])),
        (torch.zeros(0, 3).to(fmt.dtype), torch.zeros(0, 1)),
    ]
    for x_fp8, scale_inv in cases:
        got, got_scale_inv = transpose_blockwise(x_fp8.cuda(), scale_inv.cuda())
        expected, expected_scale_inv = transpose_blockwise(x_fp8, scale_inv)
        assert_same([expected], [got])
        assert torch.equal(expected_scale_inv.isnan(), got_scale_inv.cpu().isnan())  # of one NaN or another
        assert_same([expected_scale_inv.nan_to_num()], [got_scale_inv.nan_to_num()])


@pytest.mark.parametrize("block", [ROWS, SQUARES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amaxes_of_shards_equal_the_cpu_reference_bitwise(dtype, block):
    for shape in ((130, 260), (1024, 512), (3, 5)):
        weight = many_scales("per_tile", *shape).to(dtype)
        flat = weight.flatten()
        flat[1], flat[-1] = ODD_NAN.to(dtype), float("-inf")
        assert_same([block_amax(weight, block)], [block_amax(weight.cuda(), block)])
        for num_shards in (1, 2, 7, 64):
            size = -(-flat.numel() // num_shards)
            for start in range(0, flat.numel(), size):
                shard = flat[start : start + size]
                expected = shard_block_amax(shard, start, shape, block)
                assert_same([expected], [shard_block_amax(flat.cuda()[start : start + size], start, shape, block)])


@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 0)])
@pytest.mark.parametrize("block", [ROWS, SQUARES])
def test_empty_matrices_launch_nothing(shape, block):
    x = torch.empty(shape)
    assert_same(quantize_blockwise(x, E4M3, block, "both"), quantize_blockwise(x.cuda(), E4M3, block, "both"))
    assert_same([block_amax(x, block)], [block_amax(x.cuda(), block)])


def test_ops_never_wait_and_compile_to_the_same_bytes():
    x = many_scales("per_row", 512, 512).bfloat16().cuda()

    def step(x):
        quantized = quantize_blockwise(x, E4M3, ROWS, "row")
        return quantized.x_fp8, quantized.scale_inv, *transpose_blockwise(quantized.x_fp8, quantized.scale_inv)

    expected = step(x)
    block_amax(x, SQUARES)  # compiles
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x)
        block_amax(x, SQUARES)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for got, want in zip(torch.compile(step, fullgraph=True)(x), expected, strict=True):
        assert_bitwise(got.cpu(), want.cpu())


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


@needs_hopper
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_b", [ROWS, SQUARES])
@pytest.mark.parametrize("shape", PRODUCTS)
def test_torch_equals_the_reference_up_to_accumulation(shape, block_b, out_dtype):
    num_m, num_k, num_n = shape
    a = quantize_blockwise(many_scales("per_tile", num_m, num_k).cuda(), E4M3, ROWS, "row")
    b = quantize_blockwise(many_scales("per_tile", num_n, num_k, seed=1).cuda(), E4M3, block_b, "row")
    args = (a.x_fp8, b.x_fp8, a.scale_inv, b.scale_inv)
    got = scaled_mm_blockwise(*args, out_dtype)
    expected = scaled_mm_blockwise(*args, torch.float32, "reference")
    positive = [x_fp8.float().abs().to(x_fp8.dtype) for x_fp8 in args[:2]]
    magnitude = scaled_mm_blockwise(*positive, *args[2:], torch.float32, "reference")
    assert got.dtype == out_dtype and got.is_contiguous()
    # The tensor core cuts each of 32 products at about 14 bits of the largest (DeepSeek-V3 report, 3.3.2).
    tolerance = 32 * 2.0**-14 + (2.0**-9 if out_dtype == torch.bfloat16 else 0)
    assert ((got.float() - expected).abs() <= tolerance * magnitude).all()


@needs_hopper
def test_torch_refuses_blocks_in_e5m2():
    """When it does no longer, `grad_dtype` may be "e5m2" (fp8_ds/config/__init__.py)."""
    a, b = (quantize_blockwise(torch.randn(256, 256).cuda(), fmt, ROWS, "row") for fmt in (E5M2, E4M3))
    with pytest.raises(ValueError, match="BlockWise"):
        scaled_mm_blockwise(a.x_fp8, b.x_fp8, a.scale_inv, b.scale_inv, torch.bfloat16)


def test_reference_runs_on_cuda_and_agrees_with_cpu():
    x = many_scales("per_tile", 130, 257)
    expected = reference.quantize_blockwise(x, E4M3.dtype, E4M3.max, 1, True, True)
    got = reference.quantize_blockwise(x.cuda(), E4M3.dtype, E4M3.max, 1, True, True)
    assert_same(expected, got)

"""The kernels of ops/quantize and ops/transpose against their references on a CPU, bit for bit."""

import pytest
import torch
from support import many_scales
from support.kernels import DEVICE, KERNEL, assert_all_same, check, to_device, with_cuda_sizes

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.quantize import LAYOUTS, reference, triton
from fp8_ds.ops.quantize.multi_tensor import PROGRAM, MultiTensorQuantize, QuantizePart
from fp8_ds.ops.transpose import transpose_reference
from fp8_ds.ops.transpose import triton as transpose_triton
from fp8_ds.testing import assert_bitwise

pytestmark = KERNEL

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
FORMATS = [E4M3, E5M2]
NAN, INF = float("nan"), float("inf")
SCALE = torch.tensor(3.7)
CUDA_SHAPES = [(304, 4096), (40, 16400), (2, 40005)]
SEVERAL_TILES = 4 * triton.AMAX_WORDS * (triton.AMAX_PROGRAMS * 2 + 1)
"""More than one tile for a program of the amax kernel on the interpreter's two processors."""


def matrix(num_rows, num_cols, dtype=BF16):
    return many_scales("per_tile", num_rows, num_cols, seed=num_rows).to(dtype)


def both(name, *args):
    check(reference, triton, name, *args)


def assert_amax(x, start=0.0):
    slots = torch.tensor(start), torch.tensor(start, device=DEVICE)
    reference.record_amax(x, slots[0])
    triton.record_amax(x.to(DEVICE), slots[1])
    assert_all_same(*slots)


def assert_delayed(x, fmt, layout, record=True, start=0.25):
    slots = torch.full((3,), start), torch.full((3,), start, device=DEVICE)
    expected, got = (
        module.quantize_and_transpose_delayed(moved, scale, inverse, slot[1], record, fmt.dtype, fmt.max, layout)
        for module, slot, (moved, scale, inverse) in zip(
            (reference, triton), slots, ((x, SCALE, 1 / SCALE), to_device(x, SCALE, 1 / SCALE)), strict=True
        )
    )
    assert_all_same([*expected, slots[0]], [*got, slots[1]])


@pytest.mark.parametrize(
    "shape",
    with_cuda_sizes(
        [(1, 1), (80, 144), (65, 9), (32, 7), (7, 32), (3, 16, 32), (2, 67, 35), (5, 1, 7), (1, 128, 256)],
        [*CUDA_SHAPES, (4096, 14336), (128, 96, 208), (8, 1024, 512)],
    ),
)
def test_transpose_equals_reference_for_every_byte_value_and_side(shape):
    x = (torch.arange(torch.Size(shape).numel()) % 257 % 256).to(torch.uint8).reshape(shape)
    assert_bitwise(transpose_reference(x), transpose_triton.transpose(x.to(DEVICE)).cpu())


def test_transpose_of_floats_and_of_misaligned_tensors_moves_bytes():
    codes = torch.arange(300, dtype=torch.int16).to(torch.uint8)
    on_device = codes.to(DEVICE)
    for start in (0, 1, 4, 8, 16):
        for dtype in (E4M3.dtype, torch.int8):
            x, moved = (one[start : start + 256].view(dtype).view(16, 16) for one in (codes, on_device))
            assert_all_same(transpose_reference(x), transpose_triton.transpose(moved))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("scale", with_cuda_sizes([1.0, 2.0**-9], [2.0**9, 97.3]))
def test_cast_equals_reference_for_every_bf16_number_and_many_others(scale, fmt):
    """Infinities, both signs of NaN and zero, halfway cases, subnormals of both formats, and of float32."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    codes = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    codes = codes[codes.isfinite()]
    halfway = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, halfway, halfway * (1 + 2**-23), halfway * (1 - 2**-24), -halfway])
    random = torch.randint(-(2**31), 2**31, (1 << 18,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for x in (every.view(BF16), near, *with_cuda_sizes([], [every.view(FP16), random.view(FP32)])):
        both("quantize", x, torch.tensor(scale), fmt.dtype, fmt.max)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "numel", with_cuda_sizes([1, 4 * triton.CAST_WORDS + 16, 4 * triton.CAST_WORDS + 3], [1 << 20])
)
def test_elementwise_casts_equal_reference(numel, dtype):
    x = matrix(1, numel, dtype).flatten()
    assert_amax(x)
    both("quantize", x, SCALE, E5M2.dtype, E5M2.max)
    both("quantize_tensorwise", x, E4M3.dtype, E4M3.max)
    for fmt in FORMATS:
        both("quantize_tensor_pow2", x, fmt.dtype, fmt.max)


@pytest.mark.parametrize("largest", [0.0, 1e-40, 448.0, 449.0, 57344.0, 3e38, INF, NAN])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_powers_of_two_equal_reference_at_the_edges(fmt, largest):
    x = torch.tensor([largest, 0.25 * largest, -0.5, 0.0]) * (1.0 if largest else 0.0)
    both("quantize_tensor_pow2", x, fmt.dtype, fmt.max)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("shape", "block"),
    with_cuda_sizes(
        [((33, 160), (1, 160)), ((130, 257), (128, 128)), ((130, 132), (128, 128))],
        [((304, 4096), (1, 4096)), ((300, 4100), (128, 128))],
    ),
)
def test_parts_of_a_matrix_with_a_scale_for_each_block_equal_reference(shape, block, dtype):
    """Cut where words hold one row and where they hold two, where they are aligned and where they are not."""
    x = matrix(*shape, dtype).flatten()
    grid = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) + 0.5
    for start, end in ((0, 32), (3, 40), (128, 160), (x.numel() - 700, x.numel())):
        both("quantize_part", x[start:end].clone(), grid, start, shape[1], *block, E4M3.dtype, E4M3.max)
    both("quantize_part", x, grid, 0, shape[1], *block, E5M2.dtype, E5M2.max)


@pytest.mark.parametrize(("fmt", "dtype"), [(E4M3, BF16), (E4M3, FP16), (E5M2, FP32)])
def test_parts_of_many_matrices_cast_at_once_equal_reference(dtype, fmt):
    """Aligned and not, of no element, of several programs; with one scale, one a word, several a word. All at once."""
    shapes = {(33, 160): (1, 160), (130, 257): (128, 128), (130, 132): (128, 128), (2, PROGRAM): None}
    parts = []
    for shape, block in shapes.items():
        x = matrix(*shape, dtype).flatten()
        x[-1], x[-5] = INF, NAN
        x = x.to(DEVICE)
        size = () if block is None else (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        grid = (torch.rand(size) + 0.5).to(DEVICE)
        for start, end in ((0, x.numel()), (3, 40), (128, 160), (x.numel() - 700, x.numel()), (5, 5)):
            memory = torch.zeros(end - start + 32, dtype=torch.uint8, device=DEVICE).view(fmt.dtype)
            out = memory[start % 16 :][: end - start]
            parts.append(QuantizePart(x[start:end], out, grid, start, shape[1], block or (1, 1)))
    cast = MultiTensorQuantize(parts, fmt)
    assert len(cast._launches) == 6  # one scale, one a word, several a word; whole vectors or not
    expected = [torch.empty_like(part.out, device="cpu") for part in parts]
    xs, grids = [part.x.cpu() for part in parts], [part.grid.cpu() for part in parts]
    places = [n for part in parts for n in (*part[3:5], *part.block)]
    unread = torch.empty(0)
    reference.quantize_parts(unread, unread, xs, expected, grids, places, False, False, fmt.max)
    for launch in cast._launches:
        arguments = launch.table, launch.program_parts, launch.xs, launch.outs, launch.grids, launch.places
        triton.quantize_parts(*arguments, launch.has_one_scale, launch.is_vector, fmt.max)
    for part, codes in zip(parts, expected, strict=True):
        assert_all_same(codes, part.out)
        around = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(part.out.untyped_storage()).tolist()
        at = part.out.storage_offset()
        assert not any(around[:at]) and not any(around[at + len(codes) :])


def test_amax_sees_the_last_element_of_several_tiles_and_every_program():
    x = torch.zeros(SEVERAL_TILES, dtype=BF16)
    for at in (0, 4 * triton.AMAX_WORDS, SEVERAL_TILES - 1):
        x[at] = -2.0 - at
        assert_amax(x)
        both("quantize_tensorwise", x[-40000:].clone(), E4M3.dtype, E4M3.max)


@pytest.mark.parametrize("start", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [32, 33])
def test_tensors_that_begin_anywhere_equal_reference(numel, start):
    x = matrix(1, 64).flatten()
    x, moved = (one[start : start + numel] for one in (x, x.to(DEVICE)))
    for name, *args in (("quantize_tensorwise",), ("quantize_rowwise", None)):
        expected, got = (
            getattr(module, name)(one.reshape(1, -1), *args, E4M3.dtype, E4M3.max)
            for module, one in ((reference, x), (triton, moved))
        )
        assert_all_same(expected, got)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.0])
@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("start", [0.25, 1e30])
def test_delayed_equals_reference_with_and_without_a_broken_element(bad, record, start):
    x = matrix(5, 16)
    x[4, 7] = bad
    assert_delayed(x, E4M3, "row", record, start)
    assert_delayed(x, E5M2, "col", record, start)


@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    with_cuda_sizes(
        [
            ((80, 16), BF16, "both"),  # two programs, all vectors whole
            ((16, 80), FP16, "col"),  # two programs, side by side
            ((16, 32), FP32, "both"),
            ((67, 35), BF16, "both"),  # no vector whole
            ((33, 16), FP32, "col"),  # whole when read, not when written
            ((16, 9), FP16, "col"),  # the reverse
        ],
        [(shape, dtype, layout) for shape in CUDA_SHAPES for dtype in DTYPES for layout in LAYOUTS],
    ),
)
def test_layouts_equal_reference(shape, dtype, layout):
    for fmt in with_cuda_sizes([E5M2 if layout == "col" else E4M3], FORMATS):
        assert_delayed(matrix(*shape, dtype), fmt, layout)


@pytest.mark.parametrize(("layout", "bad"), [("row", 0.0), ("col", INF), ("both", 0.0), ("both", NAN)])
@pytest.mark.parametrize("shape", with_cuda_sizes([(17, 48)], CUDA_SHAPES))
def test_tensorwise_layouts_equal_reference(shape, layout, bad):
    x = matrix(*shape)
    x[1, 4] = bad
    both("quantize_and_transpose_tensorwise", x, E4M3.dtype, E4M3.max, layout)


@pytest.mark.parametrize("with_fold", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", with_cuda_sizes([(3, 48), (17, 131), (1, 1)], CUDA_SHAPES))
def test_rowwise_equals_reference(shape, dtype, with_fold):
    fold = torch.rand(shape[1], 1) if with_fold else None
    both("quantize_rowwise", matrix(*shape, dtype), fold, E4M3.dtype, E4M3.max)


@pytest.mark.parametrize("num_cols", [4 * triton.MAX_ROW_WORDS, 4 * triton.MAX_ROW_WORDS + 16, 8 * 4096 + 5])
def test_rows_longer_than_the_registers_equal_reference(num_cols):
    """The largest element lies in another part than the first."""
    x, fold = matrix(2, num_cols), torch.rand(num_cols)
    x[1, -1] = 1e4
    both("quantize_rowwise", x, fold, E4M3.dtype, E4M3.max)


@pytest.mark.parametrize(
    ("shape", "dtype", "with_fold"),
    with_cuda_sizes(
        [
            ((32, 64), BF16, True),
            ((17, 9), FP16, True),
            ((5, 16), FP32, True),
            ((16, 17), BF16, False),
            ((128, 256), BF16, False),  # four programs, from the last to the first
            ((70, 130), BF16, True),
        ],
        # 64 MiB and more: the kernel lets go of what it reads, and does not.
        [*((shape, dtype, True) for shape in CUDA_SHAPES for dtype in DTYPES), ((8192, 4096), BF16, False),
         ((8192, 4112), BF16, True)],
    ),
)  # fmt: skip
def test_colwise_equals_reference(shape, dtype, with_fold):
    fold = torch.rand(shape[0], 1) if with_fold else None
    both("quantize_colwise_t", matrix(*shape, dtype), fold, E5M2.dtype, E5M2.max)


def test_amaxes_of_columns_come_from_every_row_of_several_programs():
    num_rows = triton.COLS_ROWS * triton.COLS_UNROLL * triton.COLS_TILES + 16
    x = torch.zeros(num_rows, 16, dtype=BF16)
    x[0, 0], x[num_rows // 2 + 1, 5], x[-17, 10], x[-1, 15] = -2.0, 3.0, 5.0, -7.0
    both("quantize_colwise_t", x, None, E4M3.dtype, E4M3.max)


@pytest.mark.parametrize("name", ["quantize_rowwise", "quantize_colwise_t"])
def test_broken_zero_and_tiny_rows_and_columns_equal_reference(name):
    x = matrix(16, 16, FP32)
    x[0], x[1] = 0.0, 2.0**-149
    x[2, 3], x[4, 5], x[6, 7] = NAN, INF, -INF
    x[:, 8], x[:, 9] = 0.0, 1e-39
    both(name, x, None, E4M3.dtype, E4M3.max)

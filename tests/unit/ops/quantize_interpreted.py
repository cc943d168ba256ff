"""The kernels of ops/quantize and ops/transpose in Triton's interpreter against their references, bit for bit.

test_interpreted.py runs this file in a child process.
"""

import pytest
import torch
from support import many_scales

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.quantize import kernel, reference, triton
from fp8_ds.ops.quantize.multi_tensor import PROGRAM, MultiTensorQuantize, QuantizePart
from fp8_ds.ops.transpose import transpose_reference
from fp8_ds.ops.transpose import triton as transpose_triton
from fp8_ds.testing import assert_bitwise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
FORMATS = [E4M3, E5M2]
NAN, INF = float("nan"), float("inf")
SCALE = torch.tensor(3.7)
SEVERAL_TILES = 4 * triton.AMAX_WORDS * (triton.AMAX_PROGRAMS * 2 + 1)
"""More than one tile for a program of the amax kernel on the interpreter's two processors."""


def assert_equal(expected, got):
    for a, b in zip(expected, got, strict=True):
        assert_bitwise(a, b)


def matrix(num_rows, num_cols, dtype=BF16):
    return many_scales("per_tile", num_rows, num_cols, seed=num_rows).to(dtype)


def both(name, *args):
    """What the reference and the kernels make of the same arguments."""
    return getattr(reference, name)(*args), getattr(triton, name)(*args)


def recorded(module, x):
    measured = torch.zeros(())
    module.record_amax(x, measured)
    return measured


@pytest.mark.parametrize("shape", [(1, 1), (80, 144), (65, 9), (32, 7), (7, 32)])
def test_transpose_equals_reference_for_every_byte_value_and_side(shape):
    x = (torch.arange(shape[0] * shape[1]) % 257 % 256).to(torch.uint8).reshape(shape)
    assert_bitwise(transpose_reference(x), transpose_triton.transpose(x))


def test_transpose_of_floats_and_of_misaligned_tensors_moves_bytes():
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    for x in (codes[:256].view(E4M3.dtype).reshape(16, 16), codes[1:257].view(torch.int8).reshape(16, 16)):
        assert_bitwise(transpose_reference(x), transpose_triton.transpose(x))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_cast_equals_reference_for_every_bf16_number_and_many_float32(fmt):
    """Infinities, both signs of NaN and zero, halfway cases, subnormals of both formats, and of float32."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    codes = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    codes = codes[codes.isfinite()]
    halfway = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([halfway, halfway * (1 + 2**-23), halfway * (1 - 2**-24), -halfway])
    for x, scale in ((every, torch.tensor(1.0)), (every, torch.tensor(2.0**-9)), (near, torch.tensor(1.0))):
        assert_bitwise(*both("quantize", x, scale, fmt.dtype, fmt.max))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 4 * triton.CAST_WORDS + 16, 4 * triton.CAST_WORDS + 3])
def test_elementwise_casts_equal_reference(numel, dtype):
    x = matrix(1, numel, dtype).flatten()
    assert_bitwise(recorded(reference, x), recorded(triton, x))
    assert_bitwise(*both("quantize", x, SCALE, E5M2.dtype, E5M2.max))
    assert_equal(*both("quantize_tensorwise", x, E4M3.dtype, E4M3.max))
    for fmt in FORMATS:
        assert_equal(*both("quantize_tensor_pow2", x, fmt.dtype, fmt.max))


@pytest.mark.parametrize("largest", [0.0, 1e-40, 448.0, 449.0, 57344.0, 3e38, INF, NAN])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_powers_of_two_equal_reference_at_the_edges(fmt, largest):
    x = torch.tensor([largest, 0.25 * largest, -0.5, 0.0]) * (1.0 if largest else 0.0)
    assert_equal(*both("quantize_tensor_pow2", x, fmt.dtype, fmt.max))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("shape", "block"), [((33, 160), (1, 160)), ((130, 257), (128, 128)), ((130, 132), (128, 128))]
)
def test_parts_of_a_matrix_with_a_scale_for_each_block_equal_reference(shape, block, dtype):
    """Cut where words hold one row and where they hold two, where they are aligned and where they are not."""
    x = matrix(*shape, dtype).flatten()
    grid = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) + 0.5
    for start, end in ((0, 32), (3, 40), (128, 160), (x.numel() - 700, x.numel())):
        part = x[start:end].clone()
        args = (part, grid, start, shape[1], *block)
        assert_bitwise(*both("quantize_part", *args, E4M3.dtype, E4M3.max))
    assert_bitwise(*both("quantize_part", x, grid, 0, shape[1], *block, E5M2.dtype, E5M2.max))


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (E4M3, BF16),
        (E4M3, FP16),
        (E5M2, FP32),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((E4M3, FP32), (E5M2, BF16), (E5M2, FP16))),
    ],
)
def test_parts_of_many_matrices_cast_at_once_equal_reference(dtype, fmt):
    """Aligned and not, of no element, of several programs; with one scale, one a word, several a word. All at once."""
    shapes = {(33, 160): (1, 160), (130, 257): (128, 128), (130, 132): (128, 128), (2, PROGRAM): None}
    parts = []
    for shape, block in shapes.items():
        x = matrix(*shape, dtype).flatten()
        size = () if block is None else (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        grid = torch.rand(size) + 0.5
        for start, end in ((0, x.numel()), (3, 40), (128, 160), (x.numel() - 700, x.numel()), (5, 5)):
            memory = torch.zeros(end - start + 32, dtype=fmt.dtype)
            out = memory[start % 16 :][: end - start]
            parts.append(QuantizePart(x[start:end], out, grid, start, shape[1], block or (1, 1)))
    parts[0].x[:4] = torch.tensor([INF, -INF, NAN, 0.0])
    cast = MultiTensorQuantize(parts, fmt)
    assert len(cast._launches) == 6  # one scale, one a word, several a word; whole vectors or not
    expected = [torch.empty_like(part.out) for part in parts]
    grids, places = [part.grid for part in parts], [n for part in parts for n in (*part[3:5], *part.block)]
    unread = torch.empty(0)
    reference.quantize_parts(unread, unread, [part.x for part in parts], expected, grids, places, False, False, fmt.max)
    for launch in cast._launches:
        arguments = launch.table, launch.program_parts, launch.xs, launch.outs, launch.grids, launch.places
        triton.quantize_parts(*arguments, launch.has_one_scale, launch.is_vector, fmt.max)
    for part, codes in zip(parts, expected, strict=True):
        assert_bitwise(codes, part.out)
        around = part.out.untyped_storage().tolist()
        at = part.out.storage_offset()
        assert not any(around[:at]) and not any(around[at + len(codes) :])


def test_amax_sees_the_last_element_of_several_tiles_and_every_program():
    x = torch.zeros(SEVERAL_TILES, dtype=BF16)
    for at in (0, 4 * triton.AMAX_WORDS, SEVERAL_TILES - 1):
        x[at] = -2.0 - at
        assert_bitwise(recorded(reference, x), recorded(triton, x))
        assert_equal(*both("quantize_tensorwise", x[-40000:], E4M3.dtype, E4M3.max))


@pytest.mark.parametrize("numel", [32, 33])
def test_misaligned_tensors_equal_reference(numel):
    x = matrix(1, 64).flatten()[1 : 1 + numel]
    assert_bitwise(recorded(reference, x), recorded(triton, x))
    assert_equal(*both("quantize_tensorwise", x, E4M3.dtype, E4M3.max))
    assert_equal(*both("quantize_rowwise", x.reshape(1, -1), None, E4M3.dtype, E4M3.max))


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.0])
@pytest.mark.parametrize("record", [True, False])
def test_delayed_equals_reference_with_and_without_a_broken_element(bad, record):
    x = matrix(5, 16)
    x[4, 7] = bad
    for start in (0.25, 1e30):
        slots = torch.full((3,), start), torch.full((3,), start)
        expected, got = (
            module.quantize_and_transpose_delayed(x, SCALE, 1 / SCALE, slot[1], record, E4M3.dtype, E4M3.max, "row")
            for module, slot in zip((reference, triton), slots, strict=True)
        )
        assert_equal(expected, got)
        torch.testing.assert_close(slots[0], slots[1], rtol=0, atol=0, equal_nan=True)


def test_delayed_layouts_equal_reference():
    x = matrix(5, 16)
    x[4, 7] = INF
    slots = torch.tensor(0.25), torch.tensor(0.25)
    expected, got = (
        module.quantize_and_transpose_delayed(x, SCALE, 1 / SCALE, slot, True, E5M2.dtype, E5M2.max, "col")
        for module, slot in zip((reference, triton), slots, strict=True)
    )
    assert_equal(expected, got)
    torch.testing.assert_close(slots[0], slots[1], rtol=0, atol=0, equal_nan=True)


def test_record_amax_keeps_a_larger_one_and_a_nan():
    x = torch.full((48,), -3.0)
    for start, end in ((1.0, 3.0), (5.0, 5.0), (INF, INF), (NAN, NAN)):
        slot = torch.tensor(start)
        triton.record_amax(x, slot)
        torch.testing.assert_close(slot, torch.tensor(end), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((80, 16), BF16, "both"),  # two programs, all vectors whole
        ((16, 80), FP16, "col"),  # two programs, side by side
        ((16, 32), FP32, "both"),
        ((67, 35), BF16, "both"),  # no vector whole
        ((33, 16), FP32, "col"),  # whole when read, not when written
        ((16, 9), FP16, "col"),  # the reverse
    ],
)
def test_layouts_equal_reference(shape, dtype, layout):
    fmt = E5M2 if layout == "col" else E4M3
    slots = torch.zeros(()), torch.zeros(())
    expected, got = (
        module.quantize_and_transpose_delayed(
            matrix(*shape, dtype), SCALE, 1 / SCALE, slot, True, fmt.dtype, fmt.max, layout
        )
        for module, slot in zip((reference, triton), slots, strict=True)
    )
    assert_equal(expected, got)
    assert_bitwise(*slots)


@pytest.mark.parametrize(("layout", "bad"), [("row", 0.0), ("col", INF), ("both", 0.0)])
def test_tensorwise_layouts_equal_reference(layout, bad):
    x = matrix(17, 48)
    x[3, 4] = bad
    assert_equal(*both("quantize_and_transpose_tensorwise", x, E4M3.dtype, E4M3.max, layout))


@pytest.mark.parametrize("with_fold", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 48), (17, 131), (1, 1)])
def test_rowwise_equals_reference(shape, dtype, with_fold):
    fold = torch.rand(shape[1], 1) if with_fold else None
    assert_equal(*both("quantize_rowwise", matrix(*shape, dtype), fold, E4M3.dtype, E4M3.max))


@pytest.mark.parametrize("num_cols", [4 * triton.MAX_ROW_WORDS, 4 * triton.MAX_ROW_WORDS + 16, 8 * 4096 + 5])
def test_rows_longer_than_the_registers_equal_reference(num_cols):
    """The largest element lies in another part than the first."""
    x, fold = matrix(2, num_cols), torch.rand(num_cols)
    x[1, -1] = 1e4
    assert_equal(*both("quantize_rowwise", x, fold, E4M3.dtype, E4M3.max))


@pytest.mark.parametrize(
    ("shape", "dtype", "with_fold"),
    [
        ((32, 64), BF16, True),
        ((17, 9), FP16, True),
        ((5, 16), FP32, True),
        ((16, 17), BF16, False),
        ((128, 256), BF16, False),  # four programs, from the last to the first
        ((70, 130), BF16, True),
    ],
)
def test_colwise_equals_reference(shape, dtype, with_fold):
    fold = torch.rand(shape[0], 1) if with_fold else None
    assert_equal(*both("quantize_colwise_t", matrix(*shape, dtype), fold, E5M2.dtype, E5M2.max))


def test_amaxes_of_columns_come_from_every_row_of_several_programs():
    num_rows = triton.COLS_ROWS * triton.COLS_UNROLL * triton.COLS_TILES + 16
    x = torch.zeros(num_rows, 16, dtype=BF16)
    x[0, 0], x[num_rows // 2 + 1, 5], x[-17, 10], x[-1, 15] = -2.0, 3.0, 5.0, -7.0
    _, scale_inv = triton.quantize_colwise_t(x, None, E4M3.dtype, E4M3.max)
    torch.testing.assert_close(scale_inv[::5, 0] * E4M3.max, torch.tensor([2.0, 3.0, 5.0, 7.0]))
    assert (scale_inv.flatten() == 2.0**-126).sum() == 12


@pytest.mark.parametrize("name", ["quantize_rowwise", "quantize_colwise_t"])
def test_broken_zero_and_tiny_rows_and_columns_equal_reference(name):
    x = matrix(16, 16, FP32)
    x[0], x[1] = 0.0, 2.0**-149
    x[2, 3], x[4, 5], x[6, 7] = NAN, INF, -INF
    x[:, 8], x[:, 9] = 0.0, 1e-39
    assert_equal(*both(name, x, None, E4M3.dtype, E4M3.max))


def test_partial_maxima_fit_what_the_casts_read():
    assert triton._num_amax_programs(torch.empty(1 << 30, dtype=BF16, device="meta")) <= kernel.MAX_PARTIALS.value

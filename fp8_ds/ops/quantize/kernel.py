"""Device code of `triton`; the same bits as `reference`.

Four neighbouring elements make one int32 word of FP8 bytes, and all tensors here but those that are transposed are
tensors of words: so every thread loads and stores 16 bytes at a time. `ops/_tiles.py` says how tiles are transposed.

Nothing is fused (`enable_fp_fusion=False`), quotients are correctly rounded, subnormals are kept. Magnitudes are
compared as integers: the bits of an infinity are above those of every number, a NaN's above those of an infinity.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import MANTISSA_BITS, exponent_rule
from fp8_ds.ops._device import INFINITY, encode_bytes, encode_four, record_amax, row_scale_from_amax, scale_from_amax
from fp8_ds.ops._tiles import (
    largest_magnitude,
    load_folded,
    load_rows,
    load_words,
    store_rows,
    store_transposed,
    tile_corner,
    tile_masks,
)
from fp8_ds.ops.quantize.multi_tensor import TABLE_COLUMNS
from fp8_ds.ops.transpose.triton import store_word

_E4M3_MAX, _E5M2_MAX = tl.constexpr(E4M3.max), tl.constexpr(E5M2.max)
MAX_PARTIALS = tl.constexpr(512)
"""Most programs of the amax kernel whose maxima a cast kernel reads; a power of two."""

GIVEN, CURRENT, DELAYED, COLUMNS, POW2 = (tl.constexpr(mode) for mode in range(5))
"""Source of a scale: a scalar; the maxima of an amax kernel; a scalar of the past, with this call's amax recorded; the
amax of each column; the maxima of an amax kernel, to a power of two."""
_E4M3_CARRY, _E4M3_SHIFT = (tl.constexpr(number) for number in exponent_rule(E4M3.max))
_E5M2_CARRY, _E5M2_SHIFT = (tl.constexpr(number) for number in exponent_rule(E5M2.max))
_MANTISSA_BITS = tl.constexpr(MANTISSA_BITS)
_X, _OUT, _GRID, _NUMEL, _START, _NUM_COLS, _BLOCK_ROWS, _BLOCK_COLS, _GRID_COLS, _FIRST_PROGRAM = (
    tl.constexpr(column) for column in range(len(TABLE_COLUMNS))
)
_TABLE_WIDTH = tl.constexpr(len(TABLE_COLUMNS))


@triton.jit
def _largest(partials, num_partials):
    """Return the bits of the amax of which `partials` are the maxima."""
    at = tl.arange(0, MAX_PARTIALS)
    return tl.max(tl.load(partials + at, at < num_partials, 0), 0)


@triton.jit
def _pow2_scale(bits, IS_E4M3: tl.constexpr):
    """Return (scale, scale_inv) for the float with these bits, as `numerics.scale.pow2_scale` does."""
    finite = tl.where(bits < INFINITY, bits, 0x3F800000)
    rounded_up = (finite + (_E4M3_CARRY if IS_E4M3 else _E5M2_CARRY)) >> _MANTISSA_BITS
    biased = tl.maximum(rounded_up - (_E4M3_SHIFT if IS_E4M3 else _E5M2_SHIFT), 1)
    scale = ((254 - biased) << _MANTISSA_BITS).to(tl.float32, bitcast=True)
    scale_inv = (biased << _MANTISSA_BITS).to(tl.float32, bitcast=True)
    return scale, tl.where(bits < INFINITY, scale_inv, float("nan"))


@triton.jit
def _tensor_scale(scale, partials, num_partials, scale_inv, is_first, MODE: tl.constexpr, IS_E4M3: tl.constexpr):
    """Return the scale of the whole tensor; in modes CURRENT and POW2 the first program stores its inverse."""
    if MODE == CURRENT:
        factor, inverse = scale_from_amax(_largest(partials, num_partials), _E4M3_MAX if IS_E4M3 else _E5M2_MAX)
        tl.store(scale_inv, inverse, is_first)
    elif MODE == POW2:
        factor, inverse = _pow2_scale(_largest(partials, num_partials), IS_E4M3)
        tl.store(scale_inv, inverse, is_first)
    else:
        factor = tl.load(scale)
    return factor


@triton.jit
def _record(amax, scale_inv, amax_local, RECORD: tl.constexpr):
    """Take the amax of one program into that of the tensor; a non-finite one makes its scale_inv NaN."""
    if RECORD:
        record_amax(amax_local, amax)
    tl.store(scale_inv, float("nan"), amax >= INFINITY)


@triton.jit
def amax_kernel(x, out, numel, WORDS: tl.constexpr, ATOMIC: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr):
    """Find the amax. ATOMIC: float32 `out` takes the maximum; else each program stores the bits of its amax there."""
    word = tl.arange(0, WORDS)
    largest = tl.zeros([WORDS], tl.int32)
    start = tl.program_id(0).to(tl.int64) * (WORDS * 4)
    while start < numel:  # not `range`: in Triton 3.6 its bounds cannot be interpreted with NumPy 2.4
        left = tl.minimum(numel - start, WORDS * 4).to(tl.int32)
        x0, x1, x2, x3 = load_words(x + start, word, left, VECTOR, PTX)
        largest = tl.maximum(largest, largest_magnitude(x0, x1, x2, x3))
        start += tl.num_programs(0) * (WORDS * 4)
    amax = tl.max(largest, 0)
    if ATOMIC:
        record_amax(out, amax)
    else:
        tl.store(out + tl.program_id(0), amax)


@triton.jit
def quantize_kernel(
    x, out, scale, partials, num_partials, scale_inv, amax_local, numel,
    WORDS: tl.constexpr, MODE: tl.constexpr, RECORD: tl.constexpr, IS_E4M3: tl.constexpr, VECTOR: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Quantize elements in the order of memory; a program for 4 * WORDS of them.

    Args:
        scale: float32, read in modes GIVEN and DELAYED.
        partials: int32 [num_partials], bits of maxima, read in modes CURRENT and POW2.
        scale_inv: float32; written in modes CURRENT and POW2; a non-finite `x` makes it NaN in mode DELAYED.
        amax_local: float32; in mode DELAYED it takes the maximum with the amax if RECORD.
    """
    word = tl.arange(0, WORDS)
    start = tl.program_id(0).to(tl.int64) * (WORDS * 4)
    left = tl.minimum(numel - start, WORDS * 4).to(tl.int32)
    # Before the scale: its way from memory is waited for along with theirs.
    x0, x1, x2, x3 = load_words(x + start, word, left, VECTOR, PTX)
    factor = _tensor_scale(scale, partials, num_partials, scale_inv, tl.program_id(0) == 0, MODE, IS_E4M3)
    if MODE == DELAYED:
        _record(tl.max(largest_magnitude(x0, x1, x2, x3), 0), scale_inv, amax_local, RECORD)
    code = encode_four(x0 * factor, x1 * factor, x2 * factor, x3 * factor, IS_E4M3, PTX)
    store_word(out + start, word, code, left, VECTOR)


@triton.jit
def _part_scale(grid, grid_cols, row, col, inside, num_cols, block_rows, block_cols):
    """Return the scale of each element at `col`, which may lie beyond the end of `row`; 0 where not `inside`."""
    row += col // num_cols
    block = row // block_rows * grid_cols + col % num_cols // block_cols
    return tl.load(grid + block, inside, 0.0)


@triton.jit
def _cast_part(
    x, out, grid, grid_cols, start, left, num_cols, block_rows, block_cols,
    WORDS: tl.constexpr, IS_E4M3: tl.constexpr, ONE_SCALE: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Cast up to 4 * WORDS elements, `start` and on of a flattened matrix; `left` of them exist. See `part_kernel`."""
    word = tl.arange(0, WORDS)
    x0, x1, x2, x3 = load_words(x, word, left, VECTOR, PTX)
    # Divided once in 64 bits: what is left fits 32.
    row = (start // num_cols).to(tl.int32)
    col = (start % num_cols).to(tl.int32) + word * 4
    at = word * 4
    scale0 = _part_scale(grid, grid_cols, row, col, at < left, num_cols, block_rows, block_cols)
    scale1, scale2, scale3 = scale0, scale0, scale0
    if not ONE_SCALE:
        scale1 = _part_scale(grid, grid_cols, row, col + 1, at + 1 < left, num_cols, block_rows, block_cols)
        scale2 = _part_scale(grid, grid_cols, row, col + 2, at + 2 < left, num_cols, block_rows, block_cols)
        scale3 = _part_scale(grid, grid_cols, row, col + 3, at + 3 < left, num_cols, block_rows, block_cols)
    code = encode_four(x0 * scale0, x1 * scale1, x2 * scale2, x3 * scale3, IS_E4M3, PTX)
    store_word(out, word, code, left, VECTOR)


@triton.jit
def part_kernel(
    x, out, grid, grid_cols, start, numel, num_cols, block_rows, block_cols,
    WORDS: tl.constexpr, IS_E4M3: tl.constexpr, ONE_SCALE: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Quantize elements `start` and on of a flattened matrix; a program for 4 * WORDS of them.

    Args:
        grid: float32 [_, grid_cols], contiguous: a scale for each block of block_rows x block_cols elements.
        ONE_SCALE: the four elements of a word are always of one block.
    """
    first = tl.program_id(0).to(tl.int64) * (WORDS * 4)
    left = tl.minimum(numel - first, WORDS * 4).to(tl.int32)
    _cast_part(
        x + first, out + first, grid, grid_cols, start + first, left, num_cols, block_rows, block_cols,
        WORDS, IS_E4M3, ONE_SCALE, VECTOR, PTX,
    )  # fmt: skip


@triton.jit
def parts_kernel(
    table, program_parts,
    DTYPE: tl.constexpr, WORDS: tl.constexpr, IS_E4M3: tl.constexpr, ONE_GRID: tl.constexpr, ONE_SCALE: tl.constexpr,
    VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Quantize many tensors; a program for 4 * WORDS elements of part `program_parts[i]`, a row of `table`.

    Args:
        table: int64 [num_parts, len(TABLE_COLUMNS)], see multi_tensor.py.
        DTYPE: dtype of all sources.
        ONE_GRID: each part has one scale.
        ONE_SCALE: as in `part_kernel`.
    """
    program = tl.program_id(0)
    row = table + tl.load(program_parts + program) * _TABLE_WIDTH
    first = (program - tl.load(row + _FIRST_PROGRAM)) * (WORDS * 4)
    left = tl.minimum(tl.load(row + _NUMEL) - first, WORDS * 4).to(tl.int32)
    x = tl.load(row + _X).to(tl.pointer_type(DTYPE)) + first
    out = tl.load(row + _OUT).to(tl.pointer_type(tl.uint8)) + first
    grid = tl.load(row + _GRID).to(tl.pointer_type(tl.float32))
    if VECTOR:
        x = tl.multiple_of(x, 16)
        out = tl.multiple_of(out, 16)
    if ONE_GRID:
        word = tl.arange(0, WORDS)
        x0, x1, x2, x3 = load_words(x, word, left, VECTOR, PTX)
        factor = tl.load(grid)
        code = encode_four(x0 * factor, x1 * factor, x2 * factor, x3 * factor, IS_E4M3, PTX)
        store_word(out, word, code, left, VECTOR)
    else:
        start = tl.load(row + _START) + first
        num_cols = tl.load(row + _NUM_COLS).to(tl.int32)
        block_rows = tl.load(row + _BLOCK_ROWS).to(tl.int32)
        block_cols = tl.load(row + _BLOCK_COLS).to(tl.int32)
        grid_cols = tl.load(row + _GRID_COLS).to(tl.int32)
        _cast_part(
            x, out, grid, grid_cols, start, left, num_cols, block_rows, block_cols,
            WORDS, IS_E4M3, ONE_SCALE, VECTOR, PTX,
        )  # fmt: skip


@triton.jit
def _column_scales(amax_cols, scale_inv, col, num_cols, first_row, IS_E4M3: tl.constexpr):
    """Return the scales of the columns `col`; the programs of the first rows store their inverses."""
    bits = tl.load(amax_cols + col, col < num_cols, 0)
    factor, inverse = row_scale_from_amax(bits, _E4M3_MAX if IS_E4M3 else _E5M2_MAX)
    tl.store(scale_inv + col, inverse, col < tl.where(first_row == 0, num_cols, 0))
    return factor


@triton.jit
def quantize_and_transpose_kernel(
    x, x_fp8, x_fp8_t, scale, partials, num_partials, amax_cols, fold, scale_inv, amax_local, num_rows, num_cols,
    MODE: tl.constexpr, RECORD: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_FOLD: tl.constexpr, IS_E4M3: tl.constexpr,
    QUARTER: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr, ONCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Quantize into the transpose, and the plain layout if HAS_ROWS; a program for a tile (ops/_tiles.py).

    Args: as `quantize_kernel`, and
        amax_cols: int32 [num_cols], bits of the amaxes; mode COLUMNS, which stores all of scale_inv [num_cols].
        fold: float32 [num_rows], multiplied in first, if HAS_FOLD.
        WORDS: x_fp8_t is int32, not uint8.
        ONCE: what is read makes room in the L2 cache first.
    """
    # Backwards by columns: what was read last for their amaxes is still in the L2 cache.
    first_row, first_col = tile_corner(num_cols, QUARTER, MODE == COLUMNS)
    rows, cols, mask0, mask1, mask2, mask3 = tile_masks(first_row, first_col, num_rows, num_cols, QUARTER)
    corner = first_row.to(tl.int64) * num_cols + first_col
    # Before the scale: its way from memory is waited for along with theirs.
    x0 = load_rows(x + corner, rows, cols, num_cols, mask0, EVEN, ONCE).to(tl.float32)
    x1 = load_rows(x + corner, rows + 1, cols, num_cols, mask1, EVEN, ONCE).to(tl.float32)
    x2 = load_rows(x + corner, rows + 2, cols, num_cols, mask2, EVEN, ONCE).to(tl.float32)
    x3 = load_rows(x + corner, rows + 3, cols, num_cols, mask3, EVEN, ONCE).to(tl.float32)
    if MODE == COLUMNS:
        factor = _column_scales(amax_cols, scale_inv, first_col + cols, num_cols, first_row, IS_E4M3)[None, :]
    else:
        factor = _tensor_scale(scale, partials, num_partials, scale_inv, tl.program_id(0) == 0, MODE, IS_E4M3)
    if MODE == DELAYED:
        _record(tl.max(tl.max(largest_magnitude(x0, x1, x2, x3), 1), 0), scale_inv, amax_local, RECORD)
    if HAS_FOLD:
        left = num_rows - first_row
        fold += first_row
        x0 *= tl.load(fold + rows, rows < left, 0.0)[:, None]
        x1 *= tl.load(fold + rows + 1, rows + 1 < left, 0.0)[:, None]
        x2 *= tl.load(fold + rows + 2, rows + 2 < left, 0.0)[:, None]
        x3 *= tl.load(fold + rows + 3, rows + 3 < left, 0.0)[:, None]
    x0, x1, x2, x3 = x0 * factor, x1 * factor, x2 * factor, x3 * factor
    if HAS_ROWS:
        x_fp8 += corner
        store_rows(x_fp8, rows, cols, num_cols, encode_bytes(x0, IS_E4M3, PTX), mask0, EVEN)
        store_rows(x_fp8, rows + 1, cols, num_cols, encode_bytes(x1, IS_E4M3, PTX), mask1, EVEN)
        store_rows(x_fp8, rows + 2, cols, num_cols, encode_bytes(x2, IS_E4M3, PTX), mask2, EVEN)
        store_rows(x_fp8, rows + 3, cols, num_cols, encode_bytes(x3, IS_E4M3, PTX), mask3, EVEN)
    word = encode_four(x0, x1, x2, x3, IS_E4M3, PTX)
    store_transposed(word, x_fp8_t, first_row, first_col, num_rows, num_cols, EVEN, WORDS)


@triton.jit
def amax_cols_kernel(
    x, fold, amax_cols, num_rows, num_cols,
    ROWS: tl.constexpr, UNROLL: tl.constexpr, NUM_TILES: tl.constexpr, WORDS: tl.constexpr, HAS_FOLD: tl.constexpr,
    VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Find the bits of the amaxes of columns; int32 [num_cols] takes the maximum.

    A program works on 4 * WORDS columns and NUM_TILES tiles of ROWS * UNROLL rows.
    """
    tiles_per_row = tl.cdiv(num_cols, WORDS * 4)
    first_row = tl.program_id(0) // tiles_per_row * (ROWS * UNROLL * NUM_TILES)
    end = tl.minimum(first_row + ROWS * UNROLL * NUM_TILES, num_rows)
    first_col = tl.program_id(0) % tiles_per_row * (WORDS * 4)
    word = tl.arange(0, WORDS)[None, :]
    m0 = tl.zeros([ROWS, WORDS], tl.int32)
    m1, m2, m3 = m0, m0, m0
    while first_row < end:
        for tile in tl.static_range(UNROLL):
            row = first_row + tile * ROWS + tl.arange(0, ROWS)[:, None]
            left = tl.where(row < num_rows, num_cols - first_col, 0)
            x0, x1, x2, x3 = load_words(x + first_col + row.to(tl.int64) * num_cols, word, left, VECTOR, PTX)
            if HAS_FOLD:
                factor = tl.load(fold + row, row < num_rows, 0.0)
                x0, x1, x2, x3 = x0 * factor, x1 * factor, x2 * factor, x3 * factor
            m0 = tl.maximum(m0, x0.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            m1 = tl.maximum(m1, x1.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            m2 = tl.maximum(m2, x2.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            m3 = tl.maximum(m3, x3.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        first_row += ROWS * UNROLL
    col = first_col + tl.arange(0, WORDS) * 4
    tl.atomic_max(amax_cols + col, tl.max(m0, 0), col < num_cols, sem="relaxed")
    tl.atomic_max(amax_cols + col + 1, tl.max(m1, 0), col + 1 < num_cols, sem="relaxed")
    tl.atomic_max(amax_cols + col + 2, tl.max(m2, 0), col + 2 < num_cols, sem="relaxed")
    tl.atomic_max(amax_cols + col + 3, tl.max(m3, 0), col + 3 < num_cols, sem="relaxed")


@triton.jit
def rowwise_kernel(
    x, out, fold, scale_inv, num_rows, num_cols,
    ROWS: tl.constexpr, WORDS: tl.constexpr, LOOP: tl.constexpr, HAS_FOLD: tl.constexpr, IS_E4M3: tl.constexpr,
    VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Quantize rowwise; a program for ROWS rows, which stay in its registers, or are read twice if LOOP.

    Args:
        fold: float32 [num_cols], multiplied in first, if HAS_FOLD.
        scale_inv: float32 [num_rows], written.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    at = row.to(tl.int64) * num_cols
    is_row = row < num_rows
    left = tl.where(is_row, num_cols, 0)
    x0, x1, x2, x3 = load_folded(x + at, fold, 0, word, left, num_cols, HAS_FOLD, VECTOR, PTX)
    largest = largest_magnitude(x0, x1, x2, x3)
    if LOOP:
        first = WORDS * 4
        while first < num_cols:
            x0, x1, x2, x3 = load_folded(
                x + first + at, fold, first, word, left - first, num_cols, HAS_FOLD, VECTOR, PTX
            )
            largest = tl.maximum(largest, largest_magnitude(x0, x1, x2, x3))
            first += WORDS * 4
    factor, inverse = row_scale_from_amax(tl.max(largest, 1)[:, None], _E4M3_MAX if IS_E4M3 else _E5M2_MAX)
    tl.store(scale_inv + row, inverse, is_row)
    if LOOP:
        first = 0
        while first < num_cols:
            x0, x1, x2, x3 = load_folded(
                x + first + at, fold, first, word, left - first, num_cols, HAS_FOLD, VECTOR, PTX
            )
            code = encode_four(x0 * factor, x1 * factor, x2 * factor, x3 * factor, IS_E4M3, PTX)
            store_word(out + first + at, word, code, left - first, VECTOR)
            first += WORDS * 4
    else:
        code = encode_four(x0 * factor, x1 * factor, x2 * factor, x3 * factor, IS_E4M3, PTX)
        store_word(out + at, word, code, left, VECTOR)

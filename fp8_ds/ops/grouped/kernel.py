"""Device code of the grouped products: kernels work out on the device, from `ends`, which tile is of which group.

Shape suffixes as in `__init__.py`. Operands come as descriptors, and tiles of them are fetched by the copy engine
(TMA): what lies outside of a matrix is 0. Programs take tiles in turn, so their number is the launch's choice.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.ops.grouped.reference import GROUP_BLOCK
from fp8_ds.ops.transpose.triton import four_rows, store_columns

_BLOCK = tl.constexpr(GROUP_BLOCK)


@triton.jit
def _group_bounds(ends, group, num_groups, num_rows):
    """Return first row and end of a group, or of each of a tensor of them. Group `num_groups` has all rows after the
    last group, and those beyond have none."""
    start = tl.load(ends + group - 1, (group > 0) & (group <= num_groups), 0)
    end = tl.load(ends + group, group < num_groups, num_rows)
    return tl.where(group > num_groups, num_rows, start), end


@triton.jit
def _column_ends(ends, num_groups, GROUPS: tl.constexpr):
    """Return, for each group, the first column after it and its zeros."""
    group = tl.arange(0, GROUPS)
    start = tl.load(ends + group - 1, (group > 0) & (group < num_groups), 0)
    size = tl.load(ends + group, group < num_groups, 0) - start
    return tl.cumsum((size + _BLOCK - 1) // _BLOCK * _BLOCK)


@triton.jit
def _place(tile, num_tall, num_wide, SUPER: tl.constexpr):
    """Return (row of tiles, column of tiles) of one tile in num_tall by num_wide: SUPER rows of tiles at a time, column
    by column, so that tiles that run at the same time read the same rows and columns."""
    first = tile // (SUPER * num_wide) * SUPER
    height = tl.minimum(num_tall - first, SUPER)
    inside = tile % (SUPER * num_wide)
    return first + inside % height, inside // height


@triton.jit
def _product(a_tile, b_tile, acc, FAST: tl.constexpr):
    """Compute `acc + a b^T`. Not FAST: the tensor core's sum over a tile's columns is added in float32."""
    if FAST:
        return tl.dot(a_tile, b_tile.T, acc)
    return tl.dot(a_tile, b_tile.T, acc, max_num_imprecise_acc=a_tile.shape[1])


@triton.jit
def _store(out, first, rows, cols, num_rows, num_cols, value):
    """Store a tile of `value` at rows and columns of the matrix whose first row is row `first` of `out`, as far as it
    is inside."""
    at = out + (first + rows[:, None]).to(tl.int64) * num_cols + cols[None, :]
    tl.store(at, value.to(out.dtype.element_ty), (rows < num_rows)[:, None] & (cols < num_cols)[None, :])


@triton.jit
def rows_kernel(
    out, a, b, ends, scale_inv_a, scale_inv_b, num_rows, num_cols, num_inner, num_groups,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUPER: tl.constexpr,
    HALVES: tl.constexpr, FAST: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Multiply each group's rows of a [P, K] by its matrix of b [E N, K]; zeros in the rows after all groups.

    GROUPS: a power of two > E. HALVES: 1 or 2 steps in which a tile's columns are computed: sums that are not FAST,
    beside the accumulators, then take half the registers.
    """
    WIDTH: tl.constexpr = BLOCK_N // HALVES
    group = tl.arange(0, GROUPS)
    start, end = _group_bounds(ends, group, num_groups, num_rows)
    col_tiles = tl.cdiv(num_cols, BLOCK_N)
    tile_end = tl.cumsum((end - start + BLOCK_M - 1) // BLOCK_M) * col_tiles
    num_tiles = tl.max(tile_end)
    scale_inv = tl.load(scale_inv_a) * tl.load(scale_inv_b)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        own = tl.sum((tile_end <= tile).to(tl.int32))
        first_tile = tl.max(tl.where(tile_end <= tile, tile_end, 0))
        own_start, own_end = _group_bounds(ends, own, num_groups, num_rows)
        tall, wide = _place(tile - first_tile, tl.cdiv(own_end - own_start, BLOCK_M), col_tiles, SUPER)
        row = own_start + tall * BLOCK_M
        col = wide * BLOCK_N
        # Where no group is, zeros by zeros, from outside of both. As many as elsewhere: FLATTEN wants it so.
        source = tl.where(own < num_groups, row, num_rows)
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        other = acc
        for inner in tl.range(0, num_inner, BLOCK_K):
            a_tile = a.load([source, inner])
            acc = _product(a_tile, b.load([own * num_cols + col, inner]), acc, FAST)
            if HALVES == 2:
                other = _product(a_tile, b.load([own * num_cols + col + WIDTH, inner]), other, FAST)
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, WIDTH)
        _store(out, 0, rows, cols, own_end, num_cols, acc * scale_inv)
        if HALVES == 2:
            _store(out, 0, rows, cols + WIDTH, own_end, num_cols, other * scale_inv)


@triton.jit
def columns_kernel(
    x, out_t, ends, num_cols, num_out, num_groups,
    GROUPS: tl.constexpr, VECTORS: tl.constexpr, WORDS: tl.constexpr, VECTOR_IN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Transpose uint8 [P, num_cols] to [num_cols, num_out], each group from a multiple of `GROUP_BLOCK` on, with zeros
    after it; a program for 16 * VECTORS rows of one group, and 4 * WORDS columns."""
    tiles_per_row = tl.cdiv(num_cols, WORDS * 4)
    first_out = tl.program_id(0) // tiles_per_row * (VECTORS * 16)
    first_col = tl.program_id(0) % tiles_per_row * (WORDS * 4)
    column_end = _column_ends(ends, num_groups, GROUPS)
    own = tl.sum((column_end <= first_out).to(tl.int32))
    if own < num_groups:
        own_start, own_end = _group_bounds(ends, own, num_groups, 0)
        first_row = own_start + first_out - tl.max(tl.where(column_end <= first_out, column_end, 0))
        row = first_row + tl.arange(0, VECTORS)[:, None] * 16
        a0, a1, a2, a3 = four_rows(x, row, first_col, own_end, num_cols, WORDS, VECTOR_IN, PTX)
        b0, b1, b2, b3 = four_rows(x, row + 4, first_col, own_end, num_cols, WORDS, VECTOR_IN, PTX)
        c0, c1, c2, c3 = four_rows(x, row + 8, first_col, own_end, num_cols, WORDS, VECTOR_IN, PTX)
        d0, d1, d2, d3 = four_rows(x, row + 12, first_col, own_end, num_cols, WORDS, VECTOR_IN, PTX)
        store_columns(
            out_t, first_out, first_col, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, num_out,
            num_cols, True, PTX,
        )  # fmt: skip


@triton.jit
def matrices_kernel(
    out, a_t, b_t, ends, scale_inv_a, scale_inv_b, num_a, num_b, num_groups,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUPER: tl.constexpr,
    HALVES: tl.constexpr, FAST: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Multiply each group's columns of a_t [N, Q] by those of b_t [K, Q], made by `columns_kernel`, into [E, N, K]."""
    WIDTH: tl.constexpr = BLOCK_N // HALVES
    group = tl.arange(0, GROUPS)
    column_end = _column_ends(ends, num_groups, GROUPS)
    num_tall = tl.cdiv(num_a, BLOCK_M)
    num_wide = tl.cdiv(num_b, BLOCK_N)
    num_each = num_tall * num_wide
    scale_inv = tl.load(scale_inv_a) * tl.load(scale_inv_b)
    for tile in tl.range(tl.program_id(0), num_groups * num_each, tl.num_programs(0), flatten=FLATTEN):
        own = tile // num_each
        tall, wide = _place(tile % num_each, num_tall, num_wide, SUPER)
        own_end = tl.sum(tl.where(group == own, column_end, 0))
        own_start = tl.sum(tl.where(group == own - 1, column_end, 0))
        row = tall * BLOCK_M
        col = wide * BLOCK_N
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        other = acc
        for inner in tl.range(own_start, own_end, BLOCK_K):
            a_tile = a_t.load([row, inner])
            acc = _product(a_tile, b_t.load([col, inner]), acc, FAST)
            if HALVES == 2:
                other = _product(a_tile, b_t.load([col + WIDTH, inner]), other, FAST)
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, WIDTH)
        first = own.to(tl.int64) * num_a
        _store(out, first, rows, cols, num_a, num_b, acc * scale_inv)
        if HALVES == 2:
            _store(out, first, rows, cols + WIDTH, num_a, num_b, other * scale_inv)

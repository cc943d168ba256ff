"""Device code of kernels that write a matrix's transpose where they compute it.

A program takes a tile of 4 * QUARTER rows and 128 columns as four tensors [QUARTER, 128], of the rows 4 j, 4 j + 1, 4 j
+ 2 and 4 j + 3. So a thread holds four codes of a column side by side and packs them into one 32-bit word: the
transpose moves words, not bytes, through shared memory, and both sides of it are read and written 16 bytes at a time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops._device import magnitude
from fp8_ds.ops._launch import ceil_div

TILE_COLS = 128
_ALIGNMENT = 16
_COLS = tl.constexpr(TILE_COLS)


def num_tiles(num_rows: int, num_cols: int, quarter: int) -> int:
    """Return the number of programs for a matrix."""
    return ceil_div(num_rows, 4 * quarter) * ceil_div(num_cols, TILE_COLS)


def is_even(num_rows: int, num_cols: int, quarter: int) -> bool:
    """Whether all tiles are whole."""
    return num_rows % (4 * quarter) == 0 and num_cols % TILE_COLS == 0


def as_words(x_fp8_t: Tensor) -> Tensor:
    """View a transposed matrix as int32 if each of its rows begins at a vector, else as bytes."""
    return x_fp8_t.view(torch.int32 if x_fp8_t.shape[1] % _ALIGNMENT == 0 else torch.uint8)


def tile_options(quarter: int, num_rows: int, num_cols: int, columns: Tensor) -> dict[str, Any]:
    """Return the constants of a kernel that takes such tiles and writes `columns`, made by `as_words`."""
    return {
        "QUARTER": quarter,
        "EVEN": is_even(num_rows, num_cols, quarter),
        "WORDS": columns.dtype == torch.int32,
    }


@triton.jit
def tile_corner(num_cols, QUARTER: tl.constexpr, BACKWARDS: tl.constexpr = False):
    """Return (first row, first column) of this program's tile; BACKWARDS: the first program has the last one."""
    col_tiles = tl.cdiv(num_cols, _COLS)
    tile = tl.program_id(0)
    if BACKWARDS:
        tile = tl.num_programs(0) - 1 - tile
    return tile // col_tiles * (4 * QUARTER), tile % col_tiles * _COLS


@triton.jit
def tile_masks(first_row, first_col, num_rows, num_cols, QUARTER: tl.constexpr):
    """Return row numbers (of the first of each four), column numbers in the tile, and masks of the four tensors."""
    rows = tl.arange(0, QUARTER) * 4
    cols = tl.arange(0, _COLS)
    left = num_rows - first_row
    in_cols = (cols < num_cols - first_col)[None, :]
    mask0 = (rows < left)[:, None] & in_cols
    mask1 = (rows + 1 < left)[:, None] & in_cols
    mask2 = (rows + 2 < left)[:, None] & in_cols
    mask3 = (rows + 3 < left)[:, None] & in_cols
    return rows, cols, mask0, mask1, mask2, mask3


@triton.jit
def load_rows(x, rows, cols, stride, mask, EVEN: tl.constexpr, ONCE: tl.constexpr = False):
    """Load one of the four tensors, zeros outside. `x` points at the tile's corner. ONCE: nobody reads it again, so it
    makes room in the L2 cache first."""
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    at = x + rows[:, None] * stride + cols[None, :]
    return tl.load(at, eviction_policy=POLICY) if EVEN else tl.load(at, mask, 0.0, eviction_policy=POLICY)


@triton.jit
def store_rows(out, rows, cols, stride, value, mask, EVEN: tl.constexpr):
    """Store one of the four tensors, the reverse of `load_rows`."""
    tl.store(out + rows[:, None] * stride + cols[None, :], value, None if EVEN else mask)


@triton.jit
def store_transposed(word, x_t, first_row, first_col, num_rows, num_cols, EVEN: tl.constexpr, WORDS: tl.constexpr):
    """Store [QUARTER, 128] words of four rows each as 128 rows of the transpose. WORDS: x_t is int32, not uint8."""
    word = tl.trans(word)
    cols = tl.arange(0, word.shape[0])[:, None]
    quads = tl.arange(0, word.shape[1])[None, :]
    in_cols = cols < num_cols - first_col
    if WORDS:
        # num_rows is a multiple of 16: no word, and no vector of four, crosses the end of a row.
        stride = tl.multiple_of(num_rows // 4, 4)
        quad = tl.multiple_of(first_row // 4, 4)
        at = x_t + tl.multiple_of(first_col.to(tl.int64) * stride + quad, 4) + cols * stride + quads
        tl.store(at, word, None if EVEN else in_cols & (quads < tl.multiple_of(stride - quad, 4)))
    else:
        at = x_t + first_col.to(tl.int64) * num_rows + first_row + cols * num_rows + quads * 4
        for i in tl.static_range(4):
            tl.store(at + i, ((word >> (8 * i)) & 0xFF).to(tl.uint8), in_cols & (first_row + quads * 4 + i < num_rows))


LOAD_16_BYTES = """{
.reg .pred inside;
setp.ne.b32 inside, $5, 0;
mov.f32 $0, 0f00000000;
mov.f32 $1, 0f00000000;
mov.f32 $2, 0f00000000;
mov.f32 $3, 0f00000000;
@inside ld.global.v4.f32 {$0, $1, $2, $3}, [$4];
}"""
"""Load four floats of one thread into four tensors: `tl.load` gives one, and splits it through shared memory."""

_LOAD_16_BYTES = tl.constexpr(LOAD_16_BYTES)


@triton.jit
def load_words(x, word, num, VECTOR: tl.constexpr, PTX: tl.constexpr):
    """Load elements `4 * word` to `4 * word + 3` behind `x`, 0 from element `num` on: four float32 tensors.

    VECTOR: `x` lies at a multiple of 16 bytes and `num` is a multiple of 16.
    """
    ITEM_BITS: tl.constexpr = x.dtype.scalar.element_ty.primitive_bitwidth
    ELEMENT: tl.constexpr = x.dtype.scalar.element_ty
    if not VECTOR:
        x0 = tl.load(x + word * 4, word * 4 < num, 0.0).to(tl.float32)
        x1 = tl.load(x + word * 4 + 1, word * 4 + 1 < num, 0.0).to(tl.float32)
        x2 = tl.load(x + word * 4 + 2, word * 4 + 2 < num, 0.0).to(tl.float32)
        x3 = tl.load(x + word * 4 + 3, word * 4 + 3 < num, 0.0).to(tl.float32)
    elif ITEM_BITS == 32:
        x0, x1, x2, x3 = _load_floats(x + word * 4, word // 4 * 16 < num, PTX)
    else:
        four = tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + word, word // 4 * 16 < num, 0)
        x0, x1 = _pair(four.to(tl.int32), ELEMENT)
        x2, x3 = _pair((four >> 32).to(tl.int32), ELEMENT)
    return x0, x1, x2, x3


@triton.jit
def _load_floats(at, inside, PTX: tl.constexpr):
    """Load four float32 numbers behind each pointer."""
    if PTX:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            _LOAD_16_BYTES,
            "=&f,=&f,=&f,=&f,l,r",
            [at.to(tl.int64), inside.to(tl.int32)],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        x0, x1 = tl.load(at, inside, 0.0), tl.load(at + 1, inside, 0.0)
        x2, x3 = tl.load(at + 2, inside, 0.0), tl.load(at + 3, inside, 0.0)
    return x0, x1, x2, x3


@triton.jit
def _pair(bits, ELEMENT: tl.constexpr):
    """Split bits into two numbers of 16 bits, the first one in the low half, as float32."""
    if ELEMENT.is_bf16():
        first, second = (bits << 16).to(tl.float32, bitcast=True), (bits & ~0xFFFF).to(tl.float32, bitcast=True)
    else:
        first = bits.to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
        second = (bits >> 16).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def largest_magnitude(x0, x1, x2, x3):
    """Return the bits of the largest magnitude in each word."""
    return tl.maximum(tl.maximum(magnitude(x0), magnitude(x1)), tl.maximum(magnitude(x2), magnitude(x3)))


@triton.jit
def load_folded(x, fold, first, word, num, num_in_row, HAS_FOLD: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr):
    """Load as `load_words` the rows behind `x`, from column `first` on, each element times that of `fold`."""
    x0, x1, x2, x3 = load_words(x, word, num, VECTOR, PTX)
    if HAS_FOLD:
        f0, f1, f2, f3 = load_words(fold + first, word, num_in_row - first, VECTOR, PTX)
        x0, x1, x2, x3 = x0 * f0, x1 * f1, x2 * f2, x3 * f3
    return x0, x1, x2, x3

"""Transpose through registers: a thread turns a block of 16 x 16 bytes, by 4 x 4, without shared memory.

Bytes are moved as int32 words of four, never as float8 tensors: Triton 3.7.1 corrupts transposes of those.
`quantize/kernel.py` transposes by the same functions.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops._device import runs_ptx
from fp8_ds.ops._launch import ceil_div, launch

TRANSPOSE_WORDS = """{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, $5, 0x5140;
prmt.b32 b, $6, $7, 0x5140;
prmt.b32 c, $4, $5, 0x7362;
prmt.b32 d, $6, $7, 0x7362;
prmt.b32 $0, a, b, 0x5410;
prmt.b32 $1, a, b, 0x7632;
prmt.b32 $2, c, d, 0x5410;
prmt.b32 $3, c, d, 0x7632;
}"""
"""PTX that turns four words, the rows of a block of 4 x 4 bytes, into its columns."""

STORE_16_BYTES = """{
.reg .pred inside;
setp.ne.b32 inside, $6, 0;
@inside st.global.v4.b32 [$1], {$2, $3, $4, $5};
mov.b32 $0, 0;
}"""
"""PTX that stores four words of one thread from four tensors. `tl.store` takes one tensor: joining them and storing the
result would pass everything through shared memory."""

_TRANSPOSE_WORDS = tl.constexpr(TRANSPOSE_WORDS)
_STORE_16_BYTES = tl.constexpr(STORE_16_BYTES)


@triton.jit
def word_pointer(pointer):
    """Cast a pointer (or a tensor of them) to bytes to one to int32."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def load_word(x, word, num, VECTOR: tl.constexpr):
    """Load bytes `4 * word` to `4 * word + 3` behind `x`, 0 from byte `num` on. VECTOR: both are multiples of 16."""
    if VECTOR:
        # Written so that Triton sees one mask for four neighbours; `word * 4 < num` makes it load word by word.
        return tl.load(word_pointer(x) + word, word // 4 * 16 < num, 0)
    value = tl.load(x + word * 4, word * 4 < num, 0).to(tl.int32)
    for k in tl.static_range(1, 4):
        value |= tl.load(x + word * 4 + k, word * 4 + k < num, 0).to(tl.int32) << (8 * k)
    return value


@triton.jit
def store_word(out, word, value, num, VECTOR: tl.constexpr):
    """Store a word, the reverse of `load_word`."""
    if VECTOR:
        tl.store(word_pointer(out) + word, value, word // 4 * 16 < num)
    else:
        for k in tl.static_range(4):
            tl.store(out + word * 4 + k, (value >> (8 * k)).to(tl.uint8), word * 4 + k < num)


@triton.jit
def store_words(out, vec, a, b, c, d, num, VECTOR: tl.constexpr, PTX: tl.constexpr):
    """Store bytes `16 * vec` to `16 * vec + 15` behind `out`, up to byte `num`. VECTOR: both are multiples of 16."""
    if VECTOR and PTX:
        address = (out + vec * 16).to(tl.int64)
        inside = (vec * 16 < num).to(tl.int32)
        tl.inline_asm_elementwise(
            _STORE_16_BYTES, "=r,l,r,r,r,r,r", [address, a, b, c, d, inside], tl.int32, is_pure=False, pack=1
        )
    else:
        store_word(out, vec * 4, a, num, VECTOR)
        store_word(out, vec * 4 + 1, b, num, VECTOR)
        store_word(out, vec * 4 + 2, c, num, VECTOR)
        store_word(out, vec * 4 + 3, d, num, VECTOR)


@triton.jit
def transpose_words(a, b, c, d, PTX: tl.constexpr):
    """Turn words of four bytes, the rows of a 4 x 4 block, into its columns."""
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            _TRANSPOSE_WORDS,
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [a, b, c, d],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        # Blocks of 2 x 2 first, then of 4 x 4. Arithmetic shifts drag the sign along: the masks clear it.
        ab_even = (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8)
        ab_odd = ((a >> 8) & 0x00FF00FF) | (b & ~0x00FF00FF)
        cd_even = (c & 0x00FF00FF) | ((d & 0x00FF00FF) << 8)
        cd_odd = ((c >> 8) & 0x00FF00FF) | (d & ~0x00FF00FF)
        a = (ab_even & 0xFFFF) | (cd_even << 16)
        b = (ab_odd & 0xFFFF) | (cd_odd << 16)
        c = ((ab_even >> 16) & 0xFFFF) | (cd_even & ~0xFFFF)
        d = ((ab_odd >> 16) & 0xFFFF) | (cd_odd & ~0xFFFF)
    return a, b, c, d


@triton.jit
def store_columns(
    out_t, first_row, first_col, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, num_rows, num_cols,
    VECTOR: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Store the tile that begins at a row and a column of the source, into [num_cols, num_rows] bytes.

    Args:
        a0: int32 [vectors, words]: rows 0 to 3 of each 16, column 0 of each 4; a1 to a3: columns 1 to 3 of them; b0 to
            d3: rows 4 to 15. As `transpose_words` gives them.
    """
    vec = tl.arange(0, a0.shape[0])[:, None]
    col = first_col + tl.arange(0, a0.shape[1])[None, :] * 4
    left = (num_rows - first_row).to(tl.int32)
    at = out_t + first_row
    store_words(at + col.to(tl.int64) * num_rows, vec, a0, b0, c0, d0, tl.where(col < num_cols, left, 0), VECTOR, PTX)
    col += 1
    store_words(at + col.to(tl.int64) * num_rows, vec, a1, b1, c1, d1, tl.where(col < num_cols, left, 0), VECTOR, PTX)
    col += 1
    store_words(at + col.to(tl.int64) * num_rows, vec, a2, b2, c2, d2, tl.where(col < num_cols, left, 0), VECTOR, PTX)
    col += 1
    store_words(at + col.to(tl.int64) * num_rows, vec, a3, b3, c3, d3, tl.where(col < num_cols, left, 0), VECTOR, PTX)


@triton.jit
def four_rows(x, row, first_col, num_rows, num_cols, WORDS: tl.constexpr, VECTOR: tl.constexpr, PTX: tl.constexpr):
    """Load rows `row` to `row + 3`, transposed by 4 x 4."""
    word = tl.arange(0, WORDS)[None, :]
    left = num_cols - first_col
    at = x + first_col + row.to(tl.int64) * num_cols
    a = load_word(at, word, tl.where(row < num_rows, left, 0), VECTOR)
    b = load_word(at + num_cols, word, tl.where(row + 1 < num_rows, left, 0), VECTOR)
    c = load_word(at + 2 * num_cols, word, tl.where(row + 2 < num_rows, left, 0), VECTOR)
    d = load_word(at + 3 * num_cols, word, tl.where(row + 3 < num_rows, left, 0), VECTOR)
    return transpose_words(a, b, c, d, PTX)


@triton.jit
def transpose_kernel(
    x, out_t, num_rows, num_cols,
    VECTORS: tl.constexpr, WORDS: tl.constexpr, VECTOR_IN: tl.constexpr, VECTOR_OUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Transpose uint8 matrices [num_rows, num_cols], one after another in memory, to [num_cols, num_rows]; a program
    for 16 * VECTORS rows and 4 * WORDS columns of one."""
    tiles_per_row = tl.cdiv(num_cols, WORDS * 4)
    tiles = tl.cdiv(num_rows, VECTORS * 16) * tiles_per_row
    offset = (tl.program_id(0) // tiles).to(tl.int64) * num_rows * num_cols
    x += offset
    out_t += offset
    tile = tl.program_id(0) % tiles
    first_row = tile // tiles_per_row * (VECTORS * 16)
    first_col = tile % tiles_per_row * (WORDS * 4)
    row = first_row + tl.arange(0, VECTORS)[:, None] * 16
    a0, a1, a2, a3 = four_rows(x, row, first_col, num_rows, num_cols, WORDS, VECTOR_IN, PTX)
    b0, b1, b2, b3 = four_rows(x, row + 4, first_col, num_rows, num_cols, WORDS, VECTOR_IN, PTX)
    c0, c1, c2, c3 = four_rows(x, row + 8, first_col, num_rows, num_cols, WORDS, VECTOR_IN, PTX)
    d0, d1, d2, d3 = four_rows(x, row + 12, first_col, num_rows, num_cols, WORDS, VECTOR_IN, PTX)
    store_columns(
        out_t, first_row, first_col, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, num_rows, num_cols,
        VECTOR_OUT, PTX,
    )  # fmt: skip


VECTORS, WORDS, NUM_WARPS = 4, 32, 1
"""Tile of a program: 64 rows, 128 columns. One warp reads 128 bytes of each row and writes 64 of each column."""


def transpose(x: Tensor) -> Tensor:
    """Triton version of `transpose_reference`, for at least one element; on CPU only under Triton's interpreter."""
    *batch, num_rows, num_cols = x.shape
    out_t = torch.empty((*batch, num_cols, num_rows), dtype=x.dtype, device=x.device)
    num_programs = math.prod(batch) * ceil_div(num_rows, VECTORS * 16) * ceil_div(num_cols, WORDS * 4)
    launch(
        transpose_kernel,
        num_programs,
        x.view(torch.uint8),
        out_t.view(torch.uint8),
        num_rows,
        num_cols,
        VECTORS=VECTORS,
        WORDS=WORDS,
        VECTOR_IN=num_cols % 16 == 0 and x.data_ptr() % 16 == 0,
        VECTOR_OUT=num_rows % 16 == 0,
        PTX=runs_ptx(x),
        num_warps=NUM_WARPS,
    )
    return out_t

"""The device code of SwiGLU's transposed plane: the arithmetic of `kernel`, the tiles of ops/_tiles.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_ds.formats import E4M3
from fp8_ds.ops._device import INFINITY, encode_four, magnitude, scale_from_amax
from fp8_ds.ops._producer_device import FROM_AMAX, to_float
from fp8_ds.ops._tiles import load_rows, store_transposed, tile_corner, tile_masks
from fp8_ds.ops.swiglu.kernel import hidden

_E4M3_MAX = tl.constexpr(E4M3.max)


@triton.jit
def _scale(scale, scale_inv, amax, MODE: tl.constexpr, FP8_MAX: tl.constexpr):
    """Given, or from the amax of all, whose inverse the first program stores."""
    if MODE == FROM_AMAX:
        factor, inverse = scale_from_amax(magnitude(tl.load(amax)), FP8_MAX)
        tl.store(scale_inv, inverse, tl.program_id(0) == 0)
    else:
        factor = tl.load(scale)
    return factor


@triton.jit
def _word(y0, y1, y2, y3, factor, FP8_MAX: tl.constexpr, PTX: tl.constexpr):
    """Codes of four bf16 tensors times `factor`, as the bytes of one int32 each."""
    IS_E4M3: tl.constexpr = FP8_MAX == _E4M3_MAX
    y0, y1 = to_float(y0, PTX) * factor, to_float(y1, PTX) * factor
    y2, y3 = to_float(y2, PTX) * factor, to_float(y3, PTX) * factor
    return encode_four(y0, y1, y2, y3, IS_E4M3, PTX)


@triton.jit
def _largest(y0, y1, y2, y3, PTX: tl.constexpr):
    """Bits of the amax of four bf16 tensors."""
    low = tl.maximum(magnitude(to_float(y0, PTX)), magnitude(to_float(y1, PTX)))
    high = tl.maximum(magnitude(to_float(y2, PTX)), magnitude(to_float(y3, PTX)))
    return tl.max(tl.max(tl.maximum(low, high), 1), 0)


@triton.jit
def _product(
    gate, up, rows, cols, gate_stride, up_stride, mask, EVEN: tl.constexpr, TWICE: tl.constexpr, PTX: tl.constexpr
):
    """bf16 of one of a tile's four tensors; `gate` and `up` point at the tile's corner."""
    g = load_rows(gate, rows, cols, gate_stride, mask, EVEN)
    u = load_rows(up, rows, cols, up_stride, mask, EVEN)
    return hidden(g, u, TWICE, PTX)


@triton.jit(do_not_specialize_on_alignment=["scale", "scale_inv", "amax"])
def swiglu_columns_kernel(
    gate, up, columns, scale, scale_inv, amax, num_rows, num_cols, gate_stride, up_stride,
    MODE: tl.constexpr, TWICE: tl.constexpr, FP8_MAX: tl.constexpr, QUARTER: tl.constexpr, EVEN: tl.constexpr,
    WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The transposed plane of `silu(gate) * up`, and no other. MODE GIVEN: a product that is not finite spoils
    scale_inv; nothing is recorded."""
    first_row, first_col = tile_corner(num_cols, QUARTER)
    rows, cols, mask0, mask1, mask2, mask3 = tile_masks(first_row, first_col, num_rows, num_cols, QUARTER)
    gate += first_row.to(tl.int64) * gate_stride + first_col
    up += first_row.to(tl.int64) * up_stride + first_col
    factor = _scale(scale, scale_inv, amax, MODE, FP8_MAX)
    h0 = _product(gate, up, rows, cols, gate_stride, up_stride, mask0, EVEN, TWICE, PTX)
    h1 = _product(gate, up, rows + 1, cols, gate_stride, up_stride, mask1, EVEN, TWICE, PTX)
    h2 = _product(gate, up, rows + 2, cols, gate_stride, up_stride, mask2, EVEN, TWICE, PTX)
    h3 = _product(gate, up, rows + 3, cols, gate_stride, up_stride, mask3, EVEN, TWICE, PTX)
    if MODE != FROM_AMAX:
        tl.store(scale_inv, float("nan"), _largest(h0, h1, h2, h3, PTX) >= INFINITY)
    word = _word(h0, h1, h2, h3, factor, FP8_MAX, PTX)
    store_transposed(word, columns, first_row, first_col, num_rows, num_cols, EVEN, WORDS)

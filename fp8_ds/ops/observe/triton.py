"""The counts in one read of the tensor: partial ones by the programs of a launch, added up by a second one.

As many as the reference's dozen passes find, to the last bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops._device import INFINITY, decode, magnitude
from fp8_ds.ops._launch import ceil_div, launch
from fp8_ds.ops.blockwise.reference import BLOCK

CODES, CODES_WARPS = 8192, 8
"""Codes that a program has in flight, 32 a thread, and its warps: with 64 a thread's registers do not suffice."""
NUMBERS, NUMBERS_WARPS = 8192, 8
"""The same of bf16 numbers, 32 a thread."""
SPAN = 16
"""How many of these a program looks at."""
ROWS, ROW_BLOCKS, ROWS_WARPS = 64, 8, 8
"""Of codes with a scale for each row or block: rows of a program, of how many blocks of 128 columns each; its warps."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FIELDS = tl.constexpr(4)
"""Of a program's partial counts, int32."""
_CHUNK = 1024
"""Partial counts that the second launch adds up at a time."""


@triton.jit
def _codes_of(magnitudes, inside, IS_E4M3: tl.constexpr):
    """(at the largest code or beyond, zero or subnormal) as 0 or 1, of magnitude bits; nothing outside."""
    TOP: tl.constexpr = 0x7E if IS_E4M3 else 0x7B
    NORMAL: tl.constexpr = 8 if IS_E4M3 else 4
    return ((magnitudes >= TOP) & inside).to(tl.int32), ((magnitudes < NORMAL) & inside).to(tl.int32)


@triton.jit
def codes_kernel(
    codes, scale_inv, partials, numel,
    SIZE: tl.constexpr, SPAN: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """uint8 [numel] under one float32 scale: amax and scale as bits, at the top, small, of SPAN times SIZE codes."""
    start = tl.program_id(0).to(tl.int64) * (SIZE * SPAN)
    left = tl.minimum(numel - start, SIZE * SPAN).to(tl.int32)
    at = tl.arange(0, SIZE)
    largest = tl.zeros([SIZE], tl.int32)
    top, small = tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.int32)
    done = 0
    while done < left:  # not `range`: in Triton 3.6 its bounds cannot be interpreted with NumPy 2.4
        inside = at < left - done
        mag = tl.load(codes + start + done + at, inside, 0).to(tl.int32) & 0x7F
        largest = tl.maximum(largest, mag)
        is_top, is_small = _codes_of(mag, inside, IS_E4M3)
        top += is_top
        small += is_small
        done += SIZE
    scale = tl.load(scale_inv)
    amax = decode(tl.max(largest, 0), IS_E4M3, False) * scale
    _store(partials, magnitude(amax), magnitude(scale), tl.sum(top, 0), tl.sum(small, 0))


@triton.jit
def grouped_codes_kernel(
    codes, scale_inv, partials, num_rows, num_cols, rows_per_scale, row_stride, col_stride,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, IS_E4M3: tl.constexpr,
):  # fmt: skip
    """The same of [num_rows, num_cols] with a scale for `rows_per_scale` rows and all or 128 columns, by strides."""
    tiles_per_row = tl.cdiv(num_cols, BLOCKS * BLOCK)
    row = tl.program_id(0) // tiles_per_row * ROWS + tl.arange(0, ROWS)
    first_block = tl.program_id(0) % tiles_per_row * BLOCKS
    at = codes + row.to(tl.int64)[:, None] * num_cols
    scales = scale_inv + (row // rows_per_scale).to(tl.int64) * row_stride
    amax, largest_scale = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    top, small = tl.zeros([ROWS, BLOCK], tl.int32), tl.zeros([ROWS, BLOCK], tl.int32)
    done = 0
    while done < BLOCKS:
        block = first_block + done
        col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row[:, None] < num_rows) & (col < num_cols)
        mag = tl.load(at + col, inside, 0).to(tl.int32) & 0x7F
        exists = (row < num_rows) & (tl.zeros_like(row) + block * BLOCK < num_cols)
        scale = tl.load(scales + block.to(tl.int64) * col_stride, exists, 0.0)
        value = decode(tl.max(mag, 1), IS_E4M3, False) * scale
        amax = tl.maximum(amax, magnitude(value))
        largest_scale = tl.maximum(largest_scale, magnitude(scale))
        is_top, is_small = _codes_of(mag, inside, IS_E4M3)
        top += is_top
        small += is_small
        done += 1
    _store(partials, tl.max(amax, 0), tl.max(largest_scale, 0), tl.sum(tl.sum(top, 1), 0), tl.sum(tl.sum(small, 1), 0))


@triton.jit
def numbers_kernel(
    x, scale_inv, partials, numel, fp8_max,
    SIZE: tl.constexpr, SPAN: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Floats [numel]: amax as bits, exact zeros, and if BOUNDED those beyond `fp8_max * scale_inv`, with NaN."""
    start = tl.program_id(0).to(tl.int64) * (SIZE * SPAN)
    left = tl.minimum(numel - start, SIZE * SPAN).to(tl.int32)
    at = tl.arange(0, SIZE)
    largest = tl.zeros([SIZE], tl.int32)
    zeros, beyond = tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.int32)
    bound = fp8_max * tl.load(scale_inv) if BOUNDED else 0.0
    done = 0
    while done < left:
        inside = at < left - done
        mag = magnitude(tl.load(x + start + done + at, inside, 0.0).to(tl.float32))
        largest = tl.maximum(largest, mag)
        zeros += ((mag == 0) & inside).to(tl.int32)
        if BOUNDED:
            fits = mag.to(tl.float32, bitcast=True) <= bound  # NaN does not, nor does anything a bound that is NaN
            beyond += tl.where(inside & (fits == 0), 1, 0)
        done += SIZE
    _store(partials, tl.max(largest, 0), 0, tl.sum(zeros, 0), tl.sum(beyond, 0))


@triton.jit
def _store(partials, first, second, third, fourth):
    at = partials + tl.program_id(0) * _FIELDS
    tl.store(at, first)
    tl.store(at + 1, second)
    tl.store(at + 2, third)
    tl.store(at + 3, fourth)


@triton.jit
def _larger(counts, bits):
    """The count there, float64, is at least the float32 with these bits; NaN stays, as with torch.maximum."""
    before = tl.load(counts)
    value = bits.to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(counts, tl.where(bits > INFINITY, value, tl.where(value > before, value, before)))


@triton.jit
def finish_kernel(
    partials, counts, num_partials, numel,
    CHUNK: tl.constexpr, OF_CODES: tl.constexpr, CAN_SATURATE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Partial counts, int32 [num_partials, 4], into `counts`, as the reference has it. One program."""
    at = tl.arange(0, CHUNK)
    first, second = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    third, fourth = tl.zeros([CHUNK], tl.int64), tl.zeros([CHUNK], tl.int64)
    done = 0
    while done < num_partials:
        inside = at < num_partials - done
        row = partials + (done + at) * _FIELDS
        first = tl.maximum(first, tl.load(row, inside, 0))
        second = tl.maximum(second, tl.load(row + 1, inside, 0))
        third += tl.load(row + 2, inside, 0)
        fourth += tl.load(row + 3, inside, 0)
        done += CHUNK
    sum_third, sum_fourth = tl.sum(third, 0).to(tl.float64), tl.sum(fourth, 0).to(tl.float64)
    if OF_CODES:
        _larger(counts, tl.max(first, 0))
        _larger(counts + 1, tl.max(second, 0))
        known = tl.load(counts + 8)
        saturated = tl.where(known > 0, known - 1, sum_third if CAN_SATURATE else 0.0)
        tl.store(counts + 2, tl.load(counts + 2) + numel)
        tl.store(counts + 3, tl.load(counts + 3) + saturated)
        tl.store(counts + 4, tl.load(counts + 4) + sum_fourth)
        tl.store(counts + 5, tl.load(counts + 5) + tl.load(counts + 7))
        tl.store(counts + 7, 0.0)
        tl.store(counts + 8, 0.0)
    else:
        _larger(counts + 6, tl.max(first, 0))
        tl.store(counts + 7, sum_third)
        tl.store(counts + 8, sum_fourth + 1 if BOUNDED else 1.0)


def takes_codes(codes: Tensor) -> bool:
    """Whether `observe_codes` can read it: a contiguous matrix in FP8."""
    return codes.dim() == 2 and codes.is_contiguous()


def takes_numbers(x: Tensor) -> bool:
    """Whether `observe_hp` can read it: contiguous, and exact in float32."""
    return x.dtype in _DTYPES and x.is_contiguous()


def observe_codes(codes: Tensor, scale_inv: Tensor, counts: Tensor, can_saturate: bool) -> None:
    """As `reference.observe_codes`, of what `takes_codes`; on CPU only under Triton's interpreter."""
    num_rows, num_cols = codes.shape
    is_e4m3 = codes.dtype == torch.float8_e4m3fn
    if scale_inv.numel() == 1:
        num_programs = ceil_div(codes.numel(), CODES * SPAN)
        partials = _partials(num_programs, codes)
        flat = codes.view(torch.uint8), scale_inv, partials, codes.numel()
        launch(codes_kernel, num_programs, *flat, SIZE=CODES, SPAN=SPAN, IS_E4M3=is_e4m3, num_warps=CODES_WARPS)
    else:
        num_programs = ceil_div(num_rows, ROWS) * ceil_div(num_cols, ROW_BLOCKS * BLOCK)
        partials = _partials(num_programs, codes)
        rows_per_scale = 1 if scale_inv.shape[0] == num_rows else BLOCK
        col_stride = 0 if scale_inv.shape == (num_rows, 1) else scale_inv.stride(1)
        strides = rows_per_scale, scale_inv.stride(0), col_stride
        args = codes.view(torch.uint8), scale_inv, partials, num_rows, num_cols, *strides
        tile = {"ROWS": ROWS, "BLOCKS": ROW_BLOCKS, "BLOCK": BLOCK, "IS_E4M3": is_e4m3}
        launch(grouped_codes_kernel, num_programs, *args, num_warps=ROWS_WARPS, **tile)
    _finish(partials, counts, codes.numel(), of_codes=True, can_saturate=can_saturate)


def observe_hp(x: Tensor, scale_inv: Tensor | None, fp8_max: float, counts: Tensor) -> None:
    """As `reference.observe_hp`, of what `takes_numbers`; on CPU only under Triton's interpreter."""
    num_programs = ceil_div(x.numel(), NUMBERS * SPAN)
    partials = _partials(num_programs, x)
    args = x, counts if scale_inv is None else scale_inv, partials, x.numel(), float(fp8_max)
    bounded = scale_inv is not None
    launch(numbers_kernel, num_programs, *args, SIZE=NUMBERS, SPAN=SPAN, BOUNDED=bounded, num_warps=NUMBERS_WARPS)
    _finish(partials, counts, x.numel(), of_codes=False, is_bounded=bounded)


def _partials(num_programs: int, x: Tensor) -> Tensor:
    return torch.empty((num_programs, 4), dtype=torch.int32, device=x.device)


def _finish(
    partials: Tensor,
    counts: Tensor,
    numel: int,
    *,
    of_codes: bool,
    can_saturate: bool = False,
    is_bounded: bool = False,
) -> None:
    flags = {"OF_CODES": of_codes, "CAN_SATURATE": can_saturate, "BOUNDED": is_bounded}
    launch(finish_kernel, 1, partials, counts, len(partials), numel, CHUNK=_CHUNK, num_warps=8, **flags)

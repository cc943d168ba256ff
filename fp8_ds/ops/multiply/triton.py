"""Triton kernel of the product: the programs fill the device and take blocks in turn."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops._launch import ceil_div, num_processors

BLOCK, NUM_WARPS = 8192, 8
"""Elements that a program has in flight, 32 a thread, and its warps."""
_PROGRAMS = 4
"""Programs for each multiprocessor."""


@triton.jit
def multiply_kernel(x, factor, numel, BLOCK: tl.constexpr):
    """Multiply elements in the order of memory."""
    by = tl.load(factor)
    if by != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < numel:  # not `range`: in Triton 3.6 its bounds cannot be interpreted with NumPy 2.4
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, at < numel).to(tl.float32)
            tl.store(x + at, (value * by).to(x.dtype.element_ty), at < numel)
            start += tl.num_programs(0).to(tl.int64) * BLOCK


def multiply_(x: Tensor, factor: Tensor) -> None:
    """Triton version of `reference.multiply_`, without reading the factor back; on CPU only under the interpreter."""
    num_programs = min(ceil_div(x.numel(), BLOCK), _PROGRAMS * num_processors(x.device))
    if num_programs:
        multiply_kernel[(num_programs,)](x, factor, x.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)

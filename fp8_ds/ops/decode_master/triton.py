"""Triton kernel that decodes masters, 16 elements a thread, by words of 16 bytes where the tensors are aligned."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.numerics.masters import MasterFormat
from fp8_ds.ops._producer_device import to_bf16
from fp8_ds.ops.adamw.arithmetic import UP, decode_bf16_master, decode_fp8_master
from fp8_ds.ops.transpose.triton import runs_ptx

BLOCK, NUM_WARPS = 2048, 4


@triton.jit(do_not_specialize_on_alignment=["scale_inv"])
def decode_kernel(
    hi, lo, scale_inv, out, numel,
    LO_BITS: tl.constexpr, DROP_BITS: tl.constexpr, IS_FP8: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode BLOCK elements by one program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    high = tl.load(hi + at, mask, 0)
    low = tl.load(lo + at, mask, 0)
    if IS_FP8:
        value = (decode_fp8_master(high, low, LO_BITS, DROP_BITS, False) * UP) * tl.load(scale_inv)
    else:
        value = decode_bf16_master(high, low, LO_BITS, DROP_BITS)
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + at, to_bf16(value, PTX), mask)
    else:
        tl.store(out + at, value, mask)


def decode_master(hi: Tensor, lo: Tensor, fmt: MasterFormat, scale_inv: Tensor | None, out: Tensor) -> None:
    """Triton version of `ops.decode_master`, contiguous, `out` bf16 or float32; on CPU only under the interpreter."""
    decode_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        hi if fmt.is_fp8 else hi.view(torch.int16),
        lo,
        scale_inv,
        out,
        out.numel(),
        LO_BITS=fmt.lo_bits,
        DROP_BITS=fmt.drop_bits,
        IS_FP8=fmt.is_fp8,
        PTX=runs_ptx(out),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )

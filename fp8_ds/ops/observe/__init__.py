"""Counts of what a quantisation did to a tensor, accumulated on the device, without a host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.ops._register import register
from fp8_ds.ops.observe import reference

NUM_COUNTS = 9
"""amax of the codes, largest scale_inv; elements, saturated, zero or subnormal, exact zeros; amax before the cast; and
what is known of a tensor whose codes have not been counted yet (two)."""

MAXIMA = (0, 1, 6)
"""Which of them are maximumed; the others are added up."""


def _codes_kernel(codes: Tensor, scale_inv: Tensor, counts: Tensor, can_saturate: bool) -> None:
    if codes.is_cuda and codes.numel():
        from fp8_ds.ops.observe import triton  # the package is missing where there is no GPU

        if scale_inv.numel() == 1 and codes.dim() == 2 and not codes.is_contiguous():
            codes = codes.t()  # of a Conv1D: under one scale it does not matter how codes lie
        if triton.takes_codes(codes):
            with torch.cuda.device_of(codes):  # Triton launches on the current device
                return triton.observe_codes(codes, scale_inv, counts, can_saturate)
    return reference.observe_codes(codes, scale_inv, counts, can_saturate)


def _hp_kernel(x: Tensor, scale_inv: Tensor | None, fp8_max: float, counts: Tensor) -> None:
    if x.is_cuda and x.numel():
        from fp8_ds.ops.observe import triton

        if triton.takes_numbers(x):
            with torch.cuda.device_of(x):
                return triton.observe_hp(x, scale_inv, fp8_max, counts)
    return reference.observe_hp(x, scale_inv, fp8_max, counts)


_observe_codes, _LIBRARY_CODES = register(
    "observe_codes(Tensor codes, Tensor scale_inv, Tensor(a!) counts, bool can_saturate) -> ()",
    _codes_kernel,
    lambda codes, scale_inv, counts, can_saturate: None,
)
_observe_hp, _LIBRARY_HP = register(
    "observe_hp(Tensor x, Tensor? scale_inv, float fp8_max, Tensor(a!) counts) -> ()",
    _hp_kernel,
    lambda x, scale_inv, fp8_max, counts: None,
)


def new_counts(*shape: int, device: torch.device | str) -> Tensor:
    """Zeros, float64 [*shape, NUM_COUNTS]: exact counts up to 2**53."""
    return torch.zeros(*shape, NUM_COUNTS, dtype=torch.float64, device=device)


def observe_codes(codes: Tensor, scale_inv: Tensor, counts: Tensor, *, can_saturate: bool) -> None:
    """The codes of one tensor are counted.

    Args:
        codes: float8_e4m3fn or float8_e5m2, [T, C].
        scale_inv: float32, multiply to leave FP8: one for all, [T, 1], or one per 1x128 or 128x128 block.
        counts: float64 [NUM_COUNTS], same device.
        can_saturate: the scale is not of this tensor's own amax. Where `observe_hp` has not counted the saturated
            elements, those at the largest code (or NaN) are: some too many.
    """
    _observe_codes(codes, scale_inv, counts, can_saturate)


def observe_hp(x: Tensor, counts: Tensor, scale_inv: Tensor | None = None, fp8_max: float = 0.0) -> None:
    """Of a tensor before its cast: the amax, and, with the codes that are counted next, exact zeros and saturated ones.

    A cast whose codes no GEMM reads (one repeated in the backward) therefore counts for nothing.

    Args:
        x: floating, any shape.
        counts: as above; the same tensor's codes are counted into it next.
        scale_inv: float32, 0-dim, that `x` was quantised by, if elements beyond `fp8_max * scale_inv` are possible.
        fp8_max: largest finite value of the format.
    """
    _observe_hp(x, scale_inv, fp8_max, counts)

"""Counters of what a quantisation did to a tensor, accumulated on the device, without a host synchronisation.

They are plain torch, some passes over the tensor, and run in sampled steps alone. They are ops, so that a graph of
torch.compile has them as they are and fuses none with what it computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_ds.numerics.formats import BY_NAME
from fp8_ds.ops._register import register
from fp8_ds.ops.blockwise import BLOCK

NUM_COUNTS = 9
"""Number of counts: amax of the codes, largest scale_inv; elements, saturated, zero or subnormal, exact zeros; amax
before the cast; and two of a tensor whose codes have not been counted yet."""

MAXIMA = (0, 1, 6)
"""Counts that take the maximum; the others are added up."""

_PENDING_ZEROS, _PENDING_SATURATED = 7, 8
"""Numbers of a tensor until its codes are counted; the latter plus 1, where 0 means unknown."""

_SIGN = 0x80


def new_counts(*shape: int, device: torch.device | str) -> Tensor:
    """Return zeros, float64 [*shape, NUM_COUNTS]: counts are exact up to 2**53."""
    return torch.zeros(*shape, NUM_COUNTS, dtype=torch.float64, device=device)


def observe_codes(codes: Tensor, scale_inv: Tensor, counts: Tensor, *, can_saturate: bool) -> None:
    """Count the codes of one tensor.

    Args:
        codes: float8_e4m3fn or float8_e5m2, [T, C].
        scale_inv: float32, multiply to leave FP8: one for all, [T, 1], or one per 1x128 or 128x128 block.
        counts: float64 [NUM_COUNTS], same device.
        can_saturate: whether the scale is not of this tensor's own amax. If `observe_hp` has not counted the saturated
            elements, those at the largest code (or NaN) are counted instead: some too many.
    """
    _observe_codes(codes, scale_inv, counts, can_saturate)


def observe_hp(x: Tensor, counts: Tensor, scale_inv: Tensor | None = None, fp8_max: float = 0.0) -> None:
    """Record the amax of a tensor before its cast and, for the codes counted next, exact zeros and saturated elements.

    A cast whose codes no GEMM reads, such as one repeated in the backward, therefore counts for nothing.

    Args:
        x: floating, any shape.
        counts: as above; the same tensor's codes are counted into it next.
        scale_inv: float32, 0-dim, that `x` was quantised by, if elements beyond `fp8_max * scale_inv` are possible.
        fp8_max: largest finite value of the format.
    """
    _observe_hp(x, scale_inv, fp8_max, counts)


def _count_codes(codes: Tensor, scale_inv: Tensor, counts: Tensor, can_saturate: bool) -> None:
    if codes.numel() == 0:
        return
    fmt = next(fmt for fmt in BY_NAME.values() if fmt.dtype == codes.dtype)
    top_code = int(torch.tensor(fmt.max).to(codes.dtype).view(torch.uint8))
    smallest_normal_code = 1 << fmt.mantissa_bits
    magnitude = codes.view(torch.uint8) & (_SIGN - 1)
    largest = _block_maxima(magnitude, scale_inv).view(codes.dtype).float()
    maxima = torch.stack([(largest * scale_inv).amax(), scale_inv.amax()]).to(counts.dtype)
    counts[:2] = torch.maximum(counts[:2], maxima)
    at_top = (magnitude >= top_code).sum().to(counts.dtype) if can_saturate else counts.new_zeros(())
    known = counts[_PENDING_SATURATED]
    saturated = torch.where(known > 0, known - 1, at_top)
    small = (magnitude < smallest_normal_code).sum().to(counts.dtype)
    numel = counts.new_full((), codes.numel())
    counts[2:6] += torch.stack([numel, saturated, small, counts[_PENDING_ZEROS]])
    counts[_PENDING_ZEROS:].zero_()


def _block_maxima(magnitude: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the largest magnitude bits under each scale, shaped as `scale_inv`: codes order as their values do."""
    if scale_inv.numel() == 1:
        return magnitude.amax().reshape(scale_inv.shape)
    if scale_inv.shape == (magnitude.shape[0], 1):
        return magnitude.amax(1, keepdim=True)
    rows, cols = scale_inv.shape
    block_rows = 1 if rows == magnitude.shape[0] else BLOCK
    missing = cols * BLOCK - magnitude.shape[1], rows * block_rows - magnitude.shape[0]
    padded = F.pad(magnitude, (0, missing[0], 0, missing[1]))
    return padded.view(rows, block_rows, cols, BLOCK).amax(dim=(1, 3))


def _count_hp(x: Tensor, scale_inv: Tensor | None, fp8_max: float, counts: Tensor) -> None:
    if x.numel() == 0:
        return
    amax = torch.linalg.vector_norm(x, float("inf")).to(counts.dtype)
    counts[6] = torch.maximum(counts[6], amax)
    counts[_PENDING_ZEROS] = x.numel() - torch.count_nonzero(x)
    if scale_inv is None:
        counts[_PENDING_SATURATED].fill_(1)  # assigned by an index, a number of the host's would be waited for
        return
    bound = (fp8_max * scale_inv).reshape(1)  # of one dimension: a 0-dim one would be rounded to the dtype of x
    counts[_PENDING_SATURATED] = x.numel() - (x.abs() <= bound).sum() + 1  # NaN is not within


_observe_codes = register(
    "observe_codes(Tensor codes, Tensor scale_inv, Tensor(a!) counts, bool can_saturate) -> ()",
    _count_codes,
    lambda codes, scale_inv, counts, can_saturate: None,
)
_observe_hp = register(
    "observe_hp(Tensor x, Tensor? scale_inv, float fp8_max, Tensor(a!) counts) -> ()",
    _count_hp,
    lambda x, scale_inv, fp8_max, counts: None,
)

"""What FP8 codes tell about their tensor, in plain torch: byte arithmetic, a byte or less an element in temporaries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_ds.formats import BY_NAME, Float8Format
from fp8_ds.ops.blockwise import BLOCK

_SIGN = 0x80

PENDING_ZEROS, PENDING_SATURATED = 7, 8
"""Entries of the counts that hold numbers of a tensor until its codes are counted; the latter plus 1, 0: unknown."""


def format_of(dtype: torch.dtype) -> Float8Format:
    """The format with that torch dtype."""
    return next(fmt for fmt in BY_NAME.values() if fmt.dtype == dtype)


def top_code(fmt: Float8Format) -> int:
    """Magnitude bits of the largest finite value."""
    return int(torch.tensor(fmt.max, dtype=torch.float32).to(fmt.torch_dtype).view(torch.uint8))


def smallest_normal_code(fmt: Float8Format) -> int:
    """Magnitude bits of the smallest normal value: those below are 0 and the subnormals."""
    return 1 << fmt.mantissa_bits


def observe_codes(codes: Tensor, scale_inv: Tensor, counts: Tensor, can_saturate: bool) -> None:
    """See `fp8_ds.ops.observe.observe_codes`."""
    if codes.numel() == 0:
        return
    fmt = format_of(codes.dtype)
    magnitude = codes.view(torch.uint8) & (_SIGN - 1)
    largest = _block_maxima(magnitude, scale_inv).view(codes.dtype).float()
    maxima = torch.stack([(largest * scale_inv).amax(), scale_inv.amax()]).to(counts.dtype)
    counts[:2] = torch.maximum(counts[:2], maxima)
    at_top = (magnitude >= top_code(fmt)).sum().to(counts.dtype) if can_saturate else counts.new_zeros(())
    known = counts[PENDING_SATURATED]
    saturated = torch.where(known > 0, known - 1, at_top)
    small = (magnitude < smallest_normal_code(fmt)).sum().to(counts.dtype)
    numel = counts.new_full((), codes.numel())
    counts[2:6] += torch.stack([numel, saturated, small, counts[PENDING_ZEROS]])
    counts[PENDING_ZEROS:].zero_()


def _block_maxima(magnitude: Tensor, scale_inv: Tensor) -> Tensor:
    """Largest magnitude bits under each scale, in the shape of `scale_inv`: order of codes is order of values."""
    if scale_inv.numel() == 1:
        return magnitude.amax().reshape(scale_inv.shape)
    if scale_inv.shape == (magnitude.shape[0], 1):
        return magnitude.amax(1, keepdim=True)
    rows, cols = scale_inv.shape
    block_rows = 1 if rows == magnitude.shape[0] else BLOCK
    missing = cols * BLOCK - magnitude.shape[1], rows * block_rows - magnitude.shape[0]
    padded = F.pad(magnitude, (0, missing[0], 0, missing[1]))
    return padded.view(rows, block_rows, cols, BLOCK).amax(dim=(1, 3))


def observe_hp(x: Tensor, scale_inv: Tensor | None, fp8_max: float, counts: Tensor) -> None:
    """See `fp8_ds.ops.observe.observe_hp`."""
    if x.numel() == 0:
        return
    amax = torch.linalg.vector_norm(x, float("inf")).to(counts.dtype)
    counts[6] = torch.maximum(counts[6], amax)
    counts[PENDING_ZEROS] = x.numel() - torch.count_nonzero(x)
    if scale_inv is None:
        counts[PENDING_SATURATED].fill_(1)  # assigned by an index, a number of the host's would be waited for
    else:
        inside = x.abs().float() <= fp8_max * scale_inv  # so that NaN is not; bf16 would round the bound
        counts[PENDING_SATURATED] = x.numel() - inside.sum() + 1

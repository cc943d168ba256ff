"""Users' writes into weights whose FP8 bytes are the high parts of masters; unchanged elements keep their masters.

A reader gets the bytes, without the low parts, which lie on one rank only. So a write leaves the masters of unchanged
elements alone, and the scale follows from the rest, on every rank alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.masters import MasterFormat, encode
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.optim.states import CHUNK, chunks, lo_of

_MANTISSA_BITS = 3
_SMALLEST_MOVABLE = (1 << _MANTISSA_BITS) + 1
"""Code above that of the smallest normal number: another power of two moves the exponents of such a byte and of its
master alike, whatever the low part. Below it, the result depends on the rounding of the master, which its owner has."""

CHANCE = 1 / 8
"""If fewer elements than this are as they were read, all of them count as written: one in 16 bf16 numbers has FP8's
mantissa, and may equal what was read by chance."""


@torch.no_grad()
def overwrite(
    codes: Tensor, value: Tensor, scales: PredictedScales, index: int, fmt: MasterFormat, read: Tensor | None = None
) -> Tensor:
    """Write the high parts of `value` to `codes`, with a scale to fit; elements that equal what was read keep theirs.

    Waits for the device. If the scale changes, kept elements below 9/8 of FP8's smallest normal number (in the old
    scale or the new) take the written value: they change by half a step of FP8's subnormals at most.

    Args:
        codes: uint8 [numel], of the whole weight.
        value: [numel], any float dtype.
        index: position of the weight in `scales`.
        read: [numel], the values that readers get; None: the de-quantised codes.

    Returns:
        bool [numel]: elements whose low parts are still right.
    """
    scales.wait()
    old, limit = scales.scale_inv[index].clone(), scales.amax[index].clone()
    kept, written, held = _compare(codes, value, old, read)
    num_kept = int(kept.sum())
    if num_kept == kept.numel():
        return kept
    if num_kept < CHANCE * kept.numel():
        kept.zero_()
    # A master lies within half a step of its high part: 1/16 of it, or 2**-10 where that is subnormal.
    bound = torch.minimum(limit, held * (1 + 2.0**-4) + old * 2.0**-10)
    scales.replace(index, torch.maximum(written, torch.where(kept.any(), bound, 0.0)))
    _write_codes(codes, value, kept, old, scales.scale_inv[index], fmt)
    return kept


def _compare(codes: Tensor, value: Tensor, scale_inv: Tensor, read: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (unchanged elements, amax of the changed values, amax of the unchanged ones as read); see `overwrite`."""
    kept = torch.empty(value.shape, dtype=torch.bool, device=codes.device)
    reads = codes.view(E4M3.torch_dtype) if read is None else read
    written, held = torch.zeros_like(scale_inv), torch.zeros_like(scale_inv)
    for source, before, keep in zip(value.split(CHUNK), reads.split(CHUNK), kept.split(CHUNK), strict=True):
        source, before = source.float(), before.float() * scale_inv if read is None else before.float()
        keep.copy_(source.view(torch.int32) == before.view(torch.int32))
        written = torch.maximum(written, torch.where(keep, 0.0, source).abs().max())
        held = torch.maximum(held, torch.where(keep, before, 0.0).abs().max())
    return kept, written, held


def _write_codes(codes: Tensor, value: Tensor, kept: Tensor, old: Tensor, new: Tensor, fmt: MasterFormat) -> None:
    """Rewrite `codes` from scale_inv `old` to those of `value` with `new`; where `kept`, move exponents only.

    `kept` becomes false where that is impossible, and the code is the value's.
    """
    shift = (torch.frexp(new)[1] - torch.frexp(old)[1]) << _MANTISSA_BITS
    for source, code, keep in zip(value.split(CHUNK), codes.split(CHUNK), kept.split(CHUNK), strict=True):
        magnitude = (code & 0x7F).int()
        moved = magnitude - shift
        keep &= (shift == 0) | ((magnitude >= _SMALLEST_MOVABLE) & (moved >= _SMALLEST_MOVABLE))
        code.copy_(torch.where(keep, (code & 0x80) | moved, encode(source.float(), fmt, new)[0]))


@torch.no_grad()
def write_low(shard: AdamShard, value: Tensor, kept: Tensor, scale_inv: Tensor) -> None:
    """Write the low parts of `value` ([shard.numel]) to a shard, except where `kept` (bool)."""
    for part, place in chunks(shard):
        lo = encode(place.narrow(value).float(), part.fmt, scale_inv[part.scale_index])[1]
        lo_of(part).copy_(torch.where(place.narrow(kept), lo_of(part), lo))

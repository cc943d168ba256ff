"""Masters made from values: the first ones, and those that users write.

The first master of a bf16 weight in FP8 is one of the many float32 numbers that round to it. By a power of two one bf16
number in 16 lies exactly between two FP8 numbers, and the first update, however small, moves half of these by a whole
step of FP8. So a first master takes noise below bf16's last bit: read as bf16 it is the weight, bit for bit. The noise
follows from (seed, parameter, element), not from ranks. See docs/decisions/0009.

A reader of a weight whose FP8 bytes are the high parts of masters gets the bytes, without the low parts, which lie on
one rank only. So a user's write leaves the masters of unchanged elements alone, and the scale follows from the rest, on
every rank alike.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.masters import MasterFormat, decode, encode
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.numerics.rounding import noise
from fp8_ds.numerics.scale import amax_of

CHUNK = 1 << 24
"""Elements converted at a time, a multiple of 128: bounds the float32 temporaries to 64 MiB each."""


def weight_id(name: str) -> int:
    """Return the number of a weight for rounding noise, from its name: the same in every run and on every rank."""
    return zlib.crc32(name.encode())


def encode_first(
    value: Tensor, fmt: MasterFormat, scale_inv: Tensor, amax: Tensor, seed: int | None, param_id: int, start: int
) -> tuple[Tensor, Tensor]:
    """Return (hi, lo) of `value` with noise below half a bf16 step; without noise where its bf16 would differ.

    Args:
        value: bf16 [numel], elements from `start` on of parameter `param_id`.
        fmt: an FP8 format.
        scale_inv, amax: float32, 0-dim, of the whole parameter. No master exceeds amax.
        seed: of the noise; None: there is none, for values that came in FP8.
    """
    if seed is None:
        return encode(value.float(), fmt, scale_inv)
    bits = 16 - fmt.drop_bits  # of float32's 16 bits below bf16's last one
    half = 1 << (bits - 1)
    plain = value.float()
    step = 0  # those of training count from 1
    offset = noise(seed, step, param_id, start, value.numel(), bits, value.device).sub_(half)
    offset[offset == -half] = 0  # half a step away bf16 is undecided
    noisy = offset.bitwise_left_shift_(fmt.drop_bits).add_(plain.view(torch.int32)).view(torch.float32)
    hi, lo = encode(noisy, fmt, scale_inv)
    del noisy, offset
    master = decode(hi, lo, fmt, scale_inv)
    keeps = (master.abs() <= amax) & (master.to(value.dtype).view(torch.int16) == value.view(torch.int16))
    del master
    plain_hi, plain_lo = encode(plain, fmt, scale_inv)
    return torch.where(keeps, hi, plain_hi), torch.where(keeps, lo, plain_lo)


@torch.no_grad()
def write_first_codes(
    codes: Tensor,
    value: Tensor,
    fmt: MasterFormat,
    scales: PredictedScales,
    index: int,
    seed: int | None,
    param_id: int,
) -> None:
    """Write the high parts of the first masters of a whole weight, `value` (bf16 [numel]), to `codes` (uint8).

    `seed`: see `encode_first`.
    """
    for start in range(0, value.numel(), CHUNK):
        piece = value[start : start + CHUNK]
        numbers = scales.scale_inv[index], scales.amax[index], seed, param_id, start
        codes[start : start + CHUNK] = encode_first(piece, fmt, *numbers)[0]


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


def newer(source: Tensor, read: Tensor) -> Tensor:
    """Return `source` (hp) where it rounds to `read`, else `read`: unchanged elements keep full precision. 1-D.

    Args:
        read: bf16; float32 where DeepSpeed has left that, as in a LoRA whose base zero.Init has sharded.
    """
    return torch.where(same_bits(source.to(read.dtype), read), source.float(), read.float())


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Return which elements are the same, bit for bit; both tensors are bf16, or float32."""
    bits = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return left.view(bits) == right.view(bits)


class SplitQuantizer:
    """Replacement of `WeightQuantizer` where the masters, in `fmt`, contain the FP8 bytes."""

    def __init__(self, scales: PredictedScales, fmt: MasterFormat) -> None:
        self.scales = scales
        self.fmt = fmt
        self.group = scales.group
        self.scale, self.scale_inv = scales.scale, scales.scale_inv

    @torch.no_grad()
    def amax_of(self, index: int, value: Tensor, start: int = 0) -> Tensor:
        """Return the largest magnitude of `value`, a part of weight `index`: float32, 0-dim."""
        return amax_of(value)

    @torch.no_grad()
    def rescale(self, index: int, amax: Tensor) -> None:
        """Give weight `index` the scale of `amax` (0-dim), the same on all ranks if `amax` is."""
        self.scales.replace(index, amax)

    @torch.no_grad()
    def quantize_into(self, out: Tensor, value: Tensor, index: int, start: int = 0) -> None:
        """Write the high parts of `value` (1-D), wherever in the weight it starts, into `out` (1-D float8)."""
        target = out.view(torch.uint8)
        for source, bytes_ in zip(value.split(CHUNK), target.split(CHUNK), strict=True):
            bytes_.copy_(encode(source.float(), self.fmt, self.scale_inv[index])[0])

"""The shards of an optimizer: first masters, moments, dense float32 form, users' writes, and places in flat tensors.

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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.masters import MasterFormat, decode, encode
from fp8_ds.numerics.moments import (
    GROUP,
    dequantize_m,
    dequantize_root,
    from_groups,
    quantize_m,
    quantize_root,
    to_groups,
)
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.numerics.rounding import noise
from fp8_ds.ops.adamw import AdamShard, decode_master

CHUNK = 1 << 24
"""Elements converted at a time, a multiple of 128: bounds the float32 temporaries to 64 MiB each."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names that torch's Adam gives the moments in a state_dict."""


@dataclass
class FlatBuffer:
    """A tensor that the optimizer sees as one parameter, and the shards it is made of; gaps are padding.

    Args:
        row: index of its hyperparameters and of its step count.
        numel: elements, padding included.
        pieces: the shards, and which of its elements they are.
    """

    row: int
    numel: int
    pieces: list[tuple[ShardRange, AdamShard]]

    @property
    def shards(self) -> list[AdamShard]:
        return [shard for _, shard in self.pieces]

    def split(self, x: Tensor) -> list[tuple[AdamShard, Tensor]]:
        """Return the shards that are not empty, each with a view of its elements of `x` ([numel])."""
        return [(shard, elements.narrow(x)) for elements, shard in self.pieces if shard.numel]


def has_moments(shard: AdamShard) -> bool:
    return shard.m.numel() > 0 or shard.numel == 0


def allocate_lo(shard: AdamShard, device: torch.device) -> None:
    """Allocate a low part of zeros: the master equals the compute weight."""
    if shard.fmt.is_split:
        shard.lo = torch.zeros(shard.num_groups * GROUP, dtype=shard.fmt.lo_dtype, device=device)


def chunks(shard: AdamShard) -> Iterator[tuple[AdamShard, ShardRange]]:
    """Yield parts of a shard, split where groups end, each with its place in the shard."""
    start, stop = shard.start, shard.start + shard.numel
    while start < stop:
        elements = ShardRange(start, min(start + CHUNK - start % GROUP, stop))
        yield shard.part(elements), elements.shift(-shard.start)
        start = elements.stop


def lo_of(shard: AdamShard) -> Tensor:
    """Return the low parts of a shard's own elements: a view, [shard.numel]."""
    assert shard.lo is not None
    return shard.lo.narrow(0, shard.head, shard.numel)


@torch.no_grad()
def read_dense(shard: AdamShard, key: str | None, out: Tensor, scale_inv: Tensor | None) -> None:
    """Fill `out` (float32 or bf16 [numel], any device) with the master (key None) or a moment by its torch name.

    Args:
        scale_inv: the scale vector that the masters are stored with.
    """
    for part, place in chunks(shard):
        target = place.narrow(out)
        if key is None and part.lo is None:
            target.copy_(part.hi)
        elif key is None:
            decode_master(part.hi, lo_of(part).to(part.hi.device), part.fmt, _scale_of(part, scale_inv), target)
        elif key == "exp_avg":
            groups = dequantize_m(part.m.view(-1, GROUP), part.m_scale_inv)
            target.copy_(from_groups(groups, part.numel, part.start))
        else:
            groups = dequantize_root(part.v.view(-1, GROUP), part.v_scale_inv)
            root = from_groups(groups, part.numel, part.start)
            target.copy_(root * root)


def _scale_of(shard: AdamShard, scale_inv: Tensor | None) -> Tensor | None:
    """Return the scale of a shard's master on the device of its high part; `offload_states` may have moved either."""
    if not shard.fmt.is_fp8 or scale_inv is None:
        return None
    return scale_inv[shard.scale_index].to(shard.hi.device)


@torch.no_grad()
def write_dense(shard: AdamShard, key: str | None, value: Tensor, scale_inv: Tensor | None) -> None:
    """Quantise `value` (1-D [numel], floating, any device) into the shard, to nearest. Inverse of `read_dense`."""
    for part, place in chunks(shard):
        piece = place.narrow(value).to(device=part.hi.device, dtype=torch.float32)
        if key is None and part.lo is None:
            part.hi.copy_(piece)
        elif key is None:
            hi, lo = encode(piece, part.fmt, _scale_of(part, scale_inv))
            part.hi.copy_(hi)
            lo_of(part).copy_(lo)
        elif key == "exp_avg":
            codes, scales = quantize_m(to_groups(piece, part.start))
            part.m.view(-1, GROUP).copy_(codes)
            part.m_scale_inv.copy_(scales)
        else:
            codes, scales = quantize_root(to_groups(piece.double().sqrt().float(), part.start))
            part.v.view(-1, GROUP).copy_(codes)
            part.v_scale_inv.copy_(scales)


def dense_flat(flat: FlatBuffer, key: str | None, scale_inv: Tensor | None, device: torch.device | str) -> Tensor:
    """Return float32 [flat.numel] on `device`, with zeros in the padding."""
    out = torch.zeros(flat.numel, dtype=torch.float32, device=device)
    for shard, own in flat.split(out):
        read_dense(shard, key, own, scale_inv)
    return out


def absorb_flat(flat: FlatBuffer, key: str | None, value: Tensor, scale_inv: Tensor | None) -> None:
    """Quantise a dense float32 [flat.numel] into the shards of `flat`."""
    for shard, own in flat.split(value):
        write_dense(shard, key, own, scale_inv)


@torch.no_grad()
def is_exact(shard: AdamShard, value: Tensor, scales: PredictedScales) -> bool:
    """Whether the master of an FP8 shard is `value` (bf16 [shard.numel]). Waits for the device."""
    master = torch.empty(shard.numel, dtype=torch.float32, device=shard.hi.device)
    read_dense(shard, None, master, scales.scale_inv)
    return torch.equal(master, value.to(master))


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
def write_first(shard: AdamShard, value: Tensor, scales: PredictedScales, seed: int | None) -> None:
    """Make `value` (bf16 [shard.numel]) the master of an FP8 shard. `seed`: see `encode_first`."""
    scale_inv, amax = scales.scale_inv[shard.scale_index], scales.amax[shard.scale_index]
    for part, place in chunks(shard):
        piece = place.narrow(value).to(part.hi.device)
        hi, lo = encode_first(piece, part.fmt, scale_inv, amax, seed, part.param_id, part.start)
        part.hi.copy_(hi)
        lo_of(part).copy_(lo)


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


def weight_id(name: str) -> int:
    """Return the number of a weight for rounding noise, from its name: the same in every run and on every rank."""
    return zlib.crc32(name.encode())


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

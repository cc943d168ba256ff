"""First masters of bf16 weights: each is one of the many float32 numbers that round to the weight.

By a power of two one bf16 number in 16 lies exactly between two FP8 numbers, and the first update, however small, moves
half of these by a whole step of FP8. So a first master takes noise below bf16's last bit: read as bf16 it is the
weight, bit for bit. The noise follows from (seed, parameter, element), not from ranks. See docs/decisions/0009.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.numerics.masters import MasterFormat, decode, encode
from fp8_ds.numerics.rounding import noise
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.optim.states import CHUNK, chunks
from fp8_ds.scaling.predicted import PredictedScales

_BF16_DROPS = 16
"""Number of float32's bits below bf16's last one."""
_STEP = 0
"""Step of the first masters' noise; steps of training count from 1."""


def encode_first(
    value: Tensor, fmt: MasterFormat, scale_inv: Tensor, amax: Tensor, seed: int, param_id: int, start: int
) -> tuple[Tensor, Tensor]:
    """Return (hi, lo) of `value` with noise below half a bf16 step; without noise where its bf16 would differ.

    Args:
        value: bf16 [numel], elements from `start` on of parameter `param_id`.
        fmt: an FP8 format.
        scale_inv, amax: float32, 0-dim, of the whole parameter. No master exceeds amax.
    """
    bits = _BF16_DROPS - fmt.drop_bits
    half = 1 << (bits - 1)
    plain = value.float()
    offset = noise(seed, _STEP, param_id, start, value.numel(), bits, value.device).sub_(half)
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
def write_first(shard: AdamShard, value: Tensor, scales: PredictedScales, seed: int) -> None:
    """Make `value` (bf16 [shard.numel]) the master of an FP8 shard."""
    assert shard.lo is not None
    scale_inv, amax = scales.scale_inv[shard.scale_index], scales.amax[shard.scale_index]
    for first, count, padded, _ in chunks(shard):
        piece = value[first : first + count].to(shard.hi.device)
        hi, lo = encode_first(piece, shard.fmt, scale_inv, amax, seed, shard.param_id, shard.start + first)
        shard.hi[first : first + count] = hi
        shard.lo[padded] = lo


@torch.no_grad()
def write_first_codes(
    codes: Tensor, value: Tensor, fmt: MasterFormat, scales: PredictedScales, index: int, seed: int, param_id: int
) -> None:
    """Write the high parts of the first masters of a whole weight, `value` (bf16 [numel]), to `codes` (uint8 [numel]).

    Args:
        index: position of the weight in `scales`.
    """
    for start in range(0, value.numel(), CHUNK):
        piece = value[start : start + CHUNK]
        numbers = scales.scale_inv[index], scales.amax[index], seed, param_id, start
        codes[start : start + CHUNK] = encode_first(piece, fmt, *numbers)[0]

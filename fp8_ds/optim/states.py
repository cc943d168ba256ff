"""The shards of an optimizer: moments, dense float32 form, and where they lie in DeepSpeed's flat tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8_ds.numerics.masters import encode
from fp8_ds.numerics.moments import (
    GROUP,
    dequantize_m,
    dequantize_root,
    from_groups,
    quantize_m,
    quantize_root,
    to_groups,
)
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.decode_master import decode_master

CHUNK = 1 << 24
"""Elements converted at a time, a multiple of 128: bounds the float32 temporaries to 64 MiB each."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names that torch's Adam gives the moments in a state_dict."""


@dataclass
class Piece:
    """A shard within a flat tensor: it covers elements `[offset, offset + shard.numel)`."""

    offset: int
    shard: AdamShard


@dataclass
class Flat:
    """A tensor that the optimizer sees as one parameter, and the shards it is made of; gaps are padding.

    Args:
        row: index of its hyperparameters and of its step count.
        numel: elements, padding included.
    """

    row: int
    numel: int
    pieces: list[Piece]


def allocate_moments(shard: AdamShard, device: torch.device) -> None:
    """Allocate moments of zeros."""
    shard.m = torch.zeros(shard.num_groups * GROUP, dtype=torch.uint8, device=device)
    shard.v = torch.zeros(shard.num_groups * GROUP, dtype=torch.uint8, device=device)
    shard.m_scale_inv = torch.zeros(shard.num_groups, dtype=torch.float32, device=device)
    shard.v_scale_inv = torch.zeros(shard.num_groups, dtype=torch.float32, device=device)


def has_moments(shard: AdamShard) -> bool:
    return shard.m.numel() > 0 or shard.numel == 0


def allocate_lo(shard: AdamShard, device: torch.device) -> None:
    """Allocate a low part of zeros: the master equals the compute weight."""
    if shard.fmt.is_split:
        shard.lo = torch.zeros(shard.num_groups * GROUP, dtype=shard.fmt.lo_dtype, device=device)


def chunks(shard: AdamShard) -> Iterable[tuple[int, int, slice, slice]]:
    """Yield (first element, elements, their slice of the padded arrays, their groups), split where groups end."""
    first = 0
    while first < shard.numel:
        start = shard.start + first
        count = min(CHUNK - start % GROUP, shard.numel - first)
        padded = shard.head + first
        yield first, count, slice(padded, padded + count), slice(padded // GROUP, -(-(padded + count) // GROUP))
        first += count


@torch.no_grad()
def read_dense(shard: AdamShard, key: str | None, out: Tensor, scale_inv: Tensor | None) -> None:
    """Fill `out` (float32 or bf16 [numel], any device) with the master (key None) or a moment by its torch name.

    Args:
        scale_inv: the scale vector that the masters are stored with.
    """
    for first, count, padded, groups in chunks(shard):
        start = shard.start + first
        target = out[first : first + count]
        if key is None and shard.lo is None:
            target.copy_(shard.hi[first : first + count])
        elif key is None:
            hi = shard.hi[first : first + count]
            lo = shard.lo[padded].to(hi.device)  # type: ignore[index]
            decode_master(hi, lo, shard.fmt, _scale_of(shard, scale_inv), target)
        elif key == "exp_avg":
            codes = shard.m.view(-1, GROUP)[groups]
            target.copy_(from_groups(dequantize_m(codes, shard.m_scale_inv[groups]), count, start))
        else:
            codes = shard.v.view(-1, GROUP)[groups]
            root = from_groups(dequantize_root(codes, shard.v_scale_inv[groups]), count, start)
            target.copy_(root * root)


def _scale_of(shard: AdamShard, scale_inv: Tensor | None) -> Tensor | None:
    """Return the scale of a shard's master on the device of its high part; `offload_states` may have moved either."""
    if not shard.fmt.is_fp8 or scale_inv is None:
        return None
    return scale_inv[shard.scale_index].to(shard.hi.device)


@torch.no_grad()
def write_dense(shard: AdamShard, key: str | None, value: Tensor, scale_inv: Tensor | None) -> None:
    """Quantise `value` (1-D [numel], floating, any device) into the shard, to nearest. Inverse of `read_dense`."""
    device = shard.hi.device
    for first, count, padded, groups in chunks(shard):
        piece = value[first : first + count].to(device=device, dtype=torch.float32)
        if key is None and shard.lo is None:
            shard.hi[first : first + count] = piece
        elif key is None:
            hi, lo = encode(piece, shard.fmt, _scale_of(shard, scale_inv))
            shard.hi[first : first + count] = hi
            shard.lo[padded] = lo  # type: ignore[index]
        elif key == "exp_avg":
            codes, scales = quantize_m(to_groups(piece, shard.start + first))
            shard.m.view(-1, GROUP)[groups] = codes
            shard.m_scale_inv[groups] = scales
        else:
            codes, scales = quantize_root(to_groups(piece.double().sqrt().float(), shard.start + first))
            shard.v.view(-1, GROUP)[groups] = codes
            shard.v_scale_inv[groups] = scales


@torch.no_grad()
def dense_flat(flat: Flat, key: str | None, scale_inv: Tensor | None, device: torch.device | str) -> Tensor:
    """Return float32 [flat.numel] on `device`, with zeros in the padding."""
    out = torch.zeros(flat.numel, dtype=torch.float32, device=device)
    for piece in flat.pieces:
        if piece.shard.numel:
            read_dense(piece.shard, key, out.narrow(0, piece.offset, piece.shard.numel), scale_inv)
    return out


@torch.no_grad()
def absorb_flat(flat: Flat, key: str | None, value: Tensor, scale_inv: Tensor | None) -> None:
    """Quantise a dense float32 [flat.numel] into the shards of `flat`."""
    for piece in flat.pieces:
        if piece.shard.numel:
            write_dense(piece.shard, key, value.narrow(0, piece.offset, piece.shard.numel), scale_inv)

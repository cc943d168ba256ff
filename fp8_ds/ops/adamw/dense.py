"""The master and the moments of a shard as float32 numbers: read, write, and the first master."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
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
from fp8_ds.numerics.new_masters import CHUNK, encode_first
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import decode_master
from fp8_ds.ops.adamw.shards import AdamShard

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names that torch's Adam gives the moments in a state_dict."""


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
def write_low(shard: AdamShard, value: Tensor, kept: Tensor, scale_inv: Tensor) -> None:
    """Write the low parts of `value` ([shard.numel]) to a shard, except where `kept` (bool)."""
    for part, place in chunks(shard):
        lo = encode(place.narrow(value).float(), part.fmt, scale_inv[part.scale_index])[1]
        lo_of(part).copy_(torch.where(place.narrow(kept), lo_of(part), lo))


@torch.no_grad()
def is_exact(shard: AdamShard, value: Tensor, scales: PredictedScales) -> bool:
    """Whether the master of an FP8 shard is `value` (bf16 [shard.numel]). Waits for the device."""
    master = torch.empty(shard.numel, dtype=torch.float32, device=shard.hi.device)
    read_dense(shard, None, master, scales.scale_inv)
    return torch.equal(master, value.to(master))

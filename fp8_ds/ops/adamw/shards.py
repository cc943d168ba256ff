"""Inputs of one optimizer step: shards of weights, and the few numbers of the step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.masters import MasterFormat


@dataclass
class AdamShard:
    """Contiguous elements `[start, start + numel)` of one weight, with their master and moments.

    Args:
        name: name of the weight, for messages.
        numel: number of elements.
        start: first element, counted from the weight's own first. Groups of 128 and rounding noise follow it.
        param_id: number of the weight, the same on all ranks and in all runs: for rounding noise.
        group: row of the hyperparameters.
        scale_index: entry in the scale vectors; 0 where the format has no scale.
        fmt: format of the master.
        hi: `fmt.hi_dtype` [numel], contiguous: the compute weight, or the float32 master (fp32).

    Attributes:
        lo: `fmt.lo_dtype` [num_groups * 128], None for fp32. Here and below, element i is at `start % 128 + i`.
        m, v: uint8 [num_groups * 128], E4M3 codes, and E4M4 codes of sqrt(v).
        m_scale_inv, v_scale_inv: float32 [num_groups].
    """

    name: str
    numel: int
    start: int
    param_id: int
    group: int
    scale_index: int
    fmt: MasterFormat
    hi: Tensor
    lo: Tensor | None = None
    m: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    v: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    m_scale_inv: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    v_scale_inv: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))

    @property
    def head(self) -> int:
        """Number of elements of the first group that belong to the shard before this one."""
        return self.start % 128

    @property
    def num_groups(self) -> int:
        return -(-(self.head + self.numel) // 128)

    def part(self, elements: ShardRange) -> AdamShard:
        """Return `elements` of the weight, some of this shard's, as a shard whose tensors are views of this one's."""
        if elements.numel == self.numel:
            return self
        groups = ShardRange(elements.start // 128, -(-elements.stop // 128)).shift(-(self.start // 128))
        padded = slice(groups.start * 128, groups.stop * 128)
        return replace(
            self,
            numel=elements.numel,
            start=elements.start,
            hi=elements.shift(-self.start).narrow(self.hi),
            lo=None if self.lo is None else self.lo[padded],
            m=self.m[padded],
            v=self.v[padded],
            m_scale_inv=self.m_scale_inv[groups.start : groups.stop],
            v_scale_inv=self.v_scale_inv[groups.start : groups.stop],
        )


@dataclass
class StepInputs:
    """The numbers of one step; all tensors on the shards' device, read there: the host never waits.

    Args:
        hyper: float32 [num_param_groups, 16], columns as `Hyper`.
        step: int64 [num_param_groups], count of updates including this one.
        grad_scale: float32, 0-dim: gradients are multiplied by it (clipping, averaging).
        skip: int32, 0-dim: anything but 0 leaves every byte as it is.
        scale_inv: float32 [num_weights], any stride: powers of two the masters are stored with.
        next_scale_inv: the same, to store them with now.
        amax: float32 [num_weights], contiguous, >= 0: takes the maximum of the new masters' magnitudes.
        seed: seed of the rounding noise.
        decoupled: whether weight decay acts on the weight (AdamW) or on the gradient (Adam).
    """

    hyper: Tensor
    step: Tensor
    grad_scale: Tensor
    skip: Tensor
    scale_inv: Tensor
    next_scale_inv: Tensor
    amax: Tensor
    seed: int = 0
    decoupled: bool = True

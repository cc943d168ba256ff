"""Statistics of FP8 tensors by layer: counted on the device while a step is sampled, read on the host one later.

Definitions, of all elements that were quantised in a sampled step, on all ranks of the group:

- amax: largest magnitude before the cast; where only FP8 was there (a fused producer's), that of the codes.
- scale: multiplies to enter FP8. Where rows or blocks have scales of their own, the smallest of them.
- saturation: share of elements beyond the format's largest value times scale_inv, or NaN. Only a scale from elsewhere
  than the tensor itself (recipe delayed) lets that happen; of a fused producer's output, whose values before the cast
  do not exist, those at the largest code are counted, some too many.
- underflow: share of elements that became zero or subnormal, of those that were not zero before. Elements that were
  exactly zero count in neither number where the high-precision tensor was there to see them (else they do count).

A tensor with an infinity or NaN has no scale of its own: then scale and both shares are NaN. With a scale from
elsewhere it has all of them, and its infinities and NaN are saturated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.host_copy import HostCopy
from fp8_ds.ops._register import in_own_storage
from fp8_ds.ops.observe import MAXIMA, new_counts

Kind = Literal["input", "weight", "grad_output"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The tensors of a linear that enter FP8."""


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor, see the module's definitions; shares are in [0, 1], or NaN.

    Args:
        num: elements counted; 0: the tensor did not occur, and the rest says nothing.
    """

    amax: float
    scale: float
    saturation: float
    underflow: float
    num: int


LayerStatistics = dict[str, dict[Kind, TensorStatistics]]
"""By layer and kind; kinds that did not occur are missing."""


def from_counts(counts: Tensor) -> TensorStatistics:
    """Return the statistics of counts, float64 [NUM_COUNTS] on the host."""
    amax_codes, scale_inv, num, saturated, small, zeros, amax_hp = counts.tolist()[:7]
    num_nonzero = max(num - zeros, 0.0)
    saturation = saturated / num if num else 0.0
    underflow = max(small - zeros, 0.0) / num_nonzero if num_nonzero else 0.0
    has_scale = math.isfinite(scale_inv)
    return TensorStatistics(
        amax=amax_hp or amax_codes,
        scale=1.0 / scale_inv if has_scale and scale_inv > 0 else math.nan,
        saturation=saturation if has_scale else math.nan,
        underflow=underflow if has_scale else math.nan,
        num=int(num),
    )


class StatisticsTable:
    """Counts of all layers in one device tensor, and the copy of the last sampled step on its way to the host.

    Args:
        names: of the layers.
        device: where they compute.
        group: counts are added up over its ranks; None: this rank's.
    """

    def __init__(self, names: Sequence[str], device: torch.device | str, group: Any = None) -> None:
        self.names = tuple(names)
        self.group = group
        self._counts = new_counts(len(self.names), len(KINDS), device=device)
        self._maxima = torch.tensor(MAXIMA, device=device)
        self._host = HostCopy(self._counts)
        self._is_sent = False

    def slot(self, index: int, kind: Kind) -> Tensor:
        """Return float64 [NUM_COUNTS], which `observe_codes` counts layer `index` into, for the life of this object."""
        return in_own_storage(self._counts[index, KINDS.index(kind)])  # as AmaxHistory.slot

    @torch.no_grad()
    def send(self) -> None:
        """Start the counts on their way to the host, and zero them. Collective over the group; never waits.

        Counts that were sent before and not received are gone.
        """
        if self.group is not None and dist.get_world_size(self.group) > 1:
            maxima = self._counts.index_select(-1, self._maxima)
            maxima.nan_to_num_(nan=math.inf, posinf=math.inf)  # backends differ in the maximum of a NaN and a number
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.group)
            dist.all_reduce(self._counts, group=self.group)
            self._counts.index_copy_(-1, self._maxima, maxima)
        self._host.send(self._counts)
        self._counts.zero_()
        self._is_sent = True

    def discard(self) -> None:
        """Zero the counts, so that nobody gets them."""
        self._counts.zero_()

    def receive(self) -> LayerStatistics | None:
        """Return what was last sent, once; None: nothing. Wait for that copy, which is long done an interval later."""
        if not self._is_sent:
            return None
        self._is_sent = False
        found: LayerStatistics = {}
        for name, row in zip(self.names, self._host.read(), strict=True):
            of_layer = {kind: from_counts(counts) for kind, counts in zip(KINDS, row, strict=True)}
            found[name] = {kind: one for kind, one in of_layer.items() if one.num}
        return found

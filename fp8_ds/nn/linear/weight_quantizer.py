"""WeightQuantizer: one amax all-reduce a step for all FP8 weights, then every rank quantises what it owns.

With split masters, whose high parts are the FP8 bytes, `SplitQuantizer` (numerics/new_masters.py) is in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.collectives import ByteCounter, max_reduce
from fp8_ds.comm.layout import aligned_starts
from fp8_ds.nn.linear.payload import Granularity
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.new_masters import CHUNK
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.ops.quantize import quantize, quantize_part
from fp8_ds.ops.quantize.multi_tensor import MultiTensorQuantize, QuantizePart

_ALIGNMENT = 4
"""A weight's scales start every 4 floats: cuBLASLt reads a scale through a pointer aligned to 16 bytes."""


class Part(NamedTuple):
    """One rank's part of one weight: `source` (1-D, fp32 or bf16, without padding) is quantised into `shard` (1-D
    float8 of the same numel). `start` is its first element in the flattened weight."""

    source: Tensor
    shard: Tensor
    start: int


@dataclass
class KeptScales:
    """Scales of weights that came in FP8, which hold as long as the largest magnitude of their elements is what it was.

    Made anew of it, scales would be others, and bytes be rounded twice. float32 [num_scales]; NaN where there are none.

    Attributes:
        amax: of the values that came, once they are measured.
    """

    amax: Tensor
    scale: Tensor
    scale_inv: Tensor
    is_measured: bool = False

    def measure(self, amax: Tensor) -> None:
        """Take `amax` if it is the first one."""
        if not self.is_measured:
            self.amax.copy_(torch.where(self.scale_inv.isnan(), math.nan, amax))
            self.is_measured = True

    def replace(self, amax: Tensor, start: int, scale: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales of `amax`, which begins at entry `start`, with those that hold in the place of the others."""
        kept = (x[start : start + amax.numel()].view(amax.shape) for x in (self.amax, self.scale, self.scale_inv))
        own_amax, own_scale, own_scale_inv = kept
        holds = amax == own_amax
        return torch.where(holds, own_scale, scale), torch.where(holds, own_scale_inv, scale_inv)


class WeightQuantizer:
    """Quantiser that keeps the FP8 shards of this rank equal to the quantised masters.

    All local amaxes lie in one float32 vector, and behind them the amax histories of activations and gradients (recipe
    `delayed`); one MAX all-reduce makes them, and so every scale, equal on all ranks. A shard may end inside a weight,
    a row or a tile: partition-then-quantise equals quantise-then-partition bit for bit.

    Args:
        group: the ZeRO group.
        shapes: those of the unsharded weights.
        granularity: which elements of a weight share a scale.
        history: amax histories of the recipe `delayed`, else None.
        counter: counts the all-reduces.
        stored: scale_inv of weights that came in FP8, by index.

    Attributes:
        scale, scale_inv: lists of num_weights float32 views: the grid of each weight (see nn/linear/payload.py),
            which never moves.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shapes: Sequence[Sequence[int]],
        granularity: Granularity,
        device: torch.device,
        history: AmaxHistory | None,
        counter: ByteCounter,
        stored: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.group = group
        self.history = history
        self.counter = counter
        self.granularity = granularity
        self.device = device
        self._shapes = [tuple(shape) for shape in shapes]
        sizes = [granularity.num_scales(shape) for shape in self._shapes]
        self._starts = aligned_starts(sizes, 1)
        scale_starts = aligned_starts(sizes, _ALIGNMENT)
        self._num_scales = self._starts[-1]
        num_history = 0 if history is None else history.amax_local.numel()
        self._amax = torch.zeros(self._num_scales + num_history, dtype=torch.float32, device=device)
        self._amaxes = self._grids(self._amax, self._starts)
        self._scales, self._scales_inv = (
            torch.ones(scale_starts[-1], dtype=torch.float32, device=device) for _ in range(2)
        )
        self.scale = self._grids(self._scales, scale_starts)
        self.scale_inv = self._grids(self._scales_inv, scale_starts)
        places = [torch.arange(start, start + size) for start, size in zip(scale_starts, sizes, strict=False)]
        self._scale_at = torch.cat([torch.empty(0, dtype=torch.long), *places]).to(device)
        self._parts: list[tuple[int, Part]] = []
        self._at = torch.empty(0, dtype=torch.long, device=device)
        self._cast: MultiTensorQuantize | None = None
        self._kept = self._keep(stored) if stored else None

    def _keep(self, stored: Mapping[int, Tensor]) -> KeptScales:
        nothing = torch.full((3, self._num_scales), math.nan, dtype=torch.float32, device=self.device)
        kept = KeptScales(nothing[0], nothing[1], nothing[2])
        for index, scale_inv in stored.items():
            kept.scale_inv[self._starts[index] :][: scale_inv.numel()] = scale_inv.reshape(-1)
        torch.reciprocal(kept.scale_inv, out=kept.scale)
        return kept

    def _grids(self, vector: Tensor, starts: list[int]) -> list[Tensor]:
        """Return each weight's grid as a view of a vector, with a version counter of its own."""
        shapes = [self.granularity.grid(shape) for shape in self._shapes]
        each = zip(starts, shapes, strict=False)
        return [vector.data[start : start + math.prod(shape)].view(shape) for start, shape in each]

    def set_parts(self, parts: Sequence[Part | None]) -> None:
        """Set what this rank quantises of each weight; None or empty if it owns nothing."""
        self._parts = [(index, part) for index, part in enumerate(parts) if part is not None and part.source.numel()]
        at = [self._starts[index] for index, _ in self._parts]
        self._at = torch.tensor(at, dtype=torch.long, device=self.device)
        self._cast = None  # made when it is needed: parts may be named while masters are elsewhere

    @torch.no_grad()
    def requantize(self, is_step: bool) -> None:
        """Measure, reduce, rescale and quantise everything, so that the shards are those of the masters.

        Collective over the ZeRO group. No host synchronisation, except by the first call after `set_parts`. With one
        scale a weight the host launches as much for one weight as for many.

        Args:
            is_step: an optimizer step has ended, so the amax histories advance by one entry.
        """
        self._amax.zero_()
        if self._parts and self.granularity.is_tensor:
            amaxes = torch._foreach_norm([part.source for _, part in self._parts], float("inf"))
            self._amax.index_copy_(0, self._at, torch.stack([a.float() for a in amaxes]))
        else:
            grids = [self.amax_of(index, part.source, part.start) for index, part in self._parts]
            if grids:
                torch._foreach_copy_([self._amaxes[index] for index, _ in self._parts], grids)
        if self.history is not None:
            self._amax[self._num_scales :].copy_(self.history.amax_local)
        max_reduce(self.group, self._amax)
        self.counter.num_amax_reduces += 1
        amax = self._amax[: self._num_scales]
        if self._kept is not None:
            self._kept.measure(amax)
        scale, scale_inv = self._scales_of(amax)
        self._scales.index_copy_(0, self._scale_at, scale)
        self._scales_inv.index_copy_(0, self._scale_at, scale_inv)
        if self._cast is None:
            self._cast = MultiTensorQuantize([self._cast_part(index, part) for index, part in self._parts], E4M3)
        self._cast()
        if self.history is not None and is_step:
            self.history.update(self._amax[self._num_scales :])

    @torch.no_grad()
    def amax_of(self, index: int, value: Tensor, start: int = 0) -> Tensor:
        """Return the grid of largest magnitudes of the elements from `start` on (1-D) of weight `index`, float32."""
        return self.granularity.amax(value, self._shapes[index], start)

    @torch.no_grad()
    def rescale(self, index: int, amax: Tensor) -> None:
        """Give weight `index` the scales of `amax` (a grid), the same on all ranks if `amax` is."""
        scale, scale_inv = self._scales_of(amax, self._starts[index])
        self.scale[index].copy_(scale)
        self.scale_inv[index].copy_(scale_inv)

    def _scales_of(self, amax: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return (scale, scale_inv) of `amax`, which is that of entries from `start` on of the vector of all."""
        found = self.granularity.scales(amax)
        return found if self._kept is None else self._kept.replace(amax, start, *found)

    @torch.no_grad()
    def quantize_into(self, out: Tensor, value: Tensor, index: int, start: int = 0) -> None:
        """Write `value` (1-D), elements of weight `index` from `start` on, into `out` (1-D float8)."""
        grid = self.scale[index]
        for source, target in zip(value.split(CHUNK), out.split(CHUNK), strict=True):
            if self.granularity.is_tensor:
                target.copy_(quantize(source, grid, E4M3))
                continue
            target.copy_(quantize_part(source, grid, start, self._shapes[index][1], self._block(index), E4M3))
            start += source.numel()

    def _block(self, index: int) -> tuple[int, int]:
        """Return the rows and columns of weight `index` that share a scale, if not all do."""
        return self.granularity.block[0] or 1, self.granularity.block[1] or self._shapes[index][1]

    def _cast_part(self, index: int, part: Part) -> QuantizePart:
        grid = self.scale[index]
        if self.granularity.is_tensor:
            return QuantizePart(part.source, part.shard, grid)
        return QuantizePart(part.source, part.shard, grid, part.start, self._shapes[index][1], self._block(index))

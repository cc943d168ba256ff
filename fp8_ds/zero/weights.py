"""WeightQuantizer: one amax all-reduce a step for all FP8 weights, then every rank quantises what it owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm import ByteCounter, max_reduce
from fp8_ds.formats import E4M3
from fp8_ds.ops.quantize import quantize
from fp8_ds.scaling import AmaxHistory, scale_from_amax, scale_vector

_CHUNK = 1 << 24
"""Elements quantised at a time: bounds the fp32 temporary to 64 MiB."""


class WeightQuantizer:
    """Keeps the FP8 shards of this rank equal to the quantised masters.

    All local amaxes lie in one float32 vector, the amax histories of activations and gradients (recipe `delayed`)
    behind those of the weights; one MAX all-reduce makes them, and so every scale, equal on all ranks. A shard edge
    may cut a weight: quantising is element by element, so that partition-then-quantise equals
    quantise-then-partition bit for bit.

    Args:
        group: the ZeRO group.
        num_weights: entries of the scale vectors.
        device: where weights live.
        history: of the recipe `delayed`, else None.
        counter: books the all-reduce.

    Attributes:
        scale, scale_inv: float32 [num_weights]; payloads hold 0-dim views into them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_weights: int,
        device: torch.device,
        history: AmaxHistory | None,
        counter: ByteCounter,
    ) -> None:
        self.group = group
        self.history = history
        self.counter = counter
        self.scale = scale_vector(num_weights, device)
        self.scale_inv = scale_vector(num_weights, device)
        num_history = 0 if history is None else history.amax_local.numel()
        self._amax = torch.zeros(num_weights + num_history, device=device)
        self._sources: list[Tensor] = []
        self._shards: list[Tensor] = []
        self._index: list[int] = []
        self._index_tensor = torch.empty(0, dtype=torch.long, device=device)

    @property
    def num_weights(self) -> int:
        return self.scale.numel()

    def set_shards(self, sources: Sequence[Tensor | None], shards: Sequence[Tensor | None]) -> None:
        """Name what this rank quantises: `sources[i]` (1-D, fp32 or bf16) into `shards[i]` (1-D float8, same numel).

        None or empty where this rank owns nothing of weight `i`. Padding is not part of a source.
        """
        assert len(sources) == len(shards) == self.num_weights
        self._sources, self._shards, self._index = [], [], []
        for index, (source, shard) in enumerate(zip(sources, shards, strict=True)):
            if source is None or shard is None or source.numel() == 0:
                continue
            assert source.numel() == shard.numel(), (index, source.numel(), shard.numel())
            self._sources.append(source)
            self._shards.append(shard)
            self._index.append(index)
        self._index_tensor = torch.tensor(self._index, dtype=torch.long, device=self.scale.device)

    @torch.no_grad()
    def refresh(self, is_step: bool) -> None:
        """Measure, reduce, rescale and quantise everything; afterwards the shards are those of the masters.

        Collective over the ZeRO group. No host synchronisation.

        Args:
            is_step: an optimizer step has ended, so the amax histories advance by one entry.
        """
        self._amax.zero_()
        if self._sources:
            amaxes = torch._foreach_norm(self._sources, float("inf"))
            self._amax.index_copy_(0, self._index_tensor, torch.stack([a.float() for a in amaxes]))
        if self.history is not None:
            self._amax[self.num_weights :].copy_(self.history.amax_local)
        max_reduce(self.group, self._amax)
        self.counter.num_amax_reduces += 1
        scale, scale_inv = scale_from_amax(self._amax[: self.num_weights], E4M3.max)
        self.scale.copy_(scale)
        self.scale_inv.copy_(scale_inv)
        for source, shard, index in zip(self._sources, self._shards, self._index, strict=True):
            self.quantize_into(shard, source, index)
        if self.history is not None and is_step:
            self.history.update(self._amax[self.num_weights :])

    @torch.no_grad()
    def rescale(self, index: int, amax: Tensor) -> None:
        """Give weight `index` the scale of `amax` (0-dim), the same on all ranks if `amax` is."""
        scale, scale_inv = scale_from_amax(amax.float(), E4M3.max)
        self.scale[index].copy_(scale)
        self.scale_inv[index].copy_(scale_inv)

    @torch.no_grad()
    def quantize_into(self, out: Tensor, value: Tensor, index: int) -> None:
        """Write `value` (1-D) quantised with the scale of weight `index` into `out` (1-D float8)."""
        for source, target in zip(value.split(_CHUNK), out.split(_CHUNK), strict=True):
            target.copy_(quantize(source, self.scale[index], E4M3))

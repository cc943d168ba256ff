"""How many updates of FP8 states are clamped: counted in sampled steps, by a few dozen operators for all shards.

One shard after another takes 51 operators for each, for which a GPU waits. Together it is 44 with AdamW; shards that do
not begin and end with a group of 128 take three more each, and masters, which Adam with L2 reads, a dozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.host_copy import HostCopy
from fp8_ds.monitor.gauges import Gauge
from fp8_ds.ops.adamw.reference import read_master, update_of
from fp8_ds.ops.adamw.shards import AdamShard, Hyper, StepInputs
from fp8_ds.optim.core import AdamCore
from fp8_ds.optim.moments import GROUP, dequantize_m, dequantize_root, num_groups, to_groups
from fp8_ds.optim.recent import Recent

NUM_ELEMENTS = 1 << 14
"""Elements of each shard, its first, whose updates are computed once more."""

MAX_GROUPS = 1 << 13
"""Groups of 128 that are computed on at a time, 1 M elements: some 45 MB in temporaries."""


class ClampGauge(Gauge):
    """Share of updates that Fp8AdamW clamps to Adam's bound, of the first 16384 elements of each shard.

    Computed once more before the step, from the gradient, the moments and the numbers that it is about to use.

    Args:
        core: of the optimizer.
        group: counts are added up over its ranks.
    """

    name = "clamp_rate"

    def __init__(self, core: AdamCore, group: Any) -> None:
        self.core = core
        self.group = group
        self._counts = torch.zeros(2, dtype=torch.float64, device=core.device)
        self._host = HostCopy(self._counts)
        self._is_sent = False
        self._batches: Recent[tuple[int, ...], list[Batch]] = Recent()

    def attach(self) -> None:
        stock: Any = self.core.run
        self._batches.next_step()

        def run(grads: Sequence[Tensor | None], inputs: StepInputs, chosen: Sequence[int] | None = None) -> None:
            self._count(grads, inputs, range(len(self.core.shards)) if chosen is None else chosen)
            stock(grads, inputs, chosen)

        self.core.run = run  # type: ignore[method-assign]

    def detach(self) -> None:
        del self.core.run  # the class has it
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(self._counts, group=self.group)
        self._host.send(self._counts)
        self._counts.zero_()
        self._is_sent = True

    def read(self) -> float | None:
        if not self._is_sent:
            return None
        num_clamped, num = self._host.read().tolist()
        return num_clamped / num if num else None

    def _count(self, grads: Sequence[Tensor | None], inputs: StepInputs, chosen: Sequence[int]) -> None:
        present = {i: grad for i, grad in zip(chosen, grads, strict=True) if grad is not None}
        key = tuple(i for i in present if self.core.shards[i].numel)
        if not key:
            return
        shards = [self.core.shards[i] for i in key]
        left = iter([present[i] for i in key])
        for batch in self._batches.get(key, lambda: list(batches(shards))):
            self._counts += clamped(batch, [next(left) for _ in batch.shards], inputs)


@dataclass(frozen=True)
class Batch:
    """The first elements of some shards, as rows of 128: groups of their weights.

    Args:
        shards: not empty ones, on one device.
        hyper_rows: int64 [num_groups], of each group, on the device.
        inside: bool [num_groups, 128], on the device: what is an element of the shard, and not beside it.
        num: elements.
    """

    shards: tuple[AdamShard, ...]
    hyper_rows: Tensor
    inside: Tensor
    num: int


def batches(shards: Sequence[AdamShard]) -> Iterator[Batch]:
    """All of them, in their order, in batches of at most `MAX_GROUPS` groups, or of one shard."""
    first, total = 0, 0
    for end, shard in enumerate(shards):
        groups = num_groups(_length(shard), shard.start)
        if total + groups > MAX_GROUPS and end > first:
            yield _batch(shards[first:end])
            first, total = end, 0
        total += groups
    yield _batch(shards[first:])


def _batch(shards: Sequence[AdamShard]) -> Batch:
    inside = torch.cat([to_groups(torch.ones(_length(shard), dtype=torch.bool), shard.start) for shard in shards])
    counts = torch.tensor([num_groups(_length(shard), shard.start) for shard in shards])
    rows = torch.repeat_interleave(torch.tensor([shard.group for shard in shards]), counts)
    device = shards[0].m.device
    return Batch(tuple(shards), _to(rows, device), _to(inside, device), sum(map(_length, shards)))


def _to(x: Tensor, device: torch.device) -> Tensor:
    """There, and the host has not waited for what the device does."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _length(shard: AdamShard) -> int:
    return min(shard.numel, NUM_ELEMENTS)


@torch.no_grad()
def clamped(batch: Batch, grads: Sequence[Tensor], inputs: StepInputs) -> Tensor:
    """float64 [2], on the device: how many of the batch's elements the step will clamp, and of how many.

    Args:
        batch: of shards as they are before the step.
        grads: of each shard, 1-D [shard.numel].
        inputs: of the step.
    """
    shards, parts = batch.shards, [_first(shard) for shard in batch.shards]
    row = inputs.hyper.index_select(0, batch.hyper_rows).t()[:, :, None]  # by column: float32 [num_groups, 1]
    g = torch.cat([_groups(grad, shard) for grad, shard in zip(grads, shards, strict=True)]).float() * inputs.grad_scale
    if not inputs.decoupled:
        w = torch.cat([_groups(read_master(part, inputs.scale_inv), part) for part in parts])
        g = g + w * row[Hyper.DECAY]
    m_scale_inv = torch.cat([part.m_scale_inv for part in parts])
    root_scale_inv = torch.cat([part.v_scale_inv for part in parts])
    ones = torch.ones_like(m_scale_inv)
    m_code = dequantize_m(torch.cat([part.m for part in parts]).view(-1, GROUP), ones)
    root_code = dequantize_root(torch.cat([part.v for part in parts]).view(-1, GROUP), ones)
    m_factor = row[Hyper.BETA1] * m_scale_inv[:, None]
    v_factor = row[Hyper.BETA2] * (root_scale_inv * root_scale_inv)[:, None]
    update, _, _ = update_of(g, m_code, root_code, m_factor, v_factor, row)
    found = ((update.abs() > row[Hyper.BOUND]) & batch.inside).sum()
    return torch.stack([found, torch.full_like(found, batch.num)]).double() * (inputs.skip == 0)


def _first(shard: AdamShard) -> AdamShard:
    """Its sampled elements, as a shard; views."""
    num = _length(shard)
    groups = num_groups(num, shard.start)
    padded = groups * GROUP
    return replace(
        shard,
        numel=num,
        hi=shard.hi[:num],
        lo=None if shard.lo is None else shard.lo[:padded],
        m=shard.m[:padded],
        v=shard.v[:padded],
        m_scale_inv=shard.m_scale_inv[:groups],
        v_scale_inv=shard.v_scale_inv[:groups],
    )


def _groups(x: Tensor, shard: AdamShard) -> Tensor:
    """The sampled ones of `x`, 1-D by element of the shard, as [num_groups, 128]; a view where groups are whole."""
    x = x[: _length(shard)]
    return to_groups(x, shard.start) if shard.head or x.numel() % GROUP else x.view(-1, GROUP)

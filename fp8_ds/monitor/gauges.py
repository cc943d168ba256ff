"""What is measured beside the layers' statistics, in sampled steps only: gather time, and clamped updates.

A gauge hangs itself before a method of one object while it is attached, and is gone afterwards.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.ops.adamw.reference import read_master, unclamped_update
from fp8_ds.ops.adamw.shards import AdamShard, Hyper, StepInputs
from fp8_ds.optim.core import AdamCore

_SAMPLE = 1 << 14
"""Elements of each shard, its first, whose updates are computed once more."""

_GROUP = 128


class Gauge(ABC):
    """`attach` before a sampled step, `detach` after it, `read` one step later, when the next may be attached."""

    name: str

    @abstractmethod
    def attach(self) -> None: ...

    @abstractmethod
    def detach(self) -> None: ...

    @abstractmethod
    def read(self) -> float | None:
        """The number of the last sampled step, on the host; None: there was none."""


class GatherTimer(Gauge):
    """Milliseconds for which the computing stream waits for gathers of weights in a step.

    Stages 1 and 2 gather at the end of a step, and all of it is waited for. Stage 3 gathers ahead, and what counts is
    the wait when a weight is needed: 0 where compute hides the gather.

    Args:
        owner: the ZeRO optimizer (stages 1, 2) or its Fp8Shards.
        method: of `owner`, which gathers.
        waits: the method returns a handle, whose `wait` is what is timed.
    """

    name = "gather_ms"

    def __init__(self, owner: Any, method: str, waits: bool) -> None:
        self.owner = owner
        self.method = method
        self.waits = waits
        self._spans: list[tuple[Any, Any]] = []
        self._finished: list[tuple[Any, Any]] = []

    def attach(self) -> None:
        self._spans = []
        stock = getattr(self.owner, self.method)
        setattr(self.owner, self.method, self._timed_handle(stock) if self.waits else self._timed(stock))

    def detach(self) -> None:
        delattr(self.owner, self.method)  # the class has it
        self._finished = self._spans  # of the step that is read while the next may be sampled already

    def read(self) -> float | None:
        return sum(map(_milliseconds, self._finished)) if self._finished else None

    def _timed(self, stock: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = _now()
            result = stock(*args, **kwargs)
            self._spans.append((start, _now()))
            return result

        return timed

    def _timed_handle(self, stock: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            handle = stock(*args, **kwargs)
            handle.wait = self._timed(handle.wait)
            return handle

        return timed


def _now() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(span: tuple[Any, Any]) -> float:
    start, end = span
    if isinstance(start, float):
        return float(1e3 * (end - start))
    end.synchronize()
    return float(start.elapsed_time(end))


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
        self._host = torch.zeros(2, dtype=torch.float64, pin_memory=self._counts.is_cuda)
        self._event: Any = torch.cuda.Event() if self._counts.is_cuda else None
        self._is_sent = False

    def attach(self) -> None:
        stock: Any = self.core.run

        def run(grads: Sequence[Tensor | None], inputs: StepInputs, chosen: Sequence[int] | None = None) -> None:
            shards = self.core.shards if chosen is None else [self.core.shards[i] for i in chosen]
            for shard, grad in zip(shards, grads, strict=True):
                if grad is not None and shard.numel:
                    self._counts += clamped(shard, grad, inputs)
            stock(grads, inputs, chosen)

        self.core.run = run  # type: ignore[method-assign]

    def detach(self) -> None:
        del self.core.run  # the class has it
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(self._counts, group=self.group)
        self._host.copy_(self._counts, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._counts.zero_()
        self._is_sent = True

    def read(self) -> float | None:
        if not self._is_sent:
            return None
        if self._event is not None:
            self._event.synchronize()
        num_clamped, num = self._host.tolist()
        return num_clamped / num if num else None


@torch.no_grad()
def clamped(shard: AdamShard, grad: Tensor, inputs: StepInputs) -> Tensor:
    """float64 [2], on the device: how many of the shard's first elements the step will clamp, and of how many.

    Args:
        shard: not empty, as it is before the step.
        grad: 1-D [shard.numel].
        inputs: of the step.
    """
    num = min(shard.numel, _SAMPLE)
    groups = -(-(shard.head + num) // _GROUP)
    padded = groups * _GROUP
    part = replace(
        shard,
        numel=num,
        hi=shard.hi[:num],
        lo=None if shard.lo is None else shard.lo[:padded],
        m=shard.m[:padded],
        v=shard.v[:padded],
        m_scale_inv=shard.m_scale_inv[:groups],
        v_scale_inv=shard.v_scale_inv[:groups],
    )
    update, _, _ = unclamped_update(part, grad[:num], read_master(part, inputs.scale_inv), inputs)
    found = (update.abs() > inputs.hyper[shard.group, Hyper.BOUND]).sum()
    return torch.stack([found, torch.full_like(found, num)]).double() * (inputs.skip == 0)

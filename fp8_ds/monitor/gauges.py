"""Gauges: measurements beside the layers' statistics, in sampled steps only. `attach` is called before such a step,
`detach` after it, and `read` one step later, when the next may be attached already.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from fp8_ds.comm.host_copy import HostCopy
from fp8_ds.monitor.sinks import STEP_SKIPPED


class GatherTimer:
    """Milliseconds for which the computing stream waits for gathers of weights in a step.

    Stages 1 and 2 gather at the end of a step, and all of it is waited for. Stage 3 gathers ahead, and what counts is
    the wait when a weight is needed: 0 if compute hides the gather. While attached, it wraps the method.

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
        """Return milliseconds of the last sampled step; None: there was no gather."""
        return sum(itertools.starmap(milliseconds, self._finished)) if self._finished else None

    def _timed(self, stock: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = mark()
            result = stock(*args, **kwargs)
            self._spans.append((start, mark()))
            return result

        return timed

    def _timed_handle(self, stock: Any) -> Any:
        # Not the handle with another `wait`: what it has gathered would stay until Python collects cycles.
        return lambda *args, **kwargs: SimpleNamespace(wait=self._timed(stock(*args, **kwargs).wait))


class SkippedStep:
    """1 if the sampled step was skipped, else 0: also where the host learns that in the next step.

    Args:
        flag: returns that of the step that has ended: int32, 0-dim, on the device; None: there was no step.
    """

    name = STEP_SKIPPED

    def __init__(self, flag: Callable[[], Tensor | None]) -> None:
        self._flag = flag
        self._host: HostCopy | None = None

    def attach(self) -> None:
        """Do nothing: the flag is there in any step."""

    def detach(self) -> None:
        if (flag := self._flag()) is not None:
            self._host = self._host or HostCopy(flag)
            self._host.send(flag)

    def read(self) -> float | None:
        return None if self._host is None else float(bool(self._host.read()))


Gauge = GatherTimer | SkippedStep


def mark() -> Any:
    """Record where the current stream of the device is, for `milliseconds`; on a CPU the host's time."""
    if get_accelerator().device_name() != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Return the time from one mark to another; wait until the device has passed it."""
    if isinstance(start, float):
        return float(1e3 * (end - start))
    end.synchronize()
    return float(start.elapsed_time(end))

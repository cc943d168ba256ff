"""Times on a GPU and of ranks together, and the rate of a copy that bandwidths are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NUM_WARM, NUM_TIMED = 5, 30
COPY_BYTES = 4 << 30


def make_flush(num_bytes: int) -> Tensor:
    """What is read between two timed calls: more than the L2 cache holds. The host is ahead when it is done."""
    return torch.zeros(num_bytes // 4, device="cuda")


def median_ms(function: Callable[[], object], flush: Tensor | None = None) -> float:
    """Milliseconds of one call, median of many, after some that warm up.

    Args:
        flush: of `make_flush`, for kernels whose tensors the cache could hold. None: calls follow each other.
    """
    times = []
    for _ in range(NUM_WARM + NUM_TIMED):
        if flush is not None:
            flush.sum()
        times.append(_event_ms(function))
    return statistics.median(times[NUM_WARM:])


def captured_ms(call: Callable[[Any], object], sets: Sequence[Any]) -> float:
    """Milliseconds of one call, of a CUDA graph that makes one with each set: no time of the host enters."""
    for inputs in sets:  # compiles, and makes what is kept from call to call
        call(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in sets:
            call(inputs)
    return median_ms(graph.replay) / len(sets)


def slowest_rank_ms(function: Callable[[], object], device: torch.device, *, num_warm: int, num_timed: int) -> float:
    """Milliseconds of one call that all ranks begin together: the slowest rank's, median of many. Collective.

    Args:
        device: of this rank; CUDA's calls are timed there, those of a CPU on the host.
        num_warm: calls before those that count.
        num_timed: calls that count.
    """
    times = []
    for _ in range(num_warm + num_timed):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            times.append(_event_ms(function))
        else:
            start = time.perf_counter()
            function()
            times.append(1000 * (time.perf_counter() - start))
    slowest = torch.tensor(times[num_warm:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def _event_ms(function: Callable[[], object]) -> float:
    """Milliseconds of one call on the current CUDA stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_rate() -> float:
    """Bytes per second of a device copy, reads and writes counted."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_ms(lambda: target.copy_(source)) * 1e3

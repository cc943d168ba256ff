"""Times on a GPU, and the rate of a copy that bandwidths are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

NUM_WARM, NUM_TIMED = 5, 30
COPY_BYTES, FLUSH_BYTES = 4 << 30, 1 << 30


def make_flush() -> Tensor:
    """What is read between two timed calls: more than the L2 cache holds. The host is ahead when it is done."""
    return torch.zeros(FLUSH_BYTES // 4, device="cuda")


def median_ms(function: Callable[[], object], flush: Tensor | None = None) -> float:
    """Milliseconds of one call, median of many, after some that warm up.

    Args:
        flush: of `make_flush`, for kernels whose tensors the cache could hold. None: calls follow each other.
    """
    times = []
    for _ in range(NUM_WARM + NUM_TIMED):
        if flush is not None:
            flush.sum()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[NUM_WARM:])


def copy_rate(flush: Tensor | None = None) -> float:
    """Bytes per second of a device copy, reads and writes counted."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_ms(lambda: target.copy_(source), flush) * 1e3

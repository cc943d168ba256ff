"""Steps one by one, on every rank: what the device took, what the host took to hand them over, and garbage collection.

Blocks of steps do not say who was late. A host that hands a step over faster than the device takes it waits at the
step's end (for the norm, say) or runs ahead; one whose own time is the step's is what the device waits for.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist


class Collections:
    """Milliseconds that Python's garbage collector took, by generation, while in the context."""

    def __init__(self) -> None:
        self.ms = [0.0, 0.0, 0.0]
        self.count = [0, 0, 0]
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        self.ms[info["generation"]] += 1000 * (time.perf_counter() - self._began)
        self.count[info["generation"]] += 1

    def __enter__(self) -> Collections:
        gc.callbacks.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self)


def measure(step: Callable[[int], Any], num_steps: int, on_cuda: bool) -> dict[str, Any]:
    """One rank's.

    Returns:
        `device_ms`: from one step's end to the next one's on the device's stream (on a CPU the host's); `host_ms`: in
        the call; `cpu_ms`: of that, the calling thread's own work, waits left out; `gc_ms`, `gc_count`: by generation,
        in all of them.
    """
    marks, host, cpu = [], [], []

    def mark() -> Any:
        if not on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    with Collections() as collected:
        marks.append(mark())
        for number in range(num_steps):
            began, worked = time.perf_counter(), time.thread_time()
            step(number)
            host.append(1000 * (time.perf_counter() - began))
            cpu.append(1000 * (time.thread_time() - worked))
            marks.append(mark())
    if on_cuda:
        torch.cuda.synchronize()
    device = [a.elapsed_time(b) if on_cuda else 1000 * (b - a) for a, b in itertools.pairwise(marks)]
    return {
        "device_ms": [round(ms, 2) for ms in device],
        "host_ms": [round(ms, 2) for ms in host],
        "cpu_ms": [round(ms, 2) for ms in cpu],
        "gc_ms": [round(ms, 2) for ms in collected.ms],
        "gc_count": collected.count,
    }


def of_all_ranks(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """`measure`'s results of every rank, on every rank; collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def table(ranks: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a rank."""
    lines = [
        "| rank | device, ms a step: median (smallest to largest) | host in the call | of it at work "
        "| garbage collection, ms in all (times), by generation |",
        "|---|---|---|---|---|",
    ]
    for rank, found in enumerate(ranks):
        ms = found["device_ms"]
        collected = ", ".join(f"{a:.0f} ({n})" for a, n in zip(found["gc_ms"], found["gc_count"], strict=True))
        lines.append(
            f"| {rank} | {median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f}) | {median(found['host_ms']):.1f} | "
            f"{median(found['cpu_ms']):.1f} | {collected} |"
        )
    return "\n".join(lines) + "\n"

"""What a sample of the health monitor costs, step by step; of end_to_end.py's arms that have one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

NUM_SAMPLES = 6


def measure(step: Callable[[int], Any], steps_done: int, every: int) -> dict[str, float]:
    """`NUM_SAMPLES` times `every` steps, each timed; see `summarize`.

    Args:
        step: takes one.
        steps_done: optimizer steps so far: those that `every` divides are sampled.
        every: at least 3.
    """
    from fp8_ds.monitor.gauges import mark, milliseconds  # importing fp8_ds installs it: not in stock's arms

    marks = [mark()]
    for number in range(NUM_SAMPLES * every):
        step(number)
        marks.append(mark())
    spans = itertools.starmap(milliseconds, itertools.pairwise(marks))
    return summarize({steps_done + 1 + i: ms for i, ms in enumerate(spans)}, every)


def summarize(ms_by_step: Mapping[int, float], every: int) -> dict[str, float]:
    """Milliseconds: the median of steps that the monitor does not touch, how much more a sampled one takes (median,
    smallest and largest), and how much more the one after it, which reports."""
    plain = median(ms for step, ms in ms_by_step.items() if step % every > 1)
    more = [ms - plain for step, ms in ms_by_step.items() if step % every == 0]
    after = [ms - plain for step, ms in ms_by_step.items() if step % every == 1]
    return {
        "every": every,
        "num_samples": len(more),
        "plain_ms": round(plain, 3),
        "more_ms": round(median(more), 3),
        "least_ms": round(min(more), 3),
        "most_ms": round(max(more), 3),
        "after_ms": round(median(after), 3),
    }


def sentence(arm: str, found: Mapping[str, float]) -> str:
    """What is printed, with the share of a step that is one in a hundred."""
    whole = found["more_ms"] + found["after_ms"]
    return (
        f"- {arm}: a sampled step takes {found['more_ms']:.1f} ms more ({found['least_ms']:.1f} to "
        f"{found['most_ms']:.1f}, {found['num_samples']:.0f} samples), the one after it {found['after_ms']:+.1f}, "
        f"beside {found['plain_ms']:.1f}: {100 * whole / found['plain_ms'] / found['every']:.2f} % with every "
        f"{found['every']:.0f}th sampled, {whole / found['plain_ms']:.2f} % with every hundredth."
    )

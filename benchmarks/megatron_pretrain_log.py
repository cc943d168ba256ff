"""What pretrain_gpt.py (core_v0.16.1) has written into its log: times, losses, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ \|(.*)")
_NUMBER = re.compile(r" *([^:|]+): *([-+.\dEe]+|nan|inf|-inf) *(?:\||$)")
_MEMORY = re.compile(r"\(after (\d+) iterations\) memory \(MB\)(.*)")
_HELD_OUT = re.compile(r"validation loss at .*?lm loss value: *([-+.\dEenaif]+)")
_TFLOPS = "throughput per GPU (TFLOP/s/GPU)"
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Line:
    """One line of the log.

    Args:
        iteration: the last one in it.
        ms: of an iteration, the mean over those since the line before.
        loss: the mean over the same; None where Megatron printed none, which it does not for nan.
    """

    iteration: int
    ms: float
    loss: float | None
    tflops: float | None
    num_skipped: int
    num_nan: int


def lines_of(log: str) -> list[Line]:
    """All lines about iterations, in order."""
    found = []
    for match in _ITERATION.finditer(log):
        values = dict(_NUMBER.findall(match[2]))
        if "elapsed time per iteration (ms)" not in values:
            continue
        found.append(
            Line(
                int(match[1]),
                float(values["elapsed time per iteration (ms)"]),
                float(values["lm loss"]) if "lm loss" in values else None,
                float(values[_TFLOPS]) if _TFLOPS in values else None,
                int(values.get("number of skipped iterations", 0)),
                int(values.get("number of nan iterations", 0)),
            )
        )
    return found


def losses_of(lines: Sequence[Line]) -> dict[int, float]:
    """Iteration -> loss, of a log with a line for each iteration.

    The first line does not begin a new mean (`training_log`, is_first_iteration): the second is the mean of two.
    """
    found = {line.iteration: line.loss for line in lines if line.loss is not None}
    first = [line.iteration for line in lines[:2]]
    if len(first) == 2 and first[1] == first[0] + 1 and all(number in found for number in first):
        found[first[1]] = 2 * found[first[1]] - found[first[0]]
    return found


def memory_of(log: str) -> dict[str, float]:
    """The largest peaks of all ranks that report (rank 0 of each group of data parallel ranks), GiB.

    They are torch.cuda.max_memory_allocated and max_memory_reserved since the process began, as Megatron logs them.
    """
    peaks = {"peak_allocated_gib": 0.0, "peak_reserved_gib": 0.0}
    for match in _MEMORY.finditer(log):
        values = dict(_NUMBER.findall(match[2]))
        for key, name in (("peak_allocated_gib", "max allocated"), ("peak_reserved_gib", "max reserved")):
            peaks[key] = max(peaks[key], float(values[name]) * MIB / GIB)
    return {key: round(value, 3) for key, value in peaks.items()}


def measured(log: str, warm_up: int, tokens: int, ranks: int) -> dict[str, Any]:
    """Speed, memory and the last loss.

    Args:
        warm_up: lines that end after it count, if they begin after it, too.
        tokens: of an iteration, over all ranks.

    Raises:
        ValueError: the log has no line after the warm-up.
    """
    lines = lines_of(log)
    ends = [0, *(line.iteration for line in lines)]
    timed = [line for line, begin in zip(lines, ends, strict=False) if begin >= warm_up]
    if not timed:
        raise ValueError(
            f"log: expected lines about iterations after {warm_up} that warm up, got iterations {ends[1:]}. Run more."
        )
    ms = median(line.ms for line in timed)
    speeds = [line.tflops for line in timed if line.tflops is not None]
    loss = lines[-1].loss
    return {
        "step_ms": round(ms, 2),
        "interval_ms": [line.ms for line in timed],
        "tokens_per_second_per_gpu": round(tokens / ms * 1000 / ranks, 1),
        "tflops_per_gpu": median(speeds) if speeds else None,
        "loss": loss,
        "finite": loss is not None and math.isfinite(loss) and not any(line.num_nan for line in lines),
        "num_skipped": sum(line.num_skipped for line in lines),
        **memory_of(log),
    }


def held_out_loss(log: str) -> float:
    """Of the last evaluation.

    Raises:
        ValueError: there was none.
    """
    found = _HELD_OUT.findall(log)
    if not found:
        raise ValueError("log: expected a line about the validation loss, got none. Pass --eval-iters above 0.")
    return float(found[-1])

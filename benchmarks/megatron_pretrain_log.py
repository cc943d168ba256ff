"""What pretrain_gpt.py (core_v0.16.1) has written into its log: times, losses, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

_ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ \|(.*)")
_NUMBER = re.compile(r" *([^:|]+): *([-+.\dEe]+|nan|inf|-inf) *(?:\||$)")
_MEMORY = re.compile(r"\(after (\d+) iterations\) memory \(MB\)(.*)")
_HELD_OUT = re.compile(r"validation loss at .*?lm loss value: *([-+.\dEenaif]+)")
_MS = "elapsed time per iteration (ms)"
_TFLOPS = "throughput per GPU (TFLOP/s/GPU)"
MIB, GIB = 2**20, 2**30


def lines_of(log: str) -> list[dict[str, float]]:
    """All lines about iterations, in order, each by Megatron's names: of "iteration", the last one in it, times and
    losses are means since the line before. It has no "lm loss" where that is nan."""
    found = []
    for match in _ITERATION.finditer(log):
        values = {name: float(value) for name, value in _NUMBER.findall(match[2])}
        if _MS in values:
            found.append({"iteration": int(match[1]), **values})
    return found


def losses_of(lines: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Iteration -> loss, of a log with a line for each iteration.

    The first line does not begin a new mean (`training_log`, is_first_iteration): the second is the mean of two.
    """
    found = {int(line["iteration"]): line["lm loss"] for line in lines if "lm loss" in line}
    first = [int(line["iteration"]) for line in lines[:2]]
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
    ends = [0, *(int(line["iteration"]) for line in lines)]
    timed = [line for line, begin in zip(lines, ends, strict=False) if begin >= warm_up]
    if not timed:
        raise ValueError(
            f"log: expected lines about iterations after {warm_up} that warm up, got iterations {ends[1:]}. Run more."
        )
    ms, loss = median(line[_MS] for line in timed), lines[-1].get("lm loss")
    speeds = [line[_TFLOPS] for line in timed if _TFLOPS in line]
    num_skipped, num_nan = (
        int(sum(line.get(f"number of {kind} iterations", 0) for line in lines)) for kind in ("skipped", "nan")
    )
    return {
        "step_ms": round(ms, 2),
        "interval_ms": [line[_MS] for line in timed],
        "tokens_per_second_per_gpu": round(tokens / ms * 1000 / ranks, 1),
        "tflops_per_gpu": median(speeds) if speeds else None,
        "loss": loss,
        "finite": loss is not None and math.isfinite(loss) and not num_nan,
        "num_skipped": num_skipped,
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

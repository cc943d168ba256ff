"""Differences of paired runs, the interval of their mean, and a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""0.975 quantiles of Student's t with 1, 2, ... degrees of freedom; with more than 15 that of 15, a little too wide."""
MEAN_BOUND, UPPER_BOUND = 0.1, 0.3
"""Per cent by which the loss may be higher: its mean difference, and the upper end of the 95 % interval of that.
Tighter than DeepSeek-V3's 0.25 % (arXiv 2412.19437, section 3.3)."""

Verdict = Literal["parity", "worse", "undecided"]


def mean(values: Sequence[float]) -> float:
    """NaN where a value is not finite."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def finite_or_none(value: float | None) -> float | None:
    """None where the value is NaN or infinite, for which JSON has no word."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Paired:
    """Relative differences in per cent, one for each pair of runs; positive is worse than the base."""

    by_pair: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.by_pair)

    @property
    def half_width(self) -> float:
        """Half the 95 % interval of the mean, by Student's t; infinite for one pair, NaN where one is not finite."""
        degrees = len(self.by_pair) - 1
        if degrees < 1 or not math.isfinite(self.mean):
            return math.inf if math.isfinite(self.mean) else math.nan
        quantile = T_975[min(degrees, len(T_975)) - 1]
        return quantile * statistics.stdev(self.by_pair) / math.sqrt(len(self.by_pair))

    def verdict(self) -> Verdict:
        """parity: the mean and the upper end of its interval are within the bounds. worse: the lower end is above the
        bound of the mean. undecided: neither; more pairs or longer runs would tell."""
        if self.mean <= MEAN_BOUND and self.mean + self.half_width <= UPPER_BOUND:
            return "parity"
        return "worse" if self.mean - self.half_width > MEAN_BOUND else "undecided"

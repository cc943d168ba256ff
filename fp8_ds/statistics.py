"""Are two ways of training alike? Differences of paired runs, the interval of their mean, and a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""0.975 quantiles of Student's t with 1, 2, ... degrees of freedom."""
MEAN_BOUND, UPPER_BOUND = 0.1, 0.3
"""Per cent by which the loss may be higher: its mean difference, and the upper end of the 95 % interval of that.
Tighter than DeepSeek-V3's 0.25 % (arXiv 2412.19437, section 3.3)."""

Verdict = Literal["parity", "worse", "undecided"]


def t_quantile(degrees: int) -> float:
    """0.975 quantile of Student's t; above 15 degrees that of 15, a little too wide."""
    return math.inf if degrees < 1 else T_975[min(degrees, len(T_975)) - 1]


def mean(values: Sequence[float]) -> float:
    """NaN where one is not finite."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def finite_or_none(value: float | None) -> float | None:
    """None where it is NaN or infinite, for which JSON has no word."""
    return value if value is not None and math.isfinite(value) else None


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of their mean by Student's t; infinite for one value, NaN where one is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    if len(values) < 2:
        return math.inf
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Paired:
    """Relative differences in per cent, one for each pair of runs; positive is worse than the base.

    Attributes:
        half_width: of the 95 % interval of the mean over pairs; infinite for one.
    """

    by_pair: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.by_pair)

    @property
    def half_width(self) -> float:
        return half_width(self.by_pair)

    def verdict(self, mean_bound: float = MEAN_BOUND, upper_bound: float = UPPER_BOUND) -> Verdict:
        """parity: the mean and the upper end of its interval are within the bounds. worse: the lower end is above the
        bound of the mean. undecided: neither; more pairs or longer runs would tell."""
        if self.mean <= mean_bound and self.mean + self.half_width <= upper_bound:
            return "parity"
        return "worse" if self.mean - self.half_width > mean_bound else "undecided"

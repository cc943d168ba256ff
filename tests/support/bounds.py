"""The bound on Adam's update where the betas are the same in all steps."""

from __future__ import annotations

from torch import Tensor

from fp8_ds.numerics.predicted import bound_of_powers


def update_bound(step: Tensor, beta1: float | Tensor, beta2: float | Tensor) -> Tensor:
    """Of steps from 1 on, float64; 1.165 in the limit for betas .9 and .95, 7.27 for .9 and .999."""
    t = step.double()
    ratio = beta1 * beta1 / beta2
    factor = (1 - beta1) / (1 - beta2) ** 0.5
    return bound_of_powers(factor, 1 - ratio, 1 - beta1**t, 1 - beta2**t, 1 - ratio**t)

"""Scales known before the step: how far Adam can move a weight bounds its next amax.

Cauchy and Schwarz bound Adam's update by R_t, reached by gradients that grow like (beta1 / beta2)**-i. Quantised
moments could exceed it; the step clamps the update to it, which exact Adam never feels. So the amax after the step is
at most `(1 - lr * weight_decay) * amax + lr * R_t`, and the new bytes are written in the pass that computes them. The
amax is measured in that pass too, and replaces the bound in the next step: reduced over the ranks meanwhile.

With `m = sum a_i g_i` and `v = sum c_i g_i**2` it is `|m| <= sqrt(S v)`, `S = sum a_i**2 / c_i`, whatever the betas of
each step were. A step makes of S `beta1**2 / beta2 * S + (1 - beta1)**2 / (1 - beta2)`; for constant betas it is a
geometric series. R_t is `sqrt(S)` times the bias corrections, which Adam takes from the present betas and the count of
steps, however the betas were before.

Source: derived. MOSS, arXiv 2511.05811, takes 1 for the bound, which is wrong for beta1 != beta2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import MANTISSA_BITS, exponent_rule, scale_vector

_MAX_EXPONENT = 100
_CARRY, _SHIFT = exponent_rule(E4M3.max)
_EXPONENT = -1 << MANTISSA_BITS
_RANGE = (127 + _SHIFT - _MAX_EXPONENT) << MANTISSA_BITS, (127 + _SHIFT + _MAX_EXPONENT) << MANTISSA_BITS
"""Limits of an amax's float32 bits without mantissa: its scale_inv is within 2**-100 to 2**100."""


def check_betas(beta1: float, beta2: float) -> None:
    """Raise ValueError where Adam's update has no bound: beta1**2 >= beta2, or one is not in [0, 1)."""
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0 and beta1 * beta1 < beta2):
        raise ValueError(
            f"betas: expected two numbers in [0, 1) with beta1**2 < beta2, got ({beta1}, {beta2}). Without that Adam's "
            "update has no bound, and FP8 states need one: lower beta1 or raise beta2."
        )


def bound_of_powers(
    factor: float | Tensor,
    one_minus_ratio: float | Tensor,
    correction1: Tensor,
    correction2: Tensor,
    ratio_correction: Tensor,
) -> Tensor:
    """Return the largest `|m_hat / sqrt(v_hat)|` that Adam can produce in a step, with the same betas in all steps.

    Args:
        factor: `(1 - beta1) / sqrt(1 - beta2)`.
        one_minus_ratio: 1 less the ratio of the betas, `beta1**2 / beta2`.
        correction1, correction2, ratio_correction: 1 less the step's powers of beta1, of beta2, of their ratio.
    """
    spread = (ratio_correction / one_minus_ratio).sqrt()
    corrections = correction2.sqrt() / correction1
    return factor * spread * corrections


class BoundSums:
    """Sums S of rows whose betas have changed between steps, kept on the device so that the host never waits.

    While betas are constant, R_t follows from the count of steps (`bound_of_powers`), and there is no S. `row_groups`
    has for each row the index of its parameter group.
    """

    def __init__(self, row_groups: Sequence[int], device: torch.device) -> None:
        self._groups = list(row_groups)
        self._device = device
        self._have_moved = [False] * len(self._groups)
        self._mask: Tensor | None = None  # `_have_moved` on the device
        self._values, self._before = torch.zeros(2, len(self._groups), dtype=torch.float64, device=device)
        """S, and its value before the step that began last."""

    @property
    def any_moved(self) -> bool:
        return any(self._have_moved)

    @property
    def all_moved(self) -> bool:
        return bool(self._groups) and all(self._have_moved)

    def are_constant(self, groups: Sequence[bool]) -> bool:
        """Whether one of these parameter groups has a row whose betas have not moved so far."""
        pairs = zip(self._groups, self._have_moved, strict=True)
        return any(groups) and any(groups[group] and not moved for group, moved in pairs)

    def end_constant(self, groups: Sequence[bool], sums: Tensor) -> None:
        """Record that betas of these groups change for the first time, after steps with this S, float64 [num_rows]."""
        ends = [groups[group] and not moved for group, moved in zip(self._groups, self._have_moved, strict=True)]
        torch.where(self._on_device(ends), sums, self._values, out=self._values)
        self._have_moved = [moved or end for moved, end in zip(self._have_moved, ends, strict=True)]
        self._mask = None

    def bound(
        self, constant: Tensor | None, ratio: Tensor, factor: Tensor, root_factor: Tensor, steps: Tensor
    ) -> Tensor:
        """Return R_t of the step that begins, by row, and advance S past that step.

        Args:
            constant: float64 [num_rows], R_t of rows whose betas have never moved; None if there are none.
            ratio, factor: the step's `beta1**2 / beta2`, `(1 - beta1) / sqrt(1 - beta2)`.
            root_factor: `(1 - beta1**t) / sqrt(1 - beta2**t)`.
            steps: bool [num_rows] or 0-dim, rows that the step is counted for; S of the others stays.
        """
        if not self.any_moved:
            assert constant is not None
            return constant
        self._before.copy_(self._values)
        torch.where(steps, torch.addcmul(self._values * ratio, factor, factor), self._values, out=self._values)
        bound = self._values.sqrt() / root_factor
        if constant is None:
            return bound
        if self._mask is None:
            self._mask = self._on_device(self._have_moved)
        return torch.where(self._mask, bound, constant)

    def keep(self, passed_over: Tensor | None = None) -> None:
        """Keep the bound for shards that the step now begun counts and does not update: their moments are as before it.

        `passed_over`: bool, 0-dim, whether there are such shards, the same on all ranks. None means that there are.
        """
        if self.any_moved:
            larger = torch.maximum(self._values, self._before)
            self._values.copy_(larger if passed_over is None else torch.where(passed_over, larger, self._values))

    def set(self, row: int, value: float | None) -> None:
        """Set S of row `row`, which has other moments now. None: the betas of all their steps were the same."""
        self._have_moved[row], self._mask = value is not None, None
        self._values[row] = 0.0 if value is None else value

    def get(self, row: int) -> Tensor | None:
        """Return S of a row, float64, 0-dim on the device; None if its betas have not moved."""
        return self._values[row] if self._have_moved[row] else None

    def by_group(self) -> dict[int, float]:
        """Return S by index of parameter group, the largest of its rows, where betas have moved. Waits for the GPU."""
        found: dict[int, float] = {}
        if self.any_moved:
            for group, value, moved in zip(self._groups, self._values.tolist(), self._have_moved, strict=True):
                if moved:
                    found[group] = max(value, found.get(group, 0.0))
        return found

    def set_by_group(self, sums: Mapping[int, float]) -> None:
        """Invert `by_group`, for moments that have been loaded."""
        for row, group in enumerate(self._groups):
            self.set(row, sums.get(group))

    def _on_device(self, values: list[bool]) -> Tensor:
        tensor = torch.tensor(values)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def pow2_scale_inv(amax: Tensor) -> Tensor:
    """Return the smallest power of two with `amax <= 448 * scale_inv`; 1 where amax is 0, NaN where it is not finite.

    It is float32, of any shape; multiply to leave FP8. Its inverse is exact.
    """
    # By integers: between two steps every operator on a few numbers costs the device as much as one on many.
    rounded_up = ((amax.view(torch.int32) + _CARRY) & _EXPONENT).clamp(*_RANGE)
    scale_inv = (rounded_up - (_SHIFT << MANTISSA_BITS)).view(torch.float32).masked_fill_(amax <= 0, 1.0)
    return torch.add(scale_inv, amax, alpha=0)  # NaN where amax is infinite or NaN


class PredictedScales:
    """Scales of all weights with FP8 masters, a step ahead; equal on all ranks, because their inputs are.

    Args:
        num, device: number and device of the weights.
        group: ranks that share the weights; None for one process.
        num_extra: number of floats in `extra`, which are reduced along.

    Attributes:
        scale_inv, scale: float32 [num], each entry 16-byte aligned: payloads hold views of these.
        previous_scale_inv, next_scale_inv: scales that a step reads masters with, and writes them with.
        amax: float32 [num], of the masters over all ranks.
        measured: float32 [num], local, where a step collects the new masters' amaxes.
    """

    def __init__(self, num: int, device: torch.device, group: Any = None, num_extra: int = 0) -> None:
        self.group = group
        self.num = num
        self.scale_inv, self.scale = scale_vector(num, device), scale_vector(num, device)
        self.previous_scale_inv = torch.ones(num, dtype=torch.float32, device=device)
        self.next_scale_inv = torch.ones(num, dtype=torch.float32, device=device)
        self.amax = torch.zeros(num, dtype=torch.float32, device=device)
        self._vector = torch.zeros(num + num_extra, dtype=torch.float32, device=device)
        self.measured, self.extra = self._vector[:num], self._vector[num:]
        self._work: Any = None

    @torch.no_grad()
    def set(self, amax: Tensor, scale_inv: Tensor | None = None) -> None:
        """Start from masters of these amaxes, float32 [num], over all ranks.

        `scale_inv`: float32 [num], powers of two that a checkpoint was written with; taken where amax fits them.
        """
        self.wait()
        self.measured.zero_()
        self.amax.copy_(amax)
        chosen = pow2_scale_inv(self.amax)
        if scale_inv is not None:
            scale_inv = scale_inv.to(chosen.device)
            chosen = torch.where((self.amax <= E4M3.max * scale_inv) & (scale_inv > 0), scale_inv, chosen)
        self.next_scale_inv.copy_(chosen)
        self.previous_scale_inv.copy_(chosen)
        self.commit()

    @torch.no_grad()
    def replace(self, index: int, amax: Tensor) -> None:
        """Give weight `index` the scale of `amax` (0-dim), the same on all ranks if `amax` is."""
        self.wait()
        self.measured.zero_()
        self.amax[index] = amax
        scale_inv = pow2_scale_inv(amax.float())
        for vector in (self.scale_inv, self.previous_scale_inv, self.next_scale_inv):
            vector[index] = scale_inv
        self.scale[index] = scale_inv.reciprocal()

    @torch.no_grad()
    def predict(self, lr: Tensor, decay: Tensor, bound: Tensor, moves: Tensor) -> None:
        """Find the scales that the next masters are sure to fit; `commit` puts them into force.

        Args:
            lr, bound: float32 [num], of the parameter group that each weight is in.
            decay: float32 [num], what the weight is multiplied with: `1 - lr * weight_decay`, or 1.
            moves: bool [num] or 0-dim, whether the weight takes part in the step (else its scale stays).
        """
        self.wait()
        self.previous_scale_inv.copy_(self.scale_inv)
        predicted = pow2_scale_inv(self.amax * decay.abs() + lr.abs() * bound)
        torch.where(moves, predicted, self.previous_scale_inv, out=self.next_scale_inv)
        self._vector.zero_()

    @torch.no_grad()
    def commit(self, indices: Tensor | None = None) -> None:
        """Put the next scales into force, for all weights or those at `indices` (int64)."""
        if indices is None:
            self.scale_inv.copy_(self.next_scale_inv)
            torch.reciprocal(self.next_scale_inv, out=self.scale)
        else:
            chosen = self.next_scale_inv[indices]
            self.scale_inv[indices] = chosen
            self.scale[indices] = chosen.reciprocal()

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Begin the MAX all-reduce of `measured` over the ranks, beside whatever follows; `wait` ends it."""
        if self.group is not None and self._vector.numel() and dist.get_world_size(self.group) > 1:
            self._work = dist.all_reduce(self._vector, dist.ReduceOp.MAX, group=self.group, async_op=True)

    @torch.no_grad()
    def wait(self) -> None:
        """Finish the all-reduce: `amax` becomes that of the masters. A weight that no step touched keeps its own."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        torch.where(self.measured > 0, self.measured, self.amax, out=self.amax)

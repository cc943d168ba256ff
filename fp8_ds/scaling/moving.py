"""Scales of weights that are other ones in each step, so that a weight's rounding error does not stay what it is.

A weight that changes by less than a step of FP8 keeps its rounding error for hundreds of steps, which no momentum
averages: it is the rounded weights that learn, and not the masters, which are saved. With a scale that moves within an
octave the same weight lies elsewhere between two FP8 numbers in each step. The error of a step has the power that it
had; the mean over some steps is near zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo one, are spread as evenly as can be over any number of steps (docs/decisions/0005)."""


class MovingScales:
    """By what the amax of each weight is taken for larger than it is, in [1, 2); another number in each step.

    Follows from a weight's name and the step alone: the same on all ranks, in every ZeRO stage, and after a resume.

    Args:
        names: of the weights, in the order of the scale vector; None: a weight that does not move (a frozen one).
        sizes: number of scales of each.
        device: of the scales.

    Attributes:
        step: taken so far, a host integer.
    """

    def __init__(self, names: Sequence[str | None], sizes: Sequence[int], device: torch.device | str) -> None:
        self.step = 0
        first = [0.0 if name is None else zlib.crc32(name.encode()) / 2**32 for name in names]
        self._first = torch.tensor(first, dtype=torch.float32, device=device)
        self._moves = torch.tensor([float(name is not None) for name in names], device=device)
        self._weight_at = torch.arange(len(names)).repeat_interleave(torch.tensor(sizes, dtype=torch.long)).to(device)

    def advance(self) -> None:
        """A step has ended."""
        self.step += 1

    def factors(self) -> Tensor:
        """Of every weight, float32 [num_weights]; no host synchronisation."""
        moved = torch.add(self._first, self._moves, alpha=self.step * _GOLDEN % 1.0)  # exact: times one, or zero
        return 1.0 + moved.frac()

    def widened(self, amax: Tensor) -> Tensor:
        """What scales follow from in this step.

        Args:
            amax: float32, of all scales of all weights, in the order of `names`.
        """
        return amax * self.factors()[self._weight_at]

"""Hyperparameters of Adam: rows for the kernel, made on the device from numbers that the host seldom sends."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_ds.numerics.predicted import BoundSums, bound_of_powers, check_betas

_BETAS = slice(1, 3)
_DIGEST_BITS = 24


class Hyper(IntEnum):
    """Columns of the hyperparameter rows, float32 [num_param_groups, 16] on the device."""

    LR = 0
    BETA1 = 1
    BETA2 = 2
    ONE_MINUS_BETA1 = 3
    ONE_MINUS_BETA2 = 4
    EPS = 5
    """`eps * (1 - beta1**t)`"""
    DECAY = 6
    """AdamW: `1 - lr * weight_decay`, multiplies the weight. Adam (L2): weight_decay, adds weight to gradient."""
    ROOT_FACTOR = 7
    """`(1 - beta1**t) / sqrt(1 - beta2**t)`: the update is `m / (sqrt(v) * ROOT_FACTOR + EPS)`."""
    BOUND = 8
    """R_t: the update is clamped to it."""
    WIDTH = 16


class _Constants(NamedTuple):
    """Numbers of a step that the host computes to save operators on the device: float64, by group or by row."""

    beta1: Tensor
    beta2: Tensor
    ratio: Tensor
    """`beta1**2 / beta2`; powers of these first three are computed as one."""
    one_minus_beta1: Tensor
    one_minus_beta2: Tensor
    one_minus_ratio: Tensor
    bound_factor: Tensor
    """`(1 - beta1) / sqrt(1 - beta2)`"""
    lr: Tensor
    eps: Tensor
    weight_decay: Tensor
    decay: Tensor
    """As `Hyper.DECAY`."""
    zero: Tensor


class HyperRows:
    """Rows of hyperparameters, as `Hyper` has the columns, from parameter groups whose numbers may change by step.

    Args:
        row_groups: for each row the index of its parameter group.
        decoupled: true for AdamW, false for Adam (L2).

    Attributes:
        sums: bound the update where betas have changed.
        digest: float32 [24] of zeros and ones, on the device, from the groups' numbers except tensors.
    """

    def __init__(self, row_groups: Sequence[int], device: torch.device, decoupled: bool) -> None:
        self.sums = BoundSums(row_groups, device)
        self._device = device
        self._decoupled = decoupled
        self._row_groups = torch.tensor(list(row_groups), dtype=torch.long, device=device)
        self._host_numbers: list[tuple[float, ...]] = []
        self._constants = self.digest = torch.zeros(0, dtype=torch.float32)

    def set(self, param_groups: Sequence[dict[str, Any]], step: Tensor, has_stepped: Callable[[], bool]) -> None:
        """Take the numbers of `param_groups`, and send them if one has changed.

        A learning rate that is a tensor is read on the device.

        Args:
            step: int64 [num_rows], how many steps each row has had.
            has_stepped: says whether there was a step; called only where betas have changed.

        Raises:
            ValueError: Adam's update has no bound with such betas. Nothing has changed.
        """
        host = [_numbers_of(group) for group in param_groups]
        if host != self._host_numbers:
            for group in param_groups:
                check_betas(*group["betas"])
            if self._host_numbers:
                pairs = zip(self._host_numbers, host, strict=True)
                self.end_constant_betas([old[_BETAS] != new[_BETAS] for old, new in pairs], step, has_stepped)
            # In float32, as the step has them: libraries of two hosts may differ in the last bit of a cosine.
            checksum = zlib.crc32(torch.tensor(host, dtype=torch.float32).numpy().tobytes())
            bits = [float(checksum >> place & 1) for place in range(_DIGEST_BITS)]
            rows = zip(*(_constants_of(numbers, decoupled=self._decoupled) for numbers in host), strict=True)
            packed = torch.tensor([*bits, *itertools.chain.from_iterable(rows)], dtype=torch.float64)
            if self._device.type == "cuda":
                packed = packed.pin_memory()
            packed = packed.to(self._device, non_blocking=True)
            self.digest = packed[:_DIGEST_BITS].float()
            self._constants = packed[_DIGEST_BITS:].view(-1, len(host))
            self._host_numbers = host
        rates = {index: group["lr"] for index, group in enumerate(param_groups) if isinstance(group["lr"], Tensor)}
        if rates:
            c = _Constants(*self._constants)
            for index, lr in rates.items():
                c.lr[index].copy_(lr.reshape(()), non_blocking=True)
            if self._decoupled:
                c.decay.copy_(1 - c.lr * c.weight_decay)

    def rows(self, step: Tensor, steps: Tensor) -> Tensor:
        """Return float32 [num_rows, 16], columns as `Hyper`.

        Args:
            step: int64 [num_rows], how many steps each row has had with this one.
            steps: bool [num_rows] or 0-dim: the rows that count the step.
        """
        by_row = self._constants.index_select(1, self._row_groups)
        c = _Constants(*by_row)
        t = step.clamp(min=1).double()
        # Each operator on these few numbers is one that the device waits for: one power of three bases.
        corrections = 1 - by_row[:3] ** t
        root_factor = corrections[0] * corrections[1].rsqrt()
        constant = None if self.sums.all_moved else bound_of_powers(c.bound_factor, c.one_minus_ratio, *corrections)
        bound = self.sums.bound(constant, c.ratio, c.bound_factor, root_factor, steps)
        betas = (c.beta1, c.beta2, c.one_minus_beta1, c.one_minus_beta2)
        columns = [c.lr, *betas, c.eps * corrections[0], c.decay, root_factor, bound]
        return torch.stack([*columns, *[c.zero] * (Hyper.WIDTH - len(columns))], dim=1).float()

    def end_constant_betas(self, groups: Sequence[bool], step: Tensor, has_stepped: Callable[[], bool]) -> None:
        """Compute the bound sum of these groups, whose steps so far all had the betas that are set."""
        if self.sums.are_constant(groups) and has_stepped():
            c = _Constants(*self._constants.index_select(1, self._row_groups))
            ratio_correction = 1 - c.ratio ** step.double()
            self.sums.end_constant(groups, c.bound_factor * c.bound_factor * (ratio_correction / c.one_minus_ratio))


def _numbers_of(group: dict[str, Any]) -> tuple[float, ...]:
    lr = 0.0 if isinstance(group["lr"], Tensor) else float(group["lr"])
    return lr, *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"])


def _constants_of(numbers: tuple[float, ...], *, decoupled: bool) -> list[float]:
    """Return the constants in the order of `_Constants`, each operation in float64, as on the device."""
    lr, beta1, beta2, eps, weight_decay = numbers
    ratio = beta1 * beta1 / beta2
    bound_factor = (1 - beta1) / math.sqrt(1 - beta2)
    decay = 1 - lr * weight_decay if decoupled else weight_decay
    of_betas = [beta1, beta2, ratio, 1 - beta1, 1 - beta2, 1 - ratio, bound_factor]
    return [*of_betas, lr, eps, weight_decay, decay, 0.0]

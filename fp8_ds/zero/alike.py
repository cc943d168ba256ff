"""Ranks step with the same numbers, or none of them steps.

The scale of a split master is chosen before its step, by each rank, from the learning rate and the numbers beside it.
In stock code a rank with a learning rate of its own (its scheduler is told of a loss that is not averaged) trains its
shards faster or slower than the others. Here they would read each other's bytes by different powers of two, silently.
So a digest of the numbers travels with a sum that all ranks wait for anyway, before the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.errors import ConfigError
from fp8_ds.optim.core import AdamCore


class SameNumbers:
    """Of one optimizer. Nothing is compared where no scale is chosen ahead, or by one rank alone.

    Args:
        core: what steps.
        group: the ZeRO group.
    """

    def __init__(self, core: AdamCore, group: Any) -> None:
        self._core = core
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        self._is_on = core.scales.num > 0 and self._num_ranks > 1
        self._before: Tensor | None = None
        """Bool, 0-dim: ranks differed in the step before. None: nothing was compared in it."""
        self._now: Tensor | None = None
        """Likewise in the step that runs, of one sum or, where gradients are released, of one a bucket."""

    def sum(self, values: Tensor, param_groups: Sequence[dict[str, Any]]) -> Tensor:
        """`values` added up over the ranks; all NaN, so that the step is skipped, where ranks would step differently.

        Collective: one all-reduce. Never waits for the device.

        Args:
            values: float32, 1-D.
            param_groups: that the step follows. A learning rate that is a tensor is not compared.
        """
        if not self._is_on:
            dist.all_reduce(values, group=self._group)
            return values
        sums = torch.cat([values, self._core.digest(param_groups)])
        dist.all_reduce(sums, group=self._group)
        values, bits = sums[: values.numel()], sums[values.numel() :]
        # A bit that all ranks have alike adds up to 0 or to their number. The same on all of them.
        differ = (bits * (bits - self._num_ranks)).any()
        self._now = differ if self._now is None else self._now | differ
        return torch.where(differ, torch.nan, values)

    def end_step(self, param_groups: Sequence[dict[str, Any]], overflow: bool) -> None:
        """The next sum is of another step. Waits for the device where there was an overflow.

        Args:
            overflow: this step was skipped, or the one before.

        Raises:
            ConfigError: ranks differed in one that may be meant, on all of them.
        """
        differed = [step for step in (self._before, self._now) if step is not None]
        self._before, self._now = self._now, None
        if overflow and any(map(bool, differed)):
            here = [{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} for group in param_groups]
            raise ConfigError(
                "param_groups: expected the same lr, betas, eps and weight_decay on all ranks in a step, got "
                f"{here} on rank {dist.get_rank()} and others elsewhere. No weight was changed. Average what a "
                'scheduler follows over the ranks, or set "fp8": {"optimizer": {"states": "fp32"}}.'
            )

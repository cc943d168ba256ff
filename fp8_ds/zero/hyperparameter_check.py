"""Check that ranks step with the same hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.errors import ConfigError
from fp8_ds.optim.core import AdamCore


class HyperparameterCheck:
    """Check that all ranks step with the same learning rate and the like, or none steps.

    Each rank chooses the scale of a split master from these. Where they differ, as by a scheduler that follows a loss
    without averaging it, ranks would read each other's bytes by different powers of two. So a digest of them travels
    with a sum that all ranks wait for anyway.

    Args:
        core: steps the shards. Nothing is compared if it chooses no scale ahead.
        group: the ZeRO group.
    """

    def __init__(self, core: AdamCore, group: Any) -> None:
        self._core = core
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        self._is_on = core.scales.num > 0 and self._num_ranks > 1
        # Bool, 0-dim: ranks differed in the step before, and in the one that runs. None: nothing was compared.
        self._before: Tensor | None = None
        self._now: Tensor | None = None

    def sum(self, values: Tensor, param_groups: Sequence[dict[str, Any]]) -> Tensor:
        """Add `values` up over the ranks; all NaN, so that the step is skipped, if ranks would step differently.

        Args:
            values: float32, 1-D.
            param_groups: those that the step follows. A learning rate that is a tensor is not compared.
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
        """Begin another step. Waits for the device where there was an overflow.

        Args:
            overflow: whether this step was skipped, or the one before.

        Raises:
            ConfigError: ranks differed in one of these steps; on all ranks.
        """
        differed = [step for step in (self._before, self._now) if step is not None]
        self._before, self._now = self._now, None
        if overflow and any(differed):
            here = [{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} for group in param_groups]
            raise ConfigError(
                "param_groups: expected the same lr, betas, eps and weight_decay on all ranks in a step, got "
                f"{here} on rank {dist.get_rank()} and others elsewhere. No weight was changed. Average what a "
                'scheduler follows over the ranks, or set "fp8": {"optimizer": {"states": "fp32"}}.'
            )

"""The global gradient norm, the clip factor and the overflow flag, none of which waits for the device.

With the norm travels a check that ranks step with the same hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor

from fp8_ds.errors import ConfigError
from fp8_ds.optim.core import AdamCore
from fp8_ds.zero.stage import ZeroHost


def global_norm(
    host: ZeroHost,
    grads: list[Tensor],
    params: list[Any],
    squares: Callable[[list[Tensor]], Tensor],
    alike: HyperparameterCheck,
) -> Tensor:
    """Return the L2 norm of all gradients over the ZeRO and model-parallel groups; float32, 0-dim. Collective.

    Replicated parameters (pipeline, model parallel) count once, as in DeepSpeed. The norm is infinite or NaN if a
    gradient is, and NaN if ranks would step with different numbers.

    Args:
        grads: this rank's pieces, none twice.
        params: the parameter of each.
        squares: sums the squares of all elements of a list, float32, 0-dim.
        alike: adds up over the ranks.
    """
    counted = [
        grad
        for grad, p in zip(grads, params, strict=True)
        if not getattr(p, "ds_pipe_replicated", False)
        and (is_model_parallel_parameter(p) or host.model_parallel_rank == 0)
        and grad.numel()
    ]
    if counted:
        total = squares(counted)
    else:
        device = get_accelerator().current_device_name()
        total = torch.zeros((), dtype=torch.float32, device=device)
    total = alike.sum(total.view(1), host.param_groups)[0]
    host._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
    return total.sqrt()


def overflow_flag(norm: Tensor) -> Tensor:
    """Return int32, 0-dim: 1 if a norm (float32, 0-dim) is infinite or NaN, else 0."""
    return torch.logical_not(norm < torch.inf, out=torch.empty_like(norm, dtype=torch.int32))


def clip_factor(norm: Tensor, max_norm: float, loss_scale: float) -> Tensor:
    """Return the factor that clips and un-scales gradients; float32, 0-dim."""
    if max_norm <= 0.0:
        return torch.full_like(norm, 1.0 / loss_scale)
    if loss_scale == 1.0:  # as bf16 has it: two operators less between the norm and the update
        return ((norm + 1e-6) / max_norm).clamp(min=1.0).reciprocal()
    clip = ((norm / loss_scale + 1e-6) / max_norm).clamp(min=1.0)
    return (clip * loss_scale).reciprocal()


class HyperparameterCheck:
    """Check that all ranks step with the same learning rate and the like, or none steps.

    Each rank chooses the scale of a split master from these. Where they differ, as by a scheduler that follows a loss
    without averaging it, ranks would read each other's bytes by different powers of two. So a digest of them travels
    with a sum that all ranks wait for anyway.

    Args:
        core: steps the shards. Nothing is compared without one, or if it chooses no scale ahead.
    """

    def __init__(self, core: AdamCore | None, group: Any) -> None:
        self._core = core if core is not None and core.scales.num > 0 and dist.get_world_size(group) > 1 else None
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        # Bool, 0-dim: ranks differed in the step before, and in the one that runs. None: nothing was compared.
        self._before: Tensor | None = None
        self._now: Tensor | None = None

    def sum(self, values: Tensor, param_groups: Sequence[dict[str, Any]]) -> Tensor:
        """Add `values` up over the ranks; all NaN, so that the step is skipped, if ranks would step differently.

        Args:
            values: float32, 1-D.
            param_groups: those that the step follows. A learning rate that is a tensor is not compared.
        """
        if self._core is None:
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

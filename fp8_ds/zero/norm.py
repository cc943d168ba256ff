"""The global gradient norm, the clip factor and the overflow flag, none of which waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor

from fp8_ds.comm.host_copy import HostCopy


def global_norm(optimizer: Any, grads: list[Tensor], params: list[Any]) -> Tensor:
    """Return the L2 norm of all gradients over the ZeRO and model-parallel groups; float32, 0-dim. Collective.

    Replicated parameters (pipeline, model parallel) count once, as in DeepSpeed. The norm is infinite or NaN if a
    gradient is, and NaN if ranks would step with different numbers.

    Args:
        optimizer: a ZeRO optimizer that is `Fp8States`.
        grads: this rank's pieces, none twice.
        params: the parameter of each.
    """
    counted = [
        grad
        for grad, p in zip(grads, params, strict=True)
        if not getattr(p, "ds_pipe_replicated", False)
        and (is_model_parallel_parameter(p) or optimizer.model_parallel_rank == 0)
        and grad.numel()
    ]
    if counted:
        total = optimizer._fp8_squares(counted)
    else:
        device = grads[0].device if grads else optimizer.optimizer.core.device
        total = torch.zeros((), dtype=torch.float32, device=device)
    total = optimizer._fp8_alike.sum(total.view(1), optimizer.param_groups)[0]
    optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
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


class OverflowFlag:
    """Flag of a skipped step on the host: known in that step if the host waits for the device, else a step later.

    The flag travels before the update is launched: a host that waits for it goes on while the update runs.
    """

    def __init__(self) -> None:
        self._sent: Tensor | None = None
        self._host: HostCopy | None = None
        self._is_pending = self._before = self._loaded = False
        self.last: Tensor | None = None
        """Flag that was last sent, on the device."""
        self.is_current = True
        """Whether the last answer was about the step that asked for it."""

    def send(self, skip: Tensor) -> None:
        """Start sending the flag of this step (int32, 0-dim, not written before `resolve`) to the host."""
        self.last = skip
        if skip.device.type != "cuda":
            self._sent = skip
            return
        self._before = self._read()
        if self._host is None:
            self._host = HostCopy(skip)
        self._host.send(skip)
        self._is_pending = True

    def resolve(self, wait: bool) -> bool:
        """Whether this step was skipped, or, if the host does not `wait` for the device, the one before."""
        if self._sent is not None:
            sent, self._sent = self._sent, None
            self.is_current = True
            return bool(sent)
        self.is_current = wait
        return self._read() if wait else self._before

    def late(self) -> bool:
        """Whether the last step was skipped and `resolve` has not said so yet; for a checkpoint. Waits for the flag."""
        if not self._is_pending:
            return self._loaded
        assert self._host is not None
        return bool(self._host.read())

    def load(self, late: bool) -> None:
        """Take `late` from a checkpoint, whose step is now the last: no flag of this run is on its way."""
        self._loaded, self._is_pending = late, False

    def _read(self) -> bool:
        late, self._loaded, self._is_pending = self.late(), False, False
        return late

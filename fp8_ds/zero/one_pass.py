"""`adam_step`: Adam that updates DeepSpeed's fp32 masters and moments in one pass, from gradients as they lie.

DeepSpeed 0.19.8 converts each gradient for the norm (runtime/zero/stage_1_and_2.py: `g.data.to(get_norm_dtype())`),
flattens the gradients, copies them to fp32 (`flat_grad_partition.to(...)`; stage3.py,
`_prepare_fp32_grad_for_sub_group`), multiplies the copy (`unscale_and_clip_grads`), and then runs Adam. Here one launch
reads all gradients for the norm, and one updates. Masters, moments and counts of steps stay where DeepSpeed has them,
so its checkpoints stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fp8_ds.comm.host_copy import OverflowFlag
from fp8_ds.log import logger
from fp8_ds.ops._register import HAS_TRITON
from fp8_ds.ops.dense_adam import AdamNumbers, DenseAdam, DenseStates, DenseStep
from fp8_ds.ops.squares import SumOfSquares
from fp8_ds.zero.norm import HyperparameterCheck, clip_factor, global_norm, overflow_flag
from fp8_ds.zero.stage import ZeroHost

_ADAMS: tuple[type, ...] = (torch.optim.Adam, torch.optim.AdamW, FusedAdam)


class Piece(NamedTuple):
    """A reduced gradient of this rank, contiguous, where it begins in the flat master, and its parameter."""

    start: int
    grad: Tensor
    param: Any


class Work(NamedTuple):
    """A flat fp32 master (1-D), the parameter group that it follows, and its gradients."""

    master: Tensor
    group: dict[str, Any]
    pieces: list[Piece]


class OnePassAdam:
    """Adam steps of a ZeRO optimizer `zero` over its flat masters, with the state that its inner optimizer holds."""

    def __init__(self, zero: ZeroHost) -> None:
        self.zero = zero
        self.flag = OverflowFlag()
        self._squares = _sum_of_squares()
        self._alike = HyperparameterCheck(None, zero.dp_process_group)
        self._launches: dict[int, DenseAdam] = {}  # by id of a flat master
        self._counts: dict[int, tuple[Tensor, int, int]] = {}
        """By id of a master whose count of steps is a tensor: that tensor, its version, and the number."""

    @property
    def knows_it(self) -> bool:
        """Whether the inner optimizer is one of Adam's."""
        return type(self.zero.optimizer) in _ADAMS

    def is_left_to_deepspeed(self, masters: Sequence[Tensor]) -> bool:
        """Return whether DeepSpeed's own step has to run; rank 0 says the reason once."""
        reason = self.why_not(masters)
        if reason is not None and dist.get_rank() == 0:
            _say_once(f"fp8: the optimizer's step is DeepSpeed's own: {reason}")
        return reason is not None

    def why_not(self, masters: Sequence[Tensor]) -> str | None:
        """Return why DeepSpeed's own step has to run, or None; the same on all ranks."""
        optimizer: Any = self.zero.optimizer
        groups, step = optimizer.param_groups, vars(optimizer).get("step")
        if type(optimizer) not in _ADAMS:
            return f"it is {type(optimizer).__name__}"
        for key in ("amsgrad", "maximize", "differentiable"):
            if any(group.get(key) for group in groups):
                return key
        if any(isinstance(x, Tensor) for group in groups for x in (group["lr"], *group["betas"])):
            return "lr or betas are tensors"
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if any(hooks) or any((_global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
            return "it has hooks"
        # torch's schedulers wrap the step, to see whether one came before theirs.
        if step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step:
            return "its step was replaced"
        group = self.zero.model_parallel_group
        if group is not None and dist.get_world_size(group) > 1:
            return "the norm leaves out gradients of other model-parallel ranks, which may be infinite"
        if getattr(self.zero, "torch_autocast_gradscaler", None):
            return "torch.autocast scales gradients"
        if getattr(self.zero, "cpu_offload", False) or getattr(self.zero, "offload_optimizer", False):
            return "it is offloaded"
        if any(x.dtype != torch.float32 for x in masters):
            return "masters are not in fp32"
        return "Triton is missing" if masters[0].is_cuda and not HAS_TRITON else None

    def run(self, work: Sequence[Work], waits: bool) -> None:
        """Measure the norm, update masters and moments, then the host's numbers: overflow, norm, loss scale, counts.

        Args:
            waits: whether a step with an infinite or NaN norm is skipped, which the host waits to know.
        """
        zero = self.zero
        pieces = [piece for each in work for piece in each.pieces]
        for master, group, _ in work:
            _check_states(DenseStates(master, **_moments(self._state(master, group))))
        grads, params = [piece.grad for piece in pieces], [piece.param for piece in pieces]
        norm = global_norm(zero, grads, params, self._squares, self._alike)
        skip = overflow_flag(norm)
        if waits:
            self.flag.send(skip)
        else:  # as DeepSpeed: elements with a bad gradient become NaN, and no others
            skip, norm = torch.zeros_like(skip), torch.where(norm < torch.inf, norm, torch.inf)
        scale = clip_factor(norm, zero.clip_grad, zero.loss_scale)
        for master, group, its_pieces in work:
            state = self._state(master, group)
            states = DenseStates(master.detach(), **_moments(state))
            starts, grads = [piece.start for piece in its_pieces], [piece.grad for piece in its_pieces]
            numbers = self._numbers(group, self._steps_of(master) + 1)
            update = self._launches.setdefault(id(master), DenseAdam())
            update(DenseStep(states, starts, grads, numbers, scale, skip))
        zero.overflow = self.flag.resolve(wait=True) if waits else False
        scale_before = zero.loss_scale
        zero._update_scale(zero.overflow)
        if not getattr(zero, "compute_grad_norm", True):
            zero._global_grad_norm = None
        else:
            zero._global_grad_norm = float("inf") if zero.overflow else norm / scale_before
        if not zero.overflow:
            self._count(work)

    def _state(self, master: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a flat master; made as its optimizer makes it if there is none."""
        optimizer = self.zero.optimizer
        state: dict[str, Any] = optimizer.state[master]
        if not state:
            if isinstance(optimizer, FusedAdam):
                step: Any = group.setdefault("step", 0)
            else:
                device = master.device if group.get("fused") or group.get("capturable") else "cpu"
                step = torch.zeros((), dtype=torch.float32, device=device)
            data = master.detach()
            state.update(step=step, exp_avg=torch.zeros_like(data), exp_avg_sq=torch.zeros_like(data))
        return state

    def _steps_of(self, master: Tensor) -> int:
        """Return how many steps a master has had. Waits for the device where somebody else has counted on it."""
        step = self.zero.optimizer.state[master]["step"]
        if not isinstance(step, Tensor):
            return int(step)
        known = self._counts.get(id(master))
        if known is None or known[0] is not step or known[1] != step._version:
            known = self._counts[id(master)] = (step, step._version, int(step))
        return known[2]

    def _count(self, work: Sequence[Work]) -> None:
        """Count a step that was not skipped."""
        optimizer = self.zero.optimizer
        for master, *_ in work:
            num, state = self._steps_of(master) + 1, optimizer.state[master]
            state["step"] += 1
            if isinstance(state["step"], Tensor):
                self._counts[id(master)] = (state["step"], state["step"]._version, num)
        optimizer._opt_called = True  # torch's schedulers look whether a step came before theirs

    def _numbers(self, group: dict[str, Any], step: int) -> AdamNumbers:
        optimizer, (beta1, beta2) = self.zero.optimizer, map(float, group["betas"])
        if isinstance(optimizer, FusedAdam):
            decoupled = bool(optimizer.adam_w_mode)
        else:
            decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        corrects = group.get("bias_correction", True)
        corrections = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
        lr, eps, weight_decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
        return AdamNumbers(lr, (beta1, beta2), eps, weight_decay, corrections, decoupled)

    def forget_counts(self) -> None:
        """Read counts of steps anew, because a load has written them."""
        self._counts.clear()


@functools.cache
def _say_once(line: str) -> None:
    logger.info(line)


def _moments(state: dict[str, Any]) -> dict[str, Tensor]:
    return {"m": state["exp_avg"], "v": state["exp_avg_sq"]}


def _check_states(states: DenseStates) -> None:
    """Raise if a kernel would write elsewhere.

    Raises:
        ValueError: masters or moments are not on the device, or are not float32 of the same size.
    """
    device = torch.device(get_accelerator().current_device_name())
    for name, x in states._asdict().items():
        if x.device.type != device.type or x.dtype != torch.float32 or x.shape != states.master.shape:
            raise ValueError(
                f"engine.step(): expected {name} of Adam as float32 {tuple(states.master.shape)} on {device}, got "
                f"{x.dtype} {tuple(x.shape)} on {x.device}. No weight was changed. Call engine.reload_states() if you "
                "have offloaded them; else load a checkpoint of this model."
            )


def pieces_of_master(gradients: Iterable[Tensor], params: Iterable[Any]) -> Iterable[Piece]:
    """Yield the pieces of a flat master from its gradients in order, between which there may be padding."""
    gradients = list(gradients)
    starts = accumulate((grad.numel() for grad in gradients), initial=0)
    real = ((start, g) for start, g in zip(starts, gradients, strict=False) if not getattr(g, "_zero_padding", False))
    for (start, grad), p in zip(real, params, strict=False):  # the last one may be padding without a mark
        yield Piece(start, grad.contiguous(), p)


def _sum_of_squares() -> Any:
    """Return `SumOfSquares` on CUDA; elsewhere DeepSpeed's own arithmetic, whose bits a run on CPU then has."""
    kernel = SumOfSquares()

    def squares(grads: Sequence[Tensor]) -> Tensor:
        if grads[0].is_cuda:
            return kernel(grads)
        return torch.stack([torch.linalg.vector_norm(grad.double()) for grad in grads]).square().sum().float()

    return squares

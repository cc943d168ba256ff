"""Megatron's optimizer classes over `MegatronFp8AdamW`; the distributed one is in optimizer_sharded.py.

Both the distributed and the plain one work as Megatron's precision-aware optimizer does: no float32 main parameters,
gradients read where they were reduced (`decoupled_grad`), weights written by the step itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    MixedPrecisionOptimizer,
)
from torch import Tensor

from fp8_ds.numerics.masters import BF16_8, FP32, MasterFormat
from fp8_ds.numerics.new_masters import weight_id
from fp8_ds.ops.adamw import AdamShard
from megatron_patches.optimizer_adam import MegatronFp8AdamW


def format_of(p: Tensor) -> MasterFormat:
    return FP32 if p.dtype == torch.float32 else BF16_8


def number_of(name: str, p: Any) -> int:
    """Return the number of a weight for rounding noise, equal wherever a copy of it is, or copies would drift apart.

    Ranks of a tensor parallel group have the same names. The embedding and the head are one weight in two stages.
    """
    return weight_id("shared embedding" if getattr(p, "shared_embedding", False) else name)


class Fp8Float16Optimizer(Float16OptimizerWithFloat16Params):
    """Megatron's optimizer for bf16 without sharding, with FP8 moments.

    Its attribute `fp32_from_float16_groups` holds the weights themselves: Megatron's main branch saves pairs of a
    weight and its main parameter, and finds one for each.
    """

    optimizer: MegatronFp8AdamW

    def __init__(self, optimizer: Any, config: Any, grad_scaler: Any, init_state_fn: Any) -> None:
        if optimizer is None:
            super().__init__(optimizer, config, grad_scaler, init_state_fn)
        else:
            MixedPrecisionOptimizer.__init__(self, optimizer, config, grad_scaler, init_state_fn)
            groups = [group["params"] for group in optimizer.param_groups]
            self.float16_groups = [[p for p in group if p.dtype == torch.bfloat16] for group in groups]
            self.fp32_from_fp32_groups = [[p for p in group if p.dtype == torch.float32] for group in groups]
            self.fp32_from_float16_groups = self.float16_groups
            self.is_stub_optimizer = False
        if self.is_stub_optimizer:
            return
        self.init_state_fn = _allocate
        shards = []
        for g, group in enumerate(self.optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                name = f"parameter {i} of group {g}"
                shards.append(
                    AdamShard(name, p.numel(), 0, number_of(name, p), 0, 0, format_of(p), p.detach().view(-1))
                )
        self.optimizer.hold(shards, None, torch.device(torch.cuda.current_device()))

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        return [p.decoupled_grad for p in self.get_parameters() if p.decoupled_grad is not None]

    def _copy_model_grads_to_main_grads(self) -> None:
        for p in self.get_parameters():
            p.decoupled_grad = getattr(p, "main_grad", p.grad)
            p.grad = None

    def _copy_main_params_to_model_params(self) -> None:
        """Do nothing: the step has written weights."""

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        assert state_dict is None, "Initialize main params from state dict is not supported"
        self.optimizer.forget_masters()

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        state = super().state_dict(is_loading)
        state["fp32_from_fp16_params"] = [[self.optimizer.read(p, None) for p in g] for g in self.float16_groups]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # Megatron copies masters into fp32_from_float16_groups: rounded
        masters = state_dict["fp32_from_fp16_params" if "fp32_from_fp16_params" in state_dict else "fp32_from_fp16"]
        for group, values in zip(self.float16_groups, masters, strict=True):
            for p, value in zip(group, values, strict=True):
                self.optimizer.write(p, None, value)


def _allocate(optimizer: MegatronFp8AdamW, config: Any = None) -> None:
    """Allocate the states, so that a checkpoint is asked for them."""
    optimizer.core.allocate()


class Fp8ChainedOptimizer(ChainedOptimizer):
    """Optimizer of dense and expert parameters under one norm. A step with an infinite or NaN norm changes nothing.

    Megatron's bf16 training without a loss scale has no such check: weights become NaN. Here the step reports failure,
    as with a loss scale: Megatron counts a skipped iteration, and the schedule waits.
    """

    _fp8_norm = 0.0

    def get_grad_norm(self) -> float:
        norm = super().get_grad_norm()
        self._fp8_norm = float(norm)
        return norm

    def step_with_ready_grads(self) -> bool:
        others = getattr(self, "grad_norms_by_group", {})  # 0.19: multi-token prediction has a norm of its own
        if not all(map(math.isfinite, (self._fp8_norm, *others.values()))):
            return False
        return bool(super().step_with_ready_grads())

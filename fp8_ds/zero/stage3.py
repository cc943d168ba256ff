"""ZeRO-3: the methods of DeepSpeedZeroOptimizer_Stage3 that FP8 replaces, each handed to the optimizer's `Zero3`.

Seams: fp8_ds/engine/seams.py.
"""

# mypy: disable-error-code="safe-super"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8_ds.zero.gradients import average_and_scatter
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.zero3 import Zero3

if TYPE_CHECKING:
    from fp8_ds.zero.stage import Host3 as _Host
else:
    _Host = object


class Fp8ZeroStage3(_Host):
    """Mix-in before DeepSpeedZeroOptimizer_Stage3 in the class of a retyped optimizer."""

    fp8: Zero3

    def fp8_init(self, context: Fp8Context) -> None:
        """Give every converted weight an FP8 shard and hook all parameters. Collective (first quantisation)."""
        self.fp8 = Zero3(self, context)

    def step(self, closure: Any = None) -> None:
        self.fp8.step.run(super().step, closure)

    def _post_step(self, timer_names: Any) -> None:
        self.fp8.post_step(super()._post_step, timer_names)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.fp8.load_state_dict(super().load_state_dict, *args, **kwargs)

    def _restore_from_bit16_weights(self) -> None:
        self.fp8.restore_masters()

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        self.fp8.copy_masters(super()._reassign_or_swap_out_partitioned_parameters, sub_group_id)

    def _rigid_state_dict(self) -> dict[str, Any]:
        return self.fp8.masters.saved(super()._rigid_state_dict())

    def offload_states(self, include: Any = None, device: Any = None, **kwargs: Any) -> None:
        self.fp8.offload(super().offload_states, include, device, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        self.fp8.reload(super().reload_states, non_blocking)

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> Any:
        original = super()._get_fp32_opt_state_partition
        return self.fp8.masters.read_partition(original, param, release_swap_buffers, optim_state_key)

    def set_full_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        self.fp8.masters.set_full(super().set_full_hp_param, value, param, optim_state_key)

    def set_local_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        self.fp8.masters.set_local(super().set_local_hp_param, value, param, optim_state_key)

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        return self.fp8.gradients.read(super()._get_fp32_grad_state_partition, param, release_swap_buffers)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> list[Tensor]:
        return self.fp8.gradients.partition(super().partition_grads, params_to_release, grad_partitions)

    # The name under which DeepSpeed's private `__avg_scatter_grads` is looked up.
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        original = super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads
        context = self.fp8.context
        if context.config.zero.reduce_scatter == "bf16":
            return original(params_to_reduce, communication_data_type)
        return average_and_scatter(self, context.counter, original, params_to_reduce, communication_data_type)

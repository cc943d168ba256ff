"""ZeRO-1 and 2: the methods of DeepSpeedZeroOptimizer that FP8 replaces, each handed to the optimizer's `Zero12`.

Seams: fp8_ds/engine/seams.py.
"""

# mypy: disable-error-code="safe-super"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fp8_ds.zero.gradients import reduce_and_scatter
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.zero12 import Zero12

if TYPE_CHECKING:
    from fp8_ds.zero.stage import Host12 as _Host
else:
    _Host = object


class Fp8ZeroStage12(_Host):
    """Mix-in before DeepSpeedZeroOptimizer in the class of a retyped optimizer."""

    fp8: Zero12

    def fp8_init(self, context: Fp8Context) -> None:
        """Replace the bf16 flat groups by FP8 and bf16 compact buffers. Collective (first quantisation)."""
        self.fp8 = Zero12(self, context)

    def step(self, closure: Any = None) -> None:
        self.fp8.step.run(super().step, closure)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.fp8.load_state_dict(super().load_state_dict, *args, **kwargs)

    def _restore_from_bit16_weights(self) -> None:
        self.fp8.restore_masters()

    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Do nothing: parameters point into the compact buffers since the gather (`FlatWeights.point_params`)."""

    def _link_all_hp_params(self) -> None:
        self.fp8.link(super()._link_all_hp_params)

    def _get_groups_without_padding(self, groups: Any) -> Any:
        """Return the masters as DeepSpeed saves them, dense float32, without padding."""
        return super()._get_groups_without_padding(self.fp8.masters.saved(groups))

    def offload_states(self, include: Any = None, device: Any = None, **kwargs: Any) -> None:
        self.fp8.offload(super().offload_states, include, device, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        self.fp8.reload(super().reload_states, non_blocking)

    def setup_buckets(self) -> None:
        self.fp8.gradients.setup_buckets(super().setup_buckets)

    def process_gradients(self, param: Any, i: int) -> None:
        self.fp8.gradients.process(super().process_gradients, param, i)

    def reduce_ready_partitions_and_remove_grads(self, param: Any, i: int) -> None:
        self.fp8.gradients.reduce_ready(super().reduce_ready_partitions_and_remove_grads, param, i)

    def reduce_ipg_grads(self, comm_dtype: Any = None) -> None:
        self.fp8.gradients.reduce_bucket(super().reduce_ipg_grads, comm_dtype)

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        self.fp8.gradients.reduce_all(super().reduce_gradients, pipeline_parallel)

    def copy_grads_in_partition(self, param: Any, *args: Any) -> None:
        self.fp8.gradients.copy_in_partition(super().copy_grads_in_partition, param, *args)

    def independent_gradient_partition_epilogue(self) -> None:
        self.fp8.gradients.epilogue(super().independent_gradient_partition_epilogue)

    def allreduce_and_scatter(self, bucket: Any, communication_data_type: torch.dtype, **kwargs: Any) -> None:
        original, config = super().allreduce_and_scatter, self.fp8.context.config
        if config.zero.reduce_scatter == "bf16":
            original(bucket, communication_data_type, **kwargs)
        else:
            reduce_and_scatter(self, self.fp8.context.counter, original, bucket, communication_data_type, **kwargs)

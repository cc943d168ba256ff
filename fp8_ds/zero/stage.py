"""Inputs of a stage: protocols of DeepSpeed's optimizers (`ZeroHost` for all stages, `Host12`, `Host3`), as far as they
are read, and the engine's `Fp8Context`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8_ds.comm.collectives import ByteCounter
from fp8_ds.config import Fp8Config
from fp8_ds.nn.linear.payload import Granularity, granularity_of
from fp8_ds.nn.linear.stored import StoredScales
from fp8_ds.nn.plan.plan import Plan
from fp8_ds.numerics.scale import AmaxHistory

if TYPE_CHECKING:
    from fp8_ds.engine.precision import LayerPrecision
    from fp8_ds.zero.release import ReleaseUpdater


@dataclass
class Fp8Context:
    """Configuration and shared objects of one engine.

    A weight counts as trainable if it was so at the start: one that a user freezes later keeps its master.

    Args:
        weights: name -> Parameter of every converted weight, in module order.
        history: amax histories of the recipe `delayed`, else None.
        check_overflow: `bf16.check_grad_overflow`.
        release: updates weights during the backward; None without gradient release.
        precision: which layers compute in bf16; None until the engine is built.
        started_with: the configuration before a checkpoint has changed it; None if none has.
        stored: scales of weights that came in FP8, by id of the Parameter, in FP8 or not. The data of frozen weights in
            FP8 are their bytes, in uint8, until `fp8_init`; bf16 of the others.
    """

    config: Fp8Config
    plan: Plan
    weights: dict[str, nn.Parameter]
    history: AmaxHistory | None = None
    counter: ByteCounter = field(default_factory=ByteCounter)
    check_overflow: bool = True
    release: ReleaseUpdater | None = None
    precision: LayerPrecision | None = None
    started_with: Fp8Config | None = None
    stored: dict[int, StoredScales] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trainable = frozenset(name for name, p in self.weights.items() if p.requires_grad)

    @property
    def granularity(self) -> Granularity:
        """Elements of a weight that share a scale."""
        linear, is_split = self.config.linear, self.config.optimizer.states == "fp8"
        return granularity_of(linear.recipe, is_split=is_split, is_pow2=linear.weight_scales == "power_of_two")

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weights.items() if name in self._trainable}

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.weights.items() if name not in self._trainable}

    @property
    def quantized(self) -> dict[str, nn.Parameter]:
        """Weights that this engine quantises: not the frozen ones that came in FP8."""
        frozen = self.frozen
        return {name: p for name, p in self.weights.items() if name not in frozen or id(p) not in self.stored}

    def first_scales(self, parameters: Iterable[nn.Parameter]) -> dict[int, Tensor]:
        """Return scale_inv of those of `parameters` that came in FP8 with scales as this engine's, by index."""
        is_pow2 = self.granularity.is_pow2 or self.config.optimizer.states == "fp8"
        own, stored = replace(self.granularity, is_pow2=is_pow2), [self.stored.get(id(p)) for p in parameters]
        grids = {index: one.as_grid(own) for index, one in enumerate(stored) if one is not None}
        return {index: grid for index, grid in grids.items() if grid is not None}


class ZeroHost(Protocol):
    """Attributes that are read or set of the optimizer of any stage, and methods that are called or overridden."""

    optimizer: Any
    """The inner optimizer, over flat masters."""
    dtype: torch.dtype
    dp_process_group: dist.ProcessGroup
    model_parallel_group: dist.ProcessGroup | None
    model_parallel_rank: int
    clip_grad: float
    loss_scale: float
    overflow: bool
    timers: Any
    offloaded_states: set[Any]
    reduce_bucket_size: int
    param_names: Mapping[Any, str]
    gradient_accumulation_dtype: torch.dtype
    averaged_gradients: dict[int, Any]
    """Reduced gradients of this rank: of a parameter group's partition (1, 2), or of a sub-group's shards (3)."""
    _global_grad_norm: Any

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def _model_parallel_all_reduce(self, tensor: Tensor, op: Any) -> None: ...
    def _update_scale(self, overflow: bool) -> None: ...
    def step(self, closure: Any = None) -> None: ...
    def load_state_dict(self, *args: Any, **kwargs: Any) -> None: ...
    def offload_states(self, include: Any = None, device: Any = None, **kwargs: Any) -> None: ...
    def reload_states(self, non_blocking: bool = False) -> None: ...
    def _restore_from_bit16_weights(self) -> None: ...


class Host12(ZeroHost, Protocol):
    """DeepSpeedZeroOptimizer.

    Lists have an entry for each parameter group. *Partition*: a rank's equal part of a group's flat tensor.
    """

    bit16_groups: list[list[Any]]
    """Parameters in the order in which they were given."""
    round_robin_bit16_groups: list[list[Any]]
    """Parameters in the order of the flat tensor."""
    bit16_groups_flat: list[Tensor]
    parallel_partitioned_bit16_groups: list[list[Tensor]]
    single_partition_of_fp32_groups: list[Any]
    """Masters of this rank's partition, float32."""
    partition_size: list[int]
    params_in_partition: list[list[Any]]
    params_not_in_partition: list[list[Any]]

    all_grad_tensors: dict[int, Any]
    offload_gradient_dict: Any
    ipg_buckets: Mapping[Any, Any]
    params_already_reduced: list[bool]
    reduction_stream: Any
    overlap_comm: bool
    round_robin_gradients: bool
    use_grad_accum_attribute: bool
    gradient_predivide_factor: float

    real_dp_process_group: list[dist.ProcessGroup]

    check_grad_overflow: bool
    micro_step_id: int
    _hp_optimizer_states_linked: bool
    _epilogue_ran_this_backward: bool

    def setup_buckets(self) -> None: ...
    def process_gradients(self, param: Any, i: int) -> None: ...
    def reduce_ready_partitions_and_remove_grads(self, param: Any, i: int) -> None: ...
    def reduce_ipg_grads(self, comm_dtype: Any = None) -> None: ...
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None: ...
    def copy_grads_in_partition(self, param: Any, group_idx: int | None = None) -> None: ...
    def independent_gradient_partition_epilogue(self) -> None: ...
    def overlapping_partition_gradients_reduce_epilogue(self) -> None: ...
    def allreduce_and_scatter(self, bucket: Any, communication_data_type: Any, **kwargs: Any) -> None: ...
    def get_gradient_for_reduction(self, param: Any) -> Tensor: ...
    def clear_grad_attribute(self, param: Any) -> None: ...
    def _lazy_init_hp_params_optimizer_state(self) -> None: ...
    def _link_all_hp_params(self) -> None: ...
    def _get_groups_without_padding(self, groups: Any) -> Any: ...
    def _clear_previous_reduced_grads(self) -> None: ...
    def _clear_param_grad_only(self) -> None: ...
    def _release_ipg_buffers(self) -> None: ...


class Host3(ZeroHost, Protocol):
    """DeepSpeedZeroOptimizer_Stage3.

    Lists have an entry for each *sub-group*, parameters whose masters are one flat tensor.
    """

    module: nn.Module
    persistent_parameters: list[Any]
    """Parameters that stay gathered."""
    fp16_groups: list[list[Any]]
    fp16_partitioned_groups_flat: list[Tensor]
    """Shards of a sub-group, bf16, one behind the other."""
    fp16_partitioned_groups_flat_numel: list[int]
    fp32_partitioned_groups_flat: list[Any]
    """Masters of these shards, float32."""
    lp_param_buffer: Tensor
    """Memory of all of `fp16_partitioned_groups_flat`."""
    sub_group_to_group_id: Mapping[int, int]
    reduce_and_partition_stream: Any

    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> list[Tensor]: ...
    def set_full_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None: ...
    def set_local_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None: ...
    def _pre_step(self) -> None: ...
    def _post_step(self, timer_names: Any) -> None: ...
    def _partition_all_parameters(self) -> None: ...
    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None: ...
    def _rigid_state_dict(self) -> dict[str, Any]: ...
    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any: ...
    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> Any: ...
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]: ...

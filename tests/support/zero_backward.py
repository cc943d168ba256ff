"""Stub hosts with as much of DeepSpeed's backward as gradients need on their way to the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.config import Fp8Config
from fp8_ds.zero.stage3 import Fp8ZeroStage3
from fp8_ds.zero.stage12 import Fp8ZeroStage12
from support.zero_hosts import Host3, Host12, values_of

Shapes = dict[str, tuple[int, ...]]


class _Backward12(Host12):
    """One bucket, of which the gradients, whole in `p.grad`, are averaged over the ranks.

    Attributes:
        reached: DeepSpeed's own methods that have run.
        reduced: names of the parameters of each bucket.
    """

    reduce_bucket_size, overlap_comm = 3000, True
    reduction_stream = None

    def make(self, values: dict[str, Tensor], has_states: bool) -> None:
        super().make(values, has_states)
        self.reached: list[str] = []
        self.reduced: list[list[str]] = []
        self.ipg_buckets = {torch.bfloat16: SimpleNamespace(params=[], elements=0)}
        self.params_already_reduced = [False] * len(values)

    def setup_buckets(self) -> None:
        self.reached.append("setup_buckets")

    def process_gradients(self, param: Any, i: int) -> None:
        self.reached.append("process_gradients")

    def reduce_ready_partitions_and_remove_grads(self, param: Any, i: int) -> None:
        self.reached.append("reduce_ready_partitions_and_remove_grads")
        bucket, index = self.ipg_buckets[torch.bfloat16], [p is param for p in self.bit16_groups[i]].index(True)
        if bucket.elements + param.numel() > self.reduce_bucket_size:
            self.reduce_ipg_grads(comm_dtype=torch.bfloat16)
        bucket.params.append((i, index, index))
        bucket.elements += param.numel()

    def reduce_ipg_grads(self, comm_dtype: Any = None) -> None:
        self.reached.append("reduce_ipg_grads")
        bucket = self.ipg_buckets[torch.bfloat16]
        params = [self.bit16_groups[i][index] for i, index, _ in bucket.params]
        for p in params:
            total = p.grad.float()
            dist.all_reduce(total)
            p.grad.copy_(total / dist.get_world_size())
            if self.param_names[p] in self.parts:
                self.copy_grads_in_partition(p)
        if params:
            self.reduced.append([self.param_names[p] for p in params])
        bucket.params, bucket.elements = [], 0

    def copy_grads_in_partition(self, param: Any, group_idx: Any = None) -> None:
        self.reached.append("copy_grads_in_partition")

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        self.reached.append("reduce_gradients")

    def independent_gradient_partition_epilogue(self) -> None:
        self.reached.append("independent_gradient_partition_epilogue")

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        self.independent_gradient_partition_epilogue()

    def allreduce_and_scatter(self, bucket: Any, communication_data_type: Any, divide: bool = True) -> None:
        self.reached.append("allreduce_and_scatter")

    def get_gradient_for_reduction(self, param: Any) -> Any:
        return param.grad

    def clear_grad_attribute(self, param: Any) -> None:
        param.grad = None

    _clear_previous_reduced_grads = _release_ipg_buffers = _clear_param_grad_only = lambda self: None


class _Backward3(Host3):
    def make(self, values: dict[str, Tensor], has_states: bool) -> None:
        super().make(values, has_states)
        self.reached: list[str] = []

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> list[Tensor]:
        self.reached.append("partition_grads")
        return grad_partitions

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(self, params: list[Any], dtype: torch.dtype) -> str:
        return "DeepSpeed's"

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> str:
        return "a gradient"


class _Zero12(Fp8ZeroStage12, _Backward12):
    pass


class _Zero3(Fp8ZeroStage3, _Backward3):
    pass


def zero_with_backward(stage: int, shapes: Shapes, **block: Any) -> Any:
    """As `zero_hosts.zero_optimizer`."""
    kind: type = _Zero3 if stage == 3 else _Zero12
    return kind(values_of(shapes), Fp8Config.from_block({"enabled": True, "preset": None, **block}), {})


def backward(zero: Any, gradients: dict[str, Tensor]) -> None:
    """What a backward leaves of `gradients`, the same on all ranks, in that order; its end included."""
    for name, grad in gradients.items():
        p = zero.params[name]
        if hasattr(p, "ds_id"):
            give_shards(zero, {name: grad})
        else:
            p.grad = grad.clone()
            zero.process_gradients(p, 0)
    if not hasattr(p, "ds_id"):
        zero.reduce_gradients()


def give_shards(zero: Any, gradients: dict[str, Tensor]) -> list[Tensor]:
    """A bucket of ZeRO-3, reduced: this rank's shards, padded, for `partition_grads`."""
    params, num_ranks = [zero.params[name] for name in gradients], dist.get_world_size()
    parts = []
    for p, grad in zip(params, gradients.values(), strict=True):
        whole = torch.zeros(p.ds_numel_aligned, dtype=torch.bfloat16)
        whole[: grad.numel()] = grad.flatten()
        parts.append(whole.chunk(num_ranks)[dist.get_rank()])
        p.grad = torch.zeros(0, dtype=torch.bfloat16)
    left: list[Tensor] = zero.partition_grads(params, parts)
    return left

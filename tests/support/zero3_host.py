"""Parameters as ZeRO-3 leaves them, without DeepSpeed's engine: shards, closures and their status."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from fp8_ds.comm.collectives import ByteCounter
from fp8_ds.nn.linear.payload import TENSOR
from fp8_ds.nn.linear.weight_quantizer import Part, WeightQuantizer
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import scale_from_amax
from fp8_ds.ops.quantize import quantize
from fp8_ds.zero.param_hooks import InFlight, ZeroParamHooks
from fp8_ds.zero.sharded import Fp8Shards, ShardedWeight
from support.inputs import many_scales


def sharded_parameter(number: int, value: Tensor) -> Any:
    """A bf16 parameter of which this rank holds an equal part, padded; its closures gather and free it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    numel = -(-value.numel() // num_ranks)
    padded = torch.zeros(num_ranks * numel)
    padded[: value.numel()] = value.flatten()
    p: Any = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    p.ds_id, p.ds_shape, p.ds_numel, p.ds_numel_aligned = number, value.shape, value.numel(), num_ranks * numel
    p.ds_tensor = padded[rank * numel : (rank + 1) * numel].bfloat16()
    p.ds_tensor.ds_numel = numel
    p.ds_status, p.ds_process_group, p.ds_active_sub_modules = ZeroParamStatus.NOT_AVAILABLE, dist.group.WORLD, set()
    p.ds_summary = lambda: f"parameter {number} is {p.ds_status}"

    def all_gather(params: list[Any], async_op: bool = False, hierarchy: int = 0) -> None:
        for one in params:
            if one.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                whole = torch.empty(one.ds_numel_aligned, dtype=torch.bfloat16)
                dist.all_gather_into_tensor(whole, one.ds_tensor.data.contiguous())
                with torch._C.DisableTorchFunctionSubclass():
                    one.data = whole[: one.ds_numel].view(one.ds_shape)
                one.ds_status = ZeroParamStatus.AVAILABLE

    def partition(params: Any, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True) -> None:
        for one in params:
            if one.ds_active_sub_modules:
                raise RuntimeError("still active")
            with torch._C.DisableTorchFunctionSubclass():
                if has_been_updated:
                    whole = torch.zeros(one.ds_numel_aligned, dtype=torch.bfloat16)
                    whole[: one.ds_numel] = one.data.flatten()
                    one.ds_tensor.data.copy_(whole[rank * one.ds_tensor.ds_numel :][: one.ds_tensor.ds_numel])
                one.data = torch.empty(0, dtype=torch.bfloat16)
            one.ds_status = ZeroParamStatus.NOT_AVAILABLE

    p.all_gather, p.partition = all_gather, partition
    p.all_gather_coalesced = lambda params, safe_mode=False, quantize=False: _Gathered(all_gather, params)
    return p


class _Gathered:
    def __init__(self, gather: Any, params: list[Any]) -> None:
        self.gather, self.params = gather, params

    def wait(self, **keys: Any) -> None:
        self.gather(self.params)


def refresh(shards: Any) -> None:
    """What a step does with new masters."""
    shards.scales.requantize(is_step=True)
    shards.refresh_bf16()


def fp8_shards(params: list[Any], masters: list[Tensor], num_fp8: int) -> Fp8Shards:
    """The first `num_fp8` of `params` in FP8, quantised from their float32 `masters`, one behind the other."""
    counter, group, module = ByteCounter(), params[0].ds_process_group, nn.Module()
    module.ds_inflight_param_registry = {}  # type: ignore[assignment]
    chosen = params[:num_fp8]
    quantizer = WeightQuantizer(group, [p.ds_shape for p in chosen], TENSOR, torch.device("cpu"), None, counter)
    shards = Fp8Shards(quantizer, counter, InFlight(module))
    flat = torch.zeros(sum(p.ds_tensor.ds_numel for p in chosen), dtype=E4M3.dtype)
    sizes = [p.ds_tensor.ds_numel for p in chosen]
    for index, (p, master, shard) in enumerate(zip(chosen, masters, flat.split(sizes), strict=False)):
        weight = ShardedWeight(f"weight{index}", p, index, quantizer)
        weight.shard = shard
        weight.point(weight.elements.narrow(master.flatten()).clone())
        shards.add(weight)
    quantizer.set_parts([Part(w.source, w.own_bytes, w.elements.start) for w in shards.weights])
    refresh(shards)
    for weight in shards.weights:
        weight.drop_bf16()
    return shards


SHAPES = [(3, 5), (4, 8), (1, 7), (6, 2)]
NUM_FP8 = 3
"""The last one stays in bf16."""


def shard_masters() -> list[Tensor]:
    return [many_scales("per_row", *shape, seed=i) for i, shape in enumerate(SHAPES)]


def hooked_shards() -> tuple[list[Any], Any]:
    params = [sharded_parameter(i, value.bfloat16().float()) for i, value in enumerate(shard_masters())]
    shards = fp8_shards(params, shard_masters(), NUM_FP8)
    for p in params:
        ZeroParamHooks(p, shards)
    return params, shards


def whole_bytes(index: int) -> Tensor:
    """Bytes of the whole master, by definition."""
    master = shard_masters()[index]
    return quantize(master, scale_from_amax(master.abs().max(), E4M3.max)[0], E4M3).view(torch.uint8)

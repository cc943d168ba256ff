"""ZeRO-3's persistent parameters, which stay gathered: all of them anew after a step."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from fp8_ds.zero.sharded import Fp8Shards


def gather_persistent(shards: Fp8Shards, params: list[Any]) -> None:
    """Gather what is not available, FP8 weights in FP8 and the rest in its shards' dtype. Collective.

    Stock code comes to the same bits with some four launches a parameter, 6 ms of the host (an H200's) for the norms of
    a Llama-3-8B, while the device has nothing to do.
    """
    shards.wait_until_ready()
    if weights := shards.fetched_in_fp8(params):
        shards.gather(weights).wait()
    alike: dict[Any, list[Any]] = {}  # in the order of `params`, which is that of all ranks
    for p in shards.fetched_by_stock(params):
        alike.setdefault((p.ds_process_group, p.ds_tensor.dtype), []).append(p)
    for some in alike.values():
        shards.counter.hp += _gather(some)


@torch.no_grad()
def _gather(params: list[Any]) -> int:
    """Of one process group and dtype, in one collective; bytes that arrive."""
    group = params[0].ds_process_group
    num_ranks = ds_comm.get_world_size(group=group)
    sizes = [p.ds_tensor.ds_numel for p in params]
    local = torch.cat([p.ds_tensor.data for p in params])
    buffer, num_bytes = local, 0
    if num_ranks > 1:
        buffer = local.new_empty(num_ranks * local.numel())
        ds_comm.allgather_fn(buffer, local, group=group)
        num_bytes = buffer.numel() * buffer.element_size()
    whole = [buffer.new_empty(num_ranks * size) for size in sizes]
    by_rank = [one.view(num_ranks, -1) for one in whole]
    torch.split_with_sizes_copy(buffer.view(num_ranks, -1), sizes, dim=1, out=by_rank)
    for p, one in zip(params, whole, strict=True):
        p.data = one[: p.ds_numel].view(p.ds_shape)
        p.ds_status = ZeroParamStatus.AVAILABLE
    return num_bytes

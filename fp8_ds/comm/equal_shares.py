"""Reduce-scatter of tensors that are each cut into equal shares, as ZeRO-3 has them, in few launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from torch import Tensor

from fp8_ds.comm.equal_parts import equal_shares


@torch.no_grad()
def reduce_scatter_shares(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """DeepSpeed's `reduce_scatter_coalesced`, bit for bit: this rank's share of the average of each tensor. Collective.

    Stock makes a tensor of each share of each tensor, for hundreds of ranks more than a backward launches otherwise
    (docs/reliability.md). Here torch cuts all tensors at once (`_chunk_cat`, which FSDP2 packs gradients with).

    Args:
        tensors: contiguous, of one dtype and device, of the same sizes on all ranks. A single one that needs no padding
            is divided in place, as in stock.

    Returns:
        1-D, without padding: shorter or empty on the last ranks.
    """
    numels = [tensor.numel() for tensor in tensors]
    if not any(numels):
        return [tensor.view(-1) for tensor in tensors]
    num_ranks, rank = ds_comm.get_world_size(group), ds_comm.get_rank(group)
    shares, sizes = equal_shares(numels, num_ranks, rank)
    if len(tensors) == 1 and numels[0] % num_ranks == 0:
        whole = tensors[0].view(-1)
    else:
        whole = torch._chunk_cat([tensor.view(-1) for tensor in tensors if tensor.numel()], 0, num_ranks).view(-1)
    whole.div_(num_ranks)
    own = whole.view(num_ranks, -1)[rank]
    ds_comm.reduce_scatter_fn(own, whole, group=group)
    return [part[:size] for part, size in zip(own.split(shares), sizes, strict=True)]

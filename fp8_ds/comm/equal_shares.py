"""Reduce-scatter of tensors that are each split into equal shares, as in ZeRO-3, in few launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from torch import Tensor

from fp8_ds.comm import grouped
from fp8_ds.comm.reduce_scatter import equal_shares


@torch.no_grad()
def reduce_scatter_shares(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, places: Sequence[Tensor | None] = ()
) -> list[Tensor]:
    """Average each tensor over the ranks and return this rank's shares. Collective.

    It replaces DeepSpeed's `reduce_scatter_coalesced`, which makes a tensor for each share of each tensor; with
    hundreds of ranks these are more launches than the rest of the backward (docs/reliability.md). Here large tensors
    that divide equally are sent in place, and torch splits the others in one launch (`_chunk_cat`, as FSDP2 packs
    gradients).

    With two ranks the result has the bits of DeepSpeed's, over NCCL except for subnormal numbers
    (`_is_divided_by_backend`). With more ranks the order of additions may depend on how gradients are split. Several
    tensors are not written to: autograd may hand out one storage as the gradients of two parameters.

    Args:
        tensors: contiguous, of one dtype and device, of the same sizes on all ranks. A single one that needs no padding
            is written to, as in DeepSpeed, unless it has a place.
        places: for each tensor the memory that its share may be written to (1-D, contiguous), which saves a copy.

    Returns:
        1-D shares without padding, shorter or empty on the last ranks. A share written to its place is that tensor.
    """
    numels = [tensor.numel() for tensor in tensors]
    if not any(numels):
        return [tensor.view(-1) for tensor in tensors]
    num_ranks, rank = ds_comm.get_world_size(group), ds_comm.get_rank(group)
    shares, sizes = equal_shares(numels, num_ranks, rank)
    used = [index for index, numel in enumerate(numels) if numel]
    equal = [index for index in used if numels[index] % num_ranks == 0]
    num_bytes = sum(tensors[index].nbytes for index in equal) // num_ranks
    if len(used) > 1 and not grouped.is_worth_it(len(equal), num_bytes):
        equal = []
    wholes = [tensors[index].view(-1) for index in equal]
    if cut := sorted({*used} - {*equal}):
        wholes.append(torch._chunk_cat([tensors[index].view(-1) for index in cut], 0, num_ranks).view(-1))
    op = dist.ReduceOp.AVG
    if not _is_divided_by_backend(wholes[0], num_ranks, group):
        op = dist.ReduceOp.SUM
        if len(wholes) == 1:
            wholes[0].div_(num_ranks)
        else:
            wholes = list(torch._foreach_div(wholes, num_ranks))
    places = places or [None] * len(tensors)
    own_places = [_place(places[index], tensors[index], num_ranks) for index in equal] + [None] * bool(cut)
    if len(wholes) == 1:
        owns = [wholes[0].view(num_ranks, -1)[rank] if own_places[0] is None else own_places[0]]
        ds_comm.reduce_scatter_fn(owns[0], wholes[0], op=op, group=group)
    else:
        owns = [
            whole.new_empty(whole.numel() // num_ranks) if place is None else place
            for whole, place in zip(wholes, own_places, strict=True)
        ]
        grouped.reduce_scatter_each(owns, wholes, op, group)
    found = dict(zip(equal, owns, strict=False))
    if cut:
        found |= zip(cut, owns[-1].split([shares[index] for index in cut]), strict=True)
    return [found[i][: sizes[i]] if i in found else tensor.view(-1) for i, tensor in enumerate(tensors)]


def _place(place: Tensor | None, whole: Tensor, num_ranks: int) -> Tensor | None:
    """Return `place` if this rank's share of `whole` may be written there, else None.

    NCCL moves a buffer that is not aligned to 16 bytes one element at a time: copying the result is faster.
    """
    if place is None or (place.dtype, place.device) != (whole.dtype, whole.device) or place.data_ptr() % 16:
        return None
    return place if place.numel() * num_ranks == whole.numel() else None


def _is_divided_by_backend(tensor: Tensor, num_ranks: int, group: dist.ProcessGroup | None) -> bool:
    """Whether a reduction may average with a division's bits, except for subnormal numbers.

    NCCL 2.28.9 multiplies by 1 / num_ranks in one instruction with the addition: an odd multiple of the smallest
    number, which a division would round, is not rounded before the sum.
    """
    return tensor.is_cuda and num_ranks & (num_ranks - 1) == 0 and "nccl" in dist.get_backend(group)

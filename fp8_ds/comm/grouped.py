"""Collectives of several tensors in one launch, each sent and received in its own memory.

NCCL makes one kernel of them (gloo concatenates them); one buffer for all would cost the GPU another read and write of
every byte. DeepSpeed's own ways past NCCL, such as DS_COMM_REDUCE_SCATTER_OFF, are not consulted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.logged import booked

MIN_BYTES = 2**20
"""Smallest mean size of a rank's share of a tensor. Smaller shares travel better in one message: a collective takes a
step for each rank, however small its share."""


def is_worth_it(num_tensors: int, num_bytes: int) -> bool:
    """Whether sending each tensor by itself is better than one buffer; the same on all ranks.

    It is false with TORCH_DISTRIBUTED_DEBUG=DETAIL, whose groups have no such collectives in torch 2.11.

    Args:
        num_bytes: total size of this rank's shares.
    """
    if num_tensors < 2 or num_bytes < MIN_BYTES * num_tensors:
        return False
    return bool(dist.get_debug_level() != dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def all_gather_each(wholes: Sequence[Tensor], owns: Sequence[Tensor], group: dist.ProcessGroup) -> Any:
    """Start gathering every rank's `owns` into `wholes` (1-D, contiguous), in rank order, and return the handle."""
    _check(wholes, owns, group)
    # torch >= 2.12 renamed it; torch 2.11 has the old name only.
    gather = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    num_bytes = sum(own.nbytes for own in owns)
    return booked("all_gather_into_tensor", num_bytes, lambda: gather(list(wholes), list(owns)))


def reduce_scatter_each(
    owns: Sequence[Tensor], wholes: Sequence[Tensor], op: Any, group: dist.ProcessGroup | None
) -> None:
    """Reduce all ranks' `wholes` (1-D, contiguous); each of `owns` gets this rank's equal part of one."""
    group = group or dist.group.WORLD
    assert group is not None
    _check(wholes, owns, group)
    scatter = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    num_bytes = sum(whole.nbytes for whole in wholes)
    booked("reduce_scatter_tensor", num_bytes, lambda: scatter(list(owns), list(wholes), options).wait())


def _check(wholes: Sequence[Tensor], owns: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Check the sizes, which torch does not: a wrong size would overwrite what lies behind a tensor."""
    num_ranks = group.size()
    for whole, own in zip(wholes, owns, strict=True):
        assert whole.numel() == num_ranks * own.numel() and whole.is_contiguous() and own.is_contiguous()

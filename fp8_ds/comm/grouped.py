"""Collectives of several tensors in one launch, each straight from where it lies to where it is wanted.

NCCL makes one kernel of them (gloo concatenates them): a buffer for all of them would take the GPU a read and a write
of every byte more. DeepSpeed's own ways past NCCL, such as DS_COMM_REDUCE_SCATTER_OFF, are not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.logged import booked

MIN_BYTES = 2**20
"""Of a rank's share of a tensor, in the mean. Smaller shares are better one message for all: a collective takes a step
for each rank, however small its share."""


def is_worth_it(num_tensors: int, num_bytes: int) -> bool:
    """Whether tensors are better sent each by itself than in one buffer: the same on all ranks.

    Not with TORCH_DISTRIBUTED_DEBUG=DETAIL, whose groups have no such collectives in torch 2.11.

    Args:
        num_bytes: of this rank's shares of all of them.
    """
    if num_tensors < 2 or num_bytes < MIN_BYTES * num_tensors:
        return False
    return bool(dist.get_debug_level() != dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def all_gather_each(wholes: Sequence[Tensor], owns: Sequence[Tensor], group: dist.ProcessGroup) -> Any:
    """The handle of gathers under way: each of `wholes` (1-D, contiguous) gets every rank's `owns`, in rank order."""
    _check(wholes, owns, group)
    # torch >= 2.12 renamed it; torch 2.11 has the old name only.
    gather = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    num_bytes = sum(own.nbytes for own in owns)
    return booked("all_gather_into_tensor", num_bytes, lambda: gather(list(wholes), list(owns)))


def reduce_scatter_each(
    owns: Sequence[Tensor], wholes: Sequence[Tensor], op: Any, group: dist.ProcessGroup | None
) -> None:
    """Each of `owns` gets this rank's equal part of what all ranks' `wholes` (1-D, contiguous) are together."""
    group = group or dist.group.WORLD
    assert group is not None
    _check(wholes, owns, group)
    scatter = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    num_bytes = sum(whole.nbytes for whole in wholes)
    booked("reduce_scatter_tensor", num_bytes, lambda: scatter(list(owns), list(wholes), options).wait())


def _check(wholes: Sequence[Tensor], owns: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """torch looks at nothing in these calls: another size would overwrite what lies behind a tensor."""
    num_ranks = group.size()
    for whole, own in zip(wholes, owns, strict=True):
        assert whole.numel() == num_ranks * own.numel() and whole.is_contiguous() and own.is_contiguous()

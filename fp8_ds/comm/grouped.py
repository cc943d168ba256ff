"""Collectives of several tensors in one launch, each straight from where it lies to where it is wanted.

NCCL makes one kernel of them (gloo concatenates them). A buffer for all of them takes the GPU a read and a write of
every byte more, on multiprocessors that GEMMs are running on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.logged import is_logging

MIN_BYTES = 2**20
"""Of a rank's share of a tensor, in the mean. What hundreds of ranks share is better one message for all: a collective
takes a step for each rank, however small the share."""


def is_worth_it(num_tensors: int, num_bytes: int) -> bool:
    """Whether tensors are better sent each by itself than in one buffer.

    Not while DeepSpeed counts the calls of its own functions.

    Args:
        num_bytes: of this rank's shares of all of them.
    """
    return num_tensors > 1 and num_bytes >= MIN_BYTES * num_tensors and not is_logging()


def all_gather_each(wholes: Sequence[Tensor], owns: Sequence[Tensor], group: dist.ProcessGroup) -> Any:
    """The handle of gathers under way: each of `wholes` (1-D, contiguous) gets every rank's `owns`, in rank order."""
    return group.allgather_into_tensor_coalesced(list(wholes), list(owns))


def reduce_scatter_each(
    owns: Sequence[Tensor], wholes: Sequence[Tensor], op: Any, group: dist.ProcessGroup | None
) -> None:
    """Each of `owns` gets this rank's equal part of what all ranks' `wholes` (1-D, contiguous) are together."""
    group = group or dist.group.WORLD
    assert group is not None
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    group.reduce_scatter_tensor_coalesced(list(owns), list(wholes), options).wait()

"""Our larger collectives, visible to DeepSpeed's comms_logger, which counts calls of deepspeed.comm alone.

With the logger off, or without DeepSpeed (Megatron), they are torch's own calls.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch >= 2.12 renamed it; torch 2.11 has the old name only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _logging() -> Any:
    """Return DeepSpeed's collectives while its logger is on, else None."""
    if torch.compiler.is_compiling():
        return None
    theirs = sys.modules.get("deepspeed.comm.comm")
    return theirs if theirs is not None and theirs.comms_logger.enabled else None


def booked(name: str, num_bytes: int, call: Callable[[], Any]) -> Any:
    """Run `call`, which issues one collective past deepspeed.comm, and log it while the logger is on.

    With the logger on it waits for the device, as the logger does after each of DeepSpeed's own collectives.

    Args:
        name: deepspeed.comm's name of that kind of collective.
        num_bytes: size as the logger counts it.
    """
    if (theirs := _logging()) is None:
        return call()
    from deepspeed.accelerator import get_accelerator

    start = time.perf_counter()
    result = call()
    get_accelerator().synchronize()
    if theirs.comms_logger.prof_all or name in theirs.comms_logger.prof_ops:
        theirs.comms_logger.append(name, name, 1e3 * (time.perf_counter() - start), num_bytes)
    return result


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's `own` into `whole` (1-D), in rank order; `own` may lie in it."""
    gather = _all_gather if (theirs := _logging()) is None else theirs.all_gather_into_tensor
    gather(whole, own, group=group)


def broadcast(values: Tensor, src: int, group: dist.ProcessGroup) -> Any:
    """Start a broadcast from the global rank `src` and return its handle."""
    return (_logging() or dist).broadcast(values, src=src, group=group, async_op=True)


def max_reduce(group: dist.ProcessGroup, values: Tensor) -> None:
    """All-reduce `values` in place with MAX; nothing is sent in a group of one, or if there is nothing to send."""
    if dist.get_world_size(group) > 1 and values.numel() > 0:
        theirs = _logging() or dist
        theirs.all_reduce(values, op=theirs.ReduceOp.MAX, group=group)


def all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup,
    received_sizes: Sequence[int] | None = None,
    sent_sizes: Sequence[int] | None = None,
) -> None:
    """Send each rank its part of `sent`, and receive into `received`; parts are equal without sizes."""
    (_logging() or dist).all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)

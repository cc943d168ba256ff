"""Our larger collectives, visible to DeepSpeed's comms_logger, which counts calls of deepspeed.comm alone.

With the logger off, or without DeepSpeed (Megatron), they are torch's own calls. Collectives of several tensors in one
launch (`..._each`) send and receive each in its own memory: NCCL makes one kernel of them (gloo concatenates them), and
one buffer for all would cost the GPU another read and write of every byte. DeepSpeed's own ways past NCCL, such as
DS_COMM_REDUCE_SCATTER_OFF, are not consulted there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.numerics.scale import amax_of

# torch >= 2.12 renamed it; torch 2.11 has the old name only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
MIN_BYTES = 2**20
"""Smallest mean size of a rank's share of a tensor. Smaller shares travel better in one message: a collective takes a
step for each rank, however small its share."""


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


def reduced_amaxes(num: int, sources: list[tuple[int, Tensor]], group: dist.ProcessGroup, device: Any) -> Tensor:
    """Return float32 [num]: the largest magnitude of every weight over all ranks. Collective.

    Args:
        sources: (weight, a piece of its values) as this rank holds them, any float dtype and device; pieces of no
            elements are allowed.
    """
    amaxes = torch.zeros(num, dtype=torch.float32, device=device)
    for index, piece in sources:
        if piece.numel():
            amaxes[index] = torch.maximum(amaxes[index], amax_of(piece).to(device))
    max_reduce(group, amaxes)
    return amaxes


def all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup,
    received_sizes: Sequence[int] | None = None,
    sent_sizes: Sequence[int] | None = None,
) -> None:
    """Send each rank its part of `sent`, and receive into `received`; parts are equal without sizes."""
    (_logging() or dist).all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)


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


@dataclass
class ByteCounter:
    """Bytes that our gathers delivered to this rank in the current step, its own share included.

    `fp8` counts weight bytes, `hp` those of the bf16 side channel. `reduced` counts the bytes that this rank handed to
    FP8 reduce-scatters in all micro-batches, its own share included; a skipped step's count with the next step's.
    `last` holds the counts of the finished step.
    """

    fp8: int = 0
    hp: int = 0
    reduced: int = 0
    num_amax_reduces: int = 0
    last: ByteCounter | None = None

    @property
    def total(self) -> int:
        return self.fp8 + self.hp

    def end_step(self) -> None:
        """Move the counts to `last` and start from zero."""
        self.last = ByteCounter(self.fp8, self.hp, self.reduced, self.num_amax_reduces)
        self.fp8 = self.hp = self.reduced = self.num_amax_reduces = 0

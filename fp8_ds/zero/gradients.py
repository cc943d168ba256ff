"""Gradients on their way to the step: DeepSpeed's buckets and shards, one rank, release; reduction in FP8.

Each class has a method for each of DeepSpeed's that one of them replaces. `original` is DeepSpeed's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

from fp8_ds.comm.collectives import ByteCounter
from fp8_ds.comm.reduce_scatter import reduce_scatter_fp8, reduce_scatter_fp8_shares
from fp8_ds.errors import UnsupportedError
from fp8_ds.zero.release import NO_GRADIENT, ReleaseUpdater, bucket_size
from fp8_ds.zero.stage import Host3, Host12

Original = Callable[..., None]


class BucketedGradients:
    """DeepSpeed's buckets: its methods run as they are."""

    def __init__(self, host: Host12) -> None:
        self._host = host

    def link(self) -> None:
        """Do nothing: DeepSpeed has linked readers of gradients to what is reduced."""

    def setup_buckets(self, original: Original) -> None:
        original()

    def process(self, original: Original, param: Any, i: int) -> None:
        original(param, i)

    def reduce_ready(self, original: Original, param: Any, i: int) -> None:
        original(param, i)

    def reduce_bucket(self, original: Original, comm_dtype: Any) -> None:
        original(comm_dtype=comm_dtype)

    def reduce_all(self, original: Original, pipeline_parallel: bool) -> None:
        original(pipeline_parallel=pipeline_parallel)

    def copy_in_partition(self, original: Original, param: Any, *args: Any) -> None:
        original(param, *args)

    def epilogue(self, original: Original) -> None:
        original()


class GradientsOfOneRank(BucketedGradients):
    """No bucket: a reduced gradient is the gradient itself.

    DeepSpeed then finds in `p.grad` what buckets would bring back there, and treats it as with any number of ranks.
    """

    def __init__(self, host: Host12) -> None:
        super().__init__(host)
        host.overlap_comm = False  # no stream of a reduction to wait for

    def setup_buckets(self, original: Original) -> None:
        pass

    def reduce_ready(self, original: Original, param: Any, i: int) -> None:
        pass

    def reduce_bucket(self, original: Original, comm_dtype: Any) -> None:
        pass

    def reduce_all(self, original: Original, pipeline_parallel: bool) -> None:
        self._host.overlapping_partition_gradients_reduce_epilogue()


def has_one_rank(host: Host12) -> bool:
    """Whether a reduced gradient is the gradient itself: no rank to sum with, no other dtype on the way."""
    return (
        all(dist.get_world_size(group) == 1 for group in host.real_dp_process_group)
        and not host.use_grad_accum_attribute
        and host.gradient_accumulation_dtype == host.dtype
        and host.gradient_predivide_factor == 1.0
    )


class ReleasedGradients(BucketedGradients):
    """Gradient release (zero/release.py): the reduction of a bucket is followed by its parameters' update.

    With `overlap_comm` updates run on the stream of the reduction.

    Args:
        updater: of the optimizer's shards.
    """

    def __init__(self, host: Host12, updater: ReleaseUpdater) -> None:
        super().__init__(host)
        copies = 3 if host.overlap_comm else 2  # one or two buckets, and what the reduction flattens
        host.reduce_bucket_size = min(host.reduce_bucket_size, bucket_size(copies, host.dtype))
        self._updater = updater
        self._ready: dict[str, Tensor] = {}
        self.link()

    def link(self) -> None:
        """Make readers of gradients raise on all ranks; DeepSpeed's own raise on the owners, while the others wait."""
        for p in (p for group in self._host.bit16_groups for p in group):
            p.get_full_hp_grad = p.set_full_hp_grad = functools.partial(_no_gradient, self._host.param_names[p])

    def process(self, original: Original, param: Any, i: int) -> None:
        """Put every gradient into a bucket at once, in stage 1 too."""
        host = self._host
        if getattr(host, "_coalesce_grad_reduction", False):  # since DeepSpeed 0.19.8
            return
        # Stage 1 of DeepSpeed's own empties no bucket after a micro-batch that does not end the step: it would find two
        # gradients of a parameter in one, and say nothing of release.
        self._updater.expect([host.param_names[param]])
        host.setup_buckets()
        host.reduce_ready_partitions_and_remove_grads(param, i)
        for dtype, bucket in host.ipg_buckets.items():
            # One gradient that is larger than a bucket: DeepSpeed would keep it until the next one is there.
            if bucket.elements > host.reduce_bucket_size:
                host.reduce_ipg_grads(comm_dtype=dtype)

    def reduce_all(self, original: Original, pipeline_parallel: bool) -> None:
        """Reduce the last bucket: all gradients are in buckets already, in stage 1 too."""
        self._host.overlapping_partition_gradients_reduce_epilogue()

    def copy_in_partition(self, original: Original, param: Any, *args: Any) -> None:
        """Remember this rank's part of a reduced gradient for the update of its bucket."""
        shard = param._hp_mapping.shard
        grad = self._host.get_gradient_for_reduction(param).reshape(-1).narrow(0, shard.start, shard.numel)
        self._ready[shard.name] = grad

    def reduce_bucket(self, original: Original, comm_dtype: Any) -> None:
        """Reduce a bucket, update its parameters on the same stream, and free its gradients."""
        host = self._host
        buckets = host.ipg_buckets.values() if comm_dtype is None else [host.ipg_buckets[comm_dtype]]
        params = [host.bit16_groups[i][index] for bucket in buckets for i, index, _ in bucket.params]
        grads = [host.get_gradient_for_reduction(p) for p in params]
        original(comm_dtype)
        if not params:
            return
        stream = host.reduction_stream if host.overlap_comm else get_accelerator().current_stream()
        with get_accelerator().stream(stream):
            if host.overlap_comm and not get_accelerator().is_synchronized_device():
                for grad in grads:  # those too large for the bucket's buffer are freed below
                    grad.record_stream(stream)
            names = [self._host.param_names[p] for p in params]
            self._updater.update(names, self._ready, host.param_groups, host.loss_scale)
        self._ready = {}
        for p in params:
            host.clear_grad_attribute(p)

    def epilogue(self, original: Original) -> None:
        """Run DeepSpeed's epilogue without the flat partition of gradients that its step would read."""
        host = self._host
        host.reduce_ipg_grads()
        for index in range(len(host.params_already_reduced)):
            host.params_already_reduced[index] = False
        if host.overlap_comm:
            if host.reduction_stream is not None:
                get_accelerator().current_stream().wait_stream(host.reduction_stream)
            host._clear_previous_reduced_grads()
        host._release_ipg_buffers()
        host._clear_param_grad_only()
        host._epilogue_ran_this_backward = True


def _no_gradient(name: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(f"gradient of {name}: {NO_GRADIENT}")


@torch.no_grad()
def reduce_and_scatter(
    host: Host12, counter: ByteCounter, original: Original, bucket: Any, dtype: torch.dtype, **kwargs: Any
) -> None:
    """Replace each rank's slices of a bucket, which is divided by the number of ranks, by the sum over ranks, in FP8.

    Only the transport is ours: DeepSpeed fills its buckets, calls this on the reduction's stream, and accumulates what
    comes back. Stage 1 is refused (Fp8Config.validate_with), because it reduces the running sum of the micro-batches.

    Args:
        bucket: (rank, slice of the bucket's buffer) in buffer order, from DeepSpeed 0.19.8 on ({rank}, slice, where to
            add the sum besides or None).
        dtype: names the bucket; messages are in FP8.
        kwargs: of DeepSpeed's method; `divide` is never on, for the buffer is divided by then.
    """
    group = kwargs.get("process_group") or host.dp_process_group
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if num_ranks == 1:
        original(bucket, dtype, **kwargs)
        return
    pieces: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    outputs: list[Tensor | None] = []
    for destination, piece, output in _slices(host, bucket, dtype):
        pieces[destination].append(piece)
        if destination == rank:
            outputs.append(output)
        if host.overlap_comm and not get_accelerator().resolves_data_dependency():
            piece.record_stream(host.reduction_stream)
    # The buffer's dtype: bf16, or float32 with "grad_accum_dtype": "fp32".
    sums, num_bytes = reduce_scatter_fp8(group, pieces, bucket[0][1].dtype, 1.0)
    for piece, output, total in zip(pieces[rank], outputs, sums, strict=True):
        if output is not None:
            output.add_(total)
        piece.copy_(total)
    counter.reduced += num_bytes


def _slices(host: Host12, bucket: Any, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield (destination, slice, output), with slices split where a parameter ends.

    DeepSpeed merges neighbours that go to one rank, but not everywhere on that rank itself: only the split makes
    slices, and with them the groups of 128, the same on all ranks.
    """
    left = [host.bit16_groups[i][index].numel() for i, index, _ in host.ipg_buckets[dtype].params]
    for ranks, piece, *outputs in bucket:
        destination = _destination(host, ranks)
        output, start = outputs[0] if outputs else None, 0
        while start < piece.numel():
            numel = min(left[0], piece.numel() - start)
            part = None if output is None else output.view(-1).narrow(0, start, numel)
            yield destination, piece.narrow(0, start, numel), part
            start += numel
            left[0] -= numel
            if left[0] == 0:
                del left[0]
    assert not left


def _destination(host: Host12, ranks: Any) -> int:
    """Return the one rank that needs a slice. If several do, all ranks raise, before the collective."""
    if not isinstance(ranks, (set, frozenset)):
        return int(ranks)
    if len(ranks) > 1:
        raise UnsupportedError(
            f'fp8.zero.reduce_scatter: expected "bf16" with {type(host.optimizer).__name__}, got "fp8": this '
            f'optimizer needs whole gradients on ranks {sorted(ranks)}. Set "reduce_scatter": "bf16".'
        )
    return int(next(iter(ranks)))


class ShardedGradients:
    """DeepSpeed's shards, added up in its buffer until the step."""

    def partition(self, original: Callable[..., list[Tensor]], params: list[Any], parts: list[Tensor]) -> list[Tensor]:
        return original(params, parts)

    def read(self, original: Callable[..., Any], param: Any, release_swap_buffers: bool) -> Any:
        return original(param, release_swap_buffers)

    def offload(self, include: Any) -> Any:
        """Return the states to be offloaded."""
        return include


class ReleasedGradientShards(ShardedGradients):
    """Gradient release (zero/release.py): the copy of a bucket's shards into their buffer becomes their update.

    Updates run on the stream of the reduction.
    """

    def __init__(self, host: Host3, updater: ReleaseUpdater) -> None:
        self._host = host
        self._updater = updater
        self._numels = {shard.name: shard.numel for shard in updater.core.shards}

    def partition(self, original: Callable[..., list[Tensor]], params: list[Any], parts: list[Tensor]) -> list[Tensor]:
        """Update the parameters of a bucket from their reduced shards, and free their gradients."""
        host = self._host
        names = [host.param_names[p] for p in params]
        pairs = zip(names, parts, strict=True)
        grads = {name: part.reshape(-1)[: self._numels[name]] for name, part in pairs if name in self._numels}
        self._updater.expect(names)
        self._updater.update(names, grads, host.optimizer.param_groups, host.loss_scale)
        for p in params:
            if p.grad is not None and not get_accelerator().is_synchronized_device():
                p.grad.record_stream(get_accelerator().current_stream())
            p.grad = None
        return []

    def read(self, original: Callable[..., Any], param: Any, release_swap_buffers: bool) -> Any:
        raise UnsupportedError(f"gradient of {self._host.param_names[param]}: {NO_GRADIENT}")

    def offload(self, include: Any) -> Any:
        """Return the states to be offloaded: not gradients, which have no buffer."""
        wanted = set(OffloadStateTypeEnum) if include is None else set(include)
        return wanted - {OffloadStateTypeEnum.lp_grads}


@torch.no_grad()
def average_and_scatter(
    host: Host3,
    counter: ByteCounter,
    original: Callable[..., list[Tensor]],
    params: list[Any],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return this rank's shard of each averaged gradient of a bucket, without padding, reduced in FP8.

    DeepSpeed fills the bucket, calls this on the stream of the reduction, and adds up what comes back. Its pre- and
    post-division keep 16-bit sums in range and have no counterpart: the sum here is in float64
    (`gradient_predivide_factor` is refused).

    Returns:
        in the accumulation dtype.
    """
    group = params[0].ds_process_group
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return original(params, dtype)
    grads = [p.grad.reshape(-1) for p in params]
    sums, num_bytes = reduce_scatter_fp8_shares(group, grads, host.gradient_accumulation_dtype, 1.0 / num_ranks)
    counter.reduced += num_bytes
    return sums

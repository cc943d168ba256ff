"""ZeRO-2 and 3 with gradients reduced in FP8. Seams: fp8_ds/engine/seams.py.

Only the transport is ours: DeepSpeed fills its buckets and accumulates what comes back. Stage 1 is refused
(Fp8Config.validate_with), because it reduces the running sum of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from fp8_ds.comm.reduce_scatter import reduce_scatter_fp8, reduce_scatter_fp8_shares
from fp8_ds.errors import UnsupportedError


class Fp8ReduceStage12:
    """Mix-in before Fp8ZeroStage12: reduces one bucket of gradients, already divided by the number of ranks."""

    @torch.no_grad()
    def allreduce_and_scatter(self: Any, bucket: Any, communication_data_type: torch.dtype, **kwargs: Any) -> None:
        """Replace each rank's slices of the bucket by the sum over ranks. DeepSpeed calls it on the reduction's stream.

        Args:
            bucket: (rank, slice of the bucket's buffer) in buffer order, from DeepSpeed 0.19.8 on ({rank}, slice,
                where to add the sum besides or None).
            communication_data_type: names the bucket; messages are in FP8.
            kwargs: of DeepSpeed's method; `divide` is never on, for the buffer is divided by then.
        """
        group = kwargs.get("process_group") or self.dp_process_group
        num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if num_ranks == 1:
            super().allreduce_and_scatter(bucket, communication_data_type, **kwargs)  # type: ignore[misc]
            return
        pieces: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        outputs: list[Tensor | None] = []
        for destination, piece, output in self._fp8_slices(bucket, communication_data_type):
            pieces[destination].append(piece)
            if destination == rank:
                outputs.append(output)
            if self.overlap_comm and not get_accelerator().resolves_data_dependency():
                piece.record_stream(self.reduction_stream)
        # The buffer's dtype: bf16, or float32 with "grad_accum_dtype": "fp32".
        sums, num_bytes = reduce_scatter_fp8(group, pieces, bucket[0][1].dtype, 1.0)
        for piece, output, total in zip(pieces[rank], outputs, sums, strict=True):
            if output is not None:
                output.add_(total)
            piece.copy_(total)
        self._fp8.counter.reduced += num_bytes

    def _fp8_slices(
        self: Any, bucket: Any, communication_data_type: torch.dtype
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yield (destination, slice, output), with slices split where a parameter ends.

        DeepSpeed merges neighbours that go to one rank, but not everywhere on that rank itself: only the split makes
        slices, and with them the groups of 128, the same on all ranks.
        """
        params = self.ipg_buckets[communication_data_type].params
        left = [self.bit16_groups[i][index].numel() for i, index, _ in params]
        for ranks, piece, *outputs in bucket:
            destination = self._fp8_destination(ranks)
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

    def _fp8_destination(self: Any, ranks: Any) -> int:
        """Return the one rank that needs a slice. If several do, all ranks raise, before the collective."""
        if not isinstance(ranks, (set, frozenset)):
            return int(ranks)
        if len(ranks) > 1:
            raise UnsupportedError(
                f'fp8.zero.reduce_scatter: expected "bf16" with {type(self.optimizer).__name__}, got "fp8": this '
                f'optimizer needs whole gradients on ranks {sorted(ranks)}. Set "reduce_scatter": "bf16".'
            )
        return int(next(iter(ranks)))


class Fp8ReduceStage3:
    """Mix-in before Fp8ZeroStage3: averages one bucket of gradients."""

    # The name under which DeepSpeed's private `__avg_scatter_grads` is looked up.
    @torch.no_grad()
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self: Any, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Return this rank's partition of each averaged gradient, without padding, in the accumulation dtype.

        DeepSpeed calls it on the stream of the reduction. Its pre- and post-division keep 16-bit sums in range and have
        no counterpart: the sum here is in float64 (`gradient_predivide_factor` is refused).
        """
        group = params_to_reduce[0].ds_process_group
        num_ranks = dist.get_world_size(group)
        if num_ranks == 1:
            return super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(  # type: ignore[misc]
                params_to_reduce, communication_data_type
            )
        grads = [p.grad.reshape(-1) for p in params_to_reduce]
        sums, num_bytes = reduce_scatter_fp8_shares(group, grads, self.gradient_accumulation_dtype, 1.0 / num_ranks)
        self._fp8.counter.reduced += num_bytes
        return sums

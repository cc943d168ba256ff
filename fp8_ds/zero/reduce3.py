"""ZeRO-3 with gradients reduced in FP8. Seams: fp8_ds/engine/seams.py.

Only the transport is ours: DeepSpeed fills its buckets and accumulates what comes back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.reduce_scatter import reduce_scatter_fp8_shares


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

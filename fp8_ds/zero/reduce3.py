"""ZeRO-3 with gradients reduced in FP8: mix-in before Fp8ZeroStage3. Seams: fp8_ds/engine/seams.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm.reduce_scatter import reduce_scatter_fp8_shares
from fp8_ds.zero.context import Fp8Context


class Fp8ReduceStage3:
    """Overrides what averages one bucket of gradients; DeepSpeed fills it and accumulates what comes back."""

    _fp8: Fp8Context

    # The name under which DeepSpeed's private `__avg_scatter_grads` is looked up.
    @torch.no_grad()
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self: Any, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """This rank's partition of each averaged gradient, without padding, in the accumulation dtype.

        Stock calls it on the stream of the reduction. Stock's pre- and post-division have no counterpart: they keep
        16-bit sums in range, and the sum here has float64's (`gradient_predivide_factor` is refused).
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

"""DeepSpeed's flops profiler, which by itself counts calls of torch's functions only, with the products of FP8 layers.

Modules in its own table of those that count themselves (`MODULE_HOOK_MAPPING`) would have no latency.
"""

from __future__ import annotations

import math
from typing import Any

from deepspeed.profiling.flops_profiler import profiler as theirs
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp8_ds.nn.experts import WEIGHTS, Fp8Experts
from fp8_ds.nn.linear import Fp8Linear
from fp8_ds.nn.matrices import full_shape


class Fp8FlopsProfiler(theirs.FlopsProfiler):
    """Flops profiler of an engine with FP8. Seams: fp8_ds/engine/seams.py."""

    def start_profile(self, ignore_list: Any = None) -> None:
        super().start_profile(ignore_list)
        handles: list[RemovableHandle] = [
            # Before DeepSpeed's own hook, which adds up what was counted within the module.
            module.register_forward_hook(_count, with_kwargs=True, prepend=True)
            for module in self.model.modules()
            if isinstance(module, (Fp8Linear, Fp8Experts))
        ]

        def remove(*args: Any) -> None:
            for handle in handles:
                handle.remove()

        handles.append(self.model.register_forward_hook(remove, always_call=True))


def _count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
    """Count a plain linear's products for `module`, in place of those that its parts have counted."""
    given = (*args, *kwargs.values())
    if isinstance(module, Fp8Experts):
        weights = [full_shape(getattr(module, name)) for name in WEIGHTS]
        num_macs = given[1].numel() * sum(shape.numel() // shape[0] for shape in weights)  # given[1]: top_k_index
    else:
        # With sequence parallelism one of the two is a rank's part of the tokens that are multiplied.
        num_tokens = max(math.prod(tensor.shape[:-1]) for tensor in (given[0], output))
        num_macs = num_tokens * full_shape(module.weight).numel()
    for counts, num in ((theirs.module_flop_count, 2 * num_macs), (theirs.module_mac_count, num_macs)):
        if counts:
            counts[-1][:] = [(type(module).__name__, num)]

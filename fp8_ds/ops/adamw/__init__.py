"""Adam on FP8 moments and split master weights, all shards of a device in one pass.

Not a registered torch op, unlike the others: an optimizer step is not traced, and its arguments are tables of pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fp8_ds.ops._register import triton_of
from fp8_ds.ops.adamw import reference
from fp8_ds.ops.adamw.shards import AdamShard, Hyper, StepInputs

__all__ = ["AdamShard", "AdamStep", "Hyper", "StepInputs", "prepare"]

AdamStep = Callable[[Sequence[Tensor | None], StepInputs], None]
"""One Adam step on the shards it was prepared for: updates in place what `AdamShard` names, and `inputs.amax`.

It takes gradients, bf16 or float32, 1-D [shard.numel], contiguous, one per shard (None leaves a shard as it is), and
the numbers of the step, which are read on the device: the host waits for the device with the reference only.
"""


def prepare(shards: Sequence[AdamShard]) -> AdamStep:
    """Prepare a step for these shards, whose tensors keep their addresses: by the kernel on CUDA, else the reference.

    Args:
        shards: shards on one device; empty ones are allowed.

    Raises:
        ValueError: the shards are on several devices.
        ImportError: the shards are on CUDA, and the triton package is missing.
    """
    devices = {shard.hi.device for shard in shards}
    if len(devices) > 1:
        raise ValueError(
            f"shards: expected one device, got {sorted(map(str, devices))}. Prepare one step for each device."
        )
    if any(device.type == "cuda" for device in devices):
        step: Any = triton_of(__name__).TritonStep(shards)
        return step
    return partial(reference.adamw_step, tuple(shards))

"""Adam on FP8 moments and split master weights, all shards of a device in one pass.

Not a registered torch op, unlike the others: an optimizer step is not traced, and its arguments are tables of pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from fp8_ds.ops.adamw import reference
from fp8_ds.ops.adamw.shards import AdamShard, Hyper, StepInputs

__all__ = ["AdamShard", "AdamStep", "Hyper", "StepInputs", "prepare"]


class AdamStep(Protocol):
    """One Adam step on the shards it was prepared for; bit-equal in all backends."""

    def __call__(self, grads: Sequence[Tensor | None], inputs: StepInputs) -> None:
        """Updates in place what `AdamShard` names, and `inputs.amax`.

        Args:
            grads: bf16 or float32, 1-D [shard.numel], contiguous, one per shard. None: that shard is left as it is.
            inputs: the numbers of the step, read on the device: the host does not wait for it.
        """


class _ReferenceStep:
    """`reference.adamw_step` on the shards that have a gradient."""

    def __init__(self, shards: Sequence[AdamShard]) -> None:
        self.shards = tuple(shards)

    def __call__(self, grads: Sequence[Tensor | None], inputs: StepInputs) -> None:
        pairs = [(shard, grad) for shard, grad in zip(self.shards, grads, strict=True) if grad is not None]
        reference.adamw_step([shard for shard, _ in pairs], [grad for _, grad in pairs], inputs)


def prepare(shards: Sequence[AdamShard], backend: Literal["triton", "reference"] | None = None) -> AdamStep:
    """A step for these shards, whose tensors keep their addresses from now on.

    Args:
        shards: all on one device; empty ones are allowed.
        backend: "triton" (CUDA; on CPU only under Triton's interpreter) or "reference" (plain torch, waits for the
            device). None: "triton" where the shards are on CUDA, else "reference".

    Raises:
        ValueError: shards on several devices, or "triton" on CPU without the interpreter.
        ImportError: "triton" without the triton package.
    """
    devices = {shard.hi.device for shard in shards}
    if len(devices) > 1:
        raise ValueError(
            f"shards: expected one device, got {sorted(map(str, devices))}. Prepare one step for each device."
        )
    if backend is None:
        backend = "triton" if any(device.type == "cuda" for device in devices) else "reference"
    if backend == "reference":
        return _ReferenceStep(shards)
    if backend != "triton":
        raise ValueError(f"backend: expected 'triton', 'reference' or None, got {backend!r}. Take one of these.")
    try:
        from fp8_ds.ops.adamw.triton import TritonStep
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ImportError(
            "triton: expected the package, which runs FP8 optimizer states on CUDA, got none. Install triton in the "
            "version that your torch names."
        ) from error
    return TritonStep(shards)

"""Adam on FP8 moments and split master weights, all shards of a device in one pass, and the masters as numbers.

Not a registered torch op, unlike the others: an optimizer step is not traced, and its arguments are tables of pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fp8_ds.numerics.masters import MasterFormat, decode
from fp8_ds.ops._register import triton_of
from fp8_ds.ops.adamw import reference
from fp8_ds.ops.adamw.hyper import Hyper as Hyper
from fp8_ds.ops.adamw.shards import AdamShard as AdamShard
from fp8_ds.ops.adamw.shards import StepInputs as StepInputs

_DECODED_DTYPES = (torch.bfloat16, torch.float32)

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
        return triton_of(__name__).TritonStep(shards)
    return partial(reference.adamw_step, tuple(shards))


def decode_master(hi: Tensor, lo: Tensor, fmt: MasterFormat, scale_inv: Tensor | None, out: Tensor) -> None:
    """Write the split masters into `out`, rounded to its dtype. The reference is `numerics.masters.decode`.

    Torch's operators move some 94 bytes an element where 4 are needed: at the rate of a copy on an H200 40 ms a step of
    2 B parameters whose layers are in bf16 (docs/speed.md, "Its last steps in bf16").

    Args:
        hi, lo: `fmt.hi_dtype` and `fmt.lo_dtype` [n], as `numerics.masters.encode` gives them.
        fmt: a split format.
        scale_inv: float32, 0-dim, multiply to leave FP8; None where `fmt` is not FP8.
        out: float [n], on any device.

    Raises:
        ValueError: the tensors differ in size.
    """
    if not hi.numel() == lo.numel() == out.numel():
        raise ValueError(
            f"out: expected {hi.numel()} elements, as many as both parts have, got {lo.numel()} low parts and "
            f"{out.numel()} to write. Shard all three alike."
        )
    tensors = (hi, lo, out) if scale_inv is None else (hi, lo, out, scale_inv)
    is_dense = all(x.is_cuda and x.device == out.device and x.is_contiguous() for x in tensors)
    if not is_dense or out.dtype not in _DECODED_DTYPES:
        out.copy_(decode(hi, lo, fmt, scale_inv))
    elif out.numel():
        with torch.cuda.device_of(out):  # Triton launches on the current device
            triton_of(__name__).decode_master(hi, lo, fmt, scale_inv, out)

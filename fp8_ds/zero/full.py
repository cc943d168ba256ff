"""One parameter at a time in full shape on every rank: FP8 codes, fp32 master, or value. Collective in ZeRO-3.

What is yielded may be the engine's own memory: a copy is needed for what outlives the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor


@contextmanager
def full_codes(optimizer: Any, weight: Any) -> Iterator[Tensor | None]:
    """Give the codes of an FP8 weight, float8_e4m3fn, inside the block; None while its layer computes in bf16.

    In ZeRO-3 a byte an element is gathered, unless the weight is gathered already.

    Args:
        optimizer: of the engine that trains it.
        weight: a Parameter with a payload.
    """
    payload = weight._fp8
    if not hasattr(weight, "ds_id"):
        yield payload.data if payload.hp is None else None
        return
    (shard,) = optimizer._fp8_shards.of([weight])
    if shard.in_bf16:
        yield None
        return
    if (codes := payload.data) is not None:
        yield codes.detach()
        return
    optimizer._fp8_shards.gather([shard]).wait()
    try:
        yield payload.data.detach()
    finally:
        shard.leave()


@contextmanager
def full_value(parameter: Any) -> Iterator[Tensor]:
    """Give a parameter's value in its dtype inside the block; of an FP8 weight it is de-quantised."""
    if not hasattr(parameter, "ds_id"):
        yield parameter.detach()
        return
    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter.detach()


def full_master(parameter: Any) -> Tensor | None:
    """Return a parameter's fp32 master; None without one. Collective in all stages."""
    master: Tensor | None = safe_get_full_fp32_param(parameter)
    return None if master is None else master.detach().view(getattr(parameter, "ds_shape", parameter.shape))

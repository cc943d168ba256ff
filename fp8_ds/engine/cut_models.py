"""Models that tensor parallelism has cut: what their checkpoints say of it, and which exports would be of one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint.constants import (
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from torch.nn import Module

from fp8_ds.errors import UnsupportedError
from fp8_ds.tp.linears import ParallelLinear


def is_cut(module: Module) -> bool:
    """Whether `fp8_ds.tp.parallelize` has cut it."""
    return any(isinstance(child, ParallelLinear) for child in module.modules())


def universal_info(module: Module) -> Mapping[str, Any]:
    """What ds_to_universal.py joins the parts of a cut model by, as an entry of the model file; empty for a whole one.

    By pattern: parameters that are whole on every rank, and those that are cut along their input (dim 1); all others
    are cut along dim 0. Source: deepspeed/checkpoint/ds_to_universal.py, merge_tp_slices (0.19.8).
    """
    if not is_cut(module):
        return {}
    whole, by_input = [], []
    for name, p in module.named_parameters():
        if p.requires_grad and not getattr(p, "tensor_model_parallel", False):
            whole.append(f"^{re.escape(name)}$")
        elif p.requires_grad and p.partition_dim == 1:  # type: ignore[attr-defined]
            by_input.append(f"^{re.escape(name)}$")
    patterns = {TP_REPLICATED_PARAMETER_PATTERNS: whole, PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: by_input}
    version = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    return {UNIVERSAL_CHECKPOINT_INFO: version | patterns}


def refuse_one_ranks_part(module: Module, autotp_size: int, what: str) -> None:
    """`what`, stock code, writes or returns a rank's own parameters as if they were whole.

    Raises:
        UnsupportedError: they are not, on every rank.
    """
    if is_cut(module):
        raise UnsupportedError(
            f"{what}: expected a whole model, got one that fp8_ds.tp.parallelize has cut; it would hold one rank's "
            "part. Use engine.save_checkpoint and `fp8-ds convert --to universal`, load that without parallelize, and "
            "export there."
        )
    if autotp_size > 1:
        raise UnsupportedError(
            f"{what}: expected a whole model, got tensor_parallel.autotp_size {autotp_size}; it would hold one rank's "
            "part. Call engine._consolidated_16bit_state_dict() on all ranks, as transformers and accelerate do, and "
            "save what it returns on rank 0."
        )

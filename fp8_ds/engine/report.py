"""What FP8 does in an engine, in numbers."""

from __future__ import annotations

from typing import Any

from fp8_ds.zero.context import Fp8Context
from fp8_ds.zero.stage12 import Fp8ZeroStage12


def report(context: Fp8Context, optimizer: Any) -> dict[str, Any]:
    """See `Fp8Engine.fp8_report`."""
    last = context.counter.last or context.counter
    resident = optimizer.fp8_resident_bytes()
    num_weights = resident.pop("num_fp8_weights")
    if isinstance(optimizer, Fp8ZeroStage12):  # of frozen weights, which are in no partition
        num_frozen = sum(p.numel() for p in context.frozen.values())
        resident["fp8"] += num_frozen
        num_weights += num_frozen
    assert context.precision is not None
    return {
        "enabled": True,
        "gathered_bytes": last.total,
        "gathered_fp8_bytes": last.fp8,
        "reduced_bytes": last.reduced,
        "num_amax_reduces": last.num_amax_reduces,
        "resident_weight_bytes": sum(resident.values()),
        **{f"resident_{kind}_bytes": value for kind, value in resident.items()},
        "num_fp8_weights": num_weights,
        "plan": context.plan.describe(),
        "num_layers_in_bf16": len(context.precision.in_bf16),
    }

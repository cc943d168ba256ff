"""Runs without our repairs of DeepSpeed: what FP8 computes does not depend on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from test_unused import steps

from fp8_ds.config import DEEPSPEED_FIXES

pytestmark = pytest.mark.distributed

SPLIT = {"optimizer": {"states": "fp8", "master": "e4m19"}}


def trained(stage: int, fp8: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Losses and masters of three steps of two micro-batches, and whether the throughput timer waits."""
    engine = training.build(training.ds_config(stage, fp8, gradient_accumulation_steps=2))
    found = training.train(engine, 3), training.full_masters(engine), engine.tput_timer.config.synchronized
    training.destroy(engine)
    return found


@pytest.mark.parametrize("fp8", [{}, SPLIT], ids=["fp32", "e4m19"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_without_any_repair_has_the_same_bits(ranks: Any, stage: int, fp8: dict[str, Any]) -> None:
    ours = ranks(2).run(trained, stage, fp8)
    own = ranks(2).run(trained, stage, fp8 | {"without_deepspeed_fixes": list(DEEPSPEED_FIXES)})
    for (losses, masters, waits), (own_losses, own_masters, own_waits) in zip(ours, own, strict=True):
        assert losses == own_losses and (waits, own_waits) == (False, True)
        assert all(torch.equal(master, own_masters[name]) for name, master in masters.items())


@pytest.mark.parametrize("fp8", [{}, SPLIT], ids=["fp32", "e4m19"])
def test_without_the_repair_stage_3_steps_by_gradients_of_earlier_steps(ranks: Any, fp8: dict[str, Any]) -> None:
    norms, _ = ranks(2).run(steps, 3, fp8, 1)[0]
    own_norms, _ = ranks(2).run(steps, 3, fp8 | {"without_deepspeed_fixes": ["stale_gradients"]}, 1)[0]
    assert norms[0] == own_norms[0]
    assert own_norms[1] > norms[1]  # the second block's gradient of the step before counts, too

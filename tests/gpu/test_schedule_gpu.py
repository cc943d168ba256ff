"""Layers in bf16 for a while, in engines on a GPU: what holds on a CPU (tests/distributed)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_guard
import test_schedule
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

MODEL = {"width": 64, "hidden": 192, "num_blocks": 2}
"""Multiples of 16, which FP8 GEMMs on a GPU want."""


@pytest.mark.parametrize(("stage", "fp8"), [(2, {}), (3, {}), (2, test_schedule.SPLIT)], ids=str)
def test_a_schedule_moves_bf16_of_the_masters_then_fp8_then_bf16(
    gpu_ranks: Any, stage: int, fp8: dict[str, Any]
) -> None:
    test_schedule.check_phases(gpu_ranks(1).run(test_schedule.phases, stage, fp8), stage, fp8)


@pytest.mark.parametrize(("stage", "recipe"), [(2, "delayed"), (3, "tensorwise")])
def test_a_switch_by_hand_makes_no_jump_in_the_loss_and_the_way_back_is_exact(
    gpu_ranks: Any, stage: int, recipe: str
) -> None:
    test_schedule.check_jump(gpu_ranks(1).run(test_schedule.jump, stage, recipe))


@pytest.mark.parametrize(("stage", "save_at"), [(2, 1), (3, 5)])
def test_resume_with_an_override_is_exact(gpu_ranks: Any, tmp_path: Path, stage: int, save_at: int) -> None:
    test_schedule.check_resume(gpu_ranks(1).run(test_schedule.resume, stage, {}, str(tmp_path), save_at), save_at)


@pytest.mark.parametrize(("stage", "action"), [(2, "bf16"), (3, "bf16"), (2, "report")])
def test_the_layer_that_underflows_is_named_and_leaves_fp8(
    gpu_ranks: Any, tmp_path: Path, stage: int, action: str
) -> None:
    (found,) = gpu_ranks(1).run(test_guard.guarded, str(tmp_path), stage, action, MODEL)
    sent = ["blocks.1.up"] if action == "bf16" else []
    assert (found["before"], found["after"], found["resumed"]) == ([], sent, sent)
    (line,) = found["lines"]
    assert "guard, step 6: 1 layers" in line and "blocks.1.up: underflow of input" in line
    assert torch.tensor(found["losses"]).isfinite().all()

"""Weights that a user freezes in the middle of a run keep their masters, in memory and in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import training
from torch import Tensor

pytestmark = pytest.mark.distributed

SPLIT = {"optimizer": {"states": "fp8", "master": "e4m19"}}


def freeze(engine: Any) -> None:
    engine.module.blocks[0].up.weight.requires_grad_(False)


def frozen_master(engine: Any) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    weight = engine.module.blocks[0].up.weight
    weight.requires_grad_(True)  # stock code of stage 3 reads no master of what is frozen
    found: Tensor = safe_get_full_fp32_param(weight).clone()
    weight.requires_grad_(False)
    return found


def saved_and_loaded(folder: str, stage: int, fp8: dict[str, Any]) -> None:
    first = training.build(training.ds_config(stage, fp8))
    training.train(first, 2)
    freeze(first)
    training.train(first, 2, 2)
    first.save_checkpoint(folder)
    master = frozen_master(first)
    losses = training.train(first, 2, 4)
    first.load_checkpoint(folder)
    assert training.train(first, 2, 4) == losses
    training.destroy(first)

    second = training.build(training.ds_config(stage, fp8), seed=1)
    freeze(second)
    second.load_checkpoint(folder)
    assert training.train(second, 2, 4) == losses
    second.load_checkpoint(folder, load_optimizer_states=False)
    assert torch.equal(frozen_master(second).bfloat16(), master.bfloat16())
    training.destroy(second)


@pytest.mark.parametrize(
    ("stage", "fp8"),
    [pytest.param(1, {}, marks=pytest.mark.slow), (2, SPLIT), (3, {}), pytest.param(3, SPLIT, marks=pytest.mark.slow)],
)
def test_a_checkpoint_has_the_weights_that_were_frozen_in_the_middle(
    ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any]
) -> None:
    ranks(2).run(saved_and_loaded, str(tmp_path), stage, fp8)

"""The guard on real engines: the layer that underflows is named, and sent to bf16 on all ranks alike."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import torch
import training
from torch import Tensor

pytestmark = pytest.mark.distributed


def outlier(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One channel far above all others: their elements fall below E4M3's normal range."""
    x = inputs[0].clone()
    x[..., 3] = 1e6
    return (x, *inputs[1:])


def guarded(folder: str, stage: int, action: str) -> dict[str, Any]:
    import torch.distributed as dist
    from deepspeed.utils import logger

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    # No limit is passed by this model as it is; its gradients' underflow is that of untrained weights.
    fp8 = {
        "guard": {"action": action, "underflow": 0.4},
        "monitor": {"every": 2, "sink": f"{folder}/health.jsonl"},
    }
    engine = training.build(training.ds_config(stage, fp8), base.MODEL)
    losses = training.train(engine, 4)
    before = sorted(engine.fp8.precision.in_bf16)
    if dist.get_rank() == 0:  # counts are added up over the ranks
        engine.module.blocks[1].up.register_forward_pre_hook(outlier)
    losses += training.train(engine, 5, first_step=4)
    after = sorted(engine.fp8.precision.in_bf16)
    engine.save_checkpoint(folder)
    training.destroy(engine)
    again = training.build(training.ds_config(stage, fp8), base.MODEL, seed=1)
    again.load_checkpoint(folder)
    training.train(again, 1, first_step=9)
    resumed = sorted(again.fp8.precision.in_bf16)
    training.destroy(again)
    logger.removeHandler(handler)
    lines = [line for line in said if "guard, step" in line]
    return {"losses": losses, "before": before, "after": after, "resumed": resumed, "lines": lines}


@pytest.mark.parametrize(("stage", "action"), [(1, "report"), (2, "bf16"), (3, "bf16")])
def test_the_layer_that_underflows_is_named_and_leaves_fp8_on_all_ranks(
    ranks: Any, tmp_path: Path, stage: int, action: str
) -> None:
    first, second = ranks(2).run(guarded, str(tmp_path), stage, action)
    assert first["before"] == second["before"] == []
    expected = ["blocks.1.up"] if action == "bf16" else []
    assert first["after"] == second["after"] == expected
    assert first["resumed"] == second["resumed"] == expected
    assert second["lines"] == []
    assert len(first["lines"]) == 1, first["lines"]
    assert "guard, step 6: 1 layers" in first["lines"][0]
    assert "blocks.1.up: underflow of input" in first["lines"][0]
    assert all(torch.isfinite(torch.tensor(first["losses"])))

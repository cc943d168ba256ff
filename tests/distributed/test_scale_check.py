"""Delayed scales that do not fit their tensors are named; those of healthy training are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training

pytestmark = pytest.mark.distributed

DELAYED = {"linear": {"recipe": "delayed"}}
E4M11 = {"optimizer": {"states": "fp8", "master": "e4m11"}}
RELEASED = {"optimizer": {**E4M11["optimizer"], "release": True, "release_clipping": "delayed_norm"}}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}


def lines(said: list[str]) -> list[str]:
    return [line for line in said if "fp8: delayed scales" in line]


def put_wrong(engine: Any, name: str, factor: float) -> None:
    """The scale of the slot `name` is `factor` times what it should be until the next update."""
    history = engine.fp8.history
    slot = history.names.index(name)
    history.scale[slot] *= factor
    history.scale_inv[slot] /= factor


def run(stage: int, fp8: dict[str, Any], wrong: dict[str, float], overrides: dict[str, Any]) -> dict[str, Any]:
    """Nine steps; for the five in the middle scales of some slots are wrong. Lines said until each step's end."""
    with training.log_lines() as said:
        engine = training.build(training.ds_config(stage, {**DELAYED, **fp8}, **overrides))
        told = []
        for step in range(9):
            if 3 <= step < 8:
                for name, factor in wrong.items():
                    put_wrong(engine, name, factor)
            training.train(engine, 1, step)
            told.append(len(lines(said)))
        training.destroy(engine)
    return {"told": told, "lines": lines(said)}


@pytest.mark.parametrize(
    ("stage", "fp8", "overrides"),
    [(2, E4M11, UNCHECKED), (3, RELEASED, {})],
)
def test_wrong_scales_are_named_once_a_step_late_by_one_rank(
    ranks: Any, stage: int, fp8: dict[str, Any], overrides: dict[str, Any]
) -> None:
    wrong = {"blocks.0.up grad_output": 1e-10, "blocks.1.down input": 1e4}
    first, second = ranks(2).run(run, stage, fp8, wrong, overrides)
    assert first["told"] == [0, 0, 0, 0, 0, 0, 1, 1, 1] and second["lines"] == []
    assert "blocks.0.up grad_output underflows" in first["lines"][0]
    assert "blocks.1.down input saturates" in first["lines"][0] and ": 2 (" in first["lines"][0]


def run_with_skipped_steps(stage: int, fp8: dict[str, Any], waits: bool) -> tuple[list[str], int]:
    """The lines of ten steps, of which four in a row and two more have an infinite gradient on rank 0."""
    overrides = {"bf16": {"enabled": True, "check_grad_overflow": waits}}
    is_on = torch.distributed.get_rank() == 0
    with training.log_lines() as said:
        engine = training.build(training.ds_config(stage, {**DELAYED, **fp8}, **overrides))
        if not waits:
            training.flag_late(engine.optimizer)
        for step in range(10):
            factor = float("inf") if is_on and step in (2, 3, 4, 5, 7, 8) else 1.0
            handle = engine.module.blocks[1].norm.bias.register_hook(lambda grad, factor=factor: grad * factor)
            training.train(engine, 1, step)
            handle.remove()
        skipped = engine.skipped_steps
        training.destroy(engine)
    return lines(said), skipped


@pytest.mark.parametrize(("stage", "fp8", "waits"), [(2, {}, True), (3, E4M11, False)])
def test_skipped_steps_are_not_named(ranks: Any, stage: int, fp8: dict[str, Any], waits: bool) -> None:
    """Where the host learns of them a step late, the amaxes of a skipped step are NaN."""
    assert ranks(2).run(run_with_skipped_steps, stage, fp8, waits) == [([], 6)] * 2

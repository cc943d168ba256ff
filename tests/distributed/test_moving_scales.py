"""Weights whose scales move, under ZeRO: the same bytes in every stage, on any number of ranks; others in each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import training

from fp8_ds.formats import E4M3
from fp8_ds.ops.quantize import quantize
from fp8_ds.scaling import scale_from_amax
from fp8_ds.scaling.moving import MovingScales

pytestmark = pytest.mark.distributed

MODEL = {"width": 40, "hidden": 72, "num_blocks": 2}


def settings(recipe: str = "tensorwise") -> dict[str, Any]:
    return {"linear": {"recipe": recipe, "weight_scales": "moving"}}


def run(stage: int, accumulation: int, recipe: str) -> list[dict[str, Any]]:
    """After each of four steps, and before the first one."""
    config = training.ds_config(stage, settings(recipe), gradient_accumulation_steps=accumulation)
    engine = training.build(config, MODEL)
    found: list[dict[str, Any]] = []
    for step in range(5):
        if step:
            training.train(engine, 1, first_step=step - 1)
        found.append({"weights": training.fp8_state(engine), "masters": training.full_masters(engine)})
        # What is read back from the masters at the same step has the same bytes.
        engine.optimizer._fp8_refresh(is_step=False)
        training.assert_fp8_equals(training.fp8_state(engine), found[-1]["weights"])
    training.destroy(engine)
    return found


def expected(name: str, master: torch.Tensor, step: int, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    scales = MovingScales([name], [1], "cpu")
    scales.step = step
    amax = master.abs().amax(1, keepdim=True) if recipe == "rowwise" else master.abs().max()
    scale, scale_inv = scale_from_amax(amax * scales.factors()[0], E4M3.max)
    return quantize(master, scale, E4M3).view(torch.uint8), scale_inv


@pytest.mark.parametrize(
    ("stage", "recipe"),
    [
        (2, "tensorwise"),
        (3, "rowwise"),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((1, "rowwise"), (1, "delayed"), (3, "tensorwise"))),
    ],
)
def test_bytes_are_those_of_name_step_and_master_on_any_number_of_ranks(ranks: Any, stage: int, recipe: str) -> None:
    one = ranks(1).run(run, stage, 3, recipe)
    many = ranks(3).run(run, stage, 1, recipe)
    for steps in (*one, *many):
        for step, state in enumerate(steps):
            of_masters = {n: expected(n, m, step, recipe) for n, m in state["masters"].items() if n in state["weights"]}
            training.assert_fp8_equals(state["weights"], of_masters)
    for steps in many:
        training.assert_fp8_equals(steps[0]["weights"], one[0][0]["weights"])


def idle(stage: int) -> list[dict[str, Any]]:
    """Three steps that change no master: lr 0."""
    config = training.ds_config(stage, settings())
    config["optimizer"]["params"]["lr"] = 0.0
    engine = training.build(config, MODEL)
    found = []
    for step in range(3):
        training.train(engine, 1, first_step=step)
        found.append(training.fp8_state(engine))
    training.destroy(engine)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_weight_that_stays_has_other_bytes_in_each_step(ranks: Any, stage: int) -> None:
    for states in ranks(2).run(idle, stage):
        for name in states[0]:
            scales = [float(state[name][1]) for state in states]
            assert len(set(scales)) == 3 and max(scales) < 2 * min(scales)
            assert not states[0][name][0].equal(states[1][name][0])


def resumed(folder: str, overrides: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses after a save, and after its load by an engine that has been elsewhere; nothing is looked at before them,
    which would gather weights anew."""
    config = training.ds_config(3, settings(), **overrides)
    writer = training.build(config, MODEL)
    training.train(writer, 3)
    writer.save_checkpoint(folder)
    expected = training.train(writer, 2, first_step=3)
    training.destroy(writer)
    reader = training.build(config, MODEL, seed=1)
    training.train(reader, 1, first_step=40)
    reader.load_checkpoint(folder)
    found = training.train(reader, 2, first_step=3)
    training.destroy(reader)
    return expected, found


def test_weights_that_stay_gathered_over_a_load_have_the_bytes_of_their_scales(ranks: Any, tmp_path: Path) -> None:
    """ZeRO-3 keeps small parameters on every rank: by default those below 100,000 elements."""
    persistent = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100_000}}
    for expected, found in ranks(2).run(resumed, str(tmp_path), persistent):
        assert found == expected

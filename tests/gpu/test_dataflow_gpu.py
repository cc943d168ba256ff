"""FP8 linears in an engine on a GPU: no host synchronisation beyond stock's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import training
from support.waits import host_waits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

MODEL = {"width": 512, "hidden": 2048, "num_blocks": 3}
RECIPES = ["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]
STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
LEAVES = {"leaf_module": {"classes": ["training.Block"]}}


def synchronisations(stage: int, fp8: dict[str, Any] | None, zero: dict[str, Any] | None = None) -> dict[str, int]:
    """How often the host waits for the device in one forward, backward and step, after two to warm up; and how many of
    the step's waits are for what was done before the forward."""
    config = training.ds_config(stage, fp8, zero_optimization={"stage": stage, "overlap_comm": False, **(zero or {})})
    config["bf16"] = {"enabled": True, "check_grad_overflow": False}
    engine = training.build(config, MODEL)
    training.train(engine, 2)
    if stage == 3:
        lets_the_host_run_ahead(engine)
    tokens = training.micro_batches(3, 1)[0].to(engine.device)
    counts = {}
    torch.cuda.synchronize()
    with host_waits() as count, waits_for_the_past() as past:
        loss = engine(tokens)
        counts["forward"], before = len(count), len(count)
        engine.backward(loss)
        counts["backward"], before, past_before = len(count) - before, len(count), len(past)
        engine.step()
        counts["step"], counts["past"] = len(count) - before, len(past) - past_before
    training.destroy(engine)
    return counts


def lets_the_host_run_ahead(engine: Any) -> None:
    """ZeRO-3 waits for a fetch some weights back unless it is over: as often as a device is late, that others use, too.
    It never waits for that one here."""
    from fp8_ds.engine.deepspeed_fixes import FETCHES_AHEAD

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    name = "_PartitionedParameterCoordinator__max_ongoing_fetch_events"
    assert getattr(coordinator, name) in (2, FETCHES_AHEAD)
    setattr(coordinator, name, 1 << 30)


@contextmanager
def waits_for_the_past() -> Iterator[list[Any]]:
    """Counts waits for events recorded before it: where the device was idle then, they are over."""
    count: list[Any] = []
    recorded: list[Any] = []
    record, wait = torch.cuda.Event.record, torch.cuda.Event.synchronize

    def recording(event: Any, *args: Any, **kwargs: Any) -> None:
        recorded.append(event)
        record(event, *args, **kwargs)

    def waiting(event: Any) -> None:
        if not any(event is one for one in recorded):
            count.append(event)
        wait(event)

    with patch.multiple(torch.cuda.Event, record=recording, synchronize=waiting):
        yield count


PERSISTENT = LEAVES | {"stage3_param_persistence_threshold": 10_000}
"""Norms persist: they are gathered after the step."""


@pytest.mark.parametrize("states", [{}, STATES], ids=["fp32", "fp8"])
@pytest.mark.parametrize(
    ("stage", "world_size", "recipe", "zero"),
    [
        *((2, 1, recipe, {}) for recipe in RECIPES),
        *((3, 1, recipe, {}) for recipe in RECIPES),
        (3, 2, "tensorwise", PERSISTENT),  # on one rank stock itself waits for each module's weights
    ],
)
def test_the_host_waits_no_more_often_than_in_stock(
    gpu_ranks: Any, stage: int, world_size: int, recipe: str, zero: dict[str, Any], states: dict[str, Any]
) -> None:
    blocks = (None, {"linear": {"recipe": recipe}, **states})
    stock, ours = (gpu_ranks(world_size).run(synchronisations, stage, fp8, zero)[0] for fp8 in blocks)
    for phase in ("forward", "backward", "step"):
        assert ours[phase] <= stock[phase], (phase, ours, stock)


@pytest.mark.parametrize("states", [{}, STATES], ids=["fp32", "fp8"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_is_sampled_and_reports_the_one_before_waits_no_more_often(
    gpu_ranks: Any, stage: int, states: dict[str, Any]
) -> None:
    """It waits for the numbers of the step before alone, whose copy is a step old."""
    monitor = {"monitor": {"every": 1, "sink": "/dev/null"}}
    plain, watched = (gpu_ranks(1).run(synchronisations, stage, states | more)[0] for more in ({}, monitor))
    assert watched["past"] > plain["past"]
    for counts in (plain, watched):
        counts["step"] -= counts["past"]
    for phase in ("forward", "backward", "step"):
        assert watched[phase] <= plain[phase], (phase, watched, plain)

"""The guard on real engines: the layer that underflows is named, and sent to bf16 on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import test_checkpoint as base
import test_pipeline
import torch.distributed as dist
import training
from support.ranks import on_ranks
from torch import Tensor

pytestmark = pytest.mark.distributed


def outlier(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One channel far above all others: their elements fall below E4M3's normal range."""
    x = inputs[0].clone()
    x[..., 3] = 1e6
    return (x, *inputs[1:])


@pytest.mark.parametrize(
    ("stage", "action", "save_at", "named"),
    [
        (2, "bf16", 2, True),  # sampled, and not judged yet
        (3, "report", 3, False),  # named before the save; the next step is a sampled one
    ],
)
@on_ranks(2)
def test_a_resumed_run_judges_what_the_run_before_would_have(
    folder: str, stage: int, action: str, save_at: int, named: bool
) -> None:
    """Ten steps, every second one sampled, of a layer that underflows from the start; resumed at `save_at`."""
    fp8 = {"guard": {"action": action}, "monitor": {"every": 2, "sink": f"{folder}/health.jsonl"}}

    def start(seed: int) -> Any:
        one = training.build(training.ds_config(stage, fp8), base.MODEL, seed)
        one.module.blocks[1].up.register_forward_pre_hook(outlier)
        return one

    def go_on(one: Any) -> tuple[list[Any], list[Any], list[str]]:
        reports = training.reports_of(one)
        with training.log_lines() as said:
            steps = [(*training.train(one, 1, step), sorted(one.fp8.precision.in_bf16)) for step in range(save_at, 10)]
            training.destroy(one)
        for report in reports:
            for key in ("gathered_bytes", "gathered_fp8_bytes"):  # in stage 3 a save gathers, too
                report.pop(key)
        return steps, reports, [line for line in said if "guard, step" in line]

    through = start(0)
    training.train(through, save_at)
    through.save_checkpoint(folder)
    expected = steps, reports, said = go_on(through)
    resumed = start(1)
    training.train(resumed, 1)  # a sample is under way, and is forgotten
    resumed.load_checkpoint(folder)
    assert go_on(resumed) == expected
    assert [report["step"] for report in reports] == [step for step in (2, 4, 6, 8, 10) if step >= save_at]
    assert len(said) == (named and dist.get_rank() == 0) and all("blocks.1.up" in line for line in said)
    assert steps[-1][1] == (["blocks.1.up"] if action == "bf16" else [])


@pytest.mark.parametrize(("stage", "save_at"), [(2, 7), (3, 8)])  # counted, and sent and not judged yet
@on_ranks(2)
@patch("fp8_ds.engine.step_callbacks.GUARD_EVERY", 4)
@patch("fp8_ds.monitor.overshoot.NUM_UPDATES_TO_SETTLE", 3)
def test_with_delayed_scales_one_step_beyond_them_is_seen_without_a_sample_and_after_a_resume(
    folder: str, stage: int, save_at: int
) -> None:
    """The inputs of a layer are 40 times as large on the last rank, in the sixth of ten steps alone."""
    fp8 = {"linear": {"recipe": "delayed"}, "guard": {"action": "bf16"}}

    def go_on(one: Any, first: int) -> list[Any]:
        steps = []
        for step in range(first, 10):
            up = one.module.blocks[1].up
            is_far = step == 5 and dist.get_rank() == 1
            hook = up.register_forward_pre_hook(lambda _, inputs, far=is_far: (40 * inputs[0],) if far else inputs)
            steps.append((*training.train(one, 1, step), sorted(one.fp8.precision.in_bf16)))
            hook.remove()
            if step + 1 == save_at:
                one.save_checkpoint(folder)
        return steps

    through, resumed = (training.build(training.ds_config(stage, fp8), base.MODEL, seed) for seed in (0, 1))
    assert through._fp8_step_callbacks.monitor is None
    steps = go_on(through, 0)
    assert [in_bf16 for _, in_bf16 in steps] == [[]] * 8 + [["blocks.1.up"]] * 2
    resumed.load_checkpoint(folder)
    assert go_on(resumed, save_at) == steps[save_at:]
    for one in (through, resumed):
        training.destroy(one)


@on_ranks(1)
@patch("fp8_ds.monitor.guard.NUM_STEPS_IN_BF16", 4)
@patch("fp8_ds.engine.step_callbacks.GUARD_EVERY", 4)
@patch("fp8_ds.monitor.overshoot.NUM_UPDATES_TO_SETTLE", 3)
def test_what_a_layer_sees_in_bf16_is_not_held_against_it_and_afterwards_it_is_sent_again() -> None:
    """Inputs are 40 times larger than ever in the sixth step, in the tenth, with the layer in bf16, and in the 14th."""
    fp8 = {"linear": {"recipe": "delayed"}, "guard": {"action": "bf16"}}
    engine, found = training.build(training.ds_config(2, fp8), base.MODEL), []
    for step in range(18):
        factor = {5: 40, 9: 40**2, 13: 40**3}.get(step, 1)
        up = engine.module.blocks[1].up
        hook = up.register_forward_pre_hook(lambda _, inputs, factor=factor: (factor * inputs[0],))
        training.train(engine, 1, step)
        hook.remove()
        found.append("blocks.1.up" in engine.fp8.precision.in_bf16)
    training.destroy(engine)
    assert found == [False] * 8 + [True] * 4 + [False] * 4 + [True] * 2


@pytest.mark.parametrize(("recipe", "is_late"), [("tensorwise", False), ("delayed", True)])
@on_ranks(2)
@patch("fp8_ds.engine.step_callbacks.GUARD_EVERY", 2)
@patch("fp8_ds.monitor.overshoot.NUM_UPDATES_TO_SETTLE", 1)
def test_a_step_that_was_skipped_puts_no_layer_into_bf16(folder: str, recipe: str, is_late: bool) -> None:
    """One loss of a sampled step is NaN, and a layer's inputs are 40 times as large in it."""
    fp8: dict[str, Any] = {"linear": {"recipe": recipe}, "guard": {"action": "bf16"}}
    fp8 |= {"monitor": {"every": 2, "sink": f"{folder}/health.jsonl"}}
    if is_late:
        fp8["optimizer"] = {"states": "fp8"}
    engine = training.build(training.ds_config(2, fp8, bf16={"check_grad_overflow": not is_late}), base.MODEL)
    if is_late:
        training.flag_late(engine.optimizer)
    reports = training.reports_of(engine)
    training.train(engine, 3)
    handle = engine.module.register_forward_hook(lambda module, inputs, loss: loss * float("nan"))
    far = engine.module.blocks[1].up.register_forward_pre_hook(lambda _, inputs: (40 * inputs[0],))
    training.train(engine, 1, first_step=3)
    handle.remove()
    far.remove()
    training.train(engine, 3, first_step=4)
    assert engine.skipped_steps == 1 and engine.fp8.precision.in_bf16 == frozenset()
    training.destroy(engine)
    assert [report["step_skipped"] for report in reports] == [0.0, 1.0, 0.0]


def states(engine: Any) -> dict[str, Any]:
    return training.full_masters(engine) | base.moments(engine)


def sent(folder: str, stage: int, more: dict[str, Any], by: str) -> dict[str, Any]:
    """14 steps with the outlier in steps 4 to 10. Before step 7 the guard, a listener of the user's or a call sends its
    layer to bf16. Before step 11 a call brings it back, or, by "stay", the guard."""
    fp8 = {
        "monitor": {"every": 2, "sink": f"{folder}/health.jsonl"},
        **more,
        "guard": {"action": "bf16" if by in ("guard", "stay") else None},
    }
    monkeypatch = pytest.MonkeyPatch()  # by itself the guard would bring it back later than the call
    monkeypatch.setattr("fp8_ds.monitor.guard.NUM_STEPS_IN_BF16", 4 if by == "stay" else 6)
    one = training.build(training.ds_config(stage, fp8), base.MODEL)
    reports = training.reports_of(one)

    def judge(report: Any) -> None:  # of docs/monitor.md, with another limit
        names = [name for name, kinds in report.layers.items() if "input" in kinds and kinds["input"].underflow > 0.4]
        if names and not report.numbers["step_skipped"]:
            one.set_layer_precision(names, "bf16")

    if by == "listener":
        one.add_fp8_listener(judge)
    hook, losses, in_bf16 = None, [], []
    for step in range(14):
        if step == 4 and dist.get_rank() == 0:  # counts are added up over the ranks
            hook = one.module.blocks[1].up.register_forward_pre_hook(outlier)
        if step == 11 and hook is not None:
            hook.remove()
        if step == 7 and by == "call":
            one.set_layer_precision(["blocks.1.up"], "bf16")
        if step == 11 and by != "stay":
            one.set_layer_precision(["blocks.1.up"], "schedule")
        in_bf16.append(sorted(one.fp8.precision.in_bf16))
        losses += training.train(one, 1, step)
    guard = one._fp8_step_callbacks.guard
    stays = None if guard is None else guard.state_dict()["stays"]
    result = {"losses": losses, "in_bf16": in_bf16, "states": states(one), "stays": stays}
    training.destroy(one)  # the last report
    monkeypatch.undo()
    result["changes"] = [change for report in reports for change in report.get("guard", ())]
    return result


@pytest.mark.parametrize(
    ("stage", "more", "by"),
    [
        pytest.param(1, {"optimizer": {"states": "fp8"}}, "stay", marks=pytest.mark.slow),
        (2, {}, "guard"),
        (3, {}, "listener"),
    ],
)
def test_guard_and_listener_send_a_layer_and_back_bit_for_bit_as_calls_do(
    ranks: Any, tmp_path: Path, stage: int, more: dict[str, Any], by: str
) -> None:
    by_call = ranks(2).run(sent, str(tmp_path), stage, more, "call")
    for found, expected in zip(ranks(2).run(sent, str(tmp_path), stage, more, by), by_call, strict=True):
        there = [["blocks.1.up"] if 7 <= step < 11 else [] for step in range(14)]
        assert found["in_bf16"] == expected["in_bf16"] == there
        assert found["losses"] == expected["losses"]
        base.assert_same(found["states"], expected["states"])
        steps = {"listener": {}, "guard": {7: "bf16"}, "stay": {7: "bf16", 11: "schedule"}}[by]
        assert found["changes"] == [{"step": step, "layer": "blocks.1.up", "to": to} for step, to in steps.items()]
        assert found["stays"] == {"listener": None, "guard": {}, "stay": {"blocks.1.up": [4, 0]}}[by]


def pipelined(folder: str) -> list[list[list[str]]]:
    """Layers in bf16 after each step from the third to the sixth, in one run and resumed after the second, which was
    sampled. The last block, of the second stage, underflows."""
    fp8 = {"guard": {"action": "bf16"}, "monitor": {"every": 2, "sink": f"{folder}/health.jsonl"}}
    found, batches = [], test_pipeline.data(2)
    for resumes in (False, True):
        engine = test_pipeline.pipeline_engine(fp8, "balanced")
        for name, module in engine.module.named_modules():
            if name == "4.up":
                module.register_forward_pre_hook(outlier)
        if resumes:
            engine.load_checkpoint(folder)
        else:
            for _ in range(2):
                engine.train_batch(batches)
            engine.save_checkpoint(folder)
        steps = []
        for _ in range(4):
            engine.train_batch(batches)
            steps.append(sorted(engine.fp8.precision.in_bf16))
        found.append(steps)
        test_pipeline.destroy(engine)
    return found


def test_a_resumed_pipeline_judges_the_layers_of_every_stage(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(pipelined, str(tmp_path))
    assert first == [[[]] * 4] * 2 and second == [[["4.up"]] * 4] * 2


@patch("fp8_ds.engine.step_callbacks.GUARD_EVERY", 2)
@patch("fp8_ds.monitor.overshoot.NUM_UPDATES_TO_SETTLE", 1)
def beside_a_stage_without_layers(folder: str) -> list[list[str]]:
    """Layers in bf16 after each of six steps; the second stage has none in FP8, and takes part in what is shared."""
    fp8 = {
        "linear": {"recipe": "delayed", "filter_fqns": ["lm_head", "3.", "4."]},
        "guard": {"action": "bf16"},
        "monitor": {"every": 3, "sink": f"{folder}/health.jsonl"},
    }
    engine, found = test_pipeline.pipeline_engine(fp8, "balanced"), []
    batches = test_pipeline.data(2)
    for step in range(6):
        up = next((module for name, module in engine.module.named_modules() if name == "1.up"), None)
        if up is not None and step == 2:
            up.register_forward_pre_hook(lambda _, inputs: (40 * inputs[0],))
        engine.train_batch(batches)
        found.append(sorted(engine.fp8.precision.in_bf16))
    test_pipeline.destroy(engine)
    return found


def test_a_stage_without_fp8_layers_takes_part(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(beside_a_stage_without_layers, str(tmp_path))
    assert first == [[]] * 4 + [["1.down", "1.up"]] * 2 and second == [[]] * 6

"""The guard on real engines: the layer that underflows is named, and sent to bf16 on all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import test_checkpoint as base
import test_pipeline
import training
from torch import Tensor

pytestmark = pytest.mark.distributed


def outlier(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One channel far above all others: their elements fall below E4M3's normal range."""
    x = inputs[0].clone()
    x[..., 3] = 1e6
    return (x, *inputs[1:])


FITS = patch.multiple("fp8_ds.monitor.guard", UNDERFLOW=0.4)
"""A limit that this model does not pass as it is, though its gradients' underflow is that of untrained weights."""


@FITS
def watched(folder: str, stage: int, action: str, save_at: int) -> dict[str, Any]:
    """Ten steps, every second one sampled, of a layer that underflows from the start; resumed at `save_at`."""

    with training.log_lines() as said:
        fp8 = {"guard": {"action": action}, "monitor": {"every": 2, "sink": f"{folder}/health.jsonl"}}

        def engine(seed: int) -> tuple[Any, list[Any]]:
            one = training.build(training.ds_config(stage, fp8), base.MODEL, seed)
            one.module.blocks[1].up.register_forward_pre_hook(outlier)
            return one, training.reports_of(one)

        def go_on(one: Any) -> list[tuple[float, list[str]]]:
            steps = range(save_at, 10)
            return [(*training.train(one, 1, step), sorted(one.fp8.precision.in_bf16)) for step in steps]

        through, reports = engine(0)
        training.train(through, save_at)
        through.save_checkpoint(folder)
        num_before, num_said = len(reports), len(said)
        steps = go_on(through)
        training.destroy(through)
        result: dict[str, Any] = {"through": (steps, reports[num_before:], said[num_said:])}
        other, reports = engine(1)
        if save_at > 1:
            training.train(other, 1)  # a sample is under way, and is forgotten
        other.load_checkpoint(folder)
        num_said = len(said)
        steps = go_on(other)
        training.destroy(other)
        result["resumed"] = steps, reports, said[num_said:]
    for _, found, lines in result.values():
        for report in found:
            for key in ("gathered_bytes", "gathered_fp8_bytes"):  # in stage 3 a save gathers, too
                report.pop(key)
        lines[:] = [line for line in lines if "guard, step" in line]
    return result


@pytest.mark.parametrize(
    ("stage", "action", "save_at", "names"),
    [
        (2, "bf16", 2, [2]),  # sampled, and not judged yet
        (3, "report", 3, []),  # named before the save; the next step is a sampled one
    ],
)
def test_a_resumed_run_judges_what_the_run_before_would_have(
    ranks: Any, tmp_path: Path, stage: int, action: str, save_at: int, names: list[int]
) -> None:
    for rank, result in enumerate(ranks(2).run(watched, str(tmp_path), stage, action, save_at)):
        steps, reports, said = result["through"]
        assert result["resumed"] == result["through"]
        assert [report["step"] for report in reports] == [step for step in (2, 4, 6, 8, 10) if step >= save_at]
        assert [f"guard, step {name}:" in line for name, line in zip(names, said, strict=False)] == [True] * len(said)
        assert len(said) == (len(names) if rank == 0 else 0)
        assert steps[-1][1] == (["blocks.1.up"] if action == "bf16" else [])


@patch.multiple("fp8_ds.monitor.guard", UNDERFLOW=0.9)
def skipped_in_a_sample(folder: str, recipe: str, is_late: bool) -> tuple[int, list[str], list[float]]:
    """(skipped steps, layers in bf16 afterwards, `step_skipped` of the reports) where one loss is NaN."""
    fp8 = {
        "linear": {"recipe": recipe},
        "guard": {"action": "bf16"},
        "monitor": {"every": 2, "sink": f"{folder}/health.jsonl"},
    }
    if is_late:
        fp8["optimizer"] = {"states": "fp8"}
    engine = training.build(training.ds_config(2, fp8, bf16={"check_grad_overflow": not is_late}), base.MODEL)
    if is_late:
        engine.optimizer.fp8_flag = training.late_flag()
    training.train(engine, 3)
    handle = engine.module.register_forward_hook(lambda module, inputs, loss: loss * float("nan"))
    training.train(engine, 1, first_step=3)
    handle.remove()
    training.train(engine, 3, first_step=4)
    skipped, in_bf16 = engine.skipped_steps, sorted(engine.fp8.precision.in_bf16)
    training.destroy(engine)
    lines = [json.loads(line) for line in Path(folder, "health.jsonl").read_text().splitlines()]
    return skipped, in_bf16, [line["step_skipped"] for line in lines]


@pytest.mark.parametrize(("recipe", "is_late"), [("tensorwise", False), ("delayed", True)])
def test_a_step_that_was_skipped_puts_no_layer_into_bf16(
    ranks: Any, tmp_path: Path, recipe: str, is_late: bool
) -> None:
    for result in ranks(2).run(skipped_in_a_sample, str(tmp_path), recipe, is_late):
        assert result == (1, [], [0.0, 1.0, 0.0])


def states(engine: Any) -> dict[str, Any]:
    return training.full_masters(engine) | base.moments(engine)


@FITS
def sent(folder: str, stage: int, more: dict[str, Any], by: str) -> dict[str, Any]:
    """14 steps with the outlier in steps 4 to 10. Before step 7 the guard, a listener of the user's or a call sends its
    layer to bf16, and a call brings it back before step 11."""
    import torch.distributed as dist

    fp8 = {
        "monitor": {"every": 2, "sink": f"{folder}/health.jsonl"},
        **more,
        "guard": {"action": "bf16" if by == "guard" else None},
    }
    one = training.build(training.ds_config(stage, fp8), base.MODEL)
    reports = training.reports_of(one)

    def judge(report: Any) -> None:  # of docs/monitor.md, with another limit
        names = [name for name, kinds in report.layers.items() if any(one.underflow > 0.4 for one in kinds.values())]
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
        if step == 11:
            one.set_layer_precision(["blocks.1.up"], "schedule")
        in_bf16.append(sorted(one.fp8.precision.in_bf16))
        losses += training.train(one, 1, step)
    result = {"losses": losses, "in_bf16": in_bf16, "states": states(one)}
    training.destroy(one)  # the last report
    result["changes"] = [change for report in reports for change in report.get("guard", ())]
    return result


@pytest.mark.parametrize(("stage", "more"), [(1, {"optimizer": {"states": "fp8"}}), (3, {})])
def test_guard_and_listener_send_a_layer_bit_for_bit_as_a_call_does_until_a_call_brings_it_back(
    ranks: Any, tmp_path: Path, stage: int, more: dict[str, Any]
) -> None:
    by_call = ranks(2).run(sent, str(tmp_path), stage, more, "call")
    by = "guard" if stage == 1 else "listener"
    for found, expected in zip(ranks(2).run(sent, str(tmp_path), stage, more, by), by_call, strict=True):
        there = [["blocks.1.up"] if 7 <= step < 11 else [] for step in range(14)]
        assert found["in_bf16"] == expected["in_bf16"] == there
        assert found["losses"] == expected["losses"]
        base.assert_same(found["states"], expected["states"])
        assert found["changes"] == ([{"step": 7, "layer": "blocks.1.up"}] if by == "guard" else [])


@FITS
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

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


def watched(folder: str, stage: int, action: str, save_at: int) -> dict[str, Any]:
    """Ten steps, every second one sampled, of a layer that underflows from the start; resumed at `save_at`."""
    from deepspeed.utils import logger

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    fp8 = {"guard": {"action": action, "underflow": 0.4}, "monitor": {"every": 2, "sink": f"{folder}/health.jsonl"}}

    def engine(seed: int) -> tuple[Any, list[Any]]:
        one = training.build(training.ds_config(stage, fp8), base.MODEL, seed)
        one.module.blocks[1].up.register_forward_pre_hook(outlier)
        reports: list[Any] = []
        one._fp8_health.sinks.append(lambda report: reports.append(report.to_json()))
        return one, reports

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
    logger.removeHandler(handler)
    for _, found, lines in result.values():
        for report in found:
            for key in ("gather_ms", "gathered_bytes", "gathered_fp8_bytes"):  # in stage 3 a save gathers, too
                report.pop(key)
        lines[:] = [line for line in lines if "guard, step" in line]
    return result


@pytest.mark.parametrize(
    ("stage", "action", "save_at", "names"),
    [
        (2, "bf16", 2, [2]),  # sampled, and not judged yet
        (3, "bf16", 2, [2]),
        (2, "report", 3, []),  # named before the save; the next step is a sampled one
        (3, "bf16", 1, [2]),  # the next step is a sampled one
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


def pipelined(folder: str) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Layers in bf16 after each of steps 3 to 5, in one run and resumed after step 2, whose sample waits; both guards'
    lines. The last block, of the second stage, underflows."""
    import deepspeed
    import test_pipeline as pipe
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.utils import groups, logger
    from torch import nn

    import fp8_ds  # noqa: F401

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    fp8 = {"guard": {"action": "bf16", "underflow": 0.4}, "monitor": {"every": 2, "sink": f"{folder}/health.jsonl"}}

    def build(seed: int) -> Any:
        layers = [LayerSpec(nn.Embedding, training.VOCABULARY, pipe.WIDTH)]
        layers += [LayerSpec(training.Block, pipe.WIDTH, pipe.HIDDEN, True) for _ in range(4)]
        layers.append(LayerSpec(pipe.Head))
        torch.manual_seed(seed)
        net = PipelineModule(layers, num_stages=2, loss_fn=pipe.loss_fn, partition_method="uniform", base_seed=7)
        for name, module in net.named_modules():
            if name == "4.up":
                module.register_forward_pre_hook(outlier)
        config = training.ds_config(1, fp8, gradient_accumulation_steps=2)
        return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]

    found = []
    batches = pipe.data(2)
    engine = build(0)
    for _ in range(2):
        engine.train_batch(batches)
    engine.save_checkpoint(folder)
    for resumes in (False, True):
        if resumes:
            training.destroy(engine)
            groups.mpu = None
            engine = build(1)
            engine.load_checkpoint(folder)
        steps = []
        for _ in range(3):
            engine.train_batch(batches)
            steps.append(sorted(engine.fp8.precision.in_bf16))
        found.append(steps)
    training.destroy(engine)
    groups.mpu = None
    logger.removeHandler(handler)
    return found[0], found[1], [line for line in said if "guard, step" in line]


def test_a_resumed_pipeline_judges_the_layers_of_every_stage(ranks: Any, tmp_path: Path) -> None:
    for rank, (through, resumed, said) in enumerate(ranks(2).run(pipelined, str(tmp_path))):
        assert through == resumed == [["4.up"] if rank == 1 else []] * 3
        assert ["guard, step 2: 1 layers" in line and "4.up" in line for line in said] == [True] * (2 - 2 * rank)

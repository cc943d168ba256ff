"""Delayed scales that do not fit their tensors are named; those of healthy training are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from torch import Tensor, nn

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
    [(1, {}, {}), (2, E4M11, UNCHECKED), (3, RELEASED, {})],
)
def test_wrong_scales_are_named_once_a_step_late_by_one_rank(
    ranks: Any, stage: int, fp8: dict[str, Any], overrides: dict[str, Any]
) -> None:
    wrong = {"blocks.0.up grad_output": 1e-10, "blocks.1.down input": 1e4}
    first, second = ranks(2).run(run, stage, fp8, wrong, overrides)
    assert first["told"] == [0, 0, 0, 0, 0, 0, 1, 1, 1] and second["lines"] == []
    assert "blocks.0.up grad_output underflows" in first["lines"][0]
    assert "blocks.1.down input saturates" in first["lines"][0] and ": 2 (" in first["lines"][0]


def run_of_stages() -> list[str]:
    import test_pipeline

    with training.log_lines() as said:
        engine = test_pipeline.pipeline_engine(DELAYED, "balanced")
        batches = test_pipeline.data(2)
        for step in range(7):
            if step >= 3 and torch.distributed.get_rank() == 1:
                put_wrong(engine, engine.fp8.history.names[0], 1e-7)
            engine.train_batch(batches)
        name = engine.fp8.history.names[0]
        test_pipeline.destroy(engine)
    return [line.replace(name, "NAME") for line in lines(said)]


def test_a_pipeline_stage_names_its_own_layers(ranks: Any) -> None:
    first, second = ranks(2).run(run_of_stages)
    assert first == [] and len(second) == 1
    assert second[0].startswith("rank 1: fp8: delayed scales") and "NAME underflows" in second[0]


def run_with_skipped_steps(stage: int, fp8: dict[str, Any], waits: bool) -> tuple[list[str], int]:
    """The lines of ten steps, of which four in a row and two more have an infinite gradient on rank 0."""
    overrides = {"bf16": {"enabled": True, "check_grad_overflow": waits}}
    is_on = torch.distributed.get_rank() == 0
    with training.log_lines() as said:
        engine = training.build(training.ds_config(stage, {**DELAYED, **fp8}, **overrides))
        if not waits:
            engine.optimizer.fp8_flag = training.late_flag()
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


class Experts(nn.Module):
    """Four MLPs of linears, each with scales of its own. A token goes to one of those that `chosen` names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32, bias=False), nn.GELU(), nn.Linear(32, width, bias=False))
            for _ in range(4)
        )
        self.chosen = [0]

    def forward(self, x: Tensor) -> Tensor:
        flat, out = x.flatten(0, -2), torch.zeros_like(x.flatten(0, -2))
        of = torch.arange(len(flat)) % len(self.chosen)
        for i, expert in enumerate(self.chosen):
            out[of == i] = self.mlps[expert](flat[of == i])
        return out.view_as(x)


def run_of_experts() -> tuple[list[str], bool]:
    """One expert idles for six steps from the start, another for twenty, longer than scales remember, in between."""
    import deepspeed

    torch.manual_seed(0)
    net = training.TinyLM(num_blocks=2)
    experts: Any = Experts(192)
    net.blocks[0].down = nn.Sequential(experts, net.blocks[0].down)  # type: ignore[assignment]
    with training.log_lines() as said:
        config = training.ds_config(2, DELAYED)
        engine = deepspeed.initialize(model=net, config=config, model_parameters=list(net.parameters()))[0]
        history = engine.fp8.history
        slot = history.names.index("blocks.0.down.0.mlps.3.0 grad_output")
        training.train(engine, 1)
        is_idle = not bool(history.amax_history[0, slot])
        for first, end, chosen in ((1, 6, [0, 1, 2]), (6, 26, [0, 1, 3]), (26, 34, [0, 1, 2, 3])):
            experts.chosen = chosen
            training.train(engine, end - first, first)
        is_used = bool(history.amax_history[33 % 16, slot])
        training.destroy(engine)
    return lines(said), is_idle and is_used


def run_of_lora(grad_dtype: str, warmup: int) -> tuple[list[str], bool]:
    """Adapters whose second matrix is zero: what the first one's output gradient is in the first step, too."""
    import deepspeed
    import peft

    torch.manual_seed(0)
    net: Any = training.TinyLM()
    net = peft.get_peft_model(net, peft.LoraConfig(r=16, lora_alpha=16, target_modules=["up", "down"]))
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": warmup}}
    config = training.ds_config(2, {"linear": {"recipe": "delayed", "grad_dtype": grad_dtype}}, scheduler=scheduler)
    trainable = [p for p in net.parameters() if p.requires_grad]
    with training.log_lines() as said:
        engine = deepspeed.initialize(model=net, config=config, model_parameters=trainable)[0]
        history = engine.fp8.history
        slots = [i for i, name in enumerate(history.names) if "lora_A" in name and name.endswith("grad_output")]
        training.train(engine, 1)
        begins_at_zero = bool(slots) and not bool(history.amax_history[0, slots].any())
        training.train(engine, 24, 1)
        has_grown = bool((history.amax_history[24 % 16, slots] > 0).all())
        training.destroy(engine)
    return lines(said), begins_at_zero and has_grown


def test_experts_that_idle_are_not_named(ranks: Any) -> None:
    assert ranks(2).run(run_of_experts) == [([], True)] * 2


@pytest.mark.parametrize(("grad_dtype", "warmup"), [("e5m2", 2), ("e4m3", 100)])
def test_lora_from_its_zero_start_is_not_named(ranks: Any, grad_dtype: str, warmup: int) -> None:
    pytest.importorskip("peft")
    assert ranks(2).run(run_of_lora, grad_dtype, warmup) == [([], True)] * 2

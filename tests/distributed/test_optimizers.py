"""Learning-rate schedulers, a learning rate that one rank has alone, and engines whose optimizer does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from support.ranks import on_ranks

from fp8_ds.errors import ConfigError

pytestmark = pytest.mark.distributed

SCHEDULERS = {
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 4e-3, "cycle_first_step_size": 2, "decay_lr_rate": 0.1},
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-3, "warmup_num_steps": 3},
    "WarmupDecayLR": {"total_num_steps": 6, "warmup_min_lr": 0.0, "warmup_max_lr": 3e-3, "warmup_num_steps": 2},
    "WarmupCosineLR": {"total_num_steps": 6, "warmup_min_ratio": 0.1, "warmup_num_steps": 2},
}
SMALL = {"width": 32, "hidden": 64, "num_blocks": 1}


def rates(stage: int, kind: str, fp8: dict[str, Any] | None) -> tuple[list[Any], list[float]]:
    """(learning rate and betas after each of 5 steps, losses)."""
    scheduler = {"type": kind, "params": SCHEDULERS[kind]}
    engine = training.build(training.ds_config(stage, fp8, scheduler=scheduler), SMALL)
    seen, losses = [], []
    for step in range(5):
        losses += training.train(engine, 1, first_step=step)
        seen.append((engine.get_lr(), [group["betas"] for group in engine.optimizer.param_groups]))
    training.destroy(engine)
    return seen, losses


def compare_rates(stages: dict[str, int]) -> dict[str, Any]:
    return {kind: (rates(stage, kind, {}), rates(stage, kind, None)) for kind, stage in stages.items()}


def test_every_scheduler_gives_the_rates_of_stock(ranks: Any) -> None:
    stages = {kind: 1 + i % 3 for i, kind in enumerate(SCHEDULERS)}
    for kind, ((ours, losses), (stock, stock_losses)) in ranks(2).run(compare_rates, stages)[0].items():
        assert ours == stock, kind
        assert len({str(rate) for rate in ours}) > 2, kind  # it does schedule
        assert max(abs(a - b) for a, b in zip(losses, stock_losses, strict=True)) < 0.02, kind


@pytest.mark.parametrize(("stage", "release"), [(2, False), (2, True), (3, True)])
@on_ranks(2)
def test_a_learning_rate_of_one_ranks_own_is_an_error_where_the_host_learns_of_it_late(
    stage: int, release: bool
) -> None:
    fp8, late = {"optimizer": {"states": "fp8", "release": release}}, {"bf16": {"check_grad_overflow": False}}
    model = {"width": 64, "hidden": 192, "num_blocks": 3}
    buckets = {"zero_optimization": {"reduce_bucket_size": 16_000}}
    engine = training.build(training.ds_config(stage, fp8, gradient_clipping=0.0, **late, **buckets), model)
    training.flag_late(engine.optimizer)
    group = engine.optimizer.param_groups[0]
    usual = group["lr"]
    training.train(engine, 1)
    masters = training.full_masters(engine)
    group["lr"] = usual / (1 + dist.get_rank())
    training.train(engine, 1, 1)
    for name, master in training.full_masters(engine).items():
        assert torch.equal(master, masters[name]), name
    group["lr"] = usual
    with pytest.raises(ConfigError, match="lr, betas, eps and weight_decay"):
        training.train(engine, 1, 2)
    training.destroy(engine)


@pytest.mark.parametrize(("stage", "num_left"), [(2, 2), (3, 2), (3, 7)])
@on_ranks(2)
def test_trainable_weights_in_no_parameter_group_stay_bf16_and_unchanged(stage: int, num_left: int) -> None:
    """Where no linear is in a group, the engine is a stock one."""
    import deepspeed

    torch.manual_seed(0)
    net = training.TinyLM()
    linears = [block.up for block in net.blocks] + [m for m in net.modules() if type(m) is torch.nn.Linear]
    left = {id(linear.weight) for linear in linears[: num_left if num_left == 2 else None]}
    params = [p for p in net.parameters() if id(p) not in left]
    weight = net.blocks[0].up.weight
    before = weight.detach().clone()
    engine = deepspeed.initialize(model=net, model_parameters=params, config=training.ds_config(stage, {}))[0]
    report, losses = engine.fp8_report(), training.train(engine, 3)
    with deepspeed.zero.GatheredParameters([weight], enabled=stage == 3):
        assert torch.equal(weight.detach(), before.bfloat16())
    if num_left == 2:
        assert "4 of 7 linears" in report["plan"] and "in no parameter group" in report["plan"]
    else:
        assert report == {"enabled": False}
    assert type(net.blocks[0].up) is torch.nn.Linear and losses[-1] < losses[0]
    training.destroy(engine)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_engine_without_optimizer_stays_bf16_and_says_so(stage: int) -> None:
    """A reference model. The block would refuse its few layers if it trained.

    Source of stage 0: huggingface/trl 1.16 trl/models/utils.py, prepare_deepspeed: beside a policy of stage 1 or 2.
    """
    import deepspeed

    losses = []
    with training.log_lines() as said:
        for fp8 in ({"linear": {"filter_fqns": ["lm_head", "blocks"]}}, None):
            config = training.ds_config(stage, fp8)
            del config["optimizer"]
            torch.manual_seed(0)
            engine = deepspeed.initialize(model=training.TinyLM(**SMALL), config=config)[0]
            with torch.no_grad():
                losses.append(float(engine(training.micro_batches(0, 1)[0])))
            if fp8 is not None:
                assert type(engine).__name__ == "Fp8DeepSpeedEngine" and not engine.fp8_report()["enabled"]
            training.destroy(engine)
    assert losses[0] == losses[1]
    assert sum(line.startswith("fp8") and "no optimizer" in line for line in said) == (dist.get_rank() == 0)

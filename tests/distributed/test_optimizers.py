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
    engine.optimizer.fp8_flag = training.late_flag()
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


def weights_in_no_group(stage: int, num_left: int) -> Any:
    """Train with the first `num_left` up-projections in no parameter group; (plan, losses, class and values of one)."""
    import deepspeed

    torch.manual_seed(0)
    net = training.TinyLM()
    linears = [m for m in net.modules() if type(m) is torch.nn.Linear]
    ups = [block.up for block in net.blocks][:num_left] if num_left < 9 else linears
    left = {id(linear.weight) for linear in ups}
    params = [p for p in net.parameters() if id(p) not in left]
    before = ups[0].weight.detach().clone()
    engine = deepspeed.initialize(model=net, model_parameters=params, config=training.ds_config(stage, {}))[0]
    report, losses = engine.fp8_report(), training.train(engine, 3)
    with deepspeed.zero.GatheredParameters([ups[0].weight], enabled=stage == 3):
        after = ups[0].weight.detach().clone()
    same = torch.equal(after, before.bfloat16())
    name = type(net.blocks[0].up).__name__
    training.destroy(engine)
    return report, losses, name, same


@pytest.mark.parametrize("stage", [2, 3])
def test_trainable_weights_in_no_parameter_group_stay_bf16_and_unchanged(ranks: Any, stage: int) -> None:
    for report, losses, name, same in ranks(2).run(weights_in_no_group, stage, 2):
        assert "4 of 7 linears" in report["plan"] and "in no parameter group" in report["plan"]
        assert name == "Linear" and same and losses[-1] < losses[0]


def test_an_optimizer_of_other_parameters_only_leaves_a_stock_engine(ranks: Any) -> None:
    for report, losses, name, same in ranks(2).run(weights_in_no_group, 3, 9):
        assert report == {"enabled": False} and name == "Linear" and same and losses[-1] < losses[0]


def without_optimizer(stage: int) -> tuple[str, bool, list[str], bool]:
    """A reference model: (engine class, whether FP8, notices, whether its loss is that of stock). The block would
    refuse its few layers if it trained.

    Source of stage 0: huggingface/trl 1.16 trl/models/utils.py, prepare_deepspeed: beside a policy of stage 1 or 2.
    """
    import deepspeed

    losses = []
    with training.log_lines() as notices:
        for fp8 in ({"linear": {"num_layers_at_start_in_bf16": 90}}, None):
            config = training.ds_config(stage, fp8)
            del config["optimizer"]
            torch.manual_seed(0)
            engine = deepspeed.initialize(model=training.TinyLM(**SMALL), config=config)[0]
            with torch.no_grad():
                losses.append(float(engine(training.micro_batches(0, 1)[0])))
            if fp8 is not None:
                kind, is_fp8 = type(engine).__name__, engine.fp8_report()["enabled"]
            training.destroy(engine)
    return kind, is_fp8, [line for line in notices if line.startswith("fp8")], losses[0] == losses[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_engine_without_optimizer_stays_bf16_and_says_so(ranks: Any, stage: int) -> None:
    results = ranks(2).run(without_optimizer, stage)
    for rank, (kind, is_fp8, notices, same_loss) in enumerate(results):
        assert (kind, is_fp8, same_loss) == ("Fp8DeepSpeedEngine", False, True)
        assert len(notices) == (1 if rank == 0 else 0)
    assert "no optimizer" in results[0][2][0] and "stays bf16" in results[0][2][0]

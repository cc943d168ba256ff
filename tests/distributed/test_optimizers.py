"""Learning-rate schedulers, client optimizers, and engines whose optimizer does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training

from fp8_ds.errors import Fp8DsError

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


def client_run(stage: int, fp8: dict[str, Any] | None) -> dict[str, Any]:
    import deepspeed

    torch.manual_seed(0)
    net = training.TinyLM(**SMALL)
    decays = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
    client = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1.0 / (1 + step))
    group_list = client.param_groups
    config = training.ds_config(stage, fp8)
    del config["optimizer"]
    engine, optimizer, _, _ = deepspeed.initialize(model=net, optimizer=client, config=config)
    same_list = client.param_groups is group_list and optimizer.param_groups is group_list
    losses, seen = [], []
    for step in range(5):
        losses += training.train(engine, 1, first_step=step)
        scheduler.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    result = {
        "same_list": same_list,
        "rates": seen,
        "losses": losses,
        "decay": [group["weight_decay"] for group in optimizer.param_groups],
    }
    if fp8 is not None:
        result |= {"state": training.fp8_state(engine), "masters": training.full_masters(engine)}
    training.destroy(engine)
    return result


@pytest.mark.parametrize("stage", [1, 3])
def test_client_optimizer_with_two_groups_and_its_scheduler(ranks: Any, stage: int) -> None:
    ours, stock = ranks(2).run(client_run, stage, {})[0], ranks(2).run(client_run, stage, None)[0]
    assert ours["same_list"] == stock["same_list"] is True
    assert ours["rates"] == stock["rates"] and ours["rates"][0] == [pytest.approx(1.5e-3), pytest.approx(5e-4)]
    assert ours["decay"] == [0.1, 0.0]
    assert max(abs(a - b) for a, b in zip(ours["losses"], stock["losses"], strict=True)) < 0.02
    training.assert_fp8_follows_masters(ours["state"], ours["masters"])


def initialize_error(stage: int) -> str:
    """Type and text of what deepspeed.initialize raises on this rank."""
    import deepspeed

    net = training.TinyLM(**SMALL)
    params = list(net.parameters())
    fp8 = {"linear": {"filter_fqns": ["blocks", "lm_head"]}}
    try:
        deepspeed.initialize(model=net, model_parameters=params, config=training.ds_config(stage, fp8))
    except Exception as error:  # the type is what is asserted
        return f"{type(error).__name__}: {error}"
    return "no error"


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


@pytest.mark.parametrize("stage", [2, 3])
def test_model_without_an_eligible_linear_is_refused_on_all_ranks(ranks: Any, stage: int) -> None:
    for text in ranks(2).run(initialize_error, stage):
        assert text.startswith("ConfigError: fp8: expected at least one linear to convert")


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


def goes_on_to_other_weights(fp8: dict[str, Any] | None) -> list[Any]:
    """Losses of two blocks trained in turns by an optimizer that makes ZeRO-3's masters anew, as BAdam does; or the
    error at the first change."""
    import deepspeed

    torch.manual_seed(0)
    net = training.TinyLM(**SMALL | {"num_blocks": 2})
    net.requires_grad_(False)
    blocks = [block.requires_grad_(i == 0) for i, block in enumerate(net.blocks)]
    client = torch.optim.AdamW(blocks[0].parameters(), lr=3e-3)
    config = training.ds_config(3, fp8)
    del config["optimizer"]
    engine = deepspeed.initialize(model=net, optimizer=client, config=config)[0]
    zero, step = engine.optimizer, client.step

    def then_the_next(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        for block, trains in zip(blocks, (False, True), strict=True):
            block.requires_grad_(trains)
        for name in ("fp16_groups", "fp16_partitioned_groups", "fp16_partitioned_groups_flat", "groups_padding"):
            setattr(zero, name, [])
        zero.fp16_partitioned_groups_flat_numel, zero.fp16_partitioned_groups_flat_id = [], []
        zero.fp32_partitioned_groups_flat = []
        zero._create_fp16_partitions_with_defragmentation([{"params": list(blocks[1].parameters())}])
        zero._setup_for_real_optimizer()

    client.step = then_the_next  # type: ignore[method-assign]
    try:
        found: list[Any] = training.train(engine, 1)
    except Fp8DsError as error:
        found = [type(error).__name__, str(error)]
    training.destroy(engine)
    return found


def test_masters_of_other_weights_in_the_middle_of_training_are_refused(ranks: Any) -> None:
    """BAdam trains blocks in turns: in FP8 one would not follow its new masters when its turn comes again."""
    assert all(isinstance(loss, float) for (loss,) in ranks(2).run(goes_on_to_other_weights, None))
    for kind, text in ranks(2).run(goes_on_to_other_weights, {}):
        assert kind == "UnsupportedError"
        assert text.startswith("AdamW: expected to find the masters of the start")

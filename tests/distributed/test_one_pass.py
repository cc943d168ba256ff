"""Adam on fp32 states in one pass: the bits of DeepSpeed's step, its states, and when DeepSpeed's step runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import training
from support.ranks import on_ranks
from torch.optim.optimizer import register_optimizer_step_post_hook


def two_groups(net: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay and betas of their own, the other parameters without."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1, "betas": (0.8, 0.99)}, {"params": vectors, "weight_decay": 0.0}]


def trained(
    stage: int, without: list[str], optimizer: str, clipping: float, checks: bool = True, steps: int = 1, **params: Any
) -> dict[str, Any]:
    """Four steps, in the third of which a gradient is infinite; with one group where gradients are clipped.

    `checks`: whether such a step is skipped; `steps`: micro-batches a step.
    """
    more = {"bf16": {"check_grad_overflow": checks}, "gradient_accumulation_steps": steps}
    config = training.ds_config(stage, {"without_deepspeed_fixes": without}, gradient_clipping=clipping, **more)
    config["optimizer"]["type"] = optimizer
    config["optimizer"]["params"].update(params)
    engine = training.build(config, {"width": 48}, groups=None if clipping else two_groups)
    losses = training.train(engine, 2)
    handle = engine.module.blocks[1].norm.weight.register_hook(lambda grad: grad * torch.inf)
    losses += training.train(engine, 1, 2)
    handle.remove()
    flags = bool(engine.optimizer.overflow), engine.skipped_steps
    losses += training.train(engine, 1, 3)
    optimizer_of_deepspeed = engine.optimizer.optimizer
    states = [dict(state) for state in optimizer_of_deepspeed.state.values()]
    result = {
        "losses": losses,
        "flags": flags,
        "norm": float(engine.optimizer._global_grad_norm),
        "masters": list(training.full_masters(engine).values()),
        "states": [{key: torch.as_tensor(value).clone() for key, value in state.items()} for state in states],
    }
    training.destroy(engine)
    return result


def assert_equal(ours: dict[str, Any], stock: dict[str, Any], rtol: float = 0.0) -> None:
    assert ours["flags"] == stock["flags"]
    assert ours["norm"] == pytest.approx(
        stock["norm"], rel=1e-6, nan_ok=True
    )  # DeepSpeed rounds once more between groups
    equal = partial(torch.testing.assert_close, rtol=rtol, atol=rtol, equal_nan=True)
    for key in ("losses", "masters", "states"):
        equal(ours[key], stock[key])


@pytest.mark.parametrize(
    ("stage", "optimizer", "clipping", "world_size"),
    [(1, "AdamW", 0.05, 2), (2, "Adam", 0.0, 2), (3, "AdamW", 0.05, 2), (2, "AdamW", 0.0, 1), (3, "Adam", 0.0, 1)],
)
def test_one_pass_has_the_bits_of_deepspeeds_step(
    ranks: Any, stage: int, optimizer: str, clipping: float, world_size: int
) -> None:
    run = ranks(world_size).run
    stock, ours = (run(trained, stage, without, optimizer, clipping) for without in (["adam_step"], []))
    for there, here in zip(stock, ours, strict=True):
        assert here["flags"] == (True, 1)
        # DeepSpeed clips in stage 3 by a norm in float64.
        assert_equal(here, there, rtol=1e-5 if stage == 3 and clipping else 0.0)


@pytest.mark.parametrize("params", [{"amsgrad": True}, {"maximize": True}], ids=str)
def test_what_one_pass_does_not_know_is_deepspeeds_step(ranks: Any, params: dict[str, Any]) -> None:
    stock, ours = (ranks(1).run(trained, 2, without, "AdamW", 0.05, **params)[0] for without in (["adam_step"], []))
    assert_equal(ours, stock)


def test_several_micro_batches_on_one_rank_and_a_step_that_is_not_skipped_are_deepspeeds(ranks: Any) -> None:
    for checks, steps in ((True, 2), (False, 1)):
        run = partial(ranks(1).run, trained, 2)
        stock, ours = (run(without, "AdamW", 0.05, checks, steps)[0] for without in (["adam_step"], []))
        assert ours["flags"] == (checks, int(checks))
        assert_equal(ours, stock)


@on_ranks(2)
def test_a_run_that_goes_back_counts_from_there(folder: str) -> None:
    engine = training.build(training.ds_config(2, {}), {"width": 48})
    training.train(engine, 2)
    engine.save_checkpoint(folder)
    first = training.train(engine, 3, 2)
    engine.load_checkpoint(folder)
    assert not engine.optimizer.fp8.step.adam._counts  # a load may write into the same tensor, past its version
    assert training.train(engine, 3, 2) == first
    training.destroy(engine)


@on_ranks(1)
def test_states_that_are_elsewhere_are_refused_before_anything_changes() -> None:
    engine = training.build(training.ds_config(2, {}), {"width": 48})
    training.train(engine, 1)
    master = engine.optimizer.single_partition_of_fp32_groups[0]
    before, state = master.detach().clone(), engine.optimizer.optimizer.state[master]
    state["exp_avg"] = state["exp_avg"][:-1].clone()
    with pytest.raises(ValueError, match=r"expected m of Adam as float32 .*reload_states"):
        training.train(engine, 1, 1)
    assert torch.equal(master, before)
    training.destroy(engine)


@on_ranks(1)
def test_schedulers_leave_the_pass_alone_and_steps_that_a_user_replaced_run() -> None:
    engine = training.build(training.ds_config(2, {}), {"width": 48})
    zero, calls = engine.optimizer, []
    optimizer, masters = zero.optimizer, zero.single_partition_of_fp32_groups
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert zero.fp8.step.adam.why_not(masters) is None
    own = optimizer.step
    optimizer.step = lambda *args: (calls.append(1), own(*args))
    assert "replaced" in zero.fp8.step.adam.why_not(masters)
    training.train(engine, 1)
    assert calls == [1]
    optimizer.step = own
    hook = register_optimizer_step_post_hook(lambda *args: None)
    assert "hooks" in zero.fp8.step.adam.why_not(masters)
    hook.remove()
    training.destroy(engine)

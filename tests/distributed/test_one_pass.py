"""Adam on fp32 states in one pass: the bits of DeepSpeed's step, its states, and when DeepSpeed's step runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import training


def two_groups(net: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay and betas of their own, the other parameters without."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1, "betas": (0.8, 0.99)}, {"params": vectors, "weight_decay": 0.0}]


def trained(stage: int, without: list[str], optimizer: str, clipping: float, **params: Any) -> dict[str, Any]:
    """Four steps, in the third of which a gradient is infinite; with one group where gradients are clipped."""
    config = training.ds_config(stage, {"without_deepspeed_fixes": without}, gradient_clipping=clipping)
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
    assert ours["norm"] == pytest.approx(stock["norm"], rel=1e-6)  # DeepSpeed rounds once more between groups
    equal = partial(torch.testing.assert_close, rtol=rtol, atol=rtol)
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

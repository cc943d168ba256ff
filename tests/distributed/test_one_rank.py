"""FP8 states on one rank: gradients go from autograd to the update without a bucket, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import training
from torch import nn

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
NUM_STEPS = 3


@contextmanager
def gradients(direct: bool) -> Iterator[None]:
    """Engines built inside take gradients directly, or through stock buckets."""
    from fp8_ds.zero.states12 import Fp8StatesStage12

    before = Fp8StatesStage12._fp8_takes_gradients
    Fp8StatesStage12._fp8_takes_gradients = direct
    try:
        yield
    finally:
        Fp8StatesStage12._fp8_takes_gradients = before


class UnusedLM(training.TinyLM):
    """A linear that no forward reads: its gradient stays None."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.unused = nn.Linear(16, 16)


def run(stage: int, accumulation: int, direct: bool, model: dict[str, Any]) -> dict[str, Any]:
    """Train with the direct way, or with stock buckets; what both must agree in."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    import fp8_ds  # noqa: F401

    torch.manual_seed(0)
    with gradients(direct):
        net = UnusedLM(**model)
        config = training.ds_config(stage, STATES, gradient_accumulation_steps=accumulation)
        engine = deepspeed.initialize(model=net, config=config, model_parameters=list(net.parameters()))[0]
    losses, grads, norms = [], {}, []
    for step in range(NUM_STEPS):
        for tokens in training.micro_batches(step, accumulation):
            loss = engine(tokens)
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                for name, p in engine.module.named_parameters():
                    grads[step, name] = safe_get_full_grad(p).float().clone()
            engine.step()
            losses.append(float(loss))
        norms.append(float(engine.get_global_grad_norm()))
    result = {
        "is_direct": engine.optimizer._fp8_is_direct,
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "left": [name for name, p in engine.module.named_parameters() if p.grad is not None],
        "masters": training.full_masters(engine),
        "fp8": training.fp8_state(engine),
    }
    training.destroy(engine)
    return result


REENTRANT = {"checkpointing": "reentrant"}


@pytest.mark.parametrize(
    ("stage", "model", "accumulation"),
    [
        pytest.param(1, {}, 1, id="1-1"),
        pytest.param(2, {}, 3, id="2-3"),
        pytest.param(2, REENTRANT, 1, id="2-reentrant-1"),
    ],
)
def test_every_number_is_that_of_the_way_through_buckets(
    ranks: Any, stage: int, accumulation: int, model: dict[str, Any]
) -> None:
    ours = ranks(1).run(run, stage, accumulation, True, model)[0]
    stock = ranks(1).run(run, stage, accumulation, False, model)[0]
    assert ours["is_direct"] and not stock["is_direct"]
    assert ours["losses"] == stock["losses"] and ours["norms"] == stock["norms"]
    training.assert_fp8_equals(ours["fp8"], stock["fp8"])
    for kind in ("masters", "grads"):
        assert ours[kind].keys() == stock[kind].keys()
        for name, value in stock[kind].items():
            assert torch.equal(ours[kind][name], value), (kind, name)
    assert not ours["left"]
    assert all(float(ours["grads"][0, name].abs().max()) > 0 for name in ("embedding.weight", "blocks.0.up.weight"))


def norms_of(case: str, stage: int, direct: bool) -> list[float]:
    """Gradient norms that a step would see, in loops that do not simply step after each backward."""
    accumulation = 2 if case == "zero_grad between micro-batches" else 1
    overrides = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 8000}}
    with gradients(direct):
        engine = training.build(
            training.ds_config(stage, STATES, gradient_accumulation_steps=accumulation, **overrides)
        )
    norms = []

    def backward(step: int, factor: float = 1.0) -> None:
        loss = engine(training.micro_batches(step, 1)[0]) * factor
        if case == "coalesced" and hasattr(engine, "coalesce_grad_reduction"):
            with engine.coalesce_grad_reduction():
                engine.backward(loss)
        else:
            engine.backward(loss)

    for step in range(4):
        if case == "a backward without a step":
            backward(10 + step, 1e3)
            engine.zero_grad()
            engine.optimizer.zero_grad()
        for _ in range(accumulation):
            backward(step)
            engine.step()
            if case == "zero_grad between micro-batches":
                engine.zero_grad()
        norms.append(float(engine.get_global_grad_norm()))
    training.destroy(engine)
    return norms


LOOPS = ("a backward without a step", "zero_grad between micro-batches", "coalesced")


@pytest.mark.parametrize(("case", "stage"), zip(LOOPS, (1, 2, 1), strict=True))
def test_unusual_loops_see_the_gradients_that_buckets_give(ranks: Any, case: str, stage: int) -> None:
    ours, stock = (ranks(1).run(norms_of, case, stage, way)[0] for way in (True, False))
    assert ours == stock

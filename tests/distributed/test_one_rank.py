"""FP8 states on one rank: gradients go from autograd to the update without a bucket, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import training
from support.ranks import on_ranks
from torch import nn

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}


@contextmanager
def gradients(direct: bool) -> Iterator[None]:
    """Engines built inside take gradients directly, or through stock buckets."""
    from fp8_ds.zero import zero12

    before = zero12.has_one_rank
    zero12.has_one_rank = lambda host: direct and before(host)
    try:
        yield
    finally:
        zero12.has_one_rank = before


class UnusedLM(training.TinyLM):
    """A linear that no forward reads: its gradient stays None."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.unused = nn.Linear(16, 16)


NO_STEP, ZERO_GRAD, COALESCED = "a backward without a step", "zero_grad between micro-batches", "coalesced"


def run(stage: int, accumulation: int, model: dict[str, Any], loop: str, direct: bool) -> dict[str, Any]:
    """Train with the direct way, or with stock buckets; what both must agree in."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    import fp8_ds  # noqa: F401

    torch.manual_seed(0)
    zero = {"reduce_bucket_size": 8000}
    with gradients(direct):
        net = UnusedLM(**model)
        config = training.ds_config(stage, STATES, gradient_accumulation_steps=accumulation, zero_optimization=zero)
        engine = deepspeed.initialize(model=net, config=config, model_parameters=list(net.parameters()))[0]
    assert (type(engine.optimizer.fp8.gradients).__name__ == "GradientsOfOneRank") is direct

    def backward(tokens: torch.Tensor, factor: float = 1.0) -> None:
        loss = engine(tokens) * factor
        coalesces = loop == COALESCED and hasattr(engine, "coalesce_grad_reduction")
        with engine.coalesce_grad_reduction() if coalesces else nullcontext():
            engine.backward(loss)

    grads, norms = {}, []
    for step in range(3):
        if loop == NO_STEP:
            backward(training.micro_batches(10 + step, 1)[0], 1e3)
            engine.zero_grad()
            engine.optimizer.zero_grad()
        for tokens in training.micro_batches(step, accumulation):
            backward(tokens)
            if engine.is_gradient_accumulation_boundary():
                for name, p in engine.module.named_parameters():
                    grads[f"{name} {step}"] = safe_get_full_grad(p).float().clone()
            engine.step()
            if loop == ZERO_GRAD:
                engine.zero_grad()
        norms.append(float(engine.get_global_grad_norm()))
    assert not any(p.grad is not None for p in engine.module.parameters())
    result = {"norms": norms, "tensors": grads | training.full_masters(engine), "fp8": training.fp8_state(engine)}
    training.destroy(engine)
    return result


@pytest.mark.parametrize(
    ("stage", "accumulation", "model", "loop"),
    [
        (2, 3, {}, ""),
        (2, 1, {"checkpointing": "reentrant"}, ""),
        (1, 1, {}, NO_STEP),
        (2, 2, {}, ZERO_GRAD),
        (1, 1, {}, COALESCED),
    ],
)
@on_ranks(1)
def test_every_number_is_that_of_the_way_through_buckets(
    stage: int, accumulation: int, model: dict[str, Any], loop: str
) -> None:
    ours, stock = (run(stage, accumulation, model, loop, direct) for direct in (True, False))
    assert ours["norms"] == stock["norms"]
    training.assert_fp8_equals(ours["fp8"], stock["fp8"])
    for name, value in stock["tensors"].items():
        assert torch.equal(ours["tensors"][name], value), name
    assert all(float(ours["tensors"][f"{n} 0"].abs().max()) > 0 for n in ("embedding.weight", "blocks.0.up.weight"))

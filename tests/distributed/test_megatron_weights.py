"""A weight goes into FP8 once in each step, and never lags behind the optimizer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

import megatron_training as mt
import torch
from megatron_training import Layout
from support.ranks import RankPool, on_ranks
from torch import nn

from fp8_ds.nn.linear.recipes import TensorwiseRecipe

pytestmark = pytest.mark.distributed

Ranks = Callable[[int], RankPool]
NUM_STEPS = 4
LAYOUTS = {
    "dp2_distributed_optimizer_bf16_overlap": Layout(distributed_optimizer=True, overlap=True, bf16=True),
    "tp2_sp_bf16": Layout(tp=2, sp=True, bf16=True),
    "pp2": Layout(pp=2),
}


@contextmanager
def counted(*, always: bool = False) -> Iterator[list[int]]:
    """Casts of weights, one number; `always`: at every read, as without a cache."""
    from megatron_patches.linear import StepWeight

    count, cast, current = [0], TensorwiseRecipe.quantize_weight, StepWeight._current

    def quantize_weight(self: Any, weight: Any) -> Any:
        count[0] += 1
        return cast(self, weight)

    def fresh(self: Any) -> Any:
        self.expire()
        return current(self)

    TensorwiseRecipe.quantize_weight = quantize_weight  # type: ignore[method-assign]
    if always:
        StepWeight._current = fresh  # type: ignore[method-assign]
    try:
        yield count
    finally:
        TensorwiseRecipe.quantize_weight = cast  # type: ignore[method-assign]
        StepWeight._current = current  # type: ignore[method-assign]


def casts(layout: Layout, always: bool) -> dict[str, Any]:
    with counted(always=always) as count:
        trained = mt.train(layout, NUM_STEPS, lr=1e-2)
    return {"casts": count[0], "losses": trained["losses"], "norms": trained["norms"]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_casts_each_weight_once_and_gives_the_bits_of_a_cast_at_every_read(ranks: Ranks, name: str) -> None:
    layout = LAYOUTS[name]
    kept, always = (ranks(2).run(casts, layout, flag) for flag in (False, True))
    num_linears = 4 * mt.NUM_LAYERS // layout.pp
    assert [one["casts"] for one in kept] == 2 * [num_linears * NUM_STEPS]
    # `data` and `scale_inv` are read in forward and in backward.
    assert min(one["casts"] for one in always) >= 2 * 2 * mt.NUM_MICRO * num_linears * NUM_STEPS
    assert [(one["losses"], one["norms"]) for one in kept] == [(one["losses"], one["norms"]) for one in always]
    losses = kept[-1]["losses"]
    assert losses[-1] < losses[0] - 0.15  # weights move


@on_ranks(1)
def test_loops_that_do_not_say_which_micro_batch_comes_read_the_weights_as_they_are() -> None:
    """Outputs follow a write that autograd cannot see: in a loop of one's own, and in evaluation after training by
    Megatron's schedule."""
    for schedule in (False, True):
        with mt.megatron(Layout()):
            training = mt.Training(Layout())
            data = mt.batches(4)
            if schedule:
                training.step(data)
                training.module.eval()
            tokens = next(data)
            mask = torch.triu(torch.ones(1, 1, mt.LENGTH, mt.LENGTH, dtype=torch.bool), 1)
            positions = torch.arange(mt.LENGTH)[None].expand(mt.MICRO_BATCH, -1)
            outputs = []
            for _ in range(2):
                outputs.append(training.module(tokens[:, :-1], positions, mask).detach().clone())
                for name, p in training.module.named_parameters():
                    if "linear_fc1" in name:
                        p.data.mul_(-1.5)
            assert not torch.equal(*outputs)


def test_a_write_that_autograd_sees_and_another_storage_are_noticed() -> None:
    from fp8_ds.config import LinearConfig
    from megatron_patches.linear import StepWeight

    weight = nn.Parameter(torch.randn(32, 16))
    step = StepWeight(weight, TensorwiseRecipe(LinearConfig()))
    with counted() as count:
        first = step.data.float() * step.scale_inv
        assert step.data is step.data and count == [1]
        with torch.no_grad():
            weight.mul_(2)
        torch.testing.assert_close(step.data.float() * step.scale_inv, 2 * first)
        weight.data = -weight.data
        torch.testing.assert_close(step.data.float() * step.scale_inv, -2 * first)
        assert count == [3]


def test_copies_of_a_parameter_do_not_have_its_cache() -> None:
    from fp8_ds.config import LinearConfig
    from megatron_patches.linear import StepWeight

    weight = nn.Parameter(torch.randn(32, 16))
    weight._fp8 = StepWeight(weight, TensorwiseRecipe(LinearConfig()))  # type: ignore[attr-defined]
    assert getattr(copy.deepcopy(weight), "_fp8", None) is None
    assert getattr(pickle.loads(pickle.dumps(weight)), "_fp8", None) is None


def fully_sharded(always: bool) -> list[float]:
    """Losses of steps of two micro-batches over a model that torch's FSDP2 shards, which Megatron's schedule steers."""
    from torch.distributed.fsdp import fully_shard

    with mt.megatron(Layout()), counted(always=always):
        model = mt.build(Layout())
        for layer in model.decoder.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        losses = []
        data = mt.batches(NUM_STEPS)
        for _ in range(NUM_STEPS):
            for micro_batch in range(mt.NUM_MICRO):
                for layer in model.decoder.layers:
                    layer.current_microbatch = micro_batch
                output, loss_of = mt.forward_step(data, model)
                loss, _ = loss_of(output)
                loss.backward()
                losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
        return losses


def test_weights_that_fsdp2_shards_do_not_lag_behind_the_optimizer(ranks: Ranks) -> None:
    """Between steps a layer has the shard in place of the weight, and the gathered one comes back as it left."""
    kept, always = (ranks(2).run(fully_sharded, flag) for flag in (False, True))
    assert kept == always

"""What ZeRO-3 prefetches is there in time and does no harm. What comes of collectives: tests/unit/comm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from support.ranks import on_ranks
from torch import Tensor, nn

from fp8_ds.comm import collectives

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
NUM_BLOCKS = 3


class Block(nn.Module):
    """Of four weights. Norms persist with 64 elements each, as does the one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linears = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        for linear in self.linears:
            h = F.gelu(linear(h))
        return x + h


def build(
    fp8: dict[str, Any] | None,
    num_blocks: int = NUM_BLOCKS,
    accumulation: int = 1,
    names_leaves: bool = True,
    **zero_keys: Any,
) -> Any:
    import deepspeed

    import fp8_ds  # noqa: F401

    zero = {"stage3_param_persistence_threshold": 100, **zero_keys}
    if names_leaves:
        zero["leaf_module"] = {"classes": [f"{Block.__module__}.{Block.__qualname__}"]}
    torch.manual_seed(0)
    net = training.TinyLM(num_blocks=0)
    net.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
    config = training.ds_config(3, fp8, zero_optimization=zero, gradient_accumulation_steps=accumulation)
    return deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]


def losses_of_a_trace_that_breaks(
    fp8: dict[str, Any], num_prefetched: int, min_bytes: int = collectives.MIN_BYTES, accumulation: int = 1
) -> list[float]:
    """Micro-batches with all blocks, then some that go on after the first one with the third, then with all again."""
    keys = {"stage3_prefetch_bucket_size": num_prefetched, "stage3_max_reuse_distance": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MIN_BYTES", min_bytes)
        engine = build(fp8, accumulation=accumulation, **keys)
        in_use: dict[str, Any] = engine.module.blocks._modules
        everything, losses = dict(in_use), []
        for step in range(9):
            in_use.clear()
            in_use.update({name: block for name, block in everything.items() if step // 3 != 1 or name != "1"})
            loss = engine(training.micro_batches(step, 1)[0])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    training.destroy(engine)
    return losses


@pytest.mark.parametrize("fp8", [pytest.param({}, marks=pytest.mark.slow), STATES], ids=["fp32", "fp8"])
@on_ranks(2)
def test_blocks_that_are_on_their_way_when_the_model_takes_another_way_do_no_harm_and_nor_does_how_they_are_sent(
    fp8: dict[str, Any],
) -> None:
    """DeepSpeed walks through all that is in flight then."""
    a_block = 4 * 64 * 64
    without = losses_of_a_trace_that_breaks(fp8, 0)
    assert losses_of_a_trace_that_breaks(fp8, a_block) == without and without[-1] < without[0]
    assert losses_of_a_trace_that_breaks(fp8, a_block, 0) == without  # weights and gradients are sent each by itself
    # Of two micro-batches the first one's gradients come where they are added up.
    accumulated = losses_of_a_trace_that_breaks(fp8, a_block, accumulation=2)
    assert losses_of_a_trace_that_breaks(fp8, a_block, 0, accumulation=2) == accumulated


@contextmanager
def own_bound(live: int) -> Iterator[None]:
    """DeepSpeed's own bound on live weights, for configurations that name none, is `live` elements."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    field = DeepSpeedZeroConfig.model_fields["max_live_parameters"]
    before, field.default = field.default, live
    DeepSpeedZeroConfig.model_rebuild(force=True)
    try:
        yield
    finally:
        field.default = before
        DeepSpeedZeroConfig.model_rebuild(force=True)


def take_steps(engine: Any, num: int, seen: list[Any] | None = None) -> None:
    """Take steps from batch 0 on. What hooks append to `seen` is of the last of them then."""
    for step in range(num):
        if seen is not None:
            seen.clear()
        engine.backward(engine(training.micro_batches(step, 1)[0]))
        engine.step()


def blocks_that_are_late(num_before_compile: int | None = None, **keys: int) -> list[bool]:
    """Whether each block of a third step, forward and backward, is gathered only when it is needed.

    Args:
        num_before_compile: steps before `compile()`, which makes the blocks leaves; else the configuration does.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    with own_bound(1):
        if num_before_compile is None:
            a_block = 4 * 64 * 64
            zero = {"stage3_prefetch_bucket_size": a_block, **keys}
            engine = build({}, num_blocks=8, stage3_max_reuse_distance=0, **zero)
        else:
            engine = build({}, num_blocks=8, stage3_max_reuse_distance=0, names_leaves=False, **keys)
            take_steps(engine, num_before_compile)
            engine.compile(backend="eager")
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    stock, late = coordinator.fetch_sub_module, []

    def fetch(module: nn.Module, forward: bool) -> None:
        if isinstance(module, Block):
            late.append(any(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in module.parameters()))
        stock(module, forward)

    coordinator.fetch_sub_module = fetch
    take_steps(engine, 3, late)
    training.destroy(engine)
    return late


@on_ranks(1)
def test_every_leaf_is_prefetched_where_nobody_has_set_a_bound_on_live_weights() -> None:
    assert blocks_that_are_late() == [False] * 16
    assert any(blocks_that_are_late(stage3_max_live_parameters=1))


@on_ranks(1)
def test_every_leaf_that_compile_makes_is_prefetched_where_nobody_has_set_how_much() -> None:
    for num_before in (0, 3):
        assert blocks_that_are_late(num_before) == [False] * 16
    assert any(blocks_that_are_late(0, stage3_prefetch_bucket_size=1))
    assert any(blocks_that_are_late(0, stage3_max_live_parameters=1))


def weights_there_after_release(num_before_compile: int) -> list[int]:
    """Weights of each block that are there after DeepSpeed has released it, forward and backward, in a fourth step.

    With four blocks one is released in the step of the trace in which it was before it was a leaf.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    engine = build({}, num_blocks=4, stage3_max_reuse_distance=0, names_leaves=False)
    take_steps(engine, num_before_compile)
    engine.compile(backend="eager")
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    stock, left = coordinator.release_sub_module, []

    def release(module: nn.Module, forward: bool = False) -> None:
        stock(module, forward)
        if isinstance(module, Block):
            left.append(sum(p.ds_status != ZeroParamStatus.NOT_AVAILABLE for p in module.parameters()))

    coordinator.release_sub_module = release
    take_steps(engine, 4, left)
    training.destroy(engine)
    return left


@on_ranks(1)
def test_a_leaf_that_compile_makes_after_some_steps_is_released_as_one_that_it_makes_before_them() -> None:
    assert weights_there_after_release(3) == weights_there_after_release(0)

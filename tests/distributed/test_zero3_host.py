"""What ZeRO-3 prefetches is there in time and does no harm, and gradients come where DeepSpeed adds them up. What comes
of collectives: tests/unit/comm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from packaging.version import Version
from support.ranks import on_ranks
from torch import Tensor, nn

from fp8_ds.comm import collectives
from fp8_ds.comm.reduce_scatter import reduce_scatter_shares
from fp8_ds.engine import deepspeed_fixes
from fp8_ds.engine.deepspeed_fixes import gradient_buffer
from fp8_ds.testing import assert_bitwise

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
    fp8: dict[str, Any] | None, norms_between: bool = False, num_blocks: int = NUM_BLOCKS, **zero_keys: Any
) -> Any:
    import deepspeed

    import fp8_ds  # noqa: F401

    zero = {
        "leaf_module": {"classes": [f"{Block.__module__}.{Block.__qualname__}"]},
        "stage3_param_persistence_threshold": 100,
        **zero_keys,
    }
    torch.manual_seed(0)
    net = training.TinyLM(num_blocks=0)
    net.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
    if norms_between:
        net.blocks = nn.ModuleList(part for block in net.blocks for part in (block, nn.LayerNorm(64)))
    config = training.ds_config(3, fp8, zero_optimization=zero)
    return deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]


def losses_of_a_trace_that_breaks(
    fp8: dict[str, Any], num_prefetched: int, min_bytes: int = collectives.MIN_BYTES
) -> list[float]:
    """Steps with all blocks, then some that go on after the first one with the third, then with all again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MIN_BYTES", min_bytes)
        return _losses_of_a_trace_that_breaks(fp8, num_prefetched)


def _losses_of_a_trace_that_breaks(fp8: dict[str, Any], num_prefetched: int) -> list[float]:
    engine = build(fp8, stage3_prefetch_bucket_size=num_prefetched, stage3_max_reuse_distance=0)
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


@pytest.mark.parametrize("fp8", [{}, STATES], ids=["fp32", "fp8"])
def test_blocks_that_are_on_their_way_when_the_model_takes_another_way_do_no_harm(
    ranks: Any, fp8: dict[str, Any]
) -> None:
    """DeepSpeed walks through all that is in flight then."""
    a_block = 4 * 64 * 64
    with_prefetch, without = (ranks(2).run(losses_of_a_trace_that_breaks, fp8, num)[0] for num in (a_block, 0))
    assert with_prefetch == without and with_prefetch[-1] < with_prefetch[0]


@pytest.mark.parametrize("fp8", [{}, STATES], ids=["fp32", "fp8"])
def test_steps_have_the_same_bits_with_weights_and_gradients_sent_each_by_itself(
    ranks: Any, fp8: dict[str, Any]
) -> None:
    a_block = 4 * 64 * 64
    each, together = (ranks(2).run(losses_of_a_trace_that_breaks, fp8, a_block, *least) for least in ((0,), ()))
    assert each == together


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


def blocks_that_are_late(**keys: int) -> list[bool]:
    """Whether each block of a third step, forward and backward, is gathered only when it is needed."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    a_block = 4 * 64 * 64
    with own_bound(1):
        engine = build({}, num_blocks=8, stage3_prefetch_bucket_size=a_block, stage3_max_reuse_distance=0, **keys)
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    stock, late = coordinator.fetch_sub_module, []

    def fetch(module: nn.Module, forward: bool) -> None:
        if isinstance(module, Block):
            late.append(any(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in module.parameters()))
        stock(module, forward)

    coordinator.fetch_sub_module = fetch
    for step in range(3):
        late.clear()
        engine.backward(engine(training.micro_batches(step, 1)[0]))
        engine.step()
    training.destroy(engine)
    return late


@on_ranks(1)
def test_every_leaf_is_prefetched_where_nobody_has_set_a_bound_on_live_weights() -> None:
    assert blocks_that_are_late() == [False] * 16
    assert any(blocks_that_are_late(stage3_max_live_parameters=1))


def losses_after_a_skipped_step(num_prefetched: int) -> list[float]:
    """Of blocks with norms between. What persists is released by a skipped step, and fetched with its block after."""
    keys = {"stage3_prefetch_bucket_size": num_prefetched, "stage3_max_reuse_distance": 0}
    engine = build({}, norms_between=True, num_blocks=6, **keys)
    losses = []
    for step in range(6):
        loss = engine(training.micro_batches(step, 1)[0])
        engine.backward(loss * float("inf") if step == 4 else loss)
        engine.step()
        losses.append(float(loss))
    assert engine.skipped_steps == 1
    training.destroy(engine)
    return losses


@pytest.mark.skipif(
    Version(version("deepspeed")) < Version("0.19.1"), reason="this DeepSpeed's stage 3 looks for no overflow in bf16"
)
def test_a_block_that_is_on_its_way_again_when_another_of_its_first_fetch_is_waited_for_is_waited_for_too(
    ranks: Any,
) -> None:
    """The embedding and the first two blocks are fetched together. Two more fetches later all of the forward is asked
    for, and between the blocks the first one, but for its norm, for its backward."""
    with_prefetch, without = (ranks(2).run(losses_after_a_skipped_step, num)[0] for num in (34_000, 0))
    assert with_prefetch == without


# --- gradients ---


def accumulated(fp8: dict[str, Any], patched: dict[str, Any]) -> tuple[list[set[bool]], dict[str, torch.Tensor]]:
    """By micro-batch, whether shares of the blocks' gradients come in the place where DeepSpeed adds them up; and
    masters after three steps of two micro-batches."""
    engine = training.build(training.ds_config(3, fp8, gradient_accumulation_steps=2))
    kind, found = type(engine.optimizer), []
    stock = kind.partition_grads

    def partition_grads(self: Any, params: list[Any], shares: list[torch.Tensor]) -> list[torch.Tensor]:
        places = [gradient_buffer(self, p) for p in params]
        if len(params) > 1:
            found.append({a.data_ptr() == b.data_ptr() for a, b in zip(places, shares, strict=True)})
        return stock(self, params, shares)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MIN_BYTES", 0)
        patch.setattr(kind, "partition_grads", partition_grads)
        for name, value in patched.items():
            patch.setattr(deepspeed_fixes, name, value)
        training.train(engine, 3)
    masters = training.full_masters(engine)
    training.destroy(engine)
    return found, masters


def without_places(tensors: Any, group: Any, places: Any) -> list[torch.Tensor]:
    return reduce_scatter_shares(tensors, group)


@pytest.mark.parametrize("fp8", [{}, {"optimizer": {"states": "fp8", "master": "e4m19"}}], ids=["fp32", "e4m19"])
def test_the_first_gradients_of_a_step_come_where_they_are_added_up(ranks: Any, fp8: dict[str, Any]) -> None:
    copied = ranks(2).run(accumulated, fp8, {"reduce_scatter_shares": without_places})
    for (found, masters), (found_copied, masters_copied) in zip(
        ranks(2).run(accumulated, fp8, {}), copied, strict=True
    ):
        assert found == [{True}, {False}] * 3 and found_copied == [{False}] * 6
        for name, master in masters.items():
            assert_bitwise(master, masters_copied[name])

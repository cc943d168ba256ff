"""What ZeRO-3 with blocks as leaves makes the host do: it waits no more often than in stock, and walks no arguments."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from fake_device import fake_device
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_ds.comm import collectives

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
PHASES = ("forward", "backward", "step")
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


def waits_of_a_step(fp8: dict[str, Any] | None) -> dict[str, dict[str, int]]:
    """By phase of the fourth step: waits, and "walks" over arguments of functions on weights."""
    from fp8_ds.nn.linear import parameter

    stock = parameter.tree_map
    with fake_device() as waits:
        engine = build(fp8)
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        fetch = coordinator.fetch_sub_module

        def numbered(*args: Any, **kwargs: Any) -> None:
            waits.fetch += 1
            fetch(*args, **kwargs)

        def walk(*args: Any) -> Any:
            waits["walks"] += 1
            return stock(*args)

        coordinator.fetch_sub_module = numbered
        training.train(engine, 3)
        parameter.tree_map = walk
        found = {}
        for phase in PHASES:
            waits.clear()
            if phase == "forward":
                loss = engine(training.micro_batches(3, 1)[0])
            elif phase == "backward":
                engine.backward(loss)
            else:
                engine.step()
            found[phase] = dict(waits)
        parameter.tree_map = stock
        training.destroy(engine)
    return found


def test_the_host_waits_no_more_often_than_in_stock_nor_for_a_gather_of_the_leaf_it_is_at(ranks: Any) -> None:
    stock, *both = (ranks(2).run(waits_of_a_step, fp8)[0] for fp8 in (None, {}, STATES))
    assert stock["forward"]["own event"] > 0 and stock["step"]["device"] > 0  # so that both are counted
    for ours in both:
        for phase in PHASES:
            for kind in ("stream", "event", "device"):
                assert ours[phase].get(kind, 0) <= stock[phase].get(kind, 0), (phase, kind)
            assert ours[phase].get("own event", 0) == ours[phase].get("walks", 0) == 0
        assert ours["forward"]["recorded"] == NUM_BLOCKS + 2 < stock["forward"]["recorded"]  # and embedding and head
        assert ours["step"].get("device", 0) < stock["step"]["device"]  # persistent parameters are gathered without one


def test_with_fp8_states_the_device_waits_for_the_last_reductions_and_the_host_goes_on(ranks: Any) -> None:
    stock, fp32_states, fp8_states = (ranks(2).run(waits_of_a_step, fp8)[0]["backward"] for fp8 in (None, {}, STATES))
    assert stock["stream"] == fp32_states["stream"] == 1 and fp8_states.get("stream", 0) == 0
    assert fp8_states["stream by the device"] == fp32_states["stream by the device"] + 1


def same_as_stocks(persistent: list[Any], original_all_gather: Any) -> list[tuple[bool, bool]]:
    """For each persistent parameter: whether it is here, and has the bits that stock's own gather gives it."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    is_here = [p.ds_status == ZeroParamStatus.AVAILABLE for p in persistent]
    ours = [p.data.clone() for p in persistent]
    persistent[0].partition(persistent)
    original_all_gather(persistent)
    return [
        (here, value.shape == p.ds_shape and torch.equal(value, p.data))
        for here, value, p in zip(is_here, ours, persistent, strict=True)
    ]


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def are_freed(tensors: list[weakref.ref[Tensor]]) -> bool:
    """Whether nothing keeps them for long: a thread of gloo's lets go of a tensor after it has said that it is done."""
    end = time.monotonic() + 60
    while any(tensor() is not None for tensor in tensors) and time.monotonic() < end:
        time.sleep(0.01)
    return all(tensor() is None for tensor in tensors)


def gathered(fp8: dict[str, Any]) -> dict[str, Any]:
    """After two steps: persistent parameters; operators by which three weights that lie one behind the other, and two
    that do not, are sent and taken out of one buffer, and by which each is sent by itself; and whether their bytes are
    those of gathers one by one."""
    engine = build(fp8)
    training.train(engine, 1)
    engine.backward(engine(training.micro_batches(1, 1)[0]))
    with _Names() as mode:
        engine.step()
    in_step = mode.names["aten::split_with_sizes_copy"]
    optimizer = engine.optimizer
    persistent = same_as_stocks(optimizer.persistent_parameters, optimizer._fp8_hooks[0].original_all_gather)
    shards = optimizer._fp8_shards
    names, is_same, is_freed = {}, True, True
    together, each = collectives.MIN_BYTES, 0
    for what, weights, min_bytes in (
        ("adjacent", shards.weights[:3], together),
        ("apart", shards.weights[:3:2], together),
        ("each", shards.weights[:3], each),
    ):
        with _Names() as mode, pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "MIN_BYTES", min_bytes)
            handle = shards.gather(weights)
            received = [weakref.ref(buffer) for buffer in handle.buffers]
            handle.wait()
        names[what] = mode.names
        arrived = [weight.payload.data.clone().view(torch.uint8) for weight in weights]
        for weight in weights:
            weight.param.partition()
        is_freed &= are_freed(received)  # though the handle is still here
        for weight, data in zip(weights, arrived, strict=True):
            shards.gather([weight]).wait()
            is_same &= torch.equal(weight.payload.data.view(torch.uint8), data)
            weight.param.partition()
    training.destroy(engine)
    return {"persistent": persistent, "in step": in_step, "names": names, "is same": is_same, "is freed": is_freed}


def test_what_is_gathered_has_the_bits_of_stocks_way_and_of_gathers_one_by_one(ranks: Any) -> None:
    for found in ranks(2).run(gathered, {}):
        assert found["persistent"] == [(True, True)] * (2 * NUM_BLOCKS + 2) and found["is same"] and found["is freed"]
        assert found["in step"] == 1  # which lays out all that persists
        for what, num_copies in (("adjacent", 0), ("apart", 1)):
            names = found["names"][what]
            assert names["aten::cat"] == num_copies and names["aten::split_with_sizes_copy"] == 1
            assert not {"aten::clone", "aten::copy_"} & set(names)  # of a strided view: bytewise on CUDA
        copies = {"aten::cat", "aten::split_with_sizes_copy", "aten::clone", "aten::copy_"}
        assert not copies & set(found["names"]["each"])
        assert found["names"]["each"]["c10d::allgather_into_tensor_coalesced_"] == 1


def left(fp8: dict[str, Any]) -> dict[str, Any]:
    """An FP8 weight that has been gathered and released, by stock code and by ours; and one that a module uses."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    engine = build(fp8)
    training.train(engine, 1)
    shards = engine.optimizer._fp8_shards
    weight = shards.weights[0]
    p = weight.param
    found: dict[str, Any] = {"weight": []}
    hooks = next(hooks for hooks in engine.optimizer._fp8_hooks if hooks.param is p)
    for release in (hooks.original_partition, p.partition):
        shards.gather([weight]).wait()
        assert p.ds_status == ZeroParamStatus.AVAILABLE
        release()
        with torch._C.DisableTorchFunctionSubclass():
            found["weight"].append((str(p.ds_status), p.data.numel(), p.data.dtype, weight.payload.data is None))
    shards.gather([weight]).wait()
    p.ds_active_sub_modules.add(17)
    try:
        p.partition()
    except RuntimeError as error:
        found["in use"] = str(error)
    p.ds_active_sub_modules.discard(17)
    training.destroy(engine)
    return found


def test_a_weight_is_left_as_stock_leaves_one_and_not_while_it_is_used(ranks: Any) -> None:
    for found in ranks(2).run(left, {}):
        by_stock, by_us = found["weight"]
        assert by_stock == by_us == ("ZeroParamStatus.NOT_AVAILABLE", 0, torch.bfloat16, True)
        assert "still active" in found["in use"]


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


def order_of_a_step() -> list[str]:
    """What FP8 states do in a step, in order."""
    engine = build(STATES)
    training.train(engine, 1)
    done: list[str] = []

    def spied(name: str) -> Any:
        stock = getattr(engine.optimizer, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return stock(*args, **kwargs)

        return spy

    for name in ("_fp8_update", "_partition_all_parameters", "_fp8_end_step"):
        setattr(engine.optimizer, name, spied(name))
    training.train(engine, 1, first_step=1)
    return done


def test_the_device_gets_its_update_before_the_host_walks_over_all_parameters(ranks: Any) -> None:
    assert ranks(1).run(order_of_a_step) == [["_fp8_update", "_partition_all_parameters", "_fp8_end_step"]]

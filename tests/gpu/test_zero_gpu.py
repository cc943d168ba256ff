"""FP8 ZeRO on GPUs with NCCL: bytes are those of the masters, and kernels, streams, prefetch, overlap_comm, release and
offload change no bit."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import training
from support.adam_shards import STATE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

MODEL = {"width": 512, "hidden": 2048, "num_blocks": 6}
STEPS = 8
E4M11 = {"states": "fp8", "master": "e4m11"}


def offload_and_reload(engine: Any) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    include = [OffloadStateTypeEnum(name) for name in ("optim_states", "hp_params", "lp_params")]
    engine.optimizer.offload_states(include=include, device=SimpleNamespace(value="cpu"), pin_memory=False)
    engine.reload_states()


def run(
    stage: int, fp8: dict[str, Any] | None, zero: dict[str, Any], way: str = "", min_bytes: int | None = None
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Return losses; FP8 bytes, scales, masters and states by name; launches by which several tensors were sent.

    Args:
        way: "synchronous": the host waits for the device after every module. "reference": the optimizer's step is the
            plain one, not the kernel. "offload": states go to the host and back in the middle. "plain": one micro-batch
            a step and no clipping, as release needs it.
        min_bytes: from which on a tensor is sent by itself and not copied.
    """
    from fp8_ds.comm import collectives, reduce_scatter
    from fp8_ds.ops.adamw.reference import adamw_step

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    if stage == 3:
        few = {"stage3_prefetch_bucket_size": 3_000_000, "stage3_max_live_parameters": 4_000_000}
        zero = few | {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0} | zero
    clipped = {"gradient_accumulation_steps": 2} if way != "plain" else {"gradient_clipping": 0.0}
    config = training.ds_config(stage, fp8, zero_optimization={"stage": stage, **zero}, **clipped)
    with ExitStack() as stack:
        places = ((collectives, "all_gather_each"), (reduce_scatter, "reduce_scatter_each"))
        launches = [stack.enter_context(mock.patch.object(*at, wraps=getattr(*at))) for at in places]
        if min_bytes is not None:
            stack.enter_context(mock.patch.object(collectives, "MIN_BYTES", min_bytes))
        if way == "reference":
            stack.enter_context(
                mock.patch("fp8_ds.optim.core.prepare", lambda shards: partial(adamw_step, tuple(shards)))
            )
        engine = training.build(config, MODEL)
        if way == "synchronous":
            for module in engine.module.modules():
                module.register_forward_hook(lambda *_: torch.cuda.synchronize())
                module.register_full_backward_hook(lambda *_: torch.cuda.synchronize())
        losses = training.train(engine, STEPS // 2)
        if way == "offload":
            offload_and_reload(engine)
        losses += training.train(engine, STEPS // 2, first_step=STEPS // 2)
    found = {}
    for name, (data, scale_inv) in {} if fp8 is None else training.fp8_state(engine).items():
        found |= {f"bytes {name}": data, f"scale {name}": scale_inv}
    found |= {f"master {name}": master for name, master in training.full_masters(engine).items()}
    if (core := getattr(engine.optimizer.optimizer, "core", None)) is not None:
        found |= {"step": core.step_count.cpu(), "scales": core.scales.scale_inv.contiguous().cpu().clone()}
        for shard in core.shards:
            states = {name: getattr(shard, name) for name in STATE}
            found |= {f"{name} {shard.name}": x.detach().cpu().clone() for name, x in states.items() if x is not None}
    training.destroy(engine)
    torch.cuda.empty_cache()
    return losses, found, sum(one.call_count for one in launches)


def assert_bytes_follow_masters(found: dict[str, torch.Tensor], recipe: str) -> None:
    from fp8_ds.nn.linear.payload import OF_RECIPE, per_element
    from fp8_ds.numerics.formats import E4M3
    from fp8_ds.ops.quantize import quantize

    granularity = OF_RECIPE[recipe]
    names = [key.removeprefix("bytes ") for key in found if key.startswith("bytes ")]
    assert names
    for name in names:
        value = found[f"master {name}"]
        scale, expected_inv = granularity.scales(granularity.amax(value.reshape(-1), value.shape))
        expected = quantize(value, per_element(scale, value.shape), E4M3).view(torch.uint8)
        assert torch.equal(found[f"scale {name}"], expected_inv) and torch.equal(found[f"bytes {name}"], expected), name


@pytest.mark.parametrize(
    ("stage", "world_size", "recipe"),
    [
        *((1, 1, "tensorwise"), (1, 2, "delayed"), (2, 1, "rowwise"), (2, 1, "delayed"), (2, 2, "blockwise")),
        *((2, 2, "tensorwise"), (3, 1, "blockwise"), (3, 1, "rowwise_with_gw_hp"), (3, 2, "tensorwise")),
    ],
)
def test_bytes_are_those_of_the_masters_on_all_ranks_and_losses_are_as_stocks(
    gpu_ranks: Any, stage: int, world_size: int, recipe: str
) -> None:
    overlap = {"overlap_comm": True}
    stock, *_ = gpu_ranks(world_size).run(run, stage, None, overlap)[0]
    results = gpu_ranks(world_size).run(run, stage, {"linear": {"recipe": recipe}}, overlap)
    for losses, found, _ in results:
        assert_bytes_follow_masters(found, recipe)
        assert losses == results[0][0] and losses[-1] < losses[0]
        assert max(abs(a - b) / a for a, b in zip(stock, losses, strict=True)) < 0.05


OVERLAP, APART = {"overlap_comm": True}, {"overlap_comm": False}
SMALL = {"reduce_bucket_size": 1 << 18}
E4M19, STATES = {"optimizer": {"states": "fp8", "master": "e4m19"}}, {"optimizer": E4M11}
RELEASE = {"optimizer": {**E4M11, "release": True}}
LEAVES = OVERLAP | {"leaf_module": {"classes": ["training.Block"]}}
PREFETCH = {"stage3_prefetch_bucket_size": 500_000}
"""Elements; a block has 2.1 M weights: a leaf comes by two gathers on another stream than that which computes."""
WAYS: dict[str, tuple[int, Any, Any]] = {
    "again": (2, ({}, OVERLAP), ({}, OVERLAP)),
    "streams and prefetch": (2, ({}, OVERLAP), ({}, APART, "synchronous")),
    "kernel, e4m19": (1, (E4M19, APART), (E4M19, APART, "reference")),
    "kernel, e4m11": (1, (STATES, APART), (STATES, APART, "reference")),
    "offload": (1, (STATES, APART), (STATES, APART, "offload")),
    "release": (1, (STATES, APART, "plain"), (RELEASE, APART | SMALL, "plain")),
    "release, two ranks": (2, (STATES, APART, "plain"), (RELEASE, APART | SMALL, "plain")),
    "release, overlap": (2, (STATES, APART, "plain"), (RELEASE, OVERLAP | SMALL, "plain")),
}
WAYS_OF_ZERO_3: dict[str, tuple[int, Any, Any]] = {
    "leaves": (2, ({}, OVERLAP | PREFETCH), ({}, LEAVES)),
    "leaves, small prefetch": (2, ({}, OVERLAP), ({}, LEAVES | PREFETCH)),
    "leaves of FP8 states": (2, (STATES, OVERLAP | PREFETCH), (STATES, LEAVES | PREFETCH)),
}


def assert_same(one: list[Any], other: list[Any]) -> None:
    for (losses, found, _), (other_losses, other_found, _) in zip(one, other, strict=True):
        assert losses == other_losses and losses[-1] < losses[0] and found.keys() == other_found.keys()
        for name, tensor in found.items():
            assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (tensor, other_found[name]))), name


@pytest.mark.parametrize(
    ("stage", "name"),
    [*((stage, name) for name in WAYS for stage in (1, 2, 3)), *((3, name) for name in WAYS_OF_ZERO_3)],
)
def test_another_way_changes_no_bit(gpu_ranks: Any, name: str, stage: int) -> None:
    world_size, *ways = (WAYS | WAYS_OF_ZERO_3)[name]
    assert_same(*(gpu_ranks(world_size).run(run, stage, *arguments) for arguments in ways))


def test_what_is_sent_by_itself_changes_no_bit(gpu_ranks: Any) -> None:
    copied, each = (gpu_ranks(2).run(run, 3, {}, OVERLAP, min_bytes=least) for least in (2**40, 0))
    assert copied[0][2] == 0 and each[0][2] >= 2 * STEPS
    assert_same(copied, each)

"""FP8 ZeRO on GPUs with NCCL: streams, prefetch and overlap_comm must not change a bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

MODEL = {"width": 512, "hidden": 2048, "num_blocks": 6}
STEPS = 8


def run(stage: int, overlap: bool, fp8: dict[str, Any] | None, accumulation: int, synchronous: bool = False) -> Any:
    """Losses, bytes, masters; `synchronous` waits for the device after every module."""
    import os

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    zero = {"stage": stage, "overlap_comm": overlap}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 3_000_000}
        zero |= {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 4_000_000}
    config = training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation, zero_optimization=zero)
    engine = training.build(config, MODEL)
    if synchronous:
        for module in engine.module.modules():
            module.register_forward_hook(lambda *_: torch.cuda.synchronize())
            module.register_full_backward_hook(lambda *_: torch.cuda.synchronize())
    losses = training.train(engine, STEPS)
    state = training.fp8_state(engine) if fp8 is not None else {}
    masters = training.full_masters(engine)
    training.destroy(engine)
    torch.cuda.empty_cache()
    return losses, state, masters


def assert_bytes_follow_masters(result: Any, recipe: str) -> None:
    from fp8_ds.nn.linear.payload import OF_RECIPE, per_element
    from fp8_ds.numerics.formats import E4M3
    from fp8_ds.ops.quantize import quantize

    _, state, masters = result
    granularity = OF_RECIPE[recipe]
    assert state
    for name, (data, scale_inv) in state.items():
        value = masters[name]
        scale, expected_inv = granularity.scales(granularity.amax(value.reshape(-1), value.shape))
        expected = quantize(value, per_element(scale, value.shape), E4M3).view(torch.uint8)
        assert torch.equal(scale_inv, expected_inv) and torch.equal(data, expected), name


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
    stock = gpu_ranks(world_size).run(run, stage, True, None, 2)[0]
    results = gpu_ranks(world_size).run(run, stage, True, {"linear": {"recipe": recipe}}, 2)
    for result in results:
        assert_bytes_follow_masters(result, recipe)
        assert result[0] == results[0][0] and result[0][-1] < result[0][0]
        assert max(abs(a - b) / a for a, b in zip(stock[0], result[0], strict=True)) < 0.05


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlap_and_prefetch_change_no_bit(gpu_ranks: Any, stage: int) -> None:
    asynchronous = gpu_ranks(2).run(run, stage, True, {}, 2)[0]
    again = gpu_ranks(2).run(run, stage, True, {}, 2)[0]
    synchronous = gpu_ranks(2).run(run, stage, False, {}, 2, True)[0]
    assert asynchronous[0] == again[0] == synchronous[0]
    for name, master in synchronous[2].items():
        assert torch.equal(master, asynchronous[2][name]), name


def run_grouped(min_bytes: int) -> tuple[Any, int, int]:
    """`run` of ZeRO-3; launches by which several weights were gathered, and several gradients reduced."""
    from fp8_ds.comm import collectives

    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.object(collectives, "all_gather_each", wraps=collectives.all_gather_each) as gathers,
        mock.patch.object(collectives, "reduce_scatter_each", wraps=collectives.reduce_scatter_each) as reductions,
    ):
        patch.setattr(collectives, "MIN_BYTES", min_bytes)
        found = run(3, True, {}, 2)
    return found, gathers.call_count, reductions.call_count


def test_what_is_sent_by_itself_changes_no_bit(gpu_ranks: Any) -> None:
    copied, *num_copied = gpu_ranks(2).run(run_grouped, 2**40)[0]
    each, *num_each = gpu_ranks(2).run(run_grouped, 0)[0]
    assert num_copied == [0, 0] and min(num_each) >= STEPS
    assert each[0] == copied[0]
    for name, master in copied[2].items():
        assert torch.equal(master, each[2][name]), name

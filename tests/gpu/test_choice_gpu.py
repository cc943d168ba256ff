"""The layer choice on a GPU: measured once, kept, and never slower than bf16 where layers are small."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import test_choice
import torch
import training

from fp8_ds.config import LinearConfig
from fp8_ds.nn.layer_table import Case
from fp8_ds.nn.measure import cuda_clock, time_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SMALL = {"width": 128, "hidden": 256, "num_blocks": 12}
MIXED = {"width": 128, "hidden": 32768, "num_blocks": 6}
LARGE = {"width": 4096, "hidden": 14336, "num_blocks": 4}
NOISE = 1.05
"""Of a median of steps taken in turns with the other engine's."""


def build(fp8: dict[str, Any] | None, model: dict[str, Any]) -> Any:
    return training.build(training.ds_config(2, fp8), model)


def step_times(engines: list[Any], batch: torch.Tensor | None = None) -> list[float]:
    """Median seconds of a step of each engine, taken in turns."""
    if batch is None:
        batch = training.micro_batches(0, 1)[0].to(engines[0].device)
    times: list[list[float]] = [[] for _ in engines]
    for i in range(60):
        for engine, found in zip(engines, times, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            engine.backward(engine(batch))
            engine.step()
            torch.cuda.synchronize()
            if i >= 10:
                found.append(time.perf_counter() - begin)
    return [statistics.median(found) for found in times]


def against_stock(folder: str, model: dict[str, Any]) -> dict[str, Any]:
    os.environ["FP8_DS_CACHE"] = folder
    try:
        with test_choice.heard() as first:
            training.destroy(build(test_choice.measured(), model))
        with test_choice.heard() as second:
            ours = build(test_choice.measured(), model)
    finally:
        del os.environ["FP8_DS_CACHE"]
    stock = build(None, model)
    found: dict[str, Any] = {"times": step_times([ours, stock]), "first": first, "second": second}
    found["num_fp8"] = 0 if ours.fp8 is None else len(ours.fp8.weights)
    training.destroy(ours)
    training.destroy(stock)
    return found


def test_a_model_of_small_layers_is_left_in_bf16_and_no_slower(gpu_ranks: Any, tmp_path: Path) -> None:
    (found,) = gpu_ranks(1).run(against_stock, str(tmp_path), SMALL)
    assert found["num_fp8"] == 0
    assert any(line.startswith("fp8: no linear is worth FP8") for line in found["first"])
    ours, stock = found["times"]
    assert ours < NOISE * stock, found
    assert any(line.startswith("fp8: measuring 2 kinds of linear at 128 tokens") for line in found["first"])
    assert not any(line.startswith("fp8: measuring") for line in found["second"])
    assert len(list(tmp_path.glob("layer-table-*.json"))) == 1


def test_a_model_of_other_shapes_is_no_slower_either(gpu_ranks: Any, tmp_path: Path) -> None:
    (found,) = gpu_ranks(1).run(against_stock, str(tmp_path), MIXED)
    ours, stock = found["times"]
    assert ours < NOISE * stock, found


def test_the_clock_tells_device_from_host_whoever_is_slower() -> None:
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    small = x[:16, :16].contiguous()

    def wait_and_add() -> None:
        small.add_(1)
        time.sleep(2e-3)
        small.add_(1)

    late, busy = cuda_clock([wait_and_add, lambda: x @ x])
    assert late.host_us > 2000 and busy.device_us > 2 * 8192**3 / 989e12 * 1e6
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else other tests compute beside this one
        assert late.device_us < 100 and late.host_us < 4000 and busy.host_us < 500


def large_against_stock(folder: str) -> dict[str, Any]:
    os.environ["FP8_DS_CACHE"] = folder
    try:
        with test_choice.heard() as lines:
            ours = build({"linear": {"layer_choice": "measured", "tokens": 8192}}, LARGE)
    finally:
        del os.environ["FP8_DS_CACHE"]
    stock = build(None, LARGE)
    batch = torch.randint(training.VOCABULARY, (64, 128), device=ours.device)
    found = {"times": step_times([ours, stock], batch), "num_fp8": len(ours.fp8.weights), "said": lines}
    training.destroy(ours)
    training.destroy(stock)
    return found


def test_a_model_of_large_layers_is_in_fp8_and_faster(gpu_ranks: Any, tmp_path: Path) -> None:
    (found,) = gpu_ranks(1).run(large_against_stock, str(tmp_path))
    assert found["num_fp8"] == 2 * LARGE["num_blocks"], found["said"]
    ours, stock = found["times"]
    assert ours < stock, found


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_measuring_is_repeatable_and_leaves_memory_and_random_numbers_alone(recipe: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    grad_dtype = LinearConfig(recipe=recipe).grad_dtype
    case = Case(recipe=recipe, grad_dtype=grad_dtype, backend="torch", m=8192, k=4096, n=4096)
    time_case(case, device)  # compiles
    memory, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    first, second = time_case(case, device), time_case(case, device)
    assert torch.cuda.memory_allocated() == memory
    assert torch.equal(torch.cuda.get_rng_state(), state)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else other tests compute beside this one
        assert first.fp8_us == pytest.approx(second.fp8_us, rel=0.1)
        assert first.bf16_us == pytest.approx(second.bf16_us, rel=0.1)
    assert first.fp8_host_us > first.bf16_host_us > 10
    # Three GEMMs of 2 M K N at no more than the H200's dense peak: 989 TFLOP/s.
    assert first.bf16_us > 6 * 8192 * 4096 * 4096 / 989e12 * 1e6

"""`"zero": {"reduce_scatter": "fp8"}`: gradients travel in one byte, each micro-batch rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import test_zero
import torch.distributed as dist
import training
from support.collectives import count_collectives
from torch import Tensor

from fp8_ds.testing import assert_bitwise, sqnr_db

pytestmark = pytest.mark.distributed

IN_FP8: dict[str, Any] = {"zero": {"reduce_scatter": "fp8"}}
WIDE = {"width": 128, "hidden": 384, "num_blocks": 2}
RAGGED = {"width": 50, "hidden": 70, "num_blocks": 2, "tiny": True}


# --- averaged gradients in an engine ---


def full_gradients(
    stage: int, accumulation: int, fp8: dict[str, Any], model: Any, **overrides: Any
) -> tuple[dict[str, Tensor], float]:
    """Averaged gradients of one step as the optimizer sees them, and bytes of FP8 that this rank sent, by gradient."""
    from deepspeed.utils import safe_get_full_grad

    config = training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation, **overrides)
    engine = training.build(config, model)
    rank, world = dist.get_rank(), dist.get_world_size()
    for i, batch in enumerate(training.micro_batches(0, accumulation * world)[rank::world]):
        engine.set_gradient_accumulation_boundary(i == accumulation - 1)
        engine.backward(engine(batch))
        if i < accumulation - 1:
            engine.step()
    grads = {name: safe_get_full_grad(p).detach().float().clone() for name, p in engine.module.named_parameters()}
    sent = engine.fp8.counter.reduced / (accumulation * sum(grad.numel() for grad in grads.values()))
    training.destroy(engine)
    return grads, sent


IN_FP32: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
SMALL_BUCKETS = {"reduce_bucket_size": 3000}
# stage, ranks, micro-batches, model, configuration
COVERING: list[tuple[int, int, int, dict[str, Any], dict[str, Any]]] = [
    (2, 2, 4, RAGGED, {}),
    (2, 3, 1, RAGGED, {**IN_FP32, "zero_optimization": {"overlap_comm": True, **SMALL_BUCKETS}}),
    (3, 3, 2, RAGGED, {**IN_FP32, "zero_optimization": {"overlap_comm": False, **SMALL_BUCKETS}}),
    (3, 2, 1, RAGGED, {"zero_optimization": {"contiguous_gradients": False}}),
]


@pytest.mark.parametrize(("stage", "world_size", "accumulation", "model", "overrides"), COVERING)
def test_averaged_gradient_is_28_db_above_its_error(
    ranks: Any, stage: int, world_size: int, accumulation: int, model: Any, overrides: Any
) -> None:
    exact = {"communication_data_type": "fp32", **IN_FP32}
    truth, sent = ranks(world_size).run(full_gradients, stage, accumulation, {}, model, **exact)[0]
    assert sent == 0
    for grads, sent in ranks(world_size).run(full_gradients, stage, accumulation, IN_FP8, model, **overrides):
        assert sent > 1  # each micro-batch is rounded
        ratios = {name: sqnr_db(truth[name], grad) for name, grad in grads.items()}
        ratios.pop("tiny.weight", None)  # five equal elements: one sample of an error is no statistic
        assert min(ratios.values()) >= 28, ratios
        assert max(ratios.values()) < 45, ratios  # they were rounded indeed


def test_one_rank_sends_and_rounds_nothing(ranks: Any) -> None:
    for stage in (2, 3):
        (in_fp8, sent), (in_bf16, _) = (ranks(1).run(full_gradients, stage, 2, fp8, RAGGED)[0] for fp8 in (IN_FP8, {}))
        assert sent == 0
        for name, grad in in_fp8.items():
            assert_bitwise(grad, in_bf16[name])


# --- what goes over the wire ---


def traffic(stage: int, accumulation: int, fp8: dict[str, Any]) -> dict[str, Any]:
    """Collectives of the second step, and what the engine reports of it."""
    engine = training.build(training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation), WIDE)
    training.train(engine, 1)
    with count_collectives() as count:
        training.train(engine, 1, first_step=1)
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    result = {"calls": count.calls, "records": count.records, "report": engine.fp8_report(), "numel": numel}
    training.destroy(engine)
    return result


@pytest.mark.parametrize(
    ("stage", "accumulation"),
    [(2, 3), (3, 1)],
)
def test_a_micro_batch_sends_1_02_bytes_a_gradient(ranks: Any, stage: int, accumulation: int) -> None:
    results = ranks(2).run(traffic, stage, accumulation, IN_FP8)
    bf16 = ranks(2).run(traffic, stage, accumulation, {})[0]
    numel = accumulation * results[0]["numel"]
    for result in results:
        assert numel < result["report"]["reduced_bytes"] < 1.02 * numel
    received = [sum(n for name, n, _ in r["records"] if name == "all_to_all") for r in results]
    assert sum(received) == sum(result["report"]["reduced_bytes"] for result in results)
    # One all-to-all a bucket, and the reduction that it replaces is gone.
    reduction = {2: "all_reduce", 3: "reduce_scatter"}[stage]
    large = [[n for name, n, _ in r["records"] if name == reduction and n > 1000] for r in (results[0], bf16)]
    assert large[0] == [] and sum(large[1]) >= numel / 2
    assert results[0]["calls"]["all_to_all"] == len(large[1])
    assert bf16["report"]["reduced_bytes"] == bf16["calls"]["all_to_all"] == 0


# --- training ---


def run_steps(stage: int, num_steps: int, fp8: dict[str, Any]) -> tuple[list[float], float]:
    """(losses, gradient norm of the first step) with gradients clipped at 0.1."""
    engine = training.build(training.ds_config(stage, fp8, gradient_clipping=0.1))
    losses = training.train(engine, 1)
    norm = float(engine.get_global_grad_norm())
    losses += training.train(engine, num_steps - 1, first_step=1)
    training.destroy(engine)
    return losses, norm


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_loss_stays_as_near_as_bf16_stays_to_fp32(ranks: Any, drift: Any, stage: int) -> None:
    allowed = 3 * drift(2, {})
    bf16, norm = ranks(2).run(run_steps, stage, test_zero.NUM_STEPS, {})[0]
    for losses, fp8_norm in ranks(2).run(run_steps, stage, test_zero.NUM_STEPS, IN_FP8):
        difference = max(abs(a - b) for a, b in zip(losses, bf16, strict=True))
        assert 0 < difference <= allowed, (difference, allowed)
        assert fp8_norm == pytest.approx(norm, rel=1e-2) and fp8_norm > 0.1
        assert losses[-1] < 0.9 * losses[0]

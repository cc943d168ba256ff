"""`"zero": {"reduce_scatter": "fp8"}`: gradients travel in one byte, each micro-batch rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import test_zero
import torch.distributed as dist
import training
from support.collectives import count_collectives
from torch import Tensor

from fp8_ds.comm import reduce_scatter as module
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.zero import reduce

pytestmark = pytest.mark.distributed

IN_FP8: dict[str, Any] = {"zero": {"reduce_scatter": "fp8"}}
WIDE = {"width": 128, "hidden": 384, "num_blocks": 2}
RAGGED = {"width": 50, "hidden": 70, "num_blocks": 2, "tiny": True}


# --- averaged gradients in an engine ---


def full_gradients(stage: int, accumulation: int, fp8: dict[str, Any], model: Any, **overrides: Any) -> dict[str, Any]:
    """Averaged gradients of one step as the optimizer sees them, and what was packed and sent until then."""
    from deepspeed.utils import safe_get_full_grad

    config = training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation, **overrides)
    engine = training.build(config, model)
    rank, world = dist.get_rank(), dist.get_world_size()
    packed = []

    def counting(name: str) -> Any:
        real = getattr(module, name)

        def count(group: Any, gradients: Any, *args: Any) -> Any:
            pieces = gradients if name.endswith("shares") else [piece for of_rank in gradients for piece in of_rank]
            packed.append(sum(piece.numel() for piece in pieces))
            return real(group, gradients, *args)

        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "reduce_scatter_fp8", counting("reduce_scatter_fp8"))
        patch.setattr(reduce, "reduce_scatter_fp8_shares", counting("reduce_scatter_fp8_shares"))
        for i, batch in enumerate(training.micro_batches(0, accumulation * world)[rank::world]):
            engine.set_gradient_accumulation_boundary(i == accumulation - 1)
            engine.backward(engine(batch))
            if i < accumulation - 1:
                engine.step()
    grads = {name: safe_get_full_grad(p).detach().float().clone() for name, p in engine.module.named_parameters()}
    numel = sum(grad.numel() for grad in grads.values())
    result = {"grads": grads, "packed": sum(packed), "numel": numel, "sent": engine.fp8.counter.reduced}
    training.destroy(engine)
    return result


def true_gradients(stage: int, accumulation: int, model: Any) -> dict[str, Any]:
    exact = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return full_gradients(stage, accumulation, {}, model, **exact)


IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
SMALL_BUCKETS = {"reduce_bucket_size": 3000}
# stage, ranks, micro-batches, model, configuration
COVERING: list[tuple[int, int, int, dict[str, Any], dict[str, Any]]] = [
    (2, 4, 4, RAGGED, {}),
    (2, 3, 1, RAGGED, {**IN_FP32, "zero_optimization": {"overlap_comm": True, **SMALL_BUCKETS}}),
    (3, 2, 4, {}, IN_FP32),
    (3, 3, 1, RAGGED, {**IN_FP32, "zero_optimization": {"overlap_comm": False, **SMALL_BUCKETS}}),
    (3, 2, 1, RAGGED, {"zero_optimization": {"contiguous_gradients": False}}),
]


@pytest.mark.parametrize(
    ("stage", "world_size", "accumulation", "model", "overrides"),
    COVERING,
)
def test_averaged_gradient_is_28_db_above_its_error(
    ranks: Any, stage: int, world_size: int, accumulation: int, model: Any, overrides: Any
) -> None:
    truth = ranks(world_size).run(true_gradients, stage, accumulation, model)[0]
    assert truth["packed"] == truth["sent"] == 0
    for found in ranks(world_size).run(full_gradients, stage, accumulation, IN_FP8, model, **overrides):
        assert found["packed"] == accumulation * found["numel"]  # each micro-batch is rounded, once, and nothing else
        ratios = {name: sqnr_db(truth["grads"][name], grad) for name, grad in found["grads"].items()}
        ratios.pop("tiny.weight", None)  # five equal elements: one sample of an error is no statistic
        assert min(ratios.values()) >= 28, ratios
        assert max(ratios.values()) < 45, ratios  # they were rounded indeed


def test_one_rank_sends_and_rounds_nothing(ranks: Any) -> None:
    for stage in (2, 3):
        in_fp8, in_bf16 = (ranks(1).run(full_gradients, stage, 2, fp8, RAGGED)[0] for fp8 in (IN_FP8, {}))
        assert in_fp8["packed"] == in_fp8["sent"] == 0
        for name, grad in in_fp8["grads"].items():
            assert_bitwise(grad, in_bf16["grads"][name])


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


def run_steps(
    stage: int, accumulation: int, num_steps: int, fp8: dict[str, Any], model: dict[str, Any], **overrides: Any
) -> tuple[list[float], float]:
    """(losses, gradient norm of the first step)."""
    config = training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation, **overrides)
    engine = training.build(config, model)
    losses = training.train(engine, 1)
    norm = float(engine.get_global_grad_norm())
    losses += training.train(engine, num_steps - 1, first_step=1)
    training.destroy(engine)
    return losses, norm


TRAINING: list[Any] = [
    (2, 2, 1, {}, {"gradient_clipping": 0.1}),
    (3, 2, 1, {}, {"gradient_clipping": 0.1}),
]


@pytest.mark.parametrize(("stage", "world_size", "accumulation", "model", "overrides"), TRAINING)
def test_loss_stays_as_near_as_bf16_stays_to_fp32(
    ranks: Any, drift: Any, stage: int, world_size: int, accumulation: int, model: Any, overrides: Any
) -> None:
    steps = test_zero.NUM_STEPS
    allowed = 3 * drift(world_size * accumulation, model)
    bf16, norm = ranks(world_size).run(run_steps, stage, accumulation, steps, {}, model, **overrides)[0]
    for losses, fp8_norm in ranks(world_size).run(run_steps, stage, accumulation, steps, IN_FP8, model, **overrides):
        differences = [abs(a - b) for a, b in zip(losses, bf16, strict=True)]
        assert 0 < max(differences) <= allowed, (max(differences), allowed)
        assert fp8_norm == pytest.approx(norm, rel=1e-2) and fp8_norm > overrides.get("gradient_clipping", 0)
        assert losses[-1] < 0.9 * losses[0]


def broken_gradient(stage: int, value: float) -> dict[str, Any]:
    """One element of one gradient is `value` on the last rank, in the second of three steps."""
    skipping = {"bf16": {"enabled": True, "check_grad_overflow": True}}  # the default from 0.19.8 on only
    engine = training.build(training.ds_config(stage, IN_FP8, gradient_accumulation_steps=2, **skipping), RAGGED)
    training.train(engine, 1)
    before = training.fp8_state(engine)
    last = dist.get_rank() == dist.get_world_size() - 1

    def poison(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[3] = value
        return grad

    handle = engine.module.blocks[0].up.weight.register_hook(poison) if last else None
    training.train(engine, 1, first_step=1)
    result = {"overflow": bool(engine.optimizer.overflow), "skipped": engine.skipped_steps}
    if handle is not None:
        handle.remove()
    training.assert_fp8_equals(training.fp8_state(engine), before)
    result["losses"] = training.train(engine, 2, first_step=2)
    result["skipped_in_all"] = engine.skipped_steps
    training.destroy(engine)
    return result


@pytest.mark.parametrize(
    ("value", "stage"),
    [
        (float("inf"), 2),
        (float("nan"), 3),
    ],
)
def test_an_infinity_or_nan_of_one_rank_makes_all_skip_the_step(ranks: Any, stage: int, value: float) -> None:
    for result in ranks(3).run(broken_gradient, stage, value):
        assert result["overflow"] and result["skipped"] == result["skipped_in_all"] == 1
        assert all(0 < loss < 6 for loss in result["losses"])

"""FP8 ZeRO is the same training on any number of ranks, and its weights are the quantised masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training

pytestmark = pytest.mark.distributed

NUM_STEPS = 20
# 50 and 70 are no multiples of 16; the tiny linear has fewer weights than 4 ranks of ZeRO-3 have shards for.
RAGGED = {"width": 50, "hidden": 70, "num_blocks": 2, "tiny": True}
# One block, so that the first and the last partition of ZeRO-1/2 hold embedding and head only: no FP8 weight at all.
NO_WEIGHT_ON_SOME_RANKS = {"width": 50, "hidden": 18, "num_blocks": 1}


def run_steps(
    stage: int, accumulation: int, num_steps: int, fp8: dict[str, Any], model: dict[str, Any], **overrides: Any
) -> dict[str, Any]:
    """Train; returns what a test compares: FP8 bytes at both ends, masters, losses, and how shards are spread."""
    config = training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation, **overrides)
    engine = training.build(config, model)
    first = training.fp8_state(engine)
    losses = training.train(engine, num_steps)
    result = {
        "first": first,
        "losses": losses,
        "last": training.fp8_state(engine),
        "masters": training.full_masters(engine),
        "num_owned": owned_elements(engine),
    }
    training.destroy(engine)
    return result


def owned_elements(engine: Any) -> list[int]:
    """Elements of each FP8 weight whose master this rank holds."""
    if hasattr(engine.optimizer, "_fp8_shards"):
        return [weight.num_real for weight in engine.optimizer._fp8_shards.weights]
    owned = []
    for kind in engine.optimizer._fp8_kinds:
        mine = {f.index: f.numel for f in kind.own}
        owned += [mine.get(index, 0) for index in range(len(kind.params))]
    return owned


def drift_of_gradient_dtype(accumulation: int, num_steps: int, model: dict[str, Any]) -> float:
    """Largest loss difference that summing gradients in fp32 instead of bf16 makes on one rank (stage 2)."""
    bf16, fp32 = (
        run_steps(2, accumulation, num_steps, {}, model, **extra)["losses"]
        for extra in ({}, {"data_types": {"grad_accum_dtype": "fp32"}})
    )
    return max(abs(a - b) for a, b in zip(bf16, fp32, strict=True))


def check_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        training.assert_fp8_equals(result["last"], results[0]["last"])
        training.assert_fp8_follows_masters(result["last"], result["masters"])
        assert result["losses"] == results[0]["losses"]


@pytest.mark.parametrize(("stage", "world_size", "accumulation", "model"), [(1, 2, 2, RAGGED), (3, 4, 1, RAGGED)])
def test_training_on_many_ranks_is_training_on_one(
    ranks: Any, drift: Any, stage: int, world_size: int, accumulation: int, model: dict[str, Any]
) -> None:
    total = world_size * accumulation
    allowed = 3 * drift(total, model)
    one = ranks(1).run(run_steps, stage, total, NUM_STEPS, {}, model)[0]
    many = ranks(world_size).run(run_steps, stage, accumulation, NUM_STEPS, {}, model)
    check_ranks(many)
    training.assert_fp8_equals(many[0]["first"], one["first"])
    differences = [abs(a - b) for a, b in zip(many[0]["losses"], one["losses"], strict=True)]
    assert max(differences) <= allowed, (max(differences), allowed)
    assert many[0]["losses"][-1] < 0.9 * many[0]["losses"][0]  # it is training that was compared


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_without_a_share_of_some_weights_hold_the_right_bytes(ranks: Any, stage: int) -> None:
    model = RAGGED if stage == 3 else NO_WEIGHT_ON_SOME_RANKS
    results = ranks(4).run(run_steps, stage, 1, 3, {}, model)
    check_ranks(results)
    owned = [result["num_owned"] for result in results]
    assert any(0 in mine and sum(mine) > 0 for mine in owned)  # empty shards of some weights
    if stage < 3:
        assert any(sum(mine) == 0 for mine in owned)  # and a rank without any
    sizes = [data.numel() for data, _ in results[0]["last"].values()]
    assert sorted(sum(column) for column in zip(*owned, strict=True)) == sorted(sizes)


def flat_masters(engine: Any) -> dict[str, torch.Tensor]:
    """Masters read from the gathered fp32 flat groups of ZeRO-1/2, at the offsets of the (reordered) group.

    safe_get_full_fp32_param is of no use with round_robin_gradients: stock 0.19.8 links fragments in the old order.
    """
    optimizer, names, masters = engine.optimizer, {id(p): n for n, p in engine.module.named_parameters()}, {}
    for i, partition in enumerate(optimizer.single_partition_of_fp32_groups):
        pieces = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, partition.detach())
        flat, start = torch.cat(pieces), 0
        assert not any(optimizer.round_robin_bit16_padding[i])
        for p in optimizer.round_robin_bit16_groups[i]:
            masters[names[id(p)]] = flat[start : start + p.numel()].view(p.shape).clone()
            start += p.numel()
    return masters


def round_robin(wanted: bool) -> dict[str, Any]:
    config = training.ds_config(2, {}, zero_optimization={"round_robin_gradients": wanted})
    engine = training.build(config, RAGGED)
    first, losses = training.fp8_state(engine), training.train(engine, 3)
    order = [p.numel() for p in engine.optimizer.round_robin_bit16_groups[0]]
    result = {"first": first, "losses": losses, "last": training.fp8_state(engine), "order": order}
    result["masters"] = flat_masters(engine)
    training.destroy(engine)
    return result


def test_round_robin_gradients_keep_bytes_and_masters_together(ranks: Any) -> None:
    results = ranks(2).run(round_robin, True)
    check_ranks(results)
    plain = ranks(2).run(round_robin, False)[0]
    assert plain["order"] != results[0]["order"]
    training.assert_fp8_equals(results[0]["first"], plain["first"])
    assert results[0]["losses"] == plain["losses"]


def overlap(stage: int, wanted: bool) -> list[float]:
    config = training.ds_config(stage, {}, zero_optimization={"overlap_comm": wanted}, gradient_accumulation_steps=2)
    engine = training.build(config)
    assert bool(engine.zero_overlap_comm()) == wanted
    losses = training.train(engine, 3)
    training.destroy(engine)
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_overlap_comm_changes_no_loss(ranks: Any, stage: int) -> None:
    assert ranks(2).run(overlap, stage, True)[0] == ranks(2).run(overlap, stage, False)[0]


def clipped_moments(stage: int, clip: float) -> tuple[float, float]:
    """(global gradient norm, norm of the first moments after one step)."""
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = training.build(training.ds_config(stage, {}, gradient_clipping=clip))
    training.train(engine, 1)
    squares = [safe_get_full_optimizer_state(p, "exp_avg").square().sum() for p in engine.module.parameters()]
    norm = float(engine.get_global_grad_norm())
    training.destroy(engine)
    return norm, float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_is_clipped_to_its_norm(ranks: Any, stage: int) -> None:
    for norm, moments in ranks(2).run(clipped_moments, stage, 0.01):
        assert norm > 0.1
        assert moments == pytest.approx(0.1 * 0.01, rel=2e-2)  # (1 - beta1) * clip

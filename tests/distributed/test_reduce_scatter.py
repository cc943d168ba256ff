"""`"zero": {"reduce_scatter": "fp8"}`: gradients travel in one byte, each micro-batch rounded once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import test_zero
import torch
import torch.distributed as dist
import training
from support.collectives import count_collectives
from support.inputs import many_scales
from torch import Tensor

from fp8_ds.comm import reduce_scatter as module
from fp8_ds.comm.reduce_scatter import (
    GROUP,
    block_bytes,
    num_groups,
    reduce_scatter_fp8,
    reduce_scatter_fp8_shares,
)
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.zero import reduce

pytestmark = pytest.mark.distributed

IN_FP8: dict[str, Any] = {"zero": {"reduce_scatter": "fp8"}}
WIDE = {"width": 128, "hidden": 384, "num_blocks": 2}
RAGGED = {"width": 50, "hidden": 70, "num_blocks": 2, "tiny": True}


# --- the collective ---

# Sizes of the pieces for each destination: uneven, empty, and a rank that is sent nothing.
SIZES = [[130, 0, 1], [], [1000, 127], [128, 5, 300]]


def pieces_of(owner: int, world: int) -> list[list[Tensor]]:
    """What `owner` has for each rank; each piece in a range of its own."""
    flat = many_scales("per_row", 16, 200, seed=owner).bfloat16().flatten()
    return [[flat.narrow(0, 7 * i, n) * 10.0 ** (-3 * i) for i, n in enumerate(sizes)] for sizes in SIZES[:world]]


def exchange(
    owners: list[int], balanced: bool, dtype: torch.dtype = torch.float32, chunk: int = 1 << 16
) -> tuple[list[Tensor], int, int]:
    """(sums, bytes, all-to-alls) of this rank, which brings what belongs to `owners[rank]`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = pieces_of(owners[rank], world)
    with pytest.MonkeyPatch.context() as patch, count_collectives() as count:
        patch.setattr(module, "is_balanced", lambda *_: balanced)
        patch.setattr(module, "_CHUNK_GROUPS", chunk)
        sums, num_bytes = reduce_scatter_fp8(dist.group.WORLD, mine, dtype, 1 / world)
    assert count.calls.total() == count.calls["all_to_all"]
    return sums, num_bytes, count.calls["all_to_all"]


def sum_of(of_owners: list[list[Tensor]]) -> list[Tensor]:
    """What the one rank that keeps these pieces gets, computed here."""
    groups = num_groups([piece.numel() for piece in of_owners[0]])
    blocks = torch.zeros(len(of_owners), block_bytes(groups), dtype=torch.uint8)
    for pieces, block in zip(of_owners, blocks, strict=True):
        if groups:
            module.pack(block[None], groups, pieces[0].dtype, partial(module._fill_one, pieces))
    total = module.unpack_sum(blocks, groups, torch.float32, 1 / len(of_owners))
    return module._slices(total, [piece.numel() for piece in of_owners[0]])


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_to_alls_carry_uneven_and_empty_pieces(ranks: Any, world_size: int, balanced: bool) -> None:
    owners = list(range(world_size))
    results = ranks(world_size).run(exchange, owners, balanced)
    swapped = ranks(world_size).run(exchange, owners[::-1], balanced)
    in_bf16 = ranks(world_size).run(exchange, owners, balanced, torch.bfloat16)
    in_chunks = [ranks(world_size).run(exchange, owners, balanced, torch.float32, chunk) for chunk in (1, 4, 7)]
    groups = [num_groups(sizes) for sizes in SIZES[:world_size]]
    part = -(-sum(groups) // world_size)
    for rank, (sums, num_bytes, num_calls) in enumerate(results):
        assert num_calls == 1 + balanced
        if balanced:
            to_add = [k for k in range(part * rank, part * (rank + 1)) if k < sum(groups)]
            assert num_bytes == world_size * block_bytes(part) + len(to_add) * GROUP * 4
        else:
            assert num_bytes == sum(map(block_bytes, groups))
        expected = sum_of([pieces_of(owner, world_size)[rank] for owner in owners])
        assert [piece.numel() for piece in sums] == SIZES[rank]
        for k, (piece, same) in enumerate(zip(sums, expected, strict=True)):
            assert_bitwise(piece, same)
            assert_bitwise(swapped[rank][0][k], same)  # whichever rank held what
            assert_bitwise(in_bf16[rank][0][k], same.bfloat16())
            for chunked in in_chunks:
                assert_bitwise(chunked[rank][0][k], same)


def shares(numels: list[int], chunk: int) -> tuple[list[Tensor], list[Tensor], int]:
    """What `reduce_scatter_fp8_shares` gives, what `reduce_scatter_fp8` gives of the same, and the bytes of both."""
    rank, world = dist.get_rank(), dist.get_world_size()
    flat = many_scales("per_row", 16, 200, seed=rank).bfloat16().flatten()
    tensors = [flat.narrow(0, 3 * i, numel) * 10.0**-i for i, numel in enumerate(numels)]
    pieces: list[list[Tensor]] = [[] for _ in range(world)]
    for tensor in tensors:
        share = -(-tensor.numel() // world)
        for destination, of_rank in enumerate(pieces):
            start = min(destination * share, tensor.numel())
            of_rank.append(tensor.narrow(0, start, min(share, tensor.numel() - start)))
    with pytest.MonkeyPatch.context() as patch, count_collectives() as count:
        patch.setattr(module, "_CHUNK_GROUPS", chunk)
        sums, num_bytes = reduce_scatter_fp8_shares(dist.group.WORLD, tensors, torch.float32, 1 / world)
    assert count.calls["all_to_all"] == count.calls.total() == min(1, sum(numels))
    other, _ = reduce_scatter_fp8(dist.group.WORLD, pieces, torch.float32, 1 / world)
    return sums, other, num_bytes


@pytest.mark.parametrize("chunk", [1 << 16, 7, 1])
@pytest.mark.parametrize("numels", [[1000, 3, 0, 128, 2051], [1], [0], []], ids=str)
def test_equal_shares_have_the_bits_of_pieces_rank_by_rank(ranks: Any, numels: list[int], chunk: int) -> None:
    for rank, (sums, other, num_bytes) in enumerate(ranks(3).run(shares, numels, chunk)):
        assert num_bytes == 3 * block_bytes(num_groups([-(-numel // 3) for numel in numels]))
        assert [piece.numel() for piece in sums] == [
            max(0, min(-(-numel // 3), numel - rank * -(-numel // 3))) for numel in numels
        ]
        for piece, same in zip(sums, other, strict=True):
            assert_bitwise(piece, same)


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

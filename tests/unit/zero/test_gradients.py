"""Gradients on their way to the step: one rank, release, reduction in FP8, on stub hosts whose ranks are threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from support.threads import on_threads
from support.zero_backward import backward, give_shards, zero_with_backward
from support.zero_hosts import RAGGED
from support.zero_training import different, fp8_states, gradients, trained
from torch import Tensor, nn

from fp8_ds.comm.collectives import ByteCounter
from fp8_ds.comm.layout import OUTSTANDING_UPDATE_BYTES
from fp8_ds.errors import UnsupportedError
from fp8_ds.zero.gradients import ReleasedGradients, has_one_rank, reduce_and_scatter

# --- one rank ---

BUCKETS = ["setup_buckets", "reduce_ready_partitions_and_remove_grads", "reduce_ipg_grads", "reduce_gradients"]


def called(block: dict[str, Any]) -> Any:
    """Which of DeepSpeed's own methods run of those that fill and reduce buckets, and whether it overlaps them."""
    zero = zero_with_backward(2, RAGGED, **block)
    p = zero.params["gain"]
    p.grad = torch.ones_like(p)
    zero.setup_buckets()
    zero.process_gradients(p, 0)
    zero.reduce_ready_partitions_and_remove_grads(p, 0)
    zero.reduce_ipg_grads()
    zero.copy_grads_in_partition(p)
    zero.reduce_gradients()
    return zero.reached, zero.overlap_comm, p.grad is not None


@pytest.mark.parametrize("block", [{}, fp8_states("e4m11")], ids=["fp32", "fp8"])
def test_with_one_rank_a_gradient_goes_into_no_bucket_and_the_epilogue_runs(block: dict[str, Any]) -> None:
    [(reached, overlaps, is_left)] = on_threads(1, called, block)
    assert set(reached) & set(BUCKETS) == set() and reached[-1] == "independent_gradient_partition_epilogue"
    assert {"process_gradients", "copy_grads_in_partition"} <= set(reached) and not overlaps and is_left


@pytest.mark.parametrize(("num_ranks", "block"), [(2, {}), (1, {"without_deepspeed_fixes": ["adam_step"]})])
def test_with_several_ranks_or_deepspeeds_step_buckets_are_deepspeeds(num_ranks: int, block: dict[str, Any]) -> None:
    for reached, overlaps, _ in on_threads(num_ranks, called, block):
        assert set(reached) >= set(BUCKETS) and overlaps


def test_one_rank_is_one_if_nothing_changes_a_gradient_on_its_way() -> None:
    def ask(**more: Any) -> bool:
        found: Any = SimpleNamespace(
            real_dp_process_group=[dist.group.WORLD, dist.group.WORLD],
            use_grad_accum_attribute=False,
            gradient_accumulation_dtype=torch.bfloat16,
            dtype=torch.bfloat16,
            gradient_predivide_factor=1.0,
        )
        vars(found).update(more)
        return has_one_rank(found)

    def answers() -> list[bool]:
        changes: list[dict[str, Any]] = [
            {},
            {"use_grad_accum_attribute": True},
            {"gradient_accumulation_dtype": torch.float32},
            {"gradient_predivide_factor": 2.0},
        ]
        return [ask(**change) for change in changes]

    assert on_threads(1, answers) == [[True, False, False, False]]
    assert on_threads(2, answers) == [[False] * 4] * 2


# --- gradient release ---

RELEASED = {"optimizer": {"states": "fp8", "master": "e4m11", "release": True}}
ORDER = ["down", "up", "embedding", "gain"]
"""The first two are larger than the stub's bucket, into which the others fit together."""


def ordered(step: int) -> dict[str, Tensor]:
    found = gradients(RAGGED, step)
    return {name: found[name] for name in ORDER}


def released(stage: int) -> None:
    held = trained(stage, RAGGED, fp8_states("e4m11"), 2)
    zero = zero_with_backward(stage, RAGGED, **RELEASED)
    for step in range(2):
        backward(zero, ordered(step))
        assert all(p.grad is None for p in zero.params.values()), "a gradient is kept"
        zero.step()
    assert different(zero.states(), held.states()) == []
    assert float(zero._global_grad_norm) == pytest.approx(float(held._global_grad_norm), rel=1e-5)
    if stage == 2:
        assert zero.reduced == 2 * [["down"], ["up"], ["embedding", "gain"]]
        assert set(zero.reached) & {"process_gradients", "reduce_gradients", "copy_grads_in_partition"} == set()
    assert set(zero.reached) & {"partition_grads", "independent_gradient_partition_epilogue"} == set()


@pytest.mark.parametrize(("stage", "num_ranks"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_gradients_that_are_released_update_as_those_that_are_held(stage: int, num_ranks: int) -> None:
    on_threads(num_ranks, released, stage)


def twice(stage: int) -> None:
    zero = zero_with_backward(stage, RAGGED, **RELEASED)
    backward(zero, ordered(0))
    before = zero.masters()
    with pytest.raises(RuntimeError, match="a second gradient of down"):
        backward(zero, ordered(1))
    assert different(zero.masters(), before) == []
    zero.step()
    backward(zero, ordered(1))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_gradient_of_a_parameter_before_the_step_is_refused(stage: int) -> None:
    on_threads(2, twice, stage)


def read_released(stage: int) -> None:
    zero = zero_with_backward(stage, RAGGED, **RELEASED)
    for again in (False, True):
        for name, p in zero.params.items():
            readers: list[Any] = [lambda p=p: zero._get_fp32_grad_state_partition(p, True)]
            if stage == 2:
                readers = [p.get_full_hp_grad, lambda p=p: p.set_full_hp_grad(torch.zeros(p.shape))]
            for read in readers:
                with pytest.raises(UnsupportedError, match=f"gradient of {name}"):
                    read()
        if stage == 2 and not again:  # as a load does: DeepSpeed links its own readers
            for p in zero.params.values():
                p.get_full_hp_grad = p.set_full_hp_grad = not_called
            zero._link_all_hp_params()


@pytest.mark.parametrize("stage", [2, 3])
def test_readers_of_released_gradients_raise_on_every_rank(stage: int) -> None:
    on_threads(2, read_released, stage)  # each rank looks for itself, owner or not


def test_held_gradients_of_zero_3_are_read_and_added_up_by_deepspeed() -> None:
    def held() -> Any:
        zero = zero_with_backward(3, RAGGED)
        parts = give_shards(zero, gradients(RAGGED, 0))
        return len(parts), zero.reached, zero._get_fp32_grad_state_partition(zero.params["up"], True)

    assert on_threads(1, held) == [(len(RAGGED), ["partition_grads"], "a gradient")]


def bucket_of(stage: int, size: int) -> int:
    zero = zero_with_backward(2, RAGGED)
    zero.reduce_bucket_size = size
    zero.overlap_comm = stage == 2
    ReleasedGradients(zero, None)  # type: ignore[arg-type]
    return int(zero.reduce_bucket_size)


def test_a_bucket_of_gradients_that_wait_for_their_update_is_bounded() -> None:
    [overlapping] = on_threads(1, bucket_of, 2, 10**12)
    [alone] = on_threads(1, bucket_of, 1, 10**12)
    assert 0 < 2 * 2 * alone <= OUTSTANDING_UPDATE_BYTES < 2 * 2 * (alone + 1)  # two copies of bf16
    assert 0 < 3 * 2 * overlapping <= OUTSTANDING_UPDATE_BYTES < 3 * 2 * (overlapping + 1)
    assert on_threads(1, bucket_of, 2, 77) == [77]


def test_a_gradient_that_is_larger_than_a_bucket_is_used_at_once() -> None:
    def used() -> bool:
        zero = zero_with_backward(2, RAGGED, **RELEASED)
        p = zero.params["up"]
        p.grad = gradients(RAGGED, 0)["up"]
        before = zero.masters()["up"]
        zero.process_gradients(p, 0)
        return p.grad is None and not torch.equal(zero.masters()["up"], before)

    assert on_threads(1, used) == [True]


def test_a_coalesced_reduction_is_left_to_its_end() -> None:
    """DeepSpeed from 0.19.8 on, inside `coalesce_grad_reduction`."""

    def coalesced() -> list[str]:
        zero = zero_with_backward(2, RAGGED, **RELEASED)
        zero._coalesce_grad_reduction = True
        zero.params["gain"].grad = torch.ones(RAGGED["gain"], dtype=torch.bfloat16)
        zero.process_gradients(zero.params["gain"], 0)
        found: list[str] = zero.reached
        return found

    assert on_threads(1, coalesced) == [[]]


def test_offloads_leave_out_gradients_that_are_released() -> None:
    def wanted(**block: Any) -> Any:
        zero = zero_with_backward(3, RAGGED, **block)
        return zero.fp8.gradients.offload(None), zero.fp8.gradients.offload([OffloadStateTypeEnum.lp_grads])

    [(everything, nothing)] = on_threads(1, lambda: wanted(**RELEASED))
    assert everything == set(OffloadStateTypeEnum) - {OffloadStateTypeEnum.lp_grads} and nothing == set()
    assert on_threads(1, wanted) == [(None, [OffloadStateTypeEnum.lp_grads])]


# --- reduction in FP8 ---

NUMELS = [200, 130, 50]
"""Of the parameters in one bucket; rank 0 keeps the first and part of the second, rank 1 the rest."""


def host() -> Any:
    found = SimpleNamespace(dp_process_group=dist.group.WORLD, overlap_comm=False)
    found.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    found.bit16_groups = [[torch.empty(numel) for numel in NUMELS]]
    found.ipg_buckets = {torch.bfloat16: SimpleNamespace(params=[(0, index, None) for index in range(3)])}
    return found


def not_called(*args: Any) -> None:
    raise AssertionError


def values(rank: int) -> Tensor:
    """Exact in E4M3 with a scale for each parameter, and so are their sums; a group of two parameters would round."""
    powers = torch.cat([torch.full((numel,), -20.0 * index) for index, numel in enumerate(NUMELS)])
    return (torch.arange(sum(NUMELS)) % 15 - 7).float() * torch.exp2(powers + rank)


def reduced(outputs: bool) -> tuple[Tensor, Tensor, int]:
    """The bucket after the reduction, what was added to the outputs, and the bytes sent. Rank 0's slices are merged."""
    buffer, ends = values(dist.get_rank()).bfloat16(), [(0, 0, 200), (0, 200, 260), (1, 260, 330), (1, 330, 380)]
    if dist.get_rank() == 0:
        ends = [(0, 0, 260), *ends[2:]]
    added, counter = torch.ones(sum(NUMELS), dtype=torch.bfloat16), ByteCounter()
    bucket = [
        ({rank}, buffer[start:end], added[start:end]) if outputs else (rank, buffer[start:end])
        for rank, start, end in ends
    ]
    reduce_and_scatter(host(), counter, not_called, bucket, torch.bfloat16)
    return buffer, added, counter.reduced


@pytest.mark.parametrize("outputs", [False, True], ids=["0.18", "0.19.8"])
def test_each_rank_gets_the_sum_of_its_slices_wherever_deepspeed_cuts_them(outputs: bool) -> None:
    total = values(0) + values(1)
    found = on_threads(2, reduced, outputs)
    for (buffer, added, num_bytes), own in zip(found, (slice(0, 260), slice(260, 380)), strict=True):
        assert torch.equal(buffer[own].float(), total[own])
        assert torch.equal(added[own], (total[own].bfloat16() + 1) if outputs else torch.ones_like(added[own]))
        assert num_bytes == (3 + 2) * 128 + 2 * 16  # groups of each parameter's slices, and their exponents


def test_an_optimizer_that_needs_whole_gradients_is_refused() -> None:
    def refuse() -> None:
        with pytest.raises(UnsupportedError, match=r"fp8\.zero\.reduce_scatter"):
            bucket = [({0, 1}, torch.zeros(380), None)]
            reduce_and_scatter(host(), ByteCounter(), not_called, bucket, torch.bfloat16)

    on_threads(2, refuse)


def averaged(in_fp8: bool) -> Any:
    """This rank's shards of averaged gradients of ZeRO-3, the counted bytes, and DeepSpeed's own method."""
    block = {"zero": {"reduce_scatter": "fp8" if in_fp8 else "bf16"}}
    zero = zero_with_backward(3, RAGGED, **block)
    zero.gradient_accumulation_dtype = torch.float32
    rank, params = dist.get_rank(), [zero.params[name] for name in ("up", "gain")]
    for index, p in enumerate(params):
        with torch._C.DisableTorchFunctionSubclass():
            p.data = torch.empty(p.ds_shape, dtype=torch.bfloat16)
        p.grad = gradient_of(p.ds_numel, index, rank).view(p.ds_shape).bfloat16()
    found = zero._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(params, torch.bfloat16)
    return found, zero.context.counter.reduced


def gradient_of(numel: int, index: int, rank: int) -> Tensor:
    """Exact in E4M3 with a power of two for each parameter, and so is the average over two ranks."""
    return (torch.arange(numel) % 15 - 7).float() * 2.0 ** (rank - 20 * index)


def test_zero_3_gets_its_shards_of_the_average_in_the_accumulation_dtype() -> None:
    found = on_threads(2, averaged, True)
    for index, name in enumerate(("up", "gain")):
        numel = torch.Size(RAGGED[name]).numel()
        whole = (gradient_of(numel, index, 0) + gradient_of(numel, index, 1)) / 2
        parts = [shards[index] for shards, _ in found]
        assert {part.dtype for part in parts} == {torch.float32}
        assert torch.equal(torch.cat(parts), whole)
    assert all(num_bytes > 0 for _, num_bytes in found)


@pytest.mark.parametrize(("num_ranks", "in_fp8"), [(1, True), (2, False)])
def test_with_one_rank_or_in_bf16_zero_3_reduces_as_deepspeed_does(num_ranks: int, in_fp8: bool) -> None:
    assert on_threads(num_ranks, averaged, in_fp8) == [("DeepSpeed's", 0)] * num_ranks


@pytest.mark.parametrize("block", [{}, {"zero": {"reduce_scatter": "fp8"}}], ids=["bf16", "one rank"])
def test_with_one_rank_or_in_bf16_zero_2_reduces_as_deepspeed_does(block: dict[str, Any]) -> None:
    def reduce() -> Any:
        zero = zero_with_backward(2, RAGGED, **block)
        zero.allreduce_and_scatter("bucket", torch.bfloat16, divide=False)
        return zero.reached, zero.context.counter.reduced

    assert on_threads(1 if block else 2, reduce) == [(["allreduce_and_scatter"], 0)] * (1 if block else 2)

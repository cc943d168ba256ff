"""Collectives over NCCL: averages of gradients cut in shares, gathers balanced first, and sums made by all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm import gather, reduce_scatter
from fp8_ds.comm.gather import gather_runs
from fp8_ds.comm.layout import ShardRange
from fp8_ds.comm.reduce_scatter import reduce_scatter_shares

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SMALLEST = {torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}


def both_ways(
    numels: list[int], dtype: torch.dtype, has_places: bool, factor: float = 1.0
) -> tuple[list[Tensor], list[Tensor], int]:
    """Stock's shares and ours of normal numbers times `factor`; with more than two ranks of whole ones, whose sums are
    exact in any order. How many of ours are at their places."""
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    values = [torch.randn(numel, generator=generator, device="cuda") for numel in numels]
    if dist.get_world_size() > 2:
        values = [(4 * value).round() for value in values]
    tensors = [value.mul(factor).to(dtype) for value in values]
    stock = reduce_scatter_coalesced([tensor.clone() for tensor in tensors], dist.group.WORLD)
    # As in DeepSpeed, whose places lie one behind the other in one buffer, here the last ones at odd addresses.
    sizes = [-(-numel // dist.get_world_size()) for numel in numels] if has_places else []
    places = torch.full([sum(sizes)], torch.nan, dtype=dtype, device="cuda").split(sizes) if sizes else []
    ours = reduce_scatter_shares(tensors, dist.group.WORLD, places)
    num_placed = sum(one.data_ptr() == place.data_ptr() for one, place in zip(ours, places, strict=False))
    return [one.cpu() for one in stock], [one.cpu() for one in ours], num_placed


ONE, LARGE, SMALL = [4_000_000], [64, 8_000_000, 3_000_001, 4096, 12_000_000], [4096, 333]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("numels", "num_placed"), [(ONE, 1), (LARGE, 2), (SMALL, 0)], ids=["one", "large", "small"])
def test_shares_over_nccl_have_stocks_bits_and_subnormal_ones_are_off_by_a_rounding_for_each_rank_at_most(
    gpu_ranks: Any, world_size: int, dtype: torch.dtype, numels: list[int], num_placed: int
) -> None:
    """NCCL divides and adds in one instruction, which does not round the quotient; stock's division does. Each of them
    rounds once a rank, by half the smallest number."""
    for has_places in (False, True):
        for stock, ours, found in gpu_ranks(world_size).run(both_ways, numels, dtype, has_places):
            assert found == has_places * num_placed
            assert len(stock) == len(ours) == len(numels)
            for one, other in zip(stock, ours, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if numels == LARGE:
        return
    for stock, ours, _ in gpu_ranks(world_size).run(both_ways, numels, dtype, False, 5 * SMALLEST[dtype]):
        for one, other in zip(stock, ours, strict=True):
            steps = (one.double() - other.double()).abs() / SMALLEST[dtype]
            assert bool(one.any()) and float(steps.max()) <= world_size


def gathered(numels: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether all runs are there after a balanced gather."""
    rank, start, runs = dist.get_rank(), 3, []
    for owner, numel in enumerate(numels):
        if numel:
            runs.append(ShardRange(start, start + numel, owner))
        start += numel + 3
    expected = torch.full((start,), 250, dtype=dtype, device="cuda")
    buffer = expected.clone()
    for run in runs:
        values = ((torch.arange(run.numel, device="cuda") + 37 * run.rank) % 241).to(dtype)
        expected[run.start : run.stop] = values
        if run.rank == rank:
            buffer[run.start : run.stop] = values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "MAX_BROADCASTS", 0)
        assert gather.gather_method(runs, 2, buffer.element_size()) == "balanced"
        gather_runs(dist.group.WORLD, buffer, runs)
    return buffer.equal(expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numels", [(0, 5_000_001), (1_000_000, 77), (3_000_000, 2_000_000), (0, 50)], ids=str)
def test_a_balanced_gather_over_nccl_brings_every_run(
    gpu_ranks: Any, numels: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert gpu_ranks(2).run(gathered, numels, dtype) == [True, True]


def added(dtype: torch.dtype) -> list[list[Tensor]]:
    """What this rank keeps: added by itself, and by all ranks."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    sizes = [[300, 0, 2_000_003], [70_000]]
    pieces = [[torch.randn(n, generator=generator, device="cuda").bfloat16() for n in of_rank] for of_rank in sizes]
    found = []
    for balanced in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reduce_scatter, "is_balanced", lambda *_, chosen=balanced: chosen)
            sums, _ = reduce_scatter.reduce_scatter_fp8(dist.group.WORLD, pieces, dtype, 0.5)
        found.append([piece.cpu() for piece in sums])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_added_by_all_ranks_have_the_bits_of_those_added_by_their_owner(
    gpu_ranks: Any, dtype: torch.dtype
) -> None:
    for by_owner, by_all in gpu_ranks(2).run(added, dtype):
        assert [piece.numel() for piece in by_owner] == [piece.numel() for piece in by_all]
        assert all(one.equal(other) for one, other in zip(by_owner, by_all, strict=True))

"""Averages of ZeRO-3's gradients over NCCL, which divides by itself and adds up each tensor where it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("numels", "num_placed"),
    [([4_000_000], 1), ([64, 8_000_000, 3_000_001, 4096, 12_000_000], 2), ([4096, 333], 0)],
    ids=["one", "large", "small"],
)
@pytest.mark.parametrize("has_places", [False, True], ids=["new", "placed"])
def test_shares_over_nccl_have_stocks_bits(
    gpu_ranks: Any, world_size: int, dtype: torch.dtype, numels: list[int], num_placed: int, has_places: bool
) -> None:
    for stock, ours, found in gpu_ranks(world_size).run(both_ways, numels, dtype, has_places):
        assert found == has_places * num_placed
        assert len(stock) == len(ours) == len(numels)
        for one, other in zip(stock, ours, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("numels", [[4_000_000], [4096, 333]], ids=["one", "small"])
def test_subnormal_shares_are_off_by_a_rounding_for_each_rank_at_most(
    gpu_ranks: Any, world_size: int, dtype: torch.dtype, numels: list[int]
) -> None:
    """NCCL divides and adds in one instruction, which does not round the quotient; stock's division does. Each of them
    rounds once a rank, by half the smallest number."""
    for stock, ours, _ in gpu_ranks(world_size).run(both_ways, numels, dtype, False, 5 * SMALLEST[dtype]):
        for one, other in zip(stock, ours, strict=True):
            steps = (one.double() - other.double()).abs() / SMALLEST[dtype]
            assert bool(one.any()) and float(steps.max()) <= world_size

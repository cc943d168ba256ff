"""ZeRO-3's gradients are cut for all ranks as DeepSpeed cuts them, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8_ds.comm.equal_shares import reduce_scatter_shares
from fp8_ds.testing.metrics import assert_bitwise

pytestmark = pytest.mark.distributed


def both_ways(numels: list[int], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Stock's shares and ours of the same tensors, and how many of ours lie where a tensor that was handed in does."""
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    generator = torch.Generator().manual_seed(dist.get_rank())
    tensors = [torch.randn(numel, generator=generator).to(dtype) for numel in numels]
    stock = reduce_scatter_coalesced([tensor.clone() for tensor in tensors], dist.group.WORLD)
    ours = reduce_scatter_shares(tensors, dist.group.WORLD)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return stock, ours, sum(one.untyped_storage().data_ptr() in storages for one in ours)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "numels",
    [[12], [13], [1], [6, 18, 600], [1000, 3, 1, 128, 2051, 5], [2, 0, 5], [0, 0]],
    ids=lambda one: "-".join(map(str, one)),
)
def test_shares_have_stocks_bits(ranks: Any, world_size: int, numels: list[int]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for stock, ours, num_in_place in ranks(world_size).run(both_ways, numels, dtype):
            assert len(stock) == len(ours) == len(numels)
            for one, other in zip(stock, ours, strict=True):
                assert_bitwise(one, other)
            if any(numels):
                assert num_in_place == (len(numels) == 1 and numels[0] % world_size == 0)

"""What many ranks do, on two over NCCL: shares balanced before a gather, and gradients added by all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.comm import gather, reduce_scatter
from fp8_ds.comm.gather import gather_runs
from fp8_ds.comm.layout import ShardRange

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def gathered(numels: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether all runs are there after a balanced gather."""
    rank, start, runs = dist.get_rank(), 3, []
    for owner, numel in enumerate(numels):
        if numel:
            runs.append(ShardRange(owner, start, start + numel))
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

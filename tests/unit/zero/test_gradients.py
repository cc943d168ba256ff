"""Gradients on their way to the step: one rank, release, reduction in FP8, on stub hosts whose ranks are threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.threads import on_threads
from torch import Tensor, nn

from fp8_ds.comm.collectives import ByteCounter
from fp8_ds.errors import UnsupportedError
from fp8_ds.zero.gradients import reduce_and_scatter

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
    return (torch.arange(sum(NUMELS)) % 15 - 7).float() * 2.0**rank  # exact in E4M3, and so are their sums


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
        assert torch.equal(added[own].float(), total[own] + 1 if outputs else torch.ones_like(total[own]))
        assert num_bytes == (3 + 2) * 128 + 2 * 16  # groups of each parameter's slices, and their exponents


def test_an_optimizer_that_needs_whole_gradients_is_refused() -> None:
    def refuse() -> None:
        with pytest.raises(UnsupportedError, match=r"fp8\.zero\.reduce_scatter"):
            bucket = [({0, 1}, torch.zeros(380), None)]
            reduce_and_scatter(host(), ByteCounter(), not_called, bucket, torch.bfloat16)

    on_threads(2, refuse)

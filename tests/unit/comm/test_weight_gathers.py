"""Compact buffers of ZeRO-1 and 2 on ranks that are threads, and shards of ZeRO-3 side by side."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.threads import on_threads
from torch import nn

from fp8_ds.comm.gather import CompactBuffer, adjacent, join_shards, pieces_of
from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.formats import E4M3

SHAPES = [(3, 5), (40,), (2, 33), (7,)]
NUM_RANKS = 3


def flat_starts() -> list[int]:
    return [sum(torch.Size(shape).numel() for shape in SHAPES[:i]) for i in range(len(SHAPES))]


def gathered(dtype: torch.dtype) -> list[int]:
    """Parameters whose data is no longer in the buffer, once one has been assigned elsewhere."""
    total = sum(torch.Size(shape).numel() for shape in SHAPES)
    size, rank = -(-total // NUM_RANKS), dist.get_rank()
    flat = (torch.arange(NUM_RANKS * size) % 97).float().to(dtype)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False) for shape in SHAPES]
    buffer = CompactBuffer(params, flat_starts(), size, dist.group.WORLD, dtype, torch.device("cpu"))
    for i, p in enumerate(params):
        p.data = buffer.view(i)
    buffer.copy_own(flat[rank * size : (rank + 1) * size])
    buffer.gather()
    for p, start in zip(params, flat_starts(), strict=True):
        assert torch.equal(p.float(), flat[start : start + p.numel()].view(p.shape).float())
        assert p.data_ptr() % 16 == buffer.buffer.data_ptr() % 16  # FP8 GEMMs read 16 bytes at a time
    assert buffer.strays() == []
    params[2].data = params[2].data.clone()
    return buffer.strays()


@pytest.mark.parametrize("dtype", [E4M3.dtype, torch.bfloat16], ids=str)
def test_every_parameter_arrives_in_its_place_of_the_buffer(dtype: torch.dtype) -> None:
    assert on_threads(NUM_RANKS, gathered, dtype) == [[2]] * NUM_RANKS


def test_pieces_are_views_in_order() -> None:
    flat = torch.arange(20)
    pieces = pieces_of(flat, [ShardRange(*ends) for ends in ((0, 2), (5, 8), (8, 8), (18, 20))])
    assert [piece.tolist() for piece in pieces] == [[0, 1], [5, 6, 7], [], [18, 19]]
    assert pieces[1].data_ptr() == flat[5:].data_ptr()


def test_shards_one_behind_the_other_are_one_tensor_without_a_copy() -> None:
    flat = torch.randn(100).to(torch.float8_e4m3fn)
    parts = [flat[16:40], flat[40:41], flat[41:90]]
    together = adjacent(parts)
    assert together is not None and together.data_ptr() == parts[0].data_ptr()
    assert torch.equal(together, torch.cat([part.view(torch.uint8) for part in parts]))
    alone = adjacent(parts[:1])
    assert alone is not None and torch.equal(alone, parts[0].view(torch.uint8))


def test_others_are_not() -> None:
    flat = torch.randn(100).to(torch.float8_e4m3fn)
    assert adjacent([flat[:16], flat[32:48]]) is None  # a gap
    assert adjacent([flat[16:32], flat[:16]]) is None  # the other way round
    assert adjacent([flat[:16], flat.clone()[16:32]]) is None  # of two storages


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_shards_that_arrive_rank_by_rank_become_one_tensor_for_each_weight(num_ranks: int) -> None:
    sizes = [4, 1, 7]
    wholes = [torch.arange(num_ranks * size) + 100 * index for index, size in enumerate(sizes)]
    by_rank = [torch.cat([whole.chunk(num_ranks)[rank] for whole in wholes]) for rank in range(num_ranks)]
    joined = join_shards(torch.cat(by_rank), sizes, num_ranks)
    assert all(torch.equal(one, whole) for one, whole in zip(joined, wholes, strict=True))

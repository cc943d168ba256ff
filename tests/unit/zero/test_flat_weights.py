"""Compact buffers of ZeRO-1 and 2 and frozen weights, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.threads import on_threads
from support.zero_hosts import RAGGED, values_of, zero_optimizer
from support.zero_training import (
    assert_same,
    other_values,
    quantized,
    refresh,
)
from torch import nn

from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.formats import E4M3
from fp8_ds.zero.flat_weights import CompactBuffer, pieces_of

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


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_frozen_weight_in_fp8_is_what_was_written_to_it(recipe: str) -> None:
    def frozen() -> None:
        fixed: Any = nn.Parameter(values_of(RAGGED)["up"].bfloat16(), requires_grad=False)
        zero_optimizer(2, RAGGED, {"fixed": fixed}, linear={"recipe": recipe, "frozen": "fp8"})
        for value in (fixed.detach().clone(), other_values("up")):
            fixed.copy_(value)
            assert torch.equal(fixed._fp8.data.view(torch.uint8), quantized(recipe, value.float())[0])
            assert torch.equal(fixed._fp8.scale_inv, quantized(recipe, value.float())[1])

    on_threads(1, frozen)


def assigned(states: bool, keeps: bool) -> None:
    """Data of parameters outside FP8 is replaced before a step, or before weights are moved as an offload does."""
    block = {"optimizer": {"states": "fp8", "master": "e4m11"}} if states else {}
    zero, values = zero_optimizer(2, RAGGED, **block), {n: v.bfloat16() for n, v in values_of(RAGGED).items()}
    table, gain = zero.params["embedding"], zero.params["gain"]
    table.data, gain.data = F.normalize(table.data, dim=1), gain.data.flip(0)
    now = {"embedding": table.detach().clone(), "gain": gain.detach().clone()}
    if keeps:
        zero.fp8.weights.move(torch.device("cpu"))
    elif states:  # what is assigned is the master
        zero.param_groups[0]["lr"] = 0.0
        zero.give(values)
        zero.step()
    else:
        refresh(zero, 2)
    assert_same({name: zero.read(name) for name in now}, now if keeps or states else values)
    zero.fp8.refresh(is_step=False)
    masters = zero.masters()
    for name in now:  # and it follows them again
        assert torch.equal(zero.read(name), masters[name].bfloat16()), name


@pytest.mark.parametrize(("states", "keeps"), [(False, False), (True, False), (False, True), (True, True)])
def test_parameters_follow_their_masters_again_after_their_data_was_replaced(states: bool, keeps: bool) -> None:
    on_threads(2, assigned, states, keeps)

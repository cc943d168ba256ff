"""Weights of ZeRO-1 and 2 and frozen ones, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.threads import on_threads
from support.zero_hosts import RAGGED, values_of, zero_optimizer
from support.zero_training import (
    assert_follow,
    assert_same,
    other_values,
    quantized,
    refresh,
)
from torch import Tensor, nn

from fp8_ds.nn.linear.payload import ROW
from fp8_ds.nn.linear.stored import StoredScales, freeze
from fp8_ds.numerics.formats import E4M3


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


def gathered_bytes() -> None:
    """A group of which every layer computes in bf16 sends no FP8 bytes, and sends them once one no longer does."""
    zero = zero_optimizer(2, RAGGED)
    counter, values = zero.context.counter, values_of(RAGGED)
    counter.end_step()
    version = zero.params["up"]._fp8.version
    zero.fp8.refresh(is_step=False)
    assert zero.params["up"]._fp8.version != version  # what is cached of the bytes is stale
    in_fp8, others = counter.fp8, counter.hp
    assert in_fp8 >= 7000 and others >= 2 * (150 + 51)
    zero.fp8.set_bf16({"up"})
    counter.end_step()
    zero.fp8.refresh(is_step=False)
    assert counter.fp8 == in_fp8 and counter.hp - others >= 2 * 3500
    zero.fp8.set_bf16({"up", "down"})
    counter.end_step()
    zero.single_partition_of_fp32_groups[0].data.mul_(-2)
    zero.fp8.refresh(is_step=False)
    assert counter.fp8 == 0 and counter.hp - others >= 2 * 7000
    for name in ("up", "down"):
        assert torch.equal(zero.params[name]._fp8.hp, (-2 * values[name]).bfloat16())
    zero.fp8.set_bf16(())
    assert_follow(zero, "tensorwise", {name: -2 * value for name, value in values.items()})
    assert all(zero.params[name]._fp8.hp is None for name in ("up", "down"))


def test_bytes_that_no_layer_reads_are_not_sent_and_are_there_when_one_does() -> None:
    on_threads(2, gathered_bytes)


def exchanged() -> None:
    """Two parameters of one shape whose data a user has exchanged."""
    shapes = {"embedding": (3, 50), "up": (70, 50), "down": (50, 70), "gain": (51,), "bias": (51,)}
    zero = zero_optimizer(2, shapes)
    gain, bias = zero.params["gain"], zero.params["bias"]
    before = gain.detach().clone(), bias.detach().clone()
    gain.data, bias.data = bias.data, gain.data
    zero.fp8.weights.point_params(keep_values=True)
    assert torch.equal(gain.detach(), before[1]) and torch.equal(bias.detach(), before[0])
    assert gain.data_ptr() != bias.data_ptr() and zero.fp8.weights.groups[0].hp.strays() == []


def test_values_of_parameters_that_were_exchanged_are_kept() -> None:
    on_threads(2, exchanged)


class _Leaving(torch.Tensor):
    """A buffer that is copied when it moves, on a CPU, too."""

    def to(self, *args: Any, **options: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


def moved() -> None:
    zero = zero_optimizer(2, RAGGED)
    zero.fp8.set_bf16({"up"})
    [group] = zero.fp8.weights.groups
    for kind in group.buffers:
        kind.buffer = kind.buffer.as_subclass(_Leaving)
    zero.fp8.weights.move(torch.device("cpu"))
    found = [(group.fp8, [p._fp8.data for p in group.fp8.params]), (group.hp, group.hp.params)]
    found.append((group.bf16, [p._fp8.hp for p in group.bf16.params]))
    for kind, views in found:
        assert {view.untyped_storage().data_ptr() for view in views} == {kind.buffer.untyped_storage().data_ptr()}
    assert_follow(zero, "tensorwise", values_of(RAGGED))


def test_parameters_follow_their_buffers() -> None:
    on_threads(1, moved)


def test_a_frozen_weight_that_came_in_fp8_keeps_bytes_and_scales_until_others_are_written() -> None:
    codes = (torch.arange(24) % 15 - 7).view(4, 6).float().to(E4M3.dtype)
    scale_inv = torch.tensor([[0.3], [1.7], [0.01], [5.0]])
    p: Any = nn.Parameter(codes.view(torch.uint8).clone(), requires_grad=False)
    freeze("weight", p, ROW, StoredScales(scale_inv.clone(), ROW, (4, 6), ()))
    read = p.detach().clone()
    assert torch.equal(read, (codes.float() * scale_inv).bfloat16())
    with torch.no_grad():
        p.copy_(read)
    assert torch.equal(p._fp8.data.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(p._fp8.scale_inv, scale_inv)
    with torch.no_grad():
        p.copy_(2 * read)
    torch.testing.assert_close(p.detach().float(), 2 * read.float(), rtol=2.0**-4, atol=0.0)
    assert not torch.equal(p._fp8.scale_inv, scale_inv)

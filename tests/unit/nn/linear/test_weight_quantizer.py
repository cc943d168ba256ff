"""WeightQuantizer on ranks that are threads: the bytes and scales are those of one rank, however weights are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.inputs import many_scales
from support.threads import on_threads
from torch import Tensor

from fp8_ds.comm.collectives import ByteCounter
from fp8_ds.nn.linear.payload import OF_RECIPE, Granularity
from fp8_ds.nn.linear.weight_quantizer import Part, WeightQuantizer
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import AmaxHistory

SHAPES = [(3, 5), (40, 150), (1, 129)]


def weights() -> list[Tensor]:
    return [many_scales("per_row", *shape, seed=i).flatten() for i, shape in enumerate(SHAPES)]


def cut(numel: int, num_ranks: int, rank: int) -> range:
    """Elements of a rank: uneven, and none on rank 1."""
    ends = [0, numel // 3, numel // 3, numel] if num_ranks == 3 else [0, numel]
    return range(ends[rank], ends[rank + 1])


def quantized(granularity: Granularity, history: bool) -> tuple[list[Tensor], list[Tensor], list[float], int]:
    """This rank's bytes by weight, all scale_inv, the newest row of the history, and the number of reductions."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    amaxes = AmaxHistory(2, [448.0, 448.0]) if history else None
    counter = ByteCounter()
    group: Any = dist.group.WORLD
    quantizer = WeightQuantizer(group, SHAPES, granularity, torch.device("cpu"), amaxes, counter)
    parts = []
    for weight in weights():
        own = cut(weight.numel(), num_ranks, rank)
        shard = torch.zeros(len(own), dtype=E4M3.dtype)
        parts.append(Part(weight[own.start : own.stop].clone(), shard, own.start))
    quantizer.set_parts(parts)
    before = [grid.data_ptr() for grid in quantizer.scale_inv]
    if amaxes is not None:
        amaxes.amax_local.copy_(torch.tensor([1.0 + rank, 9.0 - rank]))
    quantizer.requantize(is_step=True)
    assert before == [grid.data_ptr() for grid in quantizer.scale_inv]
    newest = [] if amaxes is None else amaxes.amax_history[0].tolist()
    return [part.shard.view(torch.uint8) for part in parts], quantizer.scale_inv, newest, counter.num_amax_reduces


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_parts_have_the_bytes_and_scales_of_the_whole(recipe: str) -> None:
    granularity, delayed = OF_RECIPE[recipe], recipe == "delayed"
    [(whole, scales, _, _)] = on_threads(1, quantized, granularity, delayed)
    of_ranks = on_threads(3, quantized, granularity, delayed)
    for index, shape in enumerate(SHAPES):
        assert torch.equal(torch.cat([parts[index] for parts, *_ in of_ranks]), whole[index])
        assert scales[index].shape == granularity.grid(shape)
        decoded = whole[index].view(E4M3.dtype).float()
        if recipe in ("tensorwise", "delayed"):
            assert torch.allclose(
                decoded * scales[index], weights()[index], rtol=2.0**-4, atol=float(scales[index]) / 512
            )
    for _, scale_inv, newest, num_reduces in of_ranks:
        assert all(torch.equal(one, other) for one, other in zip(scale_inv, scales, strict=True))
        assert newest == ([3.0, 9.0] if delayed else []) and num_reduces == 1


def kept_scales() -> None:
    """The second weight came in FP8 with a scale that its amax would not give."""
    counter, group = ByteCounter(), dist.group.WORLD
    stored = torch.tensor(0.75)
    quantizer = WeightQuantizer(group, SHAPES, OF_RECIPE["tensorwise"], torch.device("cpu"), None, counter, {1: stored})  # type: ignore[arg-type]
    sources = [weight.clone() for weight in weights()]
    quantizer.set_parts([Part(x, torch.zeros(x.numel(), dtype=E4M3.dtype), 0) for x in sources])
    for factor, is_kept in ((1.0, True), (1.0, True), (3.0, False), (1 / 3, True)):
        sources[1].mul_(factor)
        sources[1][sources[1].abs().argmax()] = sources[1].abs().max() if factor != 1 / 3 else weights()[1].abs().max()
        quantizer.requantize(is_step=True)
        own = float(sources[1].abs().max()) / E4M3.max
        assert float(quantizer.scale_inv[1]) == pytest.approx(0.75 if is_kept else own, rel=1e-6)
        assert float(quantizer.scale[1]) == pytest.approx(1 / (0.75 if is_kept else own), rel=1e-6)
        assert float(quantizer.scale_inv[0]) == pytest.approx(float(sources[0].abs().max()) / E4M3.max, rel=1e-6)


def test_a_scale_that_came_with_a_weight_holds_as_long_as_its_largest_element() -> None:
    on_threads(1, kept_scales)

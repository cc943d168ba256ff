"""Tensor-parallel FP8 layers on GPUs with NCCL: every byte in its place, transfers between peers, the align kernel."""

from __future__ import annotations

from typing import Any

import pytest
import tensor_parallel as tpar
import torch

from fp8_ds.numerics.formats import E4M3
from fp8_ds.testing import assert_bitwise
from fp8_ds.tp.gather import Gathered, Shard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

WORLDS = (2, 4)


def gathers() -> None:
    """Several times, so that buffers are used again; every rank's bytes are in their place."""
    tp = tpar.context()
    torch.manual_seed(0)
    everyone = torch.randint(0, 120, (tp.size, 512, 1024), dtype=torch.uint8, device="cuda").view(E4M3.dtype)
    scales = torch.rand(tp.size, 512, 1, device="cuda")
    for _ in range(3):
        shard = Shard(everyone[tp.rank].clone(), scales[tp.rank].clone())
        gathered = Gathered(tp.group, shard)
        del shard
        torch.zeros(512, 1024, dtype=torch.uint8, device="cuda")  # where the shard was, if its memory was given back
        assert_bitwise(gathered.codes.view(torch.uint8).cpu(), everyone.view(torch.uint8).flatten(0, 1).cpu())
        assert_bitwise(gathered.scale_inv.cpu(), scales.cpu())


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_byte_arrives_where_it_belongs(gpu_ranks: Any, world_size: int) -> None:
    gpu_ranks(world_size).run(gathers)


def layers(name: str) -> list[tuple[Any, ...]]:
    """(kind, result, SQNR of the parts, of one device)."""
    found = []
    for kind in tpar.RUN:
        sqnr = tpar.against_whole(kind, name, True, tpar.normal)
        found += [(kind, key, parts, whole) for key, (parts, whole) in sqnr.items()]
    return found


@pytest.mark.parametrize("name", tpar.SHARDED_RECIPES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_layers_are_as_close_to_the_exact_product_as_one_device(gpu_ranks: Any, world_size: int, name: str) -> None:
    for kind, key, parts, whole in gpu_ranks(world_size).run(layers, name)[0]:
        allowed = 5.0 if key == "grad_bias" else tpar.ALLOWED_LOSS.get((kind, name), 0.3)
        assert parts > whole - allowed, (kind, key, parts, whole)

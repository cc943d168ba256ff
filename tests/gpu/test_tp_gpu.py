"""Tensor-parallel FP8 layers on GPUs with NCCL: every byte in its place, transfers between peers, the align kernel."""

from __future__ import annotations

from typing import Any

import pytest
import tensor_parallel as tpar
import test_tp_linears as on_cpu
import torch

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.align import align
from fp8_ds.testing import assert_bitwise
from fp8_ds.tp.gather import Gathered, Shard
from fp8_ds.tp.regions import split_tokens
from fp8_ds.tp.rules import quantize_rows_pow2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

WORLDS = (2, 4)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(16, 16), (67, 35), (304, 4096), (8192, 4096)])
def test_align_has_the_bytes_of_the_reference(fmt: Any, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, shape[0])[:, None]
    codes, scale_inv = quantize_rows_pow2(x.bfloat16(), fmt)
    for expected, found in zip(align(codes, scale_inv[:, 0]), align(codes.cuda(), scale_inv[:, 0].cuda()), strict=True):
        assert_bitwise(found.cpu(), expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_align_finds_the_largest_of_a_few_scales_itself(num_ranks: int) -> None:
    codes = torch.randint(0, 120, (num_ranks * 80, 144), dtype=torch.uint8).view(E4M3.dtype)
    scale_inv = torch.exp2(torch.randint(-20, 20, (num_ranks,)).float())
    for expected, found in zip(align(codes, scale_inv), align(codes.cuda(), scale_inv.cuda()), strict=True):
        assert_bitwise(found.cpu(), expected)


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
    for kind in on_cpu.KINDS:
        sqnr = on_cpu.against_whole(kind, name, torch.bfloat16, True, on_cpu.normal)
        found += [(kind, key, parts, whole) for key, (parts, whole, _) in sqnr.items()]
    return found


@pytest.mark.parametrize("name", on_cpu.RECIPES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_layers_are_as_close_to_the_exact_product_as_one_device(gpu_ranks: Any, world_size: int, name: str) -> None:
    for kind, key, parts, whole in gpu_ranks(world_size).run(layers, name)[0]:
        allowed = 5.0 if key == "grad_bias" else on_cpu.ALLOWED_LOSS.get((kind, name), 0.3)
        assert parts > whole - allowed, (kind, key, parts, whole)


def later_values() -> list[str]:
    """What becomes of forwards whose second batch differs from rank to rank."""
    tp = tpar.context()
    found = []
    for step in range(4):
        x = torch.full((2, 64, 128), 1.0 + (tp.rank if step == 1 else 0), device="cuda", dtype=torch.bfloat16)
        try:
            split_tokens(x, tp)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_other_values_on_a_rank_are_an_error_on_all_a_forward_late(gpu_ranks: Any) -> None:
    for found in gpu_ranks(2).run(later_values):
        assert found[:2] == ["", ""] and "'values of the batch before " in found[2]
        assert found[3] == ""

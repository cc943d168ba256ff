"""Scales beside stacks of FP8 weights: which are known, and codes times scales from any element on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_ds.nn.linear.payload import TILE
from fp8_ds.nn.moe.stored import parameters_beside, remove_beside, scales_of, stored_names

FP8 = torch.float8_e4m3fn
E, HIDDEN = 3, 200


def stack(rows: int, cols: int, seed: int) -> Tensor:
    values = torch.randn(E, rows, cols, generator=torch.Generator().manual_seed(seed)) * 100
    return values.clamp(-448, 448).to(FP8)


def experts(inter: int, grid: tuple[int, ...], dtype: torch.dtype = torch.float32, name: str = "gate_up_proj") -> Any:
    """A module with one stack, and scales of very different sizes that are no powers of two unless in another dtype."""
    module: Any = nn.Module()
    shape = (2 * inter, HIDDEN) if name == "gate_up_proj" else (HIDDEN, inter)
    module.register_parameter(name, nn.Parameter(stack(*shape, seed=0), requires_grad=False))
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp2(torch.randint(-40, 40, grid, generator=generator).float())
    if dtype == torch.float32:
        scale *= 1 + torch.rand(grid, generator=generator)
    scale = scale.to(torch.float8_e8m0fnu).view(torch.uint8) if dtype == torch.uint8 else scale.to(dtype)
    module.register_parameter(f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
    return module


def expected(codes: Tensor, scale: Tensor, halves: int) -> Tensor:
    """Element by element; each of the `halves` of an expert's rows has blocks of its own."""
    values, rows = torch.empty(codes.shape), codes.shape[1] // halves
    for e in range(E):
        for row in range(codes.shape[1]):
            half, within = divmod(row, rows)
            block = half * (scale.shape[1] // halves) + within // 128
            for col in range(0, codes.shape[2], 128):
                part = slice(col, col + 128)
                values[e, row, part] = codes[e, row, part].float() * scale[e, block, col // 128]
    return values


CASES = [
    ("gate_up_proj", 256, (E, 4, 2), 2),
    ("gate_up_proj", 192, (E, 4, 2), 2),
    ("gate_up_proj", 192, (E, 3, 2), 1),
    ("gate_up_proj", 64, (E, 2, 2), 2),
    ("down_proj", 192, (E, 2, 2), 1),
]


@pytest.mark.parametrize(("name", "inter", "grid", "halves"), CASES, ids=str)
def test_stacks_are_codes_times_the_scales_of_each_experts_blocks(
    monkeypatch: pytest.MonkeyPatch, name: str, inter: int, grid: tuple[int, ...], halves: int
) -> None:
    """Of gate and up, each has blocks of its own, or theirs go on: their number says which. All of it is exact."""
    monkeypatch.setattr("fp8_ds.nn.linear.stored._CHUNK", 7001)
    module = experts(inter, grid, name=name)
    stored, codes = scales_of(module, name), getattr(module, name).data
    assert stored is not None and stored.granularity == TILE and stored_names(module) == [name]
    exact = expected(codes, module._parameters[f"{name}_scale_inv"], halves)
    rounded = stored.dequantize(codes, torch.bfloat16)
    assert torch.equal(stored.dequantize(codes, torch.float32), exact)
    assert torch.equal(rounded, exact.bfloat16()) and not torch.equal(rounded.float(), exact)
    for cut in (0, 1, codes[0].numel() + 12_345, codes.numel() - 1):
        for part in (slice(0, cut), slice(cut, None)):
            values = rounded.view(-1)[part].float()
            stored.restore_(values, part.start)
            assert torch.equal(values.view(torch.int32), exact.view(-1)[part].view(torch.int32))
            values = codes.view(-1)[part].float()
            stored.multiply_(values, part.start)
            assert torch.equal(values.view(torch.int32), exact.view(-1)[part].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8, torch.bfloat16])
def test_exponents_and_short_floats_are_numbers(dtype: torch.dtype) -> None:
    """As "scale_fmt": "ue8m0" stores them, and as transformers 5.24 may leave them."""
    module = experts(128, (E, 2, 2), dtype)
    stored = scales_of(module, "gate_up_proj")
    assert stored is not None and stored.scale_inv.dtype == torch.float32
    scale = module.gate_up_proj_scale_inv
    numbers = torch.exp2(scale.float() - 127) if dtype == torch.uint8 else scale.float()
    assert torch.equal(stored.scale_inv.view(E, 2, 2), numbers) and numbers.unique().numel() > 6


@pytest.mark.parametrize("grid", [(E, 2, 1), (E, 1, 2), (E, 5, 2), (E + 1, 4, 2), (E * 4, 2), (E, 512, 1), (1,)])
def test_scales_of_another_grid_are_not_known(grid: tuple[int, ...]) -> None:
    module = experts(256, grid)
    assert stored_names(module) == ["gate_up_proj"] and scales_of(module, "gate_up_proj") is None


def test_what_is_not_in_fp8_or_has_no_scales_is_not_stored() -> None:
    module = experts(256, (E, 4, 2))
    assert scales_of(module, "down_proj") is None
    beside = dict(module._parameters)
    del module._parameters["gate_up_proj_scale_inv"]
    assert stored_names(module) == []
    module._parameters.update(beside, gate_up_proj=nn.Parameter(torch.ones(E, 512, HIDDEN)))
    assert stored_names(module) == []


def test_scales_of_activations_go_with_those_of_the_weight() -> None:
    module = experts(256, (E, 4, 2))
    module.gate_up_proj_activation_scale = nn.Parameter(torch.ones(E))
    weight, *beside = module._parameters.values()
    assert list(map(id, parameters_beside(module, "gate_up_proj"))) == list(map(id, beside)) and len(beside) == 2
    remove_beside(module, "gate_up_proj")
    assert list(module._parameters.values()) == [weight]

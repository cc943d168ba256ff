"""Training on the stub hosts of zero_hosts.py: gradients, steps, values that users write, and comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.masters import BY_NAME, encode
from fp8_ds.ops.blockwise import quantize_blockwise
from fp8_ds.ops.quantize import quantize_rowwise
from support.zero_hosts import RAGGED, zero_optimizer

Shapes = dict[str, tuple[int, ...]]


def fp8_states(master: str, **more: Any) -> dict[str, Any]:
    """The "fp8" block of a run with FP8 states."""
    return {"optimizer": {"states": "fp8", "master": master}, **more}


def gradients(shapes: Shapes, step: int) -> dict[str, Tensor]:
    """bf16, with a range of its own for each group of 128; some groups are zero."""
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(100 * step + i)
        groups = torch.randn(-(-torch.Size(shape).numel() // 128), 128, generator=generator)
        groups *= torch.exp2(torch.randint(-24, 4, (len(groups), 1), generator=generator).float())
        groups[5::7] = 0
        found[name] = groups.flatten()[: torch.Size(shape).numel()].view(shape).bfloat16()
    return found


def trained(stage: int, shapes: Shapes, block: dict[str, Any], num_steps: int) -> Any:
    zero = zero_optimizer(stage, shapes, **block)
    for step in range(num_steps):
        zero.give(gradients(shapes, step))
        zero.step()
    return zero


def different(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name, value in left.items() if not torch.equal(value, right[name])]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert [name for name, value in left.items() if not torch.equal(value, right[name])] == []


def assert_high_parts(zero: Any, master: str) -> None:
    """Every FP8 weight is its master rounded to nearest, with a power of two that does not saturate."""
    masters = zero.masters()
    for name, (codes, scale_inv) in zero.weights().items():
        assert torch.equal(encode(masters[name], BY_NAME[master], scale_inv)[0], codes), name
        assert float(masters[name].abs().max()) <= 448 * float(scale_inv) * (1 + 2**-10), name
        assert float(torch.frexp(scale_inv)[0]) == 0.5, name


def quantized(recipe: str, master: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes, scale_inv) of a weight, by definition."""
    if recipe == "blockwise":
        quantized = quantize_blockwise(master, E4M3, (128, 128), "row")
        assert quantized.x_fp8 is not None and quantized.scale_inv is not None
        return quantized.x_fp8.view(torch.uint8), quantized.scale_inv
    codes, scale_inv = quantize_rowwise(master if recipe == "rowwise" else master.view(1, -1), E4M3)
    return codes.view(torch.uint8).view(master.shape), scale_inv if recipe == "rowwise" else scale_inv.view(())


def assert_follow(zero: Any, recipe: str, values: dict[str, Tensor]) -> None:
    """FP8 weights are those of `values`."""
    for name, (codes, scale_inv) in zero.weights().items():
        assert torch.equal(codes, quantized(recipe, values[name])[0]), name
        assert torch.equal(scale_inv, quantized(recipe, values[name])[1]), name


def other_values(name: str) -> Tensor:
    """bf16 values of which FP8 keeps few, with a range of its own for each row."""
    shape = RAGGED[name]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    return (values * torch.logspace(-3, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))).bfloat16()


def refresh(zero: Any, stage: int) -> None:
    """End a step at a rate of zero."""
    if stage == 3:
        zero._post_step(None)
        for i in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(i)
    else:
        zero.fp8.refresh(is_step=True)

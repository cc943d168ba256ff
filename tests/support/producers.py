"""Inputs and comparisons that the tests of the fused producers share on CPU, in the interpreter and on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.numerics.scale import AmaxSlot, in_own_storage
from fp8_ds.ops._producer import Scaling
from fp8_ds.testing import assert_bitwise
from support.inputs import many_scales

SCALINGS = ("given", "rowwise", "tensorwise")


def make_rows(num_rows: int, num_cols: int, seed: int = 0) -> Tensor:
    """bf16 [T, C] with another range in each row."""
    return many_scales("per_row", num_rows, num_cols, seed).bfloat16()


def make_gate(num_rows: int, num_cols: int, seed: int = 0) -> Tensor:
    """bf16 [T, C], |gate| <= 80: where the kernel's sigmoid keeps its relative bound."""
    return make_rows(num_rows, num_cols, seed).clamp(-80, 80)


def make_slot(scale: float = 3.7, amax: float = 0.0, device: str = "cpu") -> AmaxSlot:
    """A slot in the middle of a vector, as AmaxHistory gives it."""
    vectors = (torch.tensor([9.0, value, 9.0], device=device) for value in (amax, scale, 1 / scale))
    return AmaxSlot(*(in_own_storage(vector[1]) for vector in vectors))


def make_scaling(name: str, device: str = "cpu", scale: float = 3.7, amax: float = 0.0) -> Scaling:
    """A fresh slot for "given", the other names as they are."""
    if name == "given":
        return make_slot(scale, amax, device)
    assert name in ("rowwise", "tensorwise")
    return "rowwise" if name == "rowwise" else "tensorwise"


def assert_same(expected: Tensor, got: Tensor) -> None:
    """`assert_bitwise` of CPU copies, any NaN equal to any other."""
    expected, got = expected.cpu(), got.cpu()
    are_nan = [tensor.float().isnan() for tensor in (expected, got)]
    if are_nan[0].shape == are_nan[1].shape:
        assert_bitwise(*are_nan)
    zero = torch.zeros((), dtype=torch.uint8)
    assert_bitwise(*(_where_finite(one, nan, zero) for one, nan in zip((expected, got), are_nan, strict=True)))


def _where_finite(x: Tensor, is_nan: Tensor, zero: Tensor) -> Tensor:
    # Through bytes: not all of torch's FP8 dtypes have `where`.
    as_bytes = (
        x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).reshape(*x.shape, x.element_size())
    )
    return torch.where(is_nan[..., None], zero, as_bytes).reshape(-1).view(x.dtype).reshape(x.shape)


def steps_apart(expected: Tensor, got: Tensor) -> Tensor:
    """How many codes lie between two tensors of one format (bf16 or FP8), int32; NaN from NaN is 0, else far."""
    ordered = []
    for tensor in (expected.cpu(), got.cpu()):
        bits = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int8).int()
        top = 1 << (8 * tensor.element_size() - 1)
        mag = torch.where(tensor.float().isnan(), top, bits & (top - 1))
        ordered.append(torch.where((bits < 0) & (mag < top), -mag, mag))
    return (ordered[0] - ordered[1]).abs()


def assert_within_steps(expected: Tensor, got: Tensor, share: float, steps: int = 1) -> None:
    """Equal but for at most `share` of the elements, and no element further apart than `steps` codes.

    A single element may always differ, so that small tensors have a bound that can be met.
    """
    apart = steps_apart(expected, got)
    num_apart = int((apart > 0).sum())
    largest = int(apart.max()) if apart.numel() else 0
    if largest > steps or num_apart > max(1, share * apart.numel()):
        raise AssertionError(f"{num_apart} of {apart.numel()} differ, at most by {largest} steps")

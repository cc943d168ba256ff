"""Linears whose weight is stored in FP8, as transformers loads the FP8 folders of servers.

The module is an nn.Linear with a weight [out, in] in float8_e4m3fn, and beside it a Parameter of scales that multiply:
one for each 128 x 128 elements, cut at the edges, or one for each row. An engine takes the scales off the module. It
makes bf16 of the weights that train, and keeps the bytes of frozen ones (`freeze`, also for those that came in bf16).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.nn.linear.parameter import retype
from fp8_ds.nn.linear.payload import ROW, TILE, Fp8Payload, Granularity, dequantize_matrices
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import MANTISSA

SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""Names of the Parameter of scales, with `quant_method` "fp8" and "compressed-tensors"."""
_OF_SERVING = ("activation_scale", "input_scale", "output_scale", "input_zero_point", "output_zero_point")
"""Names of Parameters for activations, whose scales training makes for itself."""
RECIPE_OF = {TILE: "blockwise", ROW: "rowwise"}
"""Recipe that multiplies with scales of this granularity as they are."""
SMALLEST, LARGEST = 2.0**-100, 2.0**100
"""Scales within which, or of 0, no product with a code leaves bf16's normal numbers."""
_CHUNK = 1 << 22
"""Elements restored at a time: bounds the temporaries to about 100 MiB."""


@dataclass(frozen=True)
class StoredScales:
    """Scales of one weight, as its folder has them.

    Attributes:
        scale_inv: float32 grid of `granularity` (nn/linear/payload.py): a value is its code times this. A stack of
            matrices (nn/moe/stored.py) has one grid behind the other in its first dim.
        granularity: which elements share a scale, TILE or ROW.
        shape: of the weight, or of one matrix of a stack.
        parameters: the Parameter of scales, and those beside it that are for serving alone.
    """

    scale_inv: Tensor
    granularity: Granularity
    shape: tuple[int, int]
    parameters: tuple[nn.Parameter, ...]

    @property
    def scale(self) -> Tensor:
        """The grid to enter FP8, float32; 1 where `scale_inv` is 0."""
        return torch.where(self.scale_inv > 0, self.scale_inv, 1.0).reciprocal()

    def dequantize(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return codes (float8_e4m3fn [out, in], or a stack) times scales, rounded to float32 and then to `dtype`."""
        return dequantize_matrices(codes, self.scale_inv, self.shape, dtype)

    def as_grid(self, granularity: Granularity) -> Tensor | None:
        """Return these scales as the grid of a weight that trains with such of `granularity`; None: by no such rule.

        With them its first bytes are the folder's. Made of codes times scales, scales may be others: bytes of which the
        largest is 224 would be twice as large, and float32 rounds what is no power of two.
        """
        flat = self.scale_inv.reshape(-1)
        are_pow2 = bool((flat.view(torch.int32) & MANTISSA == 0).all())
        if bool((flat <= 0).any()) or are_pow2 != granularity.is_pow2:
            return None
        if granularity.is_tensor:
            return flat[0] if bool((flat == flat[0]).all()) else None
        return self.scale_inv if granularity.block == self.granularity.block else None

    @torch.no_grad()
    def restore_(self, values: Tensor, start: int) -> None:
        """Make float32 `values`, which bf16 has rounded, codes times scales again, to float32's last bit.

        bf16 is off by 2**-9 of a value at most, and a step of E4M3 is 2**-4 of it at least: the code is the nearest
        to the quotient of value and scale.

        Args:
            values: float32 [numel], changed in place: elements from `start` on of the flattened weight.
        """
        for piece, scale_inv in self._pieces(values, start):
            codes = (piece / scale_inv).clamp_(-E4M3.max, E4M3.max).to(E4M3.torch_dtype).float()
            piece.copy_(torch.where(scale_inv > 0, codes.mul_(scale_inv), piece))

    @torch.no_grad()
    def multiply_(self, codes: Tensor, start: int) -> None:
        """Multiply codes (float32 [numel], elements from `start` on of the flattened weight) by their scales."""
        for piece, scale_inv in self._pieces(codes, start):
            piece.mul_(scale_inv)

    def _pieces(self, values: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of `values` (1-D), and the scale of each of their elements."""
        rows, cols = (size or whole for size, whole in zip(self.granularity.block, self.shape, strict=True))
        grid, of_matrix = self.scale_inv.to(values.device), self.granularity.grid(self.shape)[0]
        for first in range(0, values.numel(), _CHUNK):
            piece = values[first : first + _CHUNK]
            place = torch.arange(start + first, start + first + piece.numel(), dtype=torch.long, device=values.device)
            row = place // self.shape[1]
            grid_row = row // self.shape[0] * of_matrix + row % self.shape[0] // rows
            yield piece, grid[grid_row, place % self.shape[1] // cols]


def granularity_of_grid(grid: Sequence[int], shape: tuple[int, int]) -> Granularity | None:
    """Return which elements of a matrix of `shape` share a scale where there is such a grid of them; None: unknown."""
    return next((known for known in RECIPE_OF if known.grid(shape) == tuple(grid)), None)


def freeze(name: str, p: Any, granularity: Granularity, stored: StoredScales | None) -> None:
    """Store a frozen weight in FP8. Every rank has all of it, so there is no collective and no owner.

    Args:
        stored: scales of a weight that came in FP8 and whose data are its bytes; None: it is quantised.
    """
    if stored is None:
        scale, scale_inv = granularity.scales(granularity.amax(p.data.reshape(-1), p.shape))
        payload = Fp8Payload(name, scale, scale_inv, p.dtype, p.device)
        payload.data = payload.quantize(p.data)
    else:
        scale, scale_inv, granularity = stored.scale, stored.scale_inv, stored.granularity
        payload = Fp8Payload(name, scale, scale_inv, torch.bfloat16, p.device)
        payload.data = p.data.view(E4M3.torch_dtype)

    @torch.no_grad()
    def write(value: Tensor) -> None:
        if stored is not None and torch.equal(value.to(payload.dtype), payload.dequantize()):
            return  # a checkpoint has what a reader was given, whose scales would be others
        new_scale, new_scale_inv = granularity.scales(granularity.amax(value.reshape(-1), value.shape))
        scale.copy_(new_scale)
        scale_inv.copy_(new_scale_inv)
        assert payload.data is not None
        payload.data.copy_(payload.quantize(value))

    payload.write, payload.has_master = write, False
    retype(p, payload)


def is_stored(module: nn.Module) -> bool:
    """Whether `module` is a linear whose weight is in FP8, with scales beside it."""
    weight = module._parameters.get("weight")
    return (
        isinstance(module, nn.Linear)
        and weight is not None
        and weight.dtype == E4M3.torch_dtype
        and _scale_name(module) is not None
    )


def stored_scales(module: nn.Module) -> StoredScales | None:
    """Return the scales beside a weight in FP8; None if it is in another dtype, or they are of no known granularity."""
    if not is_stored(module):
        return None
    weight: Any = module.weight
    scale = scale_parameter(module)
    shape = (weight.shape[0], weight.shape[1])
    found = granularity_of_grid(scale.shape, shape)
    if found is None:
        return None
    return StoredScales(as_numbers(scale.detach()), found, shape, tuple(serving_parameters(module)))


def remove_scales(module: nn.Module) -> None:
    """Remove the scales from a stored linear."""
    for name in (*SCALE_NAMES, *_OF_SERVING):
        module._parameters.pop(name, None)


def serving_parameters(module: nn.Module) -> list[Any]:
    """Return the Parameters of scales of a stored linear: the weight's, and those of activations."""
    found = (module._parameters.get(name) for name in (*SCALE_NAMES, *_OF_SERVING))
    return [p for p in found if p is not None]


def scale_parameter(module: nn.Module) -> Any:
    """Return the Parameter of scales beside a stored weight."""
    return module._parameters[str(_scale_name(module))]


def as_numbers(scale: Tensor) -> Tensor:
    """Return scales in float32: bytes are exponents of powers of two, as "scale_fmt": "ue8m0" may store them."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def _scale_name(module: nn.Module) -> str | None:
    return next((name for name in SCALE_NAMES if module._parameters.get(name) is not None), None)

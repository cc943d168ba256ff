"""Fp8Payload: the FP8 bytes and scales that sit beside a nominal bf16 Parameter (`p._fp8`).

A weight's scales are its *grid*: float32, 0-dim, [R, 1] or [ceil(R / 128), ceil(C / 128)] for a weight [R, C]. A stack
[E, R, C] has the grid of the matrix [E R, C]; with tiles R is a multiple of 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import amax_of, pow2_scale, row_scale_from_amax, scale_from_amax
from fp8_ds.ops.blockwise import BLOCK, shard_block_amax
from fp8_ds.ops.blockwise.reference import scale_from_amax as pow2_scale_from_amax
from fp8_ds.ops.quantize import quantize


@dataclass(frozen=True)
class Granularity:
    """Rows and columns that share a scale (None: all), as in TENSOR, ROW or TILE, and whether it is a power of two."""

    block: tuple[int | None, int | None]
    is_pow2: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether a weight has one scale."""
        return self.block == (None, None)

    @property
    def is_row(self) -> bool:
        """Whether each row of a weight has a scale."""
        return self.block == (1, None)

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [R, C]; () where there is one for any shape."""
        if self.is_tensor:
            return ()
        rows, cols = matrix_shape(shape)
        block_rows, block_cols = self.block
        return -(-rows // (block_rows or max(rows, 1))), -(-cols // (block_cols or max(cols, 1)))

    def num_scales(self, shape: Sequence[int]) -> int:
        return math.prod(self.grid(shape))

    def amax(self, part: Tensor, shape: Sequence[int], start: int = 0) -> Tensor:
        """Return the grid of largest magnitudes of a weight of `shape`, from one part of it; blocks outside it are 0.

        `part`: bf16, fp16 or fp32 [numel]: elements [start, start + numel) of the flattened weight.
        """
        if self.is_tensor:
            return amax_of(part)
        whole = matrix_shape(shape)
        if self.is_row:
            return shard_block_amax(part, start, whole, (1, BLOCK)).amax(1, keepdim=True)
        return shard_block_amax(part, start, whole, (BLOCK, BLOCK))

    def scales(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Return (scale, scale_inv) of E4M3 weights, elementwise, by the rule of this granularity."""
        if self.is_pow2:
            rule = pow2_scale if self.is_row else pow2_scale_from_amax
        else:
            rule = row_scale_from_amax if self.is_row else scale_from_amax
        return rule(amax.to(torch.float32), E4M3.max)


TENSOR = Granularity((None, None))
ROW = Granularity((1, None))
TILE = Granularity((BLOCK, BLOCK), is_pow2=True)
OF_RECIPE = {
    "tensorwise": TENSOR,
    "delayed": TENSOR,
    "rowwise": ROW,
    "rowwise_with_gw_hp": ROW,
    "blockwise": TILE,
}
"""Granularity of weights, by recipe of the linears."""


def granularity_of(recipe: str, *, is_split: bool, is_pow2: bool = False) -> Granularity:
    """Return which elements of a weight share a scale. Split masters have one scale a weight, whatever the recipe."""
    found = TENSOR if is_split else OF_RECIPE[recipe]
    return replace(found, is_pow2=True) if is_pow2 else found


@dataclass(frozen=True)
class CopiedScales:
    """Scales that quantise a high-precision copy of an FP8 weight to the bytes of the original.

    With scales of its own its values would be rounded to FP8 a second time. Where the largest magnitude changes, as
    training and moving averages make it, the scale is one of its own.

    Args:
        granularity: which elements share a scale.
        scale, scale_inv: grids of the original.
        amax: grid of the copy's largest magnitudes, float32; NaN where `scale` does not fit them.
    """

    granularity: Granularity
    scale: Tensor
    scale_inv: Tensor
    amax: Tensor

    @classmethod
    def of(cls, values: Tensor, granularity: Granularity, scale: Tensor, scale_inv: Tensor) -> CopiedScales:
        """Build scales for a copy of a weight that reads as `values` (hp, full shape) and has these scales."""
        amax = granularity.amax(values.reshape(-1), values.shape)
        fits = amax * scale <= E4M3.max * (1 + 2**-8)  # decoded values are rounded to bf16
        return cls(granularity, scale.clone(), scale_inv.clone(), torch.where(fits, amax, torch.nan))

    def fit(self, weight: Tensor) -> bool:
        """Whether `weight`, which somebody may have replaced, has such a grid."""
        return self.granularity.is_tensor or self.granularity.grid(weight.shape) == tuple(self.scale.shape)

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize hp values: return float8_e4m3fn of the shape of `weight`, and its grid of scale_inv."""
        scale, scale_inv, amax = (grid.to(weight.device) for grid in (self.scale, self.scale_inv, self.amax))
        now = self.granularity.amax(weight.reshape(-1), weight.shape)
        own_scale, own_scale_inv = self.granularity.scales(now)
        is_same = now == amax
        scale, scale_inv = torch.where(is_same, scale, own_scale), torch.where(is_same, scale_inv, own_scale_inv)
        return quantize(weight, per_element(scale, weight.shape), E4M3), scale_inv


def per_element(grid: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a grid as a tensor that broadcasts against the weight of `shape`: the grid itself but for tiles."""
    if grid.dim() == 0 or grid.numel() == 1:  # of a weight of any dims
        return grid
    rows, cols = matrix_shape(shape)
    if grid.shape == (rows, 1):
        return grid
    return grid.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :cols].view(tuple(shape))


def dequantize_matrices(codes: Tensor, grid: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return codes times scales, rounded to float32 and then to `dtype`, one matrix after another.

    Args:
        codes: float8_e4m3fn, one matrix of `shape`, or several behind each other.
        grid: float32, their scales behind each other in the first dim.
    """
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    matrices = codes.reshape(-1, *shape)
    grids = grid.to(codes.device).view(len(matrices), -1, grid.shape[1])
    for into, matrix, own in zip(values.view(-1, *shape), matrices, grids, strict=True):
        into.copy_(matrix.float().mul_(per_element(own, shape)))
    return values


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a weight; of a stack those of the matrix that has all rows, one behind the other."""
    return math.prod(shape[:-1]), shape[-1]


class Fp8Payload:
    """One FP8 weight. `p._fp8` is the only attribute this package hangs on a Parameter it does not own.

    Args:
        name: the weight's name in the model, for messages.
        scale: the weight's grid (see above), float32 on the weight's device, multiplies to enter FP8. Like
            `scale_inv` a view into the ZeRO optimizer's scale vector, which each step changes in place.
        scale_inv: of the same shape and kind, multiplies to leave FP8.
        dtype: nominal dtype of the Parameter (bf16), the dtype that readers get.
        device: where the placeholder lives.

    Attributes:
        data: float8_e4m3fn tensor of the Parameter's full shape, contiguous, or None while the weight is sharded
            (ZeRO-3) or gathered by a stock reader in bf16 (GatheredParameters). Assigning aliases the value in a tensor
            that stays the same: who holds it sees what is assigned later.
        placeholder: one NaN element of `dtype`, which the Parameter's nominal data expands: whatever reads past the
            hooks reads NaN.
        write: called with a hp tensor of full shape when somebody writes into the Parameter (`copy_`, `data = `).
        has_master: whether what is written is kept in more bits somewhere; a frozen weight's is not in ZeRO-1/2.
        export: while set, readers get this tensor instead of de-quantised bytes.
        hp: while the layer computes in bf16 under ZeRO-1/2, its weight: bf16 of the master, full shape; it is the
            Parameter's own data then, too (nn/linear/parameter.py, `point_at_bf16`).
        version: changes with each step, load and write of ZeRO-1/2; values read before are old then.
    """

    __slots__ = (
        "_bytes",
        "_is_here",
        "_no_bytes",
        "dtype",
        "export",
        "has_master",
        "hp",
        "name",
        "placeholder",
        "scale",
        "scale_inv",
        "version",
        "write",
    )

    def __init__(
        self, name: str, scale: Tensor, scale_inv: Tensor, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self.name = name
        self.scale = scale
        self.scale_inv = scale_inv
        self.dtype = dtype
        self._bytes = torch.empty(0, dtype=E4M3.torch_dtype, device=device or scale.device)
        self._no_bytes = self._bytes.detach()
        self._is_here = False
        self.placeholder = torch.full((1,), float("nan"), dtype=dtype, device=device or scale.device)
        self.write: Callable[[Tensor], None] | None = None
        self.export: Tensor | None = None
        self.has_master = True
        self.hp: Tensor | None = None
        self.version = 0

    @property
    def data(self) -> Tensor | None:
        return self._bytes if self._is_here else None

    @data.setter
    def data(self, value: Tensor | None) -> None:
        # One tensor object for life, as DeepSpeed does with `param.data`: a compiled forward keeps it for its backward,
        # and must not keep the memory that ZeRO-3 releases in between, nor miss what it gathers then.
        self._is_here = value is not None
        self._bytes.data = self._no_bytes if value is None else value

    def dequantize(self) -> Tensor:
        """Return the gathered weight in its nominal dtype, full shape; a new tensor."""
        if self.hp is not None:
            return self.hp.clone()
        assert self.data is not None, f"{self.name} is not gathered"
        if self.data.dim() < 3 or self.scale_inv.dim() == 0:
            return (self.data.float() * per_element(self.scale_inv, self.data.shape)).to(self.dtype)
        return dequantize_matrices(self.data, self.scale_inv, self.data.shape[1:], self.dtype)

    def quantize(self, weight: Tensor) -> Tensor:
        """Quantize `weight` (hp, full shape) by the scales as they are."""
        return quantize(weight, per_element(self.scale, weight.shape), E4M3)

    def nominal(self, shape: torch.Size) -> Tensor:
        """Return NaN of `shape` at the cost of one element."""
        return self.placeholder.expand(shape) if shape else self.placeholder.view(())

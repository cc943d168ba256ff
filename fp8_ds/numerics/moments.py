"""Adam's moments in one byte each: m in E4M3, the second moment as sqrt(v) in unsigned E4M4, scaled per 128 elements.

The step rounds both stochastically, by one threshold: their errors partly cancel in the update. Rounded to nearest, an
average that moves by less than half a code in one step never moves, whatever it adds up to (docs/numerics.md).

Groups are counted from a weight's first element, not from a shard's: where ranks shard a weight at a multiple of 128
they store the same bytes for any number of ranks.

Scales are float32 with five low mantissa bits cleared: `code * scale_inv` is exact, and a checkpoint in float32 gives
the same codes and scales again. A coarser scale would take v's largest elements out of the average (docs/numerics.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_ds.numerics.formats import E4M3, E4M4

GROUP = 128
"""Elements that share one scale."""

TINY = 2.0**-100
"""Groups whose amax is below this are stored as zeros: their scale would leave float32's normal range."""

SMALLEST_V = 2.0**-100
"""Smallest second moment: others are raised to it before their root is taken, so that the GPU's fast root can be
corrected to the nearest float32."""

TINY_ROOT = 2.0**-49
"""TINY for roots: it is above the root of SMALLEST_V, so that a group without gradients stays one of zeros."""

NOISE_BITS = 12
"""Random bits that moments are rounded with, of the 19 or 20 that fall away. A threshold lies in the middle of the
places that it stands for: the group's largest, which its rounded scale puts up to 32 places beside its code, is never
taken for another."""


def group_scale_inv(amax: Tensor, fmt_max: float, tiny: float = TINY) -> Tensor:
    """Return `scale_inv` of groups with the given amaxes: float32, 19 significant bits; 0 for a group of zeros."""
    bits = (amax / torch.full_like(amax, fmt_max)).view(torch.int32)
    scale_inv = ((bits + 0x10) & ~0x1F).view(torch.float32)
    return torch.where(amax < tiny, torch.zeros_like(amax), scale_inv)


def _group_scale(scale_inv: Tensor) -> Tensor:
    one = torch.ones_like(scale_inv)
    return torch.where(scale_inv == 0, torch.zeros_like(scale_inv), one / torch.where(scale_inv == 0, one, scale_inv))


def quantize_m(m: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize first moments to E4M3.

    Args:
        m: float32 [num_groups, 128], finite; zeros where a group is not full.
        noise: int32 [num_groups, 128], random in [0, 2**NOISE_BITS): rounds stochastically, but to nearest within a
            32nd of a code; subnormals too. None: to nearest even. Numbers that E4M3 has, the group's largest among
            them, stay what they are.

    Returns:
        (codes, scale_inv): uint8 [num_groups, 128]; float32 [num_groups], multiply to leave.
    """
    scale_inv = group_scale_inv(m.abs().amax(1), E4M3.max)
    scaled = m * _group_scale(scale_inv)[:, None]
    if noise is None:
        codes = scaled.clamp(-E4M3.max, E4M3.max).to(E4M3.torch_dtype)
        return codes.view(torch.uint8), scale_inv
    # E4M3's bits are those of a float32 whose exponent is less by 120: add 1/32 to 31/32 of a code, then truncate.
    rounded = (scaled * 2.0**-120).view(torch.int32) + (noise * 240 + 0x8078)
    return (((rounded >> 20) & 0x7F) | ((rounded >> 24) & 0x80)).to(torch.uint8), scale_inv


def dequantize_m(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """Dequantize what `quantize_m` returned to float32 [num_groups, 128]; exact."""
    return codes.view(E4M3.torch_dtype).float() * scale_inv[:, None]


def quantize_root(root: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize square roots of second moments to unsigned E4M4.

    Args:
        root: float32 [num_groups, 128], finite, >= 0; zeros where a group is not full.
        noise: int32 [num_groups, 128], random in [0, 2**NOISE_BITS): rounds stochastically. None: to nearest even.
            Numbers that E4M4 has, the group's largest among them, stay what they are.

    Returns:
        (codes, scale_inv): uint8 [num_groups, 128] `eeeemmmm`; float32 [num_groups], multiply to leave.
    """
    scale_inv = group_scale_inv(root.amax(1), E4M4.max, TINY_ROOT)
    # E4M4's bits are those of a float32 whose exponent is less by 120: scale there, then round 19 bits away.
    bits = ((root * _group_scale(scale_inv)[:, None]) * 2.0**-120).view(torch.int32)
    if noise is None:
        codes = (bits + 0x3FFFF + ((bits >> 19) & 1)) >> 19
    else:
        codes = (bits + ((noise << 7) | 0x40)) >> 19
    codes = codes.clamp(max=255)
    return codes.to(torch.uint8), scale_inv


def dequantize_root(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """Dequantize what `quantize_root` returned to float32 [num_groups, 128]; exact."""
    return ((codes.int() << 19).view(torch.float32) * 2.0**120) * scale_inv[:, None]


def num_groups(numel: int, start: int) -> int:
    """Number of groups that elements `[start, start + numel)` of a weight touch."""
    return -(-(start % GROUP + numel) // GROUP)


def to_groups(flat: Tensor, start: int) -> Tensor:
    """Arrange elements `[start, ...)` of a weight, 1-D, as [num_groups, 128] with zeros around them."""
    head = start % GROUP
    groups = num_groups(flat.numel(), start)
    padded = flat.new_zeros(groups * GROUP)
    padded[head : head + flat.numel()] = flat
    return padded.view(groups, GROUP)


def from_groups(groups: Tensor, numel: int, start: int) -> Tensor:
    """Invert `to_groups`: return 1-D [numel], a view."""
    return groups.reshape(-1).narrow(0, start % GROUP, numel)

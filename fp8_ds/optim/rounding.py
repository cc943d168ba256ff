"""Random bits for stochastic rounding that depend on (seed, step, parameter, element) and nothing else.

So the bytes do not depend on how many ranks share a weight, on the order of updates, or on a restart. A hash of the
element's number, not a generator with state: two multiplications for two elements.

Source of the mixing steps: C. Wellons, skeeto/hash-prospector, "lowbias32" (0x21F0AAAD, 0xD35A2D97; shifts 16, 15, 15).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
WEYL = 0x9E3779B1
"""2**32 over the golden ratio, odd: spreads consecutive numbers over all bits."""
MIX_1 = 0x21F0AAAD
MIX_2 = 0xD35A2D97
NOISE_BITS = 16
"""Random bits an element has."""


def mix(x: int) -> int:
    """One 32-bit number hashed to another; a bijection."""
    x = ((x ^ (x >> 16)) * MIX_1) & _MASK
    x = ((x ^ (x >> 15)) * MIX_2) & _MASK
    return x ^ (x >> 15)


def keys(seed: int, step: int, param_id: int) -> tuple[int, int]:
    """The two 32-bit keys of one parameter in one step."""
    first = mix((mix((seed & _MASK) ^ 0x85EBCA6B) + step) & _MASK)
    first = mix((first + param_id) & _MASK)
    return first, mix(first ^ 0xC2B2AE35)


def noise(seed: int, step: int, param_id: int, start: int, numel: int, bits: int, device: torch.device) -> Tensor:
    """Random integers in [0, 2**bits) for elements `[start, start + numel)` of a parameter.

    Args:
        bits: at most 16.

    Returns:
        int32 [numel]. Two neighbours (2k, 2k + 1) share one hash: the low and the high half of it.
    """
    assert bits <= NOISE_BITS
    first, second = keys(seed, step, param_id)
    element = torch.arange(start, start + numel, dtype=torch.int64, device=device)
    x = ((element >> 1) * WEYL + first) & _MASK
    x = ((x ^ (x >> 16)) * MIX_1) & _MASK
    x = x ^ second
    x = ((x ^ (x >> 15)) * MIX_2) & _MASK
    x = x ^ (x >> 15)
    half = torch.where(element % 2 == 0, x & 0xFFFF, x >> 16)
    return (half & ((1 << bits) - 1)).int()

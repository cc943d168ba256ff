"""Thresholds of stochastic rounding that depend on (seed, step, parameter, element) and nothing else.

So the bytes do not depend on how many ranks share a weight, on the order of updates, or on a restart: the element's
number is hashed, without a generator's state. Eight elements share a hash: its halves and those of three products.

The hash is an element's first threshold, which moves on by an irrational number from step to step, modulo one. Over
elements thresholds are independent and uniform: rounding is unbiased. Over steps they are evenly spread: what rounding
adds up to stays about one bit large instead of walking at random (docs/numerics.md).

Sources: the hash is C. Wellons, skeeto/hash-prospector, "lowbias32" (0x21F0AAAD, 0xD35A2D97; shifts 16, 15,
15). Multiples of an irrational number are evenly spread: H. Weyl 1916.
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
"""Random bits that an element has for its master, and again for its moments."""
SHARED = 8
"""Elements that share a hash."""
NEXT_PAIR = 0xA3C3118D
"""Multiplier of the hash for the second pair of elements; the third takes its square, the fourth its cube."""
STRIDE = 0xC46DC46D
"""Step of a pair's word, .767 of the range to each of its halves."""
MOMENT_FACTOR = 0xA1AC9EB3
"""Factor that makes words for moments from those for masters. They move by STRIDE * MOMENT_FACTOR = 0x9E379E37, the
golden ratio's fraction, .618. The three constants were searched for: as a lattice, the shortest dual vector of any two
thresholds of eight elements is at least .49 of the longest possible."""


def mix(x: int) -> int:
    """Hash one 32-bit number to another; a bijection."""
    x = ((x ^ (x >> 16)) * MIX_1) & _MASK
    x = ((x ^ (x >> 15)) * MIX_2) & _MASK
    return x ^ (x >> 15)


def seed_key(seed: int) -> int:
    return mix((seed & _MASK) ^ 0x85EBCA6B)


def keys(seed: int, param_id: int) -> tuple[int, int]:
    """Return the two 32-bit keys of one parameter."""
    first = mix((seed_key(seed) + param_id) & _MASK)
    return first, mix(first ^ 0xC2B2AE35)


def _words(seed: int, step: int, param_id: int, start: int, numel: int, device: torch.device) -> Tensor:
    """Return int64 [num_hashes, 4]: 32 bits for each pair of elements (2k, 2k + 1), from the hash of `start` on."""
    first, second = keys(seed, param_id)
    octet = torch.arange(start // SHARED, -(-(start + numel) // SHARED), dtype=torch.int64, device=device)
    x = (octet * WEYL + first) & _MASK
    x = ((x ^ (x >> 16)) * MIX_1) & _MASK
    x = x ^ second
    x = ((x ^ (x >> 15)) * MIX_2) & _MASK
    x = x ^ (x >> 15)
    powers = torch.tensor([pow(NEXT_PAIR, power, 1 << 32) for power in range(SHARED // 2)], device=device)
    # In int64 products wrap at 2**64: their low 32 bits are right.
    return (x[:, None] * powers + step * STRIDE) & _MASK


def _halves(words: Tensor, start: int, numel: int, bits: int) -> Tensor:
    """Return int32 [numel]: the upper `bits` of an element's half of its word, the low half for an even element."""
    assert bits <= NOISE_BITS
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=2).flatten()
    return halves.narrow(0, start % SHARED, numel).int() >> (NOISE_BITS - bits)


def noise(seed: int, step: int, param_id: int, start: int, numel: int, bits: int, device: torch.device) -> Tensor:
    """Return thresholds of master weights: int32 [numel] in [0, 2**bits), for elements from `start` on of a parameter.

    Args:
        step: from 0 to 2**31.
        bits: at most 16.
    """
    return _halves(_words(seed, step, param_id, start, numel, device), start, numel, bits)


def moment_noise(
    seed: int, step: int, param_id: int, start: int, numel: int, bits: int, device: torch.device
) -> Tensor:
    """Return thresholds of moments, like `noise`. m and sqrt(v) share them, so rounding errors partly cancel."""
    words = _words(seed, step, param_id, start, numel, device)
    return _halves((words * MOMENT_FACTOR) & _MASK, start, numel, bits)

"""Thresholds of stochastic rounding that depend on (seed, step, parameter, element) and nothing else.

So the bytes do not depend on how many ranks share a weight, on the order of updates, or on a restart: no generator with
state, but a hash of the element's number. Eight elements share one: its halves and those of three products with it.

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
"""The second pair of elements takes the hash times this, the third times its square, the fourth times its cube."""
STRIDE = 0xC46DC46D
"""What a step adds to a pair's word, .767 of the range to each of its halves."""
MOMENT_FACTOR = 0xA1AC9EB3
"""Makes words for moments from those for masters. They move by STRIDE * MOMENT_FACTOR = 0x9E379E37, the golden ratio's
fraction, .618. The three constants were searched for: as a lattice, the shortest dual vector of any two thresholds of
eight elements is at least .49 of the longest possible."""


def mix(x: int) -> int:
    """One 32-bit number hashed to another; a bijection."""
    x = ((x ^ (x >> 16)) * MIX_1) & _MASK
    x = ((x ^ (x >> 15)) * MIX_2) & _MASK
    return x ^ (x >> 15)


def seed_key(seed: int) -> int:
    return mix((seed & _MASK) ^ 0x85EBCA6B)


def keys(seed: int, param_id: int) -> tuple[int, int]:
    """The two 32-bit keys of one parameter."""
    first = mix((seed_key(seed) + param_id) & _MASK)
    return first, mix(first ^ 0xC2B2AE35)


def _words(seed: int, step: int, param_id: int, start: int, numel: int, device: torch.device) -> Tensor:
    """int64 [num_hashes, 4]: 32 bits for each pair of elements (2k, 2k + 1), from the hash that `start` is of."""
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
    """int32 [numel]: the upper `bits` of an element's half of its word, the low half for an even element."""
    assert bits <= NOISE_BITS
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=2).flatten()
    return halves.narrow(0, start % SHARED, numel).int() >> (NOISE_BITS - bits)


def noise(seed: int, step: int, param_id: int, start: int, numel: int, bits: int, device: torch.device) -> Tensor:
    """Thresholds of master weights: int32 [numel] in [0, 2**bits), for elements from `start` on of a parameter.

    Args:
        step: from 0 to 2**31.
        bits: at most 16.
    """
    return _halves(_words(seed, step, param_id, start, numel, device), start, numel, bits)


def moment_noise(
    seed: int, step: int, param_id: int, start: int, numel: int, bits: int, device: torch.device
) -> Tensor:
    """As `noise`, for moments: other numbers. One for both: their rounding errors partly cancel in the update."""
    words = _words(seed, step, param_id, start, numel, device)
    return _halves((words * MOMENT_FACTOR) & _MASK, start, numel, bits)

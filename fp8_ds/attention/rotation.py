"""Hadamard rotation of queries and keys: it keeps the scores and spreads outliers of single channels over all.

Source: "incoherent processing" of FlashAttention-3 (Shah et al., arXiv 2407.08608, section 3.3), with its random signs
before the transform, so that what all channels share does not gather in one.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fp8_ds.errors import UnsupportedError
from fp8_ds.ops._register import register

_SEED = 2407
"""Seed of the signs, a constant: the scores are the same for every seed, their rounding is not."""


def check_rotation(head_dim: int) -> None:
    """Raise UnsupportedError unless a Hadamard matrix of this size is available."""
    if head_dim < 1 or head_dim & (head_dim - 1):
        raise UnsupportedError(
            f"head dim: expected a power of two with the Hadamard rotation, got {head_dim}. Turn `hadamard` off."
        )


@functools.cache
def rotation_matrices(dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrices [dim, dim] for q and k: signs times a power of two, exact in any dtype; q's times k's.T is one."""
    bits = dim.bit_length() - 1
    matrix = torch.ones(1, 1, dtype=torch.float32)
    for _ in range(bits):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(_SEED)) * 2 - 1
    signed = (signs[:, None] * matrix).to(device, dtype)
    return signed * 2.0 ** -((bits + 1) // 2), signed * 2.0 ** -(bits // 2)


def _rotate(x: Tensor, is_query: bool, transposed: bool) -> Tensor:
    matrix = rotation_matrices(x.shape[-1], x.device, x.dtype)[0 if is_query else 1]
    return x @ (matrix.t() if transposed else matrix)


_rotate_op = register(
    "attention_rotate(Tensor x, bool is_query, bool transposed) -> Tensor",
    _rotate,
    lambda x, is_query, transposed: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)


def rotate(x: Tensor, *, is_query: bool, transposed: bool = False) -> Tensor:
    """Rotate `x` along its last dim, times 2**-0.5 for queries and 2**0.5 for keys where log2 of that dim is odd.

    Scores of rotated queries and keys are those of the queries and keys, up to the rounding to x's dtype. `transposed`
    makes the gradient of `x` from that of `rotate(x)`.
    """
    rotated: Tensor = _rotate_op(x, is_query, transposed)
    return rotated

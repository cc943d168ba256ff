"""One launch for all tensors of a dtype, whose addresses lie in a table; partial sums are added by torch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_ds.ops.adamw.triton import Addresses

BLOCK, NUM_WARPS = 16384, 8
"""Elements and warps of a program: 64 elements a thread."""

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def squares_kernel(addresses, numels, first_blocks, block_tensors, partials, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Program `i` adds the squares of one block of tensor `block_tensors[i]` into `partials[i]`."""
    tensor = tl.load(block_tensors + tl.program_id(0))
    start = (tl.program_id(0) - tl.load(first_blocks + tensor)).to(tl.int64) * BLOCK
    left = tl.load(numels + tensor) - start
    x = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE)) + start
    at = tl.arange(0, BLOCK)
    if (tl.load(addresses + tensor) % 16 == 0) & (left >= BLOCK):
        value = tl.load(tl.multiple_of(x, 16) + at).to(tl.float32)
    else:
        value = tl.load(x + at, at < left, 0.0).to(tl.float32)
    tl.store(partials + tl.program_id(0), tl.sum(value * value, 0))


class _Launch:
    """The tables of tensors of one dtype and of these sizes."""

    def __init__(self, numels: list[int], device: torch.device) -> None:
        self.numels = numels
        num_blocks = [-(-numel // BLOCK) for numel in numels]
        self.sizes = torch.tensor(numels, dtype=torch.int64).to(device)
        self.first_blocks = torch.tensor([0, *itertools.accumulate(num_blocks)], dtype=torch.int64).to(device)
        tensors = torch.arange(len(numels), dtype=torch.int32)
        self.block_tensors = torch.repeat_interleave(tensors, torch.tensor(num_blocks)).to(device)
        self.addresses = Addresses(len(numels), device)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        partials = torch.empty(len(self.block_tensors), device=tensors[0].device)
        squares_kernel[(len(partials),)](
            self.addresses.update([x.data_ptr() for x in tensors]),
            self.sizes,
            self.first_blocks,
            self.block_tensors,
            partials,
            DTYPE=_TRITON_DTYPES[tensors[0].dtype],
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
        return partials.sum()


def sum_of_squares(tensors: Sequence[Tensor], launches: dict[Any, Any]) -> Tensor:
    """As `SumOfSquares.__call__`, of contiguous bf16 and float32 tensors; on CPU only under Triton's interpreter.

    Args:
        launches: what the last call with these dtypes left, by dtype.
    """
    sums = []
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        some = [x for x in tensors if x.dtype == dtype]
        numels = [x.numel() for x in some]
        if dtype not in launches or launches[dtype].numels != numels:
            launches[dtype] = _Launch(numels, some[0].device)
        sums.append(launches[dtype](some))
    return torch.stack(sums).sum()

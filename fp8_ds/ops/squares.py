"""Sum of the squares of many tensors in one launch, for a global gradient norm.

The kernel takes all tensors of a dtype, by a table of addresses; torch adds its partial sums.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8_ds.ops._register import HAS_TRITON

BLOCK, SPAN, NUM_WARPS = 16384, 16, 8
"""Elements that a program has in flight, 64 a thread; how many such blocks it adds up; its warps."""

_KERNEL_DTYPES = (torch.bfloat16, torch.float32)

if HAS_TRITON:
    import triton
    import triton.language as tl

    from fp8_ds.ops.adamw.triton import Addresses

    @triton.jit
    def squares_kernel(
        addresses, numels, first_programs, program_tensors, partials,
        DTYPE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    ):  # fmt: skip
        """Add the squares of SPAN blocks of tensor `program_tensors[i]` into `partials[i]`, in program `i`."""
        tensor = tl.load(program_tensors + tl.program_id(0))
        start = (tl.program_id(0) - tl.load(first_programs + tensor)).to(tl.int64) * (BLOCK * SPAN)
        left = tl.minimum(tl.load(numels + tensor) - start, BLOCK * SPAN).to(tl.int32)
        address = tl.load(addresses + tensor)
        x = address.to(tl.pointer_type(DTYPE)) + start
        at = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        whole = tl.where(address % 16 == 0, left // BLOCK * BLOCK, 0)
        done = 0
        while done < whole:  # not `range`: in Triton 3.6 its bounds cannot be interpreted with NumPy 2.4
            value = tl.load(tl.multiple_of(x + done, 16) + at).to(tl.float32)
            total += value * value
            done += BLOCK
        while done < left:
            value = tl.load(x + done + at, at < left - done, 0.0).to(tl.float32)
            total += value * value
            done += BLOCK
        tl.store(partials + tl.program_id(0), tl.sum(total, 0))


class SumOfSquares:
    """Sum of squares of each step's gradients; keeps the addresses of the last ones on the device."""

    def __init__(self) -> None:
        self._launches: dict[torch.dtype, Any] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return float32, 0-dim: infinite or NaN if an element is, or if the sum overflows. Never waits for the device.

        The order of additions depends on the tensors' sizes alone, so equal tensors give equal bits on one device.

        Args:
            tensors: at least one tensor, all on one device, none empty.
        """
        use_triton = HAS_TRITON and all(x.is_cuda and x.dtype in _KERNEL_DTYPES and x.is_contiguous() for x in tensors)
        if not use_triton:
            return torch.stack(list(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))).square().sum()
        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
            return sum_of_squares(tensors, self._launches)


class _Launch:
    """Tables of tensors of one dtype and of these sizes."""

    def __init__(self, numels: list[int], device: torch.device) -> None:
        self.numels = numels
        num_programs = [-(-numel // (BLOCK * SPAN)) for numel in numels]
        self.sizes = torch.tensor(numels, dtype=torch.int64).to(device)
        self.first_programs = torch.tensor([0, *itertools.accumulate(num_programs)], dtype=torch.int64).to(device)
        tensors = torch.arange(len(numels), dtype=torch.int32)
        self.program_tensors = torch.repeat_interleave(tensors, torch.tensor(num_programs)).to(device)
        self.addresses = Addresses(len(numels), device)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        partials = torch.empty(len(self.program_tensors), dtype=torch.float32, device=tensors[0].device)
        squares_kernel[(len(partials),)](
            self.addresses.update([x.data_ptr() for x in tensors]),
            self.sizes,
            self.first_programs,
            self.program_tensors,
            partials,
            DTYPE=tl.bfloat16 if tensors[0].dtype == torch.bfloat16 else tl.float32,
            BLOCK=BLOCK,
            SPAN=SPAN,
            num_warps=NUM_WARPS,
        )
        return partials.sum()


def sum_of_squares(tensors: Sequence[Tensor], launches: dict[Any, Any]) -> Tensor:
    """Compute `SumOfSquares.__call__` by the kernel, of contiguous bf16 and float32; on CPU under the interpreter.

    Args:
        launches: tables that the last call with these dtypes left, by dtype.
    """
    sums = []
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        some = [x for x in tensors if x.dtype == dtype]
        numels = [x.numel() for x in some]
        if dtype not in launches or launches[dtype].numels != numels:
            launches[dtype] = _Launch(numels, some[0].device)
        sums.append(launches[dtype](some))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

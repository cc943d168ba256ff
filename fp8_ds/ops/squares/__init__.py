"""Sum of the squares of many tensors in one launch, for a global gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_KERNEL_DTYPES = (torch.bfloat16, torch.float32)


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
        takes_kernel = all(x.is_cuda and x.dtype in _KERNEL_DTYPES and x.is_contiguous() for x in tensors)
        if not takes_kernel:
            return torch.stack(list(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))).square().sum()
        from fp8_ds.ops.squares.triton import sum_of_squares  # the package is missing where there is no GPU

        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
            return sum_of_squares(tensors, self._launches)

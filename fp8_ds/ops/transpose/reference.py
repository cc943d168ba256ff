"""Reference of the transpose in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def transpose(x: Tensor) -> Tensor:
    """Copy the transpose, even of one row, which is contiguous already: an op's result is never its input."""
    # As integers: a copy moves bytes, whatever floats they are.
    return x.view(torch.uint8).mT.clone(memory_format=torch.contiguous_format).view(x.dtype)

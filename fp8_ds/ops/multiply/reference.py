"""Reference of the product in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_(x: Tensor, factor: Tensor) -> None:
    """Multiply in place. Reads the factor back."""
    if float(factor) != 1:
        x.data.copy_(x.to(torch.float32) * factor.reshape(()))  # `data`: the version stays, as with a kernel

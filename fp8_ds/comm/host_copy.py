"""HostCopy: a tensor that reaches the host a step late, so that the host does not wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Copy of a tensor on the host, sent without waiting.

    From CUDA the tensor is sent on the current stream, into pinned memory; from elsewhere it has arrived when `send`
    returns.

    Args:
        like: tensor of the shape, dtype and device that will be sent.
    """

    def __init__(self, like: Tensor) -> None:
        self._host = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self._arrived: Any = torch.cuda.Event() if like.is_cuda else None

    def send(self, x: Tensor) -> None:
        """Start sending `x` as it is now; what was sent before is lost. Never waits.

        Args:
            x: may be overwritten at once on the stream that it is sent on.
        """
        self._host.copy_(x, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> Tensor:
        """Return what was last sent (something must have been), valid until the next `send`. Waits for its arrival."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host

    def read_if_arrived(self) -> Tensor | None:
        """Return what `read` does, or None where that would wait. Never waits."""
        return self._host if self._arrived is None or self._arrived.query() else None

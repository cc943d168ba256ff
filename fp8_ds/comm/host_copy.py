"""Tensors and flags on their way to the host, which does not wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Copy of a tensor that reaches the host a step late, so that the host does not wait for the device.

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


class OverflowFlag:
    """Flag of a skipped step on the host: known in that step if the host waits for the device, else a step later.

    The flag travels before the update is launched: a host that waits for it goes on while the update runs.
    """

    def __init__(self) -> None:
        self._sent: Tensor | None = None
        self._host: HostCopy | None = None
        self._is_pending = self._before = self._loaded = False
        self.last: Tensor | None = None
        """Flag that was last sent, on the device."""
        self.is_current = True
        """Whether the last answer was about the step that asked for it."""

    def send(self, skip: Tensor) -> None:
        """Start sending the flag of this step (int32, 0-dim, not written before `resolve`) to the host."""
        self.last = skip
        if skip.device.type != "cuda":
            self._sent = skip
            return
        self._before = self._read()
        if self._host is None:
            self._host = HostCopy(skip)
        self._host.send(skip)
        self._is_pending = True

    def resolve(self, wait: bool) -> bool:
        """Whether this step was skipped, or, if the host does not `wait` for the device, the one before."""
        if self._sent is not None:
            sent, self._sent = self._sent, None
            self.is_current = True
            return bool(sent)
        self.is_current = wait
        return self._read() if wait else self._before

    def late(self) -> bool:
        """Whether the last step was skipped and `resolve` has not said so yet; for a checkpoint. Waits for the flag."""
        if not self._is_pending:
            return self._loaded
        assert self._host is not None
        return bool(self._host.read())

    def load(self, late: bool) -> None:
        """Take `late` from a checkpoint, whose step is now the last: no flag of this run is on its way."""
        self._loaded, self._is_pending = late, False

    def _read(self) -> bool:
        late, self._loaded, self._is_pending = self.late(), False, False
        return late

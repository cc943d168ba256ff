"""The flag of a skipped step where the host does not wait for the device."""

from __future__ import annotations

from torch import Tensor

from fp8_ds.comm.collectives import HostCopy
from fp8_ds.zero.norm import OverflowFlag


class _LateFlag(OverflowFlag):
    def send(self, skip: Tensor) -> None:
        self.last, self._before = skip, self._read()
        self._host, self._is_pending = HostCopy(skip), True
        self._host.send(skip)


def late_flag() -> OverflowFlag:
    """For `optimizer.fp8_flag`: as on a GPU that the host does not wait for (`bf16.check_grad_overflow` false)."""
    return _LateFlag()

"""The flag of a skipped step where the host does not wait for the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8_ds.comm.host_copy import HostCopy, OverflowFlag


class _LateFlag(OverflowFlag):
    def send(self, skip: Tensor) -> None:
        self.last, self._before = skip, self._read()
        self._host, self._is_pending = HostCopy(skip), True
        self._host.send(skip)


def flag_late(optimizer: Any) -> None:
    """Let an optimizer with FP8 states learn of skipped steps late: as on a GPU that the host does not wait for
    (`bf16.check_grad_overflow` false)."""
    states_of(optimizer).flag = _LateFlag()


def states_of(optimizer: Any) -> Any:
    """The `SplitStates` of an optimizer with FP8 states."""
    return optimizer.fp8.masters.states

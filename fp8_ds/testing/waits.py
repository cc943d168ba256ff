"""How often the host waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class HostWaits:
    """A count that grows by one at each wait inside `with host_waits() as count:`."""

    def __init__(self) -> None:
        self.number = 0

    def add(self) -> None:
        self.number += 1


@contextmanager
def host_waits() -> Iterator[HostWaits]:
    """Counts calls that make the host wait for a GPU: copies to the host, `.item()`, `torch.cuda.synchronize`.

    By torch's synchronisation debug mode, whose warnings are counted and not shown, and by torch.cuda.synchronize, that
    the mode leaves out. Waits of events and streams (`Event.synchronize`) are not counted.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("host_waits counts waits for a CUDA device, and there is none")
    count, stock, mode = HostWaits(), torch.cuda.synchronize, torch.cuda.get_sync_debug_mode()

    def counted(*args: Any, **kwargs: Any) -> None:
        count.add()
        stock(*args, **kwargs)

    def seen(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchroniz" in str(message):
            count.add()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        torch.cuda.synchronize = counted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.synchronize = stock

"""How often the host waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
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
    """Counts calls that make the host wait for a GPU: copies to the host, `.item()`, what is named `synchronize`.

    By torch's synchronisation debug mode, whose warnings are counted and not shown, and, as the mode leaves them out,
    by torch.cuda's `synchronize`, `Event.synchronize` and `Stream.synchronize`, whether or not there is still something
    to wait for.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("host_waits counts waits for a CUDA device, and there is none")
    count, mode = HostWaits(), torch.cuda.get_sync_debug_mode()
    places: tuple[Any, ...] = (torch.cuda, torch.cuda.Event, torch.cuda.Stream)
    stock = [place.synchronize for place in places]

    def counted(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            count.add()
            function(*args, **kwargs)

        return call

    def seen(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchroniz" in str(message):
            count.add()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        for place, function in zip(places, stock, strict=True):
            place.synchronize = counted(function)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            for place, function in zip(places, stock, strict=True):
                place.synchronize = function

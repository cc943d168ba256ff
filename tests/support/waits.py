"""How often the host waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WARNING = "called a synchronizing CUDA operation"
"""Of torch's synchronisation debug mode, at each wait that it knows. Source: torch 2.11 c10/cuda/CUDAFunctions.cpp. At
its first use in a process the mode also warns that it does not yet "detect all synchronizing operations"."""


class HostWaits:
    """Grows by one at each wait inside `with host_waits() as waits:`.

    Attributes:
        names: what waited: the line of Python that called for it, or whose `synchronize` it was.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, name: str) -> None:
        self.names.append(name)

    @property
    def number(self) -> int:
        return len(self.names)


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

    def counted(place: Any, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            count.add(f"{place.__name__}.synchronize")
            function(*args, **kwargs)

        return call

    def seen(message: Warning | str, category: Any, filename: str, lineno: int, *args: Any, **kwargs: Any) -> None:
        if _WARNING in str(message):
            count.add(f"{filename}:{lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        for place, function in zip(places, stock, strict=True):
            place.synchronize = counted(place, function)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            for place, function in zip(places, stock, strict=True):
                place.synchronize = function

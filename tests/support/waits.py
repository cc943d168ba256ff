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


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Lists calls that make the host wait for a GPU: copies to the host, `.item()`, what is named `synchronize`; each
    by the line of Python that called for it, or whose `synchronize` it was.

    By torch's synchronisation debug mode, whose warnings are counted and not shown, and, as the mode leaves them out,
    by torch.cuda's `synchronize`, `Event.synchronize` and `Stream.synchronize`, whether or not there is still something
    to wait for.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("host_waits counts waits for a CUDA device, and there is none")
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    places: tuple[Any, ...] = (torch.cuda, torch.cuda.Event, torch.cuda.Stream)
    stock = [place.synchronize for place in places]

    def counted(place: Any, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            found.append(f"{place.__name__}.synchronize")
            function(*args, **kwargs)

        return call

    def seen(message: Warning | str, category: Any, filename: str, lineno: int, *args: Any, **kwargs: Any) -> None:
        if _WARNING in str(message):
            found.append(f"{filename}:{lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        for place, function in zip(places, stock, strict=True):
            place.synchronize = counted(place, function)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            for place, function in zip(places, stock, strict=True):
                place.synchronize = function

"""A device with streams, on CPU: DeepSpeed takes its asynchronous ways, and each wait of the host is counted."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch


class Waits(Counter[str]):
    """ "stream", "event" and "device" waits of the host; "own event": of one recorded in the same `fetch`.

    Beside them "recorded": events.

    Attributes:
        fetch: number of the module whose weights are being fetched; set by the test.
    """

    fetch = 0


@contextlib.contextmanager
def fake_device() -> Iterator[Waits]:
    """While inside, DeepSpeed's accelerator has streams and events that are never done before the host waits."""
    from deepspeed.accelerator import get_accelerator

    waits = Waits()

    class Stream:
        def wait_stream(self, other: Any) -> None:
            waits["stream by the device"] += 1

        def wait_event(self, event: Any) -> None: ...

        def synchronize(self) -> None:
            waits["stream"] += 1

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.fetch = -1

        def record(self, *args: Any) -> None:
            self.fetch = waits.fetch
            waits["recorded"] += 1

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            waits["event"] += 1
            waits["own event"] += self.fetch == waits.fetch

    def synchronize(self: Any, device: Any = None) -> None:
        waits["device"] += sys._getframe(1).f_code.co_name != "see_memory_usage"

    current = Stream()
    fakes = {
        "is_synchronized_device": lambda self: False,
        "use_host_timers": lambda self: True,
        "resolves_data_dependency": lambda self: False,
        "handles_memory_backpressure": lambda self: False,
        "Stream": property(lambda self: Stream),
        "Event": property(lambda self: Event),
        "stream": lambda self, stream: contextlib.nullcontext(),
        "current_stream": lambda self, device=None: current,
        "default_stream": lambda self, device=None: current,
        "synchronize": synchronize,
    }
    owner: Any = type(get_accelerator())
    stock = {name: owner.__dict__[name] for name in fakes}
    record_stream = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    for name, fake in fakes.items():
        setattr(owner, name, fake)
    try:
        yield waits
    finally:
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]
        for name, method in stock.items():
            setattr(owner, name, method)

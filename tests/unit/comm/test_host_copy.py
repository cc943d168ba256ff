"""What is sent is what is read, and the host waits where it reads, for what was sent last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8_ds.comm.host_copy import HostCopy


def test_what_is_read_is_what_was_sent_last_as_it_was_then() -> None:
    x = torch.tensor([1.5, -2.0], dtype=torch.float64)
    copy = HostCopy(x)
    copy.send(x)
    x.zero_()
    assert copy.read().tolist() == [1.5, -2.0]
    assert copy.read().tolist() == [1.5, -2.0]
    copy.send(x + 3)
    copy.send(x + 4)
    found = copy.read()
    assert found.tolist() == [4.0, 4.0] and found.dtype == torch.float64


def test_a_flag_of_no_dimension_is_read_as_a_number() -> None:
    copy = HostCopy(torch.tensor(0, dtype=torch.int32))
    copy.send(torch.tensor(1, dtype=torch.int32))
    assert bool(copy.read()) and copy.read().shape == ()


def test_from_cuda_an_event_follows_each_copy_and_only_a_read_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the event: what it is told, and what is on the host at that time."""
    told: list[tuple[str, Any]] = []

    class Event:
        def record(self) -> None:
            told.append(("record", copy._host.tolist()))

        def synchronize(self) -> None:
            told.append(("synchronize", None))

        def query(self) -> bool:
            return has_arrived

    def empty(shape: Any, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        told.append(("pinned", pin_memory))
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", empty)
    on_cuda: Any = SimpleNamespace(shape=(2,), dtype=torch.float32, is_cuda=True)
    copy = HostCopy(on_cuda)
    copy.send(torch.tensor([1.0, 2.0]))
    copy.send(torch.tensor([3.0, 4.0]))
    assert told == [("pinned", True), ("record", [1.0, 2.0]), ("record", [3.0, 4.0])]
    assert copy.read().tolist() == [3.0, 4.0]
    assert told[3:] == [("synchronize", None)]
    has_arrived = False
    assert copy.read_if_arrived() is None
    has_arrived = True
    assert copy.read_if_arrived().tolist() == [3.0, 4.0] and len(told) == 4

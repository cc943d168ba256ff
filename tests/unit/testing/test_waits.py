from __future__ import annotations

import warnings

import pytest
import torch
from support.waits import host_waits


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str | int]:
    """As far as host_waits sees it; the debug modes that were set."""
    modes: list[str | int] = []

    def set_mode(mode: str | int) -> None:
        modes.append(mode)
        warnings.warn("the mode does not yet detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for kind in (torch.cuda.Event, torch.cuda.Stream):
        monkeypatch.setattr(kind, "synchronize", lambda self: None)
    return modes


def test_waits_are_counted_and_nothing_is_left(cuda: list[str | int]) -> None:
    places = (torch.cuda, torch.cuda.Event, torch.cuda.Stream)
    stock, shown = [place.synchronize for place in places], warnings.showwarning
    with pytest.raises(ZeroDivisionError), host_waits() as count:
        for _ in range(2):  # from one line: not shown once only
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        torch.cuda.synchronize()
        for kind in places[1:]:
            kind.synchronize(object())
        warnings.warn("something else", stacklevel=1)
        raise ZeroDivisionError
    assert count.number == len(count.names) == 5  # the mode's own warning is none
    assert [name.rpartition("/")[2].partition(":")[0] for name in count.names[:2]] == ["test_waits.py"] * 2
    assert count.names[2:] == ["torch.cuda.synchronize", "Event.synchronize", "Stream.synchronize"]
    assert cuda == ["warn", 0]
    assert [place.synchronize for place in places] == stock and warnings.showwarning is shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_counted_as_none() -> None:
    with pytest.raises(RuntimeError, match="there is none"), host_waits():
        pass

"""What is made for a set of shards and kept for the next step: buckets mostly are what they were in the last one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_KEPT_STEPS = 4


class Recent(Generic[K, V]):
    """Values by key. One that was not asked for in four steps is gone, or memory would grow where buckets vary, as they
    do when layers are dropped at random. One that a CUDA graph was captured with stays: the graph reads its tensors."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._last_step: dict[K, float] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made if there is none."""
        if key not in self._values:
            self._values[key] = make()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._last_step[key] = float("inf")
        self._last_step[key] = max(self._last_step.get(key, 0), self._step)
        return self._values[key]

    def next_step(self) -> None:
        """A step begins."""
        self._step += 1
        for key in [key for key, step in self._last_step.items() if step < self._step - _KEPT_STEPS]:
            del self._values[key], self._last_step[key]

    def clear(self) -> None:
        self._values.clear()
        self._last_step.clear()

"""StepCache: tables and prepared launches that are mostly the same in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_KEPT_STEPS = 4


class StepCache(Generic[K, V]):
    """Values by key, for sets of shards: buckets are mostly the same in every step.

    A value that was not requested for four steps is dropped, or memory would grow where layers are dropped at random. A
    value that a CUDA graph was captured with stays: the graph reads its tensors.
    """

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._last_step: dict[K, float] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`, made if there is none."""
        if key not in self._values:
            self._values[key] = make()
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        self._last_step[key] = max(self._last_step.get(key, 0), math.inf if is_captured else self._step)
        return self._values[key]

    def next_step(self) -> None:
        """Begin a step, and drop old values."""
        self._step += 1
        for key in [key for key, step in self._last_step.items() if step < self._step - _KEPT_STEPS]:
            del self._values[key], self._last_step[key]

    def clear(self) -> None:
        self._values.clear()
        self._last_step.clear()

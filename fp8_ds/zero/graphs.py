"""Gradients that a CUDA graph wrote, where they wait for those of further micro-batches."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def are_replayed() -> bool:
    """Whether torch.compile has CUDA graphs of this thread's on its device: outputs lie in memory that a replay writes.

    Source: torch 2.11 and 2.13, `torch/_inductor/cudagraph_trees.py`, `get_manager`; not imported for the question.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized():
        return False
    return trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None


class OwnGradients:
    """Gradients that are kept from one backward to the next, out of graphs' memory, each copied once."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Tensor]] = {}

    def take_over(self, lists: Iterable[list[Tensor] | None], params: Iterable[Any]) -> None:
        """Entries of `lists`, and `grad` of `params`, are copies afterwards, if they were not when this last ran."""
        known, self._known = self._known, {}

        def own(grad: Tensor) -> Tensor:
            before = known.get(id(grad))
            if before is None or before() is not grad:
                grad = grad.clone()
            self._known[id(grad)] = weakref.ref(grad)
            return grad

        for gradients in lists:
            for number, grad in enumerate(gradients or ()):
                gradients[number] = own(grad)  # type: ignore[index]  # one at a time: each frees the one before
        for p in params:
            if p.grad is not None:
                p.grad = own(p.grad)

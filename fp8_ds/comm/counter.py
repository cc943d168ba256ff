"""Count what collectives move: cheap host counters for our own, and a dispatch mode that sees everybody's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class ByteCounter:
    """Bytes that our gathers delivered to this rank (its own share included, as an all-gather's output counts).

    `fp8` counts weight bytes, `hp` the bf16 side channel, both of the step under way; `last` is the finished step.
    `reduced` is what this rank handed to FP8 reduce-scatters, of all micro-batches of the step (its own share included,
    as a reduce-scatter's input counts); those of a skipped step count with the next.
    """

    fp8: int = 0
    hp: int = 0
    reduced: int = 0
    num_amax_reduces: int = 0
    last: ByteCounter | None = None

    @property
    def total(self) -> int:
        return self.fp8 + self.hp

    def end_step(self) -> None:
        """Keep what was counted as `last` and start anew."""
        self.last = ByteCounter(self.fp8, self.hp, self.reduced, self.num_amax_reduces)
        self.fp8 = self.hp = self.reduced = self.num_amax_reduces = 0


@dataclass
class CollectiveCount:
    """What `count_collectives` saw: calls and output bytes by name of the collective.

    Names are torch's (`all_gather`, `all_reduce`, `broadcast`, `reduce_scatter`, `all_to_all`, `other`).
    `records` lists (name, elements, dtype) in order of issue.
    """

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    records: list[tuple[str, int, torch.dtype]] = field(default_factory=list)

    @property
    def gather_bytes(self) -> int:
        """Bytes delivered by gathers: all-gathers, and the broadcasts that stand in for uneven ones."""
        return self.num_bytes["all_gather"] + self.num_bytes["broadcast"]


# c10d operator -> (name, position of the argument that holds what this rank receives).
_OPERATORS = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 0),
    "reduce_scatter_": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 0),
    "alltoall_base_": ("all_to_all", 0),
    "alltoall_": ("all_to_all", 0),
}


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [t for branch in tree for t in _tensors(branch)] if isinstance(tree, (list, tuple)) else []


class _CollectiveMode(TorchDispatchMode):
    def __init__(self, count: CollectiveCount) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, received = _OPERATORS.get(func._schema.name.split("::")[1], ("other", 0))
            tensors = _tensors(args[received]) if args else []
            self.count.calls[name] += 1
            self.count.num_bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
            self.count.records += [(name, t.numel(), t.dtype) for t in tensors]
        return func(*args, **(kwargs or {}))


@contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """Count every c10d collective that this rank issues inside the block, stock DeepSpeed's included.

    It is a dispatch mode: every operator passes through Python, so use it in tests and for one step of a demo.
    """
    count = CollectiveCount()
    with _CollectiveMode(count):
        yield count

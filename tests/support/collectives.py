"""Count what collectives move: a dispatch mode that sees everybody's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class CollectiveCount:
    """Calls and output bytes by name of the collective, counted by `count_collectives`.

    Names are torch's (`all_gather`, `all_reduce`, `broadcast`, `reduce_scatter`, `all_to_all`, `other`). `records`
    lists (name, elements, dtype) in order of issue.
    """

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    records: list[tuple[str, int, torch.dtype]] = field(default_factory=list)

    @property
    def gather_bytes(self) -> int:
        """Bytes delivered by gathers: all-gathers, and the broadcasts that stand in for uneven ones."""
        return self.num_bytes["all_gather"] + self.num_bytes["broadcast"]


_NAMES = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
"""Our name of a c10d operator, by the prefix of its own. The operator's first argument is what this rank receives."""


class _CollectiveMode(TorchDispatchMode):
    def __init__(self, count: CollectiveCount) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            operator = func._schema.name.split("::")[1].lstrip("_")
            name = next((ours for begin, ours in _NAMES.items() if operator.startswith(begin)), "other")
            tensors = [x for x in tree_leaves(args[:1]) if isinstance(x, torch.Tensor)]
            self.count.calls[name] += 1
            self.count.num_bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
            self.count.records += [(name, t.numel(), t.dtype) for t in tensors]
        return func(*args, **(kwargs or {}))


@contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """Count every c10d collective that this rank issues inside the block, including DeepSpeed's own.

    It is a dispatch mode: every operator passes through Python, so it is slow.
    """
    count = CollectiveCount()
    with _CollectiveMode(count):
        yield count

"""RankMemory: PeakMemory in a rank of gloo, the same numbers on a busy machine as on an idle one."""

from __future__ import annotations

from typing import Any

import torch
from support.memory import PeakMemory
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._pytree import tree_map

BETWEEN_TWO = ("send", "recv_", "recv_any_source_")
"""Of these one rank's may wait for another of its own; the others are waited for at once."""


class RankMemory(PeakMemory):
    """PeakMemory whose collectives work on copies that do not count, nor what gloo makes of them.

    gloo's threads hold the tensors of a collective until they are scheduled once more after its end, which a busy
    machine puts off for long: they would count beside what has replaced them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or func._opname in BETWEEN_TWO:
            return super().__torch_dispatch__(func, types, args, kwargs)
        pairs: dict[int, tuple[Tensor, Tensor]] = {}  # tensor and copy, by the id of either

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in pairs:
                copy = leaf.clone(memory_format=torch.preserve_format)
                pairs[id(leaf)] = pairs[id(copy)] = (leaf, copy)
            return pairs[id(leaf)][1]

        def returned(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return pairs[id(leaf)][0] if id(leaf) in pairs else leaf
            leaf.wait()
            return _done()  # gloo's copies anew whenever it is waited for

        args, kwargs = tree_map(copied, (args, kwargs or {}))
        result = tree_map(returned, func(*args, **kwargs))
        # All are compared before any is written: an input may be a view of an output, or the other way round.
        for tensor, copy in [pair for pair in pairs.values() if not _same_bits(*pair)]:
            tensor.copy_(copy)
        for tensor, _ in pairs.values():
            self.watch(tensor)
        return result


def _done() -> Any:
    """A collective's handle that has nothing to wait for."""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future).boxed()


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))

"""PeakMemory: bytes of live tensor storages, measured without a device's allocator. For CPU tests of memory claims."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """While active, every storage that an operator returns or receives counts from then until it is freed.

    Storages are counted once however many tensors view them, in the bytes that they hold. Temporaries inside a kernel
    are not seen, nor what a communication backend holds; on a GPU use the allocator's own peak instead.

    Args:
        known: tensors that exist already and shall count from the start (a model's parameters).

    Attributes:
        live: bytes now.
        peak: largest `live` so far.
        kinds: bytes by dtype at the peak, as a hint where it comes from.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.kinds: dict[torch.dtype, int] = {}
        self._by_dtype: dict[torch.dtype, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self.watch(tensor)

    def counts(self, tensor: Tensor) -> bool:
        """Whether `tensor` has memory of its own."""
        is_real = tensor.device.type != "meta" and type(tensor).__name__ != "FakeTensor"
        return is_real and tensor.layout == torch.strided

    def watch(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` until it is freed."""
        if not self.counts(tensor):
            return
        with torch._C.DisableTorchFunctionSubclass():
            storage, dtype = tensor.untyped_storage(), tensor.dtype
        key = id(storage)
        if key in self._watched and self._watched[key]() is storage:
            return
        num_bytes = storage.nbytes()
        self._watched[key] = weakref.ref(storage, lambda ref: self._freed(key, ref, num_bytes, dtype))
        self._book(num_bytes, dtype)

    def _freed(self, key: int, ref: weakref.ref[Any], num_bytes: int, dtype: torch.dtype) -> None:
        if self._watched.get(key) is ref:
            del self._watched[key]
        self._book(-num_bytes, dtype)

    def _book(self, num_bytes: int, dtype: torch.dtype) -> None:
        self.live += num_bytes
        self._by_dtype[dtype] = self._by_dtype.get(dtype, 0) + num_bytes
        if self.live > self.peak:
            self.peak = self.live
            self.kinds = dict(self._by_dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        return result


def freeing(function: Callable[[Tensor], Tensor], seen: Sequence[weakref.ref[Tensor]]) -> Callable[[Tensor], Tensor]:
    """`function`, which asserts that nothing in `seen`, to which it may add, is left when it has returned."""

    def call(given: Tensor) -> Tensor:
        output = function(given)
        assert [one() for one in seen] == [None] * len(seen)
        return output

    return call

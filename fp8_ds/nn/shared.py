"""One quantisation of a tensor for all layers that read it: q, k and v, gate and up."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from fp8_ds.nn.quantized import Quantized


class SharedInput:
    """The last tensor that was quantised, remembered for as long as its memory lives, and no longer.

    A layer that is given the same tensor, unchanged, gets the same FP8 tensors; so it does for an alias of the same
    shape and strides, for ZeRO-3's hooks hand each module one of its own. Anything else is quantised: another tensor,
    one written in place, another stream, a layout that was not made, inference mode, a tensor that autograd has not
    computed (a parameter, a batch, anything without gradients). As for autograd, a write past the version counter
    (`.data`, a collective) is not seen.
    """

    def __init__(self) -> None:
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        self._key: tuple[object, ...] = ()
        self._quantized: Quantized | None = None

    def quantize(
        self,
        x: Tensor,
        needs_columns: bool,
        quantize: Callable[[Tensor, bool], Quantized],
        complete: Callable[[Quantized], Quantized],
        epoch: object,
    ) -> Quantized:
        """Return `quantize(x, needs_columns)`, or what it gave for this x before.

        Args:
            x: what the layer was called with, any shape.
            needs_columns: whether the transpose is needed; the other always is, from which `complete` makes it.
            epoch: tensors of another epoch do not count.
        """
        if torch.compiler.is_compiling() or _is_inference(x):  # a trace removes repetitions itself
            return quantize(x, needs_columns)
        known = self._known(x, epoch)
        if known is None and not _is_computed(x):
            return quantize(x, needs_columns)
        if known is not None and (known.columns is not None or not needs_columns):
            return known
        quantized = quantize(x, needs_columns) if known is None else complete(known)
        self.offer(x, quantized, epoch)
        return quantized

    def offer(self, x: Tensor, quantized: Quantized, epoch: object = None) -> None:
        """Give these FP8 tensors to layers that are given this tensor, unchanged, but not in inference mode."""
        if _is_inference(x):
            return
        self._quantized, self._key = quantized, _key(x, epoch)
        self._storage = weakref.ref(x.untyped_storage(), self._forget)

    def _known(self, x: Tensor, epoch: object) -> Quantized | None:
        if self._storage is None or self._storage() is not x.untyped_storage():
            return None
        return self._quantized if self._key == _key(x, epoch) else None

    def _forget(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        if storage is self._storage:
            self._storage = self._quantized = None

    def __reduce__(self) -> tuple[type[SharedInput], tuple[()]]:
        return SharedInput, ()  # copies and pickles of a model start with nothing remembered


def _is_inference(x: Tensor) -> bool:
    """Whether x has no version counter, or tensors made now could not be kept for a backward."""
    return x.is_inference() or torch.is_inference_mode_enabled()


def _is_computed(x: Tensor) -> bool:
    """Whether autograd has just computed x. A parameter, a buffer, a batch may be written past their version counters:
    by an optimizer step into the buffer that a parameter views, by a collective."""
    base = x._base if x._is_view() else x
    return x.grad_fn is not None and base is not None and base.grad_fn is not None


def _key(x: Tensor, epoch: object) -> tuple[object, ...]:
    """Return what must be unchanged: elements, their version, the stream that computes with them, and the epoch."""
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    return x.storage_offset(), x.shape, x.stride(), x.dtype, x._version, stream, epoch

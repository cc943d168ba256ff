"""One quantisation of a tensor for all layers that read it: q, k and v, gate and up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quantized:
    """A matrix [T, C] in FP8.

    Args:
        rows: [T, C], contiguous; None where nobody contracts over C.
        columns: [C, T], contiguous: the transpose, for products that contract over T; None where there is none.
        scale_inv: float32, 0-dim, multiply to leave FP8.
    """

    rows: Tensor | None
    columns: Tensor | None
    scale_inv: Tensor

    def has(self, needs_rows: bool, needs_columns: bool) -> bool:
        return (self.rows is not None or not needs_rows) and (self.columns is not None or not needs_columns)


class SharedInput:
    """Remembers the last tensor that was quantised for as long as that tensor lives, and no longer.

    A layer that is given the very same tensor, unchanged, gets the same planes. Another tensor, one written in place,
    another stream, a plane that was not made: it is quantised.
    """

    def __init__(self) -> None:
        self._reference: weakref.ref[Tensor] | None = None
        self._key: tuple[int, int] = (0, 0)
        self._planes: Quantized | None = None

    def quantize(self, x: Tensor, needs_columns: bool, quantize: Callable[[Tensor, bool], Quantized]) -> Quantized:
        """`quantize(x, needs_columns)`, or what it gave for this x before.

        Args:
            x: what the layer was called with, any shape.
            needs_columns: whether the transposed plane is needed; the other always is.
            quantize: called with the same two.
        """
        if torch.compiler.is_compiling() or x.is_inference():  # a trace removes repetitions itself; no version counter
            return quantize(x, needs_columns)
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        key = (x._version, stream)
        known = self._planes
        is_same = self._reference is not None and self._reference() is x and self._key == key
        if is_same and known is not None and known.has(True, needs_columns):
            return known
        planes = quantize(x, needs_columns)
        self._planes, self._key = planes, key
        self._reference = weakref.ref(x, self._forget)
        return planes

    def _forget(self, reference: weakref.ref[Tensor]) -> None:
        if reference is self._reference:
            self._reference = self._planes = None

    def __reduce__(self) -> tuple[type[SharedInput], tuple[()]]:
        return SharedInput, ()  # copies and pickles of a model start with nothing remembered

"""A matrix in FP8 as the GEMMs of a linear take it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fp8_ds.numerics.scale import AmaxSlot
from fp8_ds.ops.transpose import transpose


@dataclass(frozen=True)
class Quantized:
    """A matrix [T, C] in FP8, as it is, transposed, or both.

    Args:
        rows: [T, C], contiguous; None where nobody contracts over C.
        columns: [C, T], contiguous: the transpose, for products that contract over T; None where there is none.
        scale_inv: float32, multiply to leave FP8. One for all (0-dim), one per row ([T, 1]), or one per 1x128 block of
            `rows` ([T, ceil(C / 128)]). Where it is per row, `columns` have the same bytes and scales.
        columns_scale_inv: the scales of `columns` where they were quantised by their own: [C, 1] or
            [C, ceil(T / 128)]. None: `columns` are `rows` transposed, scaled by `scale_inv`.
        slot: of the amax history that gave the scale and has recorded the amax, where there is one.
    """

    rows: Tensor | None
    columns: Tensor | None
    scale_inv: Tensor
    columns_scale_inv: Tensor | None = None
    slot: AmaxSlot | None = None

    def with_columns(self) -> Quantized:
        """Return the matrix with `columns`: the bytes of `rows`, transposed, if they are missing."""
        if self.columns is not None:
            return self
        assert self.rows is not None
        return replace(self, columns=transpose(self.rows))

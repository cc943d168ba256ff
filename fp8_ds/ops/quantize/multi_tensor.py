"""Casts of parts of many matrices, one launch for all of a kind: what a step has to re-quantise on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_ds.numerics.formats import Float8Format
from fp8_ds.ops.quantize import KERNEL_DTYPES, _quantize_parts

_ADDRESSES = ("x", "out", "grid")
TABLE_COLUMNS = (*_ADDRESSES, "numel", "start", "num_cols", "block_rows", "block_cols", "grid_cols", "first_program")
"""Columns of the table of parts, int64 [num_parts, len(TABLE_COLUMNS)]."""

PROGRAM = 8192
"""Elements of a program, as in the other casts by a scale that is known."""

_ALIGNMENT = 16
_WORD = 4


class QuantizePart(NamedTuple):
    """Elements of a flattened matrix [R, C], their destination and their scales.

    Args:
        x: bf16, fp16 or fp32 [numel], contiguous: elements [start, start + numel).
        out: float8 [numel], contiguous, on the device of `x`.
        grid: float32, contiguous; multiply to enter FP8. 0-dim: one scale for all of `x`; else
            [ceil(R / block[0]), ceil(C / block[1])].
        start: >= 0.
        num_cols: C.
        block: rows and columns that share a scale.
    """

    x: Tensor
    out: Tensor
    grid: Tensor
    start: int = 0
    num_cols: int = 1
    block: tuple[int, int] = (1, 1)

    @property
    def addresses(self) -> tuple[int, int, int]:
        return self.x.data_ptr(), self.out.data_ptr(), self.grid.data_ptr()

    @property
    def is_vector(self) -> bool:
        """Whether whole vectors are loaded and stored."""
        return all(number % _ALIGNMENT == 0 for number in (self.x.numel(), *self.addresses[:2]))

    @property
    def has_one_scale(self) -> bool:
        """Whether the four elements of a word share a scale."""
        return self.grid.dim() == 0 or all(n % _WORD == 0 for n in (self.start, self.num_cols, self.block[1]))

    def check(self) -> None:
        for name, tensor in (("x", self.x), ("out", self.out)):
            if tensor.dim() != 1 or not tensor.is_contiguous() or len(tensor) != len(self.x):
                raise ValueError(
                    f"{name}: expected a contiguous vector of {self.x.numel()} elements, got {tuple(tensor.shape)} "
                    f"with strides {tensor.stride()}. Pass the shard without its padding."
                )
        if self.x.dtype not in KERNEL_DTYPES or not self.x.device == self.out.device == self.grid.device:
            raise ValueError(
                f"x: expected bfloat16, float16 or float32 on the device of its bytes and scales, got {self.x.dtype} "
                f"on {self.x.device}, {self.out.device} and {self.grid.device}. Call to() first."
            )
        rows, cols = -(-(self.start + len(self.x)) // self.num_cols), self.num_cols
        expected = (-(-rows // self.block[0]), -(-cols // self.block[1]))
        fits = self.grid.dim() == 0 or (len(self.grid) >= expected[0] and self.grid.shape[1:] == expected[1:])
        if not fits or self.grid.dtype != torch.float32 or not self.grid.is_contiguous():
            raise ValueError(
                f"grid: expected float32, 0-dim or with at least {expected[0]} rows of {expected[1]}, contiguous, got "
                f"{self.grid.dtype} {tuple(self.grid.shape)}. Pass the scales of the whole matrix."
            )


class MultiTensorQuantize:
    """Cast of many parts: a call quantises every `x` into its `out`, to the bytes of `quantize` and `quantize_part`.

    The number of launches does not grow with the parts: there is one for each dtype of `x`, and others for parts that
    are not aligned or have several scales in a word. It never waits for the device, unless a tensor has moved.

    Args:
        parts: parts on one device.
        fmt: E4M3 or E5M2, the format of every `out`.

    Raises:
        ValueError: a part is invalid, or its tensors have another dtype than `fmt`.
    """

    def __init__(self, parts: Sequence[QuantizePart], fmt: Float8Format) -> None:
        for part in parts:
            part.check()
            if part.out.dtype != fmt.torch_dtype:
                raise ValueError(
                    f"out: expected {fmt.torch_dtype}, got {part.out.dtype}. Pass the format of the bytes."
                )
        self.fmt = fmt
        self._parts = [part for part in parts if part.x.numel()]
        self._build()

    def _build(self) -> None:
        self._addresses = [part.addresses for part in self._parts]
        kinds: dict[tuple[torch.dtype, bool, bool, bool], list[QuantizePart]] = {}
        for part in self._parts:
            kind = (part.x.dtype, part.grid.dim() == 0, part.has_one_scale, part.is_vector)
            kinds.setdefault(kind, []).append(part)
        self._launches = [_Launch(parts) for parts in kinds.values()]

    @torch.no_grad()
    def __call__(self) -> None:
        if [part.addresses for part in self._parts] != self._addresses:
            self._build()
        for launch in self._launches:
            launch(self.fmt)


class _Launch:
    """Parts of one kind and their table on the device."""

    def __init__(self, parts: list[QuantizePart]) -> None:
        first = parts[0]
        self.is_vector, self.has_one_scale = first.is_vector, first.has_one_scale
        self.xs, self.outs, self.grids = ([part[k] for part in parts] for k in range(3))
        self.places = [number for part in parts for number in (part.start, part.num_cols, *part.block)]
        num_programs = [-(-part.x.numel() // PROGRAM) for part in parts]
        firsts = [0, *itertools.accumulate(num_programs)]
        table = torch.tensor([_row(part, at) for part, at in zip(parts, firsts, strict=False)], dtype=torch.int64)
        program_parts = torch.repeat_interleave(
            torch.arange(len(parts), dtype=torch.int32), torch.tensor(num_programs, dtype=torch.int64)
        )
        self.table, self.program_parts = table.to(first.x.device), program_parts.to(first.x.device)

    def __call__(self, fmt: Float8Format) -> None:
        lists = self.xs, self.outs, self.grids, self.places
        _quantize_parts(self.table, self.program_parts, *lists, self.has_one_scale, self.is_vector, fmt.max)


def _row(part: QuantizePart, first_program: int) -> list[int]:
    values = {
        **dict(zip(_ADDRESSES, part.addresses, strict=True)),
        "numel": part.x.numel(),
        "start": part.start,
        "num_cols": part.num_cols,
        "block_rows": part.block[0],
        "block_cols": part.block[1],
        "grid_cols": 1 if part.grid.dim() == 0 else part.grid.shape[1],
        "first_program": first_program,
    }
    return [values[column] for column in TABLE_COLUMNS]

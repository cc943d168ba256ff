"""Tokens sorted by expert: the rows of each expert.

Shape suffixes: T tokens, k experts that each of them chose, E experts, P rows, C features. The last rows are those of
tokens that chose the number E, no expert at all, as some routers let them: their outputs and gradients are 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp8_ds.ops._register import once_differentiable
from fp8_ds.ops.gemm.scaled_mm import ALIGNMENT
from fp8_ds.ops.weighted_sum import weighted_sum, weighted_sum_backward


@dataclass(frozen=True)
class Groups:
    """Rows of each expert, one expert behind the other.

    Attributes:
        ends: int32 [E + 1], the end of each expert's rows, then of the rows of no expert.
        place: int64 [T k], the row of each token's first expert, second, and so on, then of the next token.
        order: int64 [T k], the inverse if rows are packed: each row's index in `place`; else None.
        num_choices: k.
    """

    ends: Tensor
    place: Tensor
    order: Tensor | None
    num_choices: int

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int, *, is_packed: bool = False) -> Groups:
        """Sort tokens by expert; the host waits for nothing.

        Args:
            top_k_index: int64 [T, k], numbers of experts; E stands for none.
            num_experts: E.
            is_packed: whether P is T k, which the host knows. Else each expert's rows are padded by zeros to a multiple
                of 16: grad_weight contracts along them, and the tensor core's product of one expert needs that.
        """
        chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
        # Not torch.bincount, for which the host waits.
        ends = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=chosen.device), right=True)
        row = torch.arange(len(order), device=order.device)
        if not is_packed:
            counts = torch.diff(ends, prepend=ends.new_zeros(1))
            padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
            shift = (padded.cumsum(0) - padded) - (ends - counts)  # by the zeros of the experts before
            row, ends = row + shift[chosen], padded.cumsum(0)
        place = torch.empty_like(order)
        place[order] = row
        return cls(ends.to(torch.int32), place, order if is_packed else None, top_k_index.shape[-1])

    @functools.cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First row and end of each expert's rows, then of the rows of no expert. The host waits for them."""
        ends = _on_host(self.ends, len(self.place))
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def num_tokens(self) -> int:
        """T of the shape suffixes."""
        return len(self.place) // self.num_choices

    @property
    def num_rows(self) -> int:
        """P of the shape suffixes."""
        return len(self.place) if self.order is not None else self.bounds[-1][1]

    def occupied(self) -> Iterator[tuple[int, slice]]:
        """Return the experts that have tokens, each with its rows."""
        return ((expert, slice(*bounds)) for expert, bounds in enumerate(self.bounds[:-1]) if bounds[0] < bounds[1])

    def joined(self, parts: list[Tensor], like: Tensor, num_features: int) -> Tensor:
        """Join the parts [p, C] of the `occupied` experts to [P, C], with zeros in the rows of no expert."""
        start, end = self.bounds[-1]
        return torch.cat([*parts, like.new_zeros(end - start, num_features)])

    def spread(self, x_TC: Tensor) -> Tensor:
        """Copy each token to its experts' rows, [P, C], others zero; without autograd. FP8 is moved as bytes."""
        if self.order is not None:
            return _as_words(x_TC).index_select(0, self.order // self.num_choices).view(x_TC.dtype)
        bits = x_TC.view(torch.uint8) if x_TC.element_size() == 1 else x_TC
        rows = bits.new_zeros(self.num_rows, bits.shape[1])
        rows[self.place] = bits.repeat_interleave(self.num_choices, 0)
        return rows.view(x_TC.dtype)

    def collect(self, y_PC: Tensor) -> Tensor:
        """Return each token's own rows, [T, k, C]."""
        return y_PC.index_select(0, self.place).view(self.num_tokens, self.num_choices, y_PC.shape[1])

    def add_up(self, y_PC: Tensor) -> Tensor:
        """Add up each token's own rows, [T, C]; without autograd."""
        if self.order is None:
            return self.collect(y_PC).sum(1)
        ones = torch.ones(self.num_tokens, self.num_choices, dtype=torch.float32, device=y_PC.device)
        return weighted_sum(y_PC, self.place, ones, y_PC.dtype)

    def add_up_weighted(self, y_PC: Tensor, weights_Tk: Tensor, dtype: torch.dtype) -> Tensor:
        """Add up each token's rows times their weights, [T, C] of `dtype`; rows not packed have rounded products."""
        if self.order is None:
            return (self.collect(y_PC) * weights_Tk.unsqueeze(-1)).sum(1).to(dtype)
        apply: Any = _WeightedSum.apply  # untyped in torch
        output: Tensor = apply(y_PC, self.place, weights_Tk.contiguous(), dtype)
        return output


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PC: Tensor, place: Tensor, weights_Tk: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(y_PC, place, weights_Tk)
        return weighted_sum(y_PC, place, weights_Tk, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, None, Tensor, None]:
        grad_PC, grad_Tk = weighted_sum_backward(grad_TC.contiguous(), *ctx.saved_tensors)
        return grad_PC, None, grad_Tk, None


def _as_words(x: Tensor) -> Tensor:
    """View bytes as the longest words that fit: indexing moves one at a time."""
    if x.element_size() > 1:
        return x
    is_even = x.shape[1] % 8 == 0 and x.storage_offset() % 8 == 0
    return x.view(torch.int64 if is_even and x.numel() else torch.uint8)


def _on_host(ends: Tensor, num_tokens: int) -> list[int]:
    """Read `ends`; tensors without numbers (of an estimate) stand for experts with equally many tokens."""
    if not isinstance(ends, FakeTensor):
        return list(ends.tolist())
    num_experts = len(ends) - 1
    each = -(-num_tokens // num_experts // ALIGNMENT) * ALIGNMENT
    return [each * min(expert + 1, num_experts) for expert in range(num_experts + 1)]

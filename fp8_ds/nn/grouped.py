"""One product of all experts of a layer: each expert's weight by the tokens that chose it.

Shape suffixes: T tokens, k experts that each of them chose, E experts, P rows, N output and K input features. Rows are
tokens sorted by expert, those of each expert followed by zeros up to a multiple of 16: it is the size along which
grad_weight contracts, and the tensor core's product wants such. Behind them are the rows of tokens that chose the
number E, no expert at all, as some routers let them: their outputs and gradients are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.recipe import Fp8Weight, Recipe
from fp8_ds.ops.gemm.scaled_mm import ALIGNMENT
from fp8_ds.ops.transpose import transpose


@dataclass(frozen=True)
class Groups:
    """Which rows are whose.

    Attributes:
        bounds: of each expert's rows, and of those that are no expert's, first and end, multiples of 16; the same
            number where there are none.
        place: int64 [T k], the row of each token's first expert, second, and so on, then of the next token.
        num_choices: k.
    """

    bounds: tuple[tuple[int, int], ...]
    place: Tensor
    num_choices: int

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int) -> Groups:
        """The host waits once, for the number of tokens of each expert.

        Args:
            top_k_index: int64 [T, k], of experts; E: none.
            num_experts: E.
        """
        chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
        # Not torch.bincount, for which the host waits, too.
        ends = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=chosen.device), right=True)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        padded_ends = padded.cumsum(0)
        shift = (padded_ends - padded) - (ends - counts)  # by the zeros of the experts before
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) + shift[chosen]
        on_host = _on_host(padded_ends, chosen.numel())
        return cls(tuple(zip([0, *on_host[:-1]], on_host, strict=True)), place, top_k_index.shape[-1])

    @property
    def num_rows(self) -> int:
        """P."""
        return self.bounds[-1][1]

    def occupied(self) -> Iterator[tuple[int, slice]]:
        """Experts that have tokens, and their rows."""
        return ((expert, slice(*bounds)) for expert, bounds in enumerate(self.bounds[:-1]) if bounds[0] < bounds[1])

    def joined(self, parts: list[Tensor], like: Tensor, num_features: int) -> Tensor:
        """[P, C]: of `occupied` each one's [p, C], and zeros in the rows that are no expert's."""
        start, end = self.bounds[-1]
        return torch.cat([*parts, like.new_zeros(end - start, num_features)])

    def spread(self, x_TC: Tensor) -> Tensor:
        """[P, C]: each token in the rows of its experts, zeros in the others. No autograd; FP8 is moved as bytes."""
        bits = x_TC.view(torch.uint8) if x_TC.element_size() == 1 else x_TC
        rows = bits.new_zeros(self.num_rows, bits.shape[1])
        rows[self.place] = bits.repeat_interleave(self.num_choices, 0)
        return rows.view(x_TC.dtype)

    def collect(self, y_PC: Tensor) -> Tensor:
        """[T, k, C]: of each token the rows that are its own."""
        num_tokens = len(self.place) // self.num_choices
        return y_PC.index_select(0, self.place).view(num_tokens, self.num_choices, y_PC.shape[1])


def _on_host(ends: Tensor, num_tokens: int) -> list[int]:
    """The numbers of `ends`; tensors without numbers (fp8_ds.rehearsal) stand for experts with equally many tokens."""
    if not isinstance(ends, FakeTensor):
        found: list[int] = ends.tolist()
        return found
    num_experts = len(ends) - 1
    each = -(-num_tokens // num_experts // ALIGNMENT) * ALIGNMENT
    return [each * min(expert + 1, num_experts) for expert in range(num_experts + 1)]


class _GroupedFunction(torch.autograd.Function):
    """y = x W^T of each expert; kept for backward is x in FP8, of each token once, and its scale_inv."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: Groups, recipe: Recipe, is_spread: bool, record: bool
    ) -> Tensor:
        x_fp8 = recipe.quantize_input(x, needs_columns=False, record=record)
        assert x_fp8.rows is not None
        # On ctx, as nn/linear.py has it.
        ctx.recipe, ctx.groups, ctx.is_spread = recipe, groups, is_spread
        ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
        weight_fp8 = recipe.read_weight(weight)
        # A sum with an adapter is no Parameter, which outlives the graph: on ctx it would be kept past a checkpoint.
        ctx.weight = weight if isinstance(weight, nn.Parameter) else None
        kept = (x_fp8.rows, x_fp8.scale_inv) if record and weight.requires_grad else (None, None)
        if record:
            ctx.save_for_backward(*kept, *(weight_fp8 if ctx.weight is None else (None, None)))
        recipe.count_whole(x_fp8, weight_fp8)
        rows_PK = x_fp8.rows if is_spread else groups.spread(x_fp8.rows)
        outputs = [
            recipe.parts.output(Quantized(rows_PK[rows], None, x_fp8.scale_inv), _expert(weight_fp8, e), x.dtype)
            for e, rows in groups.occupied()
        ]
        return groups.joined(outputs, x, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        recipe, groups = ctx.recipe, ctx.groups
        *kept, data, scale_inv = ctx.saved_tensors
        weight_fp8 = recipe.read_weight(ctx.weight) if data is None else Fp8Weight(data, scale_inv)
        grad_PN = grad_PN.contiguous()
        grad_fp8 = recipe.quantize_grad_output(grad_PN, weight_fp8, None)
        rows_PN = recipe.grad_rows(grad_fp8)
        grad_x = grad_weight = None
        if needs_input:
            grads = [
                recipe.parts.grad_input(
                    Quantized(rows_PN[rows], None, grad_fp8.scale_inv), _expert(weight_fp8, e), grad_PN.dtype
                )
                for e, rows in groups.occupied()
            ]
            grad_x = groups.joined(grads, grad_PN, ctx.weight_shape[2])
            if not ctx.is_spread:
                grad_x = groups.collect(grad_x).sum(1)
        if needs_weight:
            grad_weight = _grad_weight(ctx, kept, rows_PN, grad_fp8.scale_inv, grad_PN)
        return grad_x, grad_weight, None, None, None, None


def _grad_weight(ctx: Any, kept_x: list[Tensor], rows_PN: Tensor, grad_scale_inv: Tensor, grad_PN: Tensor) -> Tensor:
    """[E, N, K]; of an expert without tokens 0."""
    recipe, groups, dtype = ctx.recipe, ctx.groups, ctx.weight_dtype
    x, x_scale_inv = kept_x
    rows_PK = x if ctx.is_spread else groups.spread(x)
    grad_weight = torch.zeros(ctx.weight_shape, dtype=dtype, device=grad_PN.device)
    for expert, rows in groups.occupied():
        grad_fp8, kept = Quantized(rows_PN[rows], None, grad_scale_inv), (rows_PK[rows], x_scale_inv)
        if recipe.is_fp8:
            grad_fp8, kept = grad_fp8.with_columns(), (transpose(rows_PK[rows]), x_scale_inv)
        grad_weight[expert] = recipe.parts.grad_weight(grad_fp8, grad_PN[rows], kept, dtype)
    return grad_weight


def _expert(weight: Fp8Weight, expert: int) -> Fp8Weight:
    return Fp8Weight(weight.data[expert], weight.scale_inv)


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups, recipe: Recipe, *, is_spread: bool) -> Tensor:
    """Of each expert `x W^T`, [P, N]; zeros in the rows that are nobody's.

    One amax and one cast of `x`, and one of its gradient, for all experts, whose weights have one scale.

    Args:
        x: bf16, fp16 or fp32: [T, K], each token once, or [P, K], spread.
        weight: [E, N, K], see `nn.linear.read_weight`. Its gradient is 0 for experts without tokens.
        groups: of the T tokens.
        recipe: of this weight; it has one scale a tensor.
        is_spread: whether `x` is [P, K].
    """
    apply: Any = _GroupedFunction.apply  # untyped in torch
    output: Tensor = apply(x, weight, groups, recipe, is_spread, torch.is_grad_enabled())
    return output

"""Tokens sorted by expert, and products of each expert's weight by its tokens: one after another, or in one launch.

Shape suffixes: T tokens, k experts that each of them chose, E experts, P rows, C features, N output and K input
features. The last rows are those of tokens that chose the number E, no expert at all, as some routers let them: their
outputs and gradients are 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.fp8_linear import checked_weights
from fp8_ds.nn.linear.recipe import Fp8Weight, Quantized, Recipe
from fp8_ds.ops import grouped
from fp8_ds.ops._register import once_differentiable
from fp8_ds.ops.gemm.scaled_mm import ALIGNMENT
from fp8_ds.ops.transpose import transpose
from fp8_ds.ops.weighted_sum import weighted_sum, weighted_sum_backward

MAX_IN_A_LOOP = 16
"""Most experts that are computed in a loop; layers of more stay in bf16, but for frozen ones from an FP8 folder. The
host takes some 0.6 ms for each expert, forward and backward of both weights (docs/decisions/0011)."""


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

    def dispatch(self, x_TC: Tensor) -> Tensor:
        """Copy each token to its experts' rows, [P, C], others zero; without autograd. FP8 is moved as bytes."""
        if self.order is not None:
            return _as_int64(x_TC).index_select(0, self.order // self.num_choices).view(x_TC.dtype)
        bits = x_TC.view(torch.uint8) if x_TC.element_size() == 1 else x_TC
        rows = bits.new_zeros(self.num_rows, bits.shape[1])
        rows[self.place] = bits.repeat_interleave(self.num_choices, 0)
        return rows.view(x_TC.dtype)

    def collect(self, y_PC: Tensor) -> Tensor:
        """Return each token's own rows, [T, k, C]."""
        return y_PC.index_select(0, self.place).view(self.num_tokens, self.num_choices, y_PC.shape[1])

    def combine(self, y_PC: Tensor) -> Tensor:
        """Add up each token's own rows, [T, C]; without autograd."""
        if self.order is None:
            return self.collect(y_PC).sum(1)
        ones = torch.ones(self.num_tokens, self.num_choices, dtype=torch.float32, device=y_PC.device)
        return weighted_sum(y_PC, self.place, ones, y_PC.dtype)

    def combine_weighted(self, y_PC: Tensor, weights_Tk: Tensor, dtype: torch.dtype) -> Tensor:
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


def _as_int64(x: Tensor) -> Tensor:
    """View bytes as int64 where these fit: indexing moves one element at a time."""
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


def can_be_one_launch(features: Iterable[int], device: torch.device | None) -> bool:
    """Whether there are kernels for all experts at once, with weights of these N and K.

    `device`: the training device. None: a GPU of compute capability 9.0, which need not be here.
    """
    is_aligned = all(size % grouped.ALIGNMENT == 0 for size in features)
    return is_aligned and (device is None or grouped.can_run(device))


def has_one_launch(like: Tensor, features: Iterable[int], recipes: Iterable[Recipe]) -> bool:
    """Whether the experts of a layer are computed all at once, and their rows are packed.

    `like`: a tensor on the layer's device, or a fake one (fp8_ds.tools.estimate.activations) for one on a GPU.
    """
    device = None if isinstance(like, FakeTensor) else like.device
    return any(map(_is_one_launch, recipes)) and can_be_one_launch(features, device)


def expert_products(groups: Groups, recipe: Recipe) -> Loop:
    """Return the products for rows of `groups`: in one launch if they are packed and there is a kernel for it."""
    return (OneLaunch if groups.order is not None and _is_one_launch(recipe) else Loop)(groups, recipe)


def _is_one_launch(recipe: Recipe) -> bool:
    """Whether there is a kernel for all experts at once: with one scale for a weight, not with blocks of a folder."""
    return recipe.is_fp8 and not recipe.is_stored and recipe.backend == "torch"


class Loop:
    """Products of one expert after another, with the bits of an `Fp8Linear` each, on any device.

    The host reads which experts have rows. Rows of no expert, and grad_weight of an expert without rows, are 0.

    Args:
        groups: the rows of each expert.
        recipe: the weight's.
    """

    def __init__(self, groups: Groups, recipe: Recipe) -> None:
        self.groups, self.recipe = groups, recipe

    def output(self, x_PK: Tensor, x_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        """Compute the output, [P, N]."""
        return self._one_by_one(self.recipe.unobserved.output, x_PK, x_scale_inv, weight, weight.data.shape[1], dtype)

    def grad_input(self, rows_PN: Tensor, grad_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        """Compute grad_input, [P, K]."""
        product = self.recipe.unobserved.grad_input
        return self._one_by_one(product, rows_PN, grad_scale_inv, weight, weight.data.shape[2], dtype)

    def _one_by_one(
        self,
        product: Callable[[Quantized, Fp8Weight, torch.dtype], Tensor],
        rows_PC: Tensor,
        scale_inv: Tensor,
        weight: Fp8Weight,
        num_features: int,
        dtype: torch.dtype,
    ) -> Tensor:
        grid = weight.scale_inv
        grids = grid.view(len(weight.data), -1, grid.shape[1]) if grid.dim() else grid.expand(len(weight.data))
        found = []
        for e, rows in self.groups.occupied():
            x_e = Quantized(rows_PC[rows], None, scale_inv[rows] if scale_inv.dim() else scale_inv)
            found.append(product(x_e, Fp8Weight(weight.data[e], grids[e]), dtype))
        start, end = self.groups.bounds[-1]
        return torch.cat([*found, rows_PC.new_zeros(end - start, num_features, dtype=dtype)])

    def grad_weight(
        self, grad_fp8: Quantized, grad_PN: Tensor, x_PK: Tensor, x_scale_inv: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Compute grad_weight, [E, N, K]; `grad_fp8` is `grad_PN` quantised."""
        rows_PN, recipe = grad_fp8.rows, self.recipe
        assert rows_PN is not None
        shape = (len(self.groups.ends) - 1, rows_PN.shape[1], x_PK.shape[1])
        grad_weight = torch.zeros(shape, dtype=dtype, device=grad_PN.device)
        for expert, rows in self.groups.occupied():
            grad_e, kept = Quantized(rows_PN[rows], None, grad_fp8.scale_inv), (x_PK[rows], x_scale_inv)
            if recipe.is_fp8:
                grad_e, kept = grad_e.with_columns(), (transpose(x_PK[rows]), x_scale_inv)
            grad_weight[expert] = recipe.unobserved.grad_weight(grad_e, grad_PN[rows], kept, dtype)
        return grad_weight

    def kept_groups(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `ends` (here as the host has read them), `place` and `order`; the backward waits for nothing."""
        ends = torch.tensor([end for _, end in self.groups.bounds], dtype=torch.int32, device="cpu")
        return ends, self.groups.place, self.groups.order


class OneLaunch(Loop):
    """Products of all experts at once (ops/grouped): the loop's but for the order of sums. The host never waits."""

    def output(self, x_PK: Tensor, x_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        is_fast = "output" in self.recipe.fast_gemms
        scales = (x_scale_inv, weight.scale_inv)
        return grouped.rows_by_matrices(x_PK, weight.data.contiguous(), self._ends, *scales, dtype, is_fast)

    def grad_input(self, rows_PN: Tensor, grad_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        is_fast = "grad_input" in self.recipe.fast_gemms
        scales = (grad_scale_inv, weight.scale_inv)
        matrices = transpose(weight.data.contiguous())
        return grouped.rows_by_matrices(rows_PN, matrices, self._ends, *scales, dtype, is_fast)

    def grad_weight(
        self, grad_fp8: Quantized, grad_PN: Tensor, x_PK: Tensor, x_scale_inv: Tensor, dtype: torch.dtype
    ) -> Tensor:
        assert grad_fp8.rows is not None
        is_fast = "grad_weight" in self.recipe.fast_gemms
        operands = (grouped.columns(grad_fp8.rows, self._ends), grouped.columns(x_PK, self._ends))
        scales = (grad_fp8.scale_inv, x_scale_inv)
        return grouped.columns_by_columns(*operands, self._ends, *scales, dtype, is_fast)

    def kept_groups(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.groups.ends, self.groups.place, self.groups.order

    @property
    def _ends(self) -> Tensor:
        """Ends of the experts' rows, without that of the rows of no expert."""
        return self.groups.ends[:-1]


class _GroupedFunction(torch.autograd.Function):
    """y = x W^T of each expert; the backward keeps x in FP8, each token once, and its scale_inv."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: Groups, recipe: Recipe, is_dispatched: bool, record: bool
    ) -> Tensor:
        if recipe.is_stored and weight.requires_grad:
            raise _not_frozen(weight)
        x_fp8 = recipe.quantize_input(x, needs_columns=False, record=record)
        assert x_fp8.rows is not None
        # On ctx, as nn/linear/fp8_linear.py has it.
        ctx.recipe, ctx.is_dispatched = recipe, is_dispatched
        ctx.weight_dtype = weight.dtype
        weight_fp8 = recipe.read_weight(weight)
        # A sum with an adapter is no Parameter, which outlives the graph: on ctx it would be kept past a checkpoint.
        ctx.weight = weight if isinstance(weight, nn.Parameter) else None
        kept = (x_fp8.rows, x_fp8.scale_inv) if record and weight.requires_grad else (None, None)
        recipe.observe_operands(x_fp8, weight_fp8)
        rows_PK, scale_inv = x_fp8.rows, x_fp8.scale_inv
        if not is_dispatched:
            rows_PK = groups.dispatch(rows_PK)
            scale_inv = groups.dispatch(scale_inv) if scale_inv.dim() else scale_inv
        products = expert_products(groups, recipe)
        output = products.output(rows_PK, scale_inv, weight_fp8, x.dtype)
        ctx.num_choices = groups.num_choices
        if record:
            # Which rows are whose, too: on ctx it would be held through a checkpoint, and a backward would go by it
            # where the rows are those of a forward that was done again, whose router may have chosen otherwise.
            whose = products.kept_groups()
            checked = checked_weights((weight, ctx.needs_input_grad[0]))
            ctx.num_checked = len(checked)
            ctx.save_for_backward(*checked, *whose, *kept, *(weight_fp8 if ctx.weight is None else (None, None)))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        recipe = ctx.recipe
        ends, place, order, *kept, data, scale_inv = ctx.saved_tensors[ctx.num_checked :]
        groups = Groups(ends, place, order, ctx.num_choices)
        weight_fp8 = recipe.read_weight(ctx.weight) if data is None else Fp8Weight(data, scale_inv)
        grad_PN = grad_PN.contiguous()
        grad_fp8 = recipe.quantize_grad_output(grad_PN, weight_fp8, None)
        rows_PN = recipe.grad_rows(grad_fp8)
        products, grad_x, grad_weight = expert_products(groups, recipe), None, None
        if needs_input:
            grad_x = products.grad_input(rows_PN, grad_fp8.scale_inv, weight_fp8, grad_PN.dtype)
            if not ctx.is_dispatched:
                grad_x = groups.combine(grad_x)
        if needs_weight:
            x, x_scale_inv = kept
            rows_PK = x if ctx.is_dispatched else groups.dispatch(x)
            whole = Quantized(rows_PN, None, grad_fp8.scale_inv)
            grad_weight = products.grad_weight(whole, grad_PN, rows_PK, x_scale_inv, ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None


def _not_frozen(weight: Any) -> UnsupportedError:
    name = getattr(getattr(weight, "_fp8", None), "name", "a copy of one")
    return UnsupportedError(
        f"experts with the scales of an FP8 folder: expected frozen weights, got {name}, which wants a gradient. Set "
        "requires_grad before deepspeed.initialize."
    )


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups, recipe: Recipe, *, is_dispatched: bool) -> Tensor:
    """Compute `x W^T` of each expert, [P, N]; rows of no expert are zeros.

    `x` and its gradient are cast once for all experts. The experts' weights have one scale; frozen ones from an FP8
    folder have tiles, each expert its own (nn/moe/stored.py).

    Args:
        x: bf16, fp16 or fp32: [T, K], each token once, or [P, K], spread (`is_dispatched`).
        weight: [E, N, K], see `nn.linear.fp8_linear.read_weight`. Its gradient is 0 for experts without tokens.
        groups: the rows of the T tokens.
        recipe: the weight's.
    """
    apply: Any = _GroupedFunction.apply  # untyped in torch
    output: Tensor = apply(x, weight, groups, recipe, is_dispatched, torch.is_grad_enabled())
    return output

"""Rules by which a recipe's operands travel, and what their GEMMs take on arrival: one object per layer.

Only two operands of a linear are gathered: x of a column-parallel layer and grad_output of a row-parallel one. All
others are local, and quantised as without tensor parallelism. On arrival each rank's rows have that rank's scales:

    output, grad_input     contract over channels: a scale for each row, or block of a row, is applied by the GEMM.
    grad_weight            contracts over tokens: codes are aligned to one scale by powers of two (ops/align), or the
                           scales are multiplied into the operand that is still in high precision.

Shape suffixes: S tokens of one rank, T of all, I input features, O output features (of the shard).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8_ds.errors import ConfigError
from fp8_ds.nn.linear.recipe import Fp8Weight, Quantized, Recipe, as_matrix
from fp8_ds.numerics.formats import E4M3, Float8Format
from fp8_ds.numerics.scale import pow2_scale
from fp8_ds.ops.align import align
from fp8_ds.ops.blockwise import BLOCK, block_amax, quantize_blockwise, transpose_blockwise
from fp8_ds.ops.quantize import quantize_colwise_t, quantize_part, quantize_tensor_pow2
from fp8_ds.ops.transpose import transpose
from fp8_ds.tp.gather import Gathered, Shard

Kept = tuple[Tensor, Tensor]
"""(columns [I, T], scale_inv): x as grad_weight takes it."""


@dataclass(frozen=True)
class Rule(ABC):
    """Form in which the operands of one tensor-parallel linear travel in FP8."""

    recipe: Recipe

    # --- x of a column-parallel layer, gathered ---

    def send_input(self, x: Tensor, *, record: bool) -> Shard:
        """Quantize x of this rank, [..., I], to E4M3, as the recipe does."""
        x_fp8 = self.recipe.quantize_input(x, needs_columns=False, record=record)
        assert x_fp8.rows is not None
        return Shard(x_fp8.rows, x_fp8.scale_inv)

    def output(self, gathered: Gathered, weight_fp8: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute `x W^T + b` of a gathered x, [T, O] in `dtype`, by this rank's weight and bias."""
        return self.recipe.biased_output(self.rows(gathered), weight_fp8, bias, dtype)

    def keep_input(self, gathered: Gathered) -> Kept:
        """Return what grad_weight needs of a gathered x, codes transposed; made once for all layers that read it."""
        return gathered.once("kept", lambda: self._columns(gathered))

    def _columns(self, gathered: Gathered) -> Kept:
        return transpose(gathered.codes), self.rows(gathered).scale_inv

    # --- grad_output of a row-parallel layer, gathered ---

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        """Quantize x of a row-parallel layer, [..., I], which stays where it is."""
        return self.recipe.quantize_input(x, needs_columns=needs_columns, record=record)

    @abstractmethod
    def send_grad(self, grad_SO: Tensor) -> Shard:
        """Quantize grad_output of this rank's tokens, [S, O], contiguous, to the recipe's gradient format."""

    def prepared(self, weight: Fp8Weight) -> Fp8Weight:
        """Return the weight with its codes laid out as `grad_input` reads them, before grad_output is there."""
        return Fp8Weight(weight.transposed().t(), weight.scale_inv)

    def grad_input(self, rows: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        """Compute grad_input, [.., I], of some rows of the gathered grad_output."""
        return self.recipe.grad_input(rows, weight, dtype)

    @abstractmethod
    def grad_weight(self, gathered: Gathered, kept: Kept, dtype: torch.dtype) -> Tensor:
        """Compute grad_weight, [O, I], of the gathered grad_output and what was kept of x."""

    def grads(
        self,
        gathered: Gathered,
        weight_fp8: Fp8Weight | None,
        kept: Kept | None,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (grad_input [T, I], grad_weight [O, I]) of a gathered grad_output, in `dtypes`; None for the first
        without a weight (from `prepared`), for the second without what was kept of x."""
        grad_input = None if weight_fp8 is None else self.grad_input(self.rows(gathered), weight_fp8, dtypes[0])
        return grad_input, None if kept is None else self.grad_weight(gathered, kept, dtypes[1])

    # --- both ---

    @abstractmethod
    def row_scales(self, scale_inv: Tensor, num_rows: int) -> Tensor:
        """Return scales as a GEMM takes them; they arrive as [n, ...] of `num_rows` rows."""

    def rows(self, gathered: Gathered) -> Quantized:
        """Return all rows of what was gathered."""
        scales = gathered.once("row_scales", lambda: self.row_scales(gathered.scale_inv, gathered.shape[0]))
        return Quantized(gathered.codes, None, scales)


class TensorRule(Rule):
    """One power-of-two scale for each rank's shard: 4 bytes in the payload."""

    def send_input(self, x: Tensor, *, record: bool) -> Shard:
        return Shard(*quantize_tensor_pow2(as_matrix(x), E4M3))

    def send_grad(self, grad_SO: Tensor) -> Shard:
        return Shard(*quantize_tensor_pow2(grad_SO, self.recipe.grad_format))

    def grad_weight(self, gathered: Gathered, kept: Kept, dtype: torch.dtype) -> Tensor:
        columns, scale_inv = self._columns(gathered)
        return self.recipe.grad_weight(Quantized(None, columns, scale_inv), None, kept, dtype)

    def row_scales(self, scale_inv: Tensor, num_rows: int) -> Tensor:
        num_ranks = scale_inv.shape[0]
        return scale_inv.view(num_ranks, 1, 1).expand(num_ranks, num_rows // num_ranks, 1).reshape(num_rows, 1)

    def _columns(self, gathered: Gathered) -> Kept:
        return align(gathered.codes, gathered.scale_inv)


class RowRule(Rule):
    """One scale for each token: 4 bytes a token in the payload, the values that one device would give.

    A gathered x keeps them to the end, for the recipe folds them into a grad_output that is local. A gathered
    grad_output has nothing left to be folded into: its scales and those of x are powers of two and aligned, and the
    weight, whose scales grad_input contracts over, is quantised once more by its columns.
    """

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        rows, scale_inv = quantize_rows_pow2(as_matrix(x), E4M3)
        x_fp8 = Quantized(rows, None, scale_inv)
        return x_fp8.with_columns() if needs_columns else x_fp8

    def send_grad(self, grad_SO: Tensor) -> Shard:
        return Shard(*quantize_rows_pow2(grad_SO, self.recipe.grad_format))

    def prepared(self, weight: Fp8Weight) -> Fp8Weight:
        return super().prepared(weight) if weight.scale_inv.dim() == 0 else weight

    def grad_input(self, rows: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        if weight.scale_inv.dim() == 0:
            return self.recipe.grad_input(rows, weight, dtype)
        by_columns, scale_inv = quantize_colwise_t((weight.data.float() * weight.scale_inv).to(torch.bfloat16), E4M3)
        grad_rows = self.recipe.grad_rows(rows)
        return self.recipe.product("grad_input", grad_rows, by_columns, rows.scale_inv, scale_inv, dtype)

    def grad_weight(self, gathered: Gathered, kept: Kept, dtype: torch.dtype) -> Tensor:
        x_fp8_IT, x_scale_inv = kept
        columns, scale_inv = align(gathered.codes, (self.rows(gathered).scale_inv * x_scale_inv)[:, 0])
        one = torch.ones_like(scale_inv)
        return self.recipe.product("grad_weight", columns, x_fp8_IT, scale_inv, one, dtype)

    def row_scales(self, scale_inv: Tensor, num_rows: int) -> Tensor:
        return scale_inv.reshape(num_rows, 1)


class BlockRule(Rule):
    """One power-of-two scale for each 1x128 block: 1/32 byte an element in the payload.

    Columns, with blocks along the tokens, are made of the gathered rows by exponent shifts (`transpose_blockwise`).
    """

    def send_input(self, x: Tensor, *, record: bool) -> Shard:
        x_fp8 = self.recipe.quantize_input(x, needs_columns=False, record=record)
        assert x_fp8.rows is not None
        return Shard(x_fp8.rows, x_fp8.scale_inv.t().contiguous())

    def send_grad(self, grad_SO: Tensor) -> Shard:
        quantized = quantize_blockwise(grad_SO, self.recipe.grad_format, (1, BLOCK), "row")
        assert quantized.x_fp8 is not None and quantized.scale_inv is not None
        return Shard(quantized.x_fp8, quantized.scale_inv.t().contiguous())

    def grad_weight(self, gathered: Gathered, kept: Kept, dtype: torch.dtype) -> Tensor:
        columns, scale_inv = self._columns(gathered)
        return self.recipe.grad_weight(Quantized(None, columns, scale_inv, scale_inv), None, kept, dtype)

    def row_scales(self, scale_inv: Tensor, num_rows: int) -> Tensor:
        num_blocks = scale_inv.shape[1]  # [n, blocks, S] to [T, blocks] with strides (1, T), cuBLASLt's layout
        return scale_inv.transpose(0, 1).reshape(num_blocks, num_rows).t()

    def _columns(self, gathered: Gathered) -> Kept:
        rows = self.rows(gathered)
        assert rows.rows is not None
        return transpose_blockwise(rows.rows, rows.scale_inv)


RULES: dict[str, type[Rule]] = {"tensorwise": TensorRule, "rowwise": RowRule, "blockwise": BlockRule}
"""Rules by the recipes of linears whose operands can be gathered in FP8."""


def rule_of(recipe: Recipe) -> Rule:
    """Return the rule of a layer with `recipe`. Raises ConfigError where there is none."""
    if recipe.name not in RULES:
        raise ConfigError(
            f"fp8.linear.recipe: expected one of {', '.join(RULES)} for tensor-parallel layers, got {recipe.name}. Set "
            "one of these."
        )
    return RULES[recipe.name](recipe)


def quantize_rows_pow2(x: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """Quantize `x` by a power of two for each row: two reads of `x`.

    Args:
        x: bf16, fp16 or fp32, contiguous [T, C].
        fmt: E4M3 or E5M2.

    Returns:
        (x_fp8 [T, C], scale_inv float32 [T, 1]).
    """
    if x.numel() == 0:
        return x.to(fmt.torch_dtype), x.new_ones((x.shape[0], 1), dtype=torch.float32)
    amax = block_amax(x, (1, 128)).amax(1, keepdim=True)
    scale, scale_inv = pow2_scale(amax, fmt.max)
    x_fp8 = quantize_part(x.view(-1), scale, 0, x.shape[1], (1, x.shape[1]), fmt)
    return x_fp8.view(x.shape), scale_inv

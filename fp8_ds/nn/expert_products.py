"""The three products of all experts: one expert after another, or all of them in one launch.

Shape suffixes: P rows (nn/groups.py), E experts, N output and K input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp8_ds.config import LinearConfig
from fp8_ds.nn.groups import Groups
from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.recipe import Fp8Weight, Recipe
from fp8_ds.ops import grouped
from fp8_ds.ops.transpose import transpose

MAX_IN_A_LOOP = 16
"""More stay bf16 where they would be a loop, of which the host takes some 0.6 ms for each, forward and backward of both
weights (docs/decisions/0011)."""


def why_too_many(
    num_experts: int, features: Iterable[int], config: LinearConfig, device: torch.device | None, *, is_whole: bool
) -> str | None:
    """Say why a layer's experts stay in bf16: more than `MAX_IN_A_LOOP` would be a loop. None: they need not.

    Args:
        num_experts: E.
        features: N and K of its weights.
        config: the "linear" block.
        device: as `can_be_one_launch`.
        is_whole: whether all its weights would be in FP8 else.
    """
    is_loop = not is_whole or config.backend != "torch" or not can_be_one_launch(features, device)
    if num_experts > MAX_IN_A_LOOP and is_loop:
        return f"more than {MAX_IN_A_LOOP} experts, which would be a loop"
    return None


def can_be_one_launch(features: Iterable[int], device: torch.device | None) -> bool:
    """Whether there are kernels for all experts at once.

    Args:
        features: N and K of the weights.
        device: that trains. None: a GPU of compute capability 9.0, which need not be here.
    """
    is_aligned = all(size % grouped.ALIGNMENT == 0 for size in features)
    return is_aligned and (device is None or grouped.can_run(device))


def has_one_launch(like: Tensor, features: Iterable[int], recipes: Iterable[Recipe]) -> bool:
    """Whether the experts of a layer are computed all at once, and their rows are packed.

    Args:
        like: on the device of the layer; one without numbers (fp8_ds.rehearsal) stands for one on a GPU.
        features: N and K of its weights.
        recipes: of its weights.
    """
    device = None if isinstance(like, FakeTensor) else like.device
    return any(map(_has_kernel, recipes)) and can_be_one_launch(features, device)


def _has_kernel(recipe: Recipe) -> bool:
    return recipe.is_fp8 and recipe.backend == "torch"


def expert_products(groups: Groups, recipe: Recipe) -> ExpertProducts:
    """For rows of `groups`: in one launch where they are packed and the recipe is in FP8."""
    kind = OneLaunch if groups.order is not None and _has_kernel(recipe) else Loop
    return kind(groups, recipe)


@dataclass(frozen=True)
class ExpertProducts(ABC):
    """What is nobody's row is 0 in each result, and of an expert without rows grad_weight is.

    Args:
        groups: whose row each is.
        recipe: of the weight.
    """

    groups: Groups
    recipe: Recipe

    @abstractmethod
    def output(self, x_PK: Tensor, x_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        """[P, N]."""

    @abstractmethod
    def grad_input(self, rows_PN: Tensor, grad_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        """[P, K]."""

    @abstractmethod
    def grad_weight(
        self, grad_fp8: Quantized, grad_PN: Tensor, x_PK: Tensor, x_scale_inv: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """[E, N, K]; grad_PN is what `grad_fp8` was quantised from."""

    @abstractmethod
    def kept_groups(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """`ends`, `place` and `order` of Groups by which the backward waits for nothing."""


class Loop(ExpertProducts):
    """Each expert's own product: the bits of its own `Fp8Linear`, on any device. The host reads who has rows."""

    def output(self, x_PK: Tensor, x_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        parts = self.recipe.parts
        outputs = [
            parts.output(Quantized(x_PK[rows], None, x_scale_inv), _expert(weight, e), dtype)
            for e, rows in self.groups.occupied()
        ]
        return self.groups.joined(outputs, x_PK.new_empty(0, dtype=dtype), weight.data.shape[1])

    def grad_input(self, rows_PN: Tensor, grad_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        parts = self.recipe.parts
        grads = [
            parts.grad_input(Quantized(rows_PN[rows], None, grad_scale_inv), _expert(weight, e), dtype)
            for e, rows in self.groups.occupied()
        ]
        return self.groups.joined(grads, rows_PN.new_empty(0, dtype=dtype), weight.data.shape[2])

    def grad_weight(
        self, grad_fp8: Quantized, grad_PN: Tensor, x_PK: Tensor, x_scale_inv: Tensor, dtype: torch.dtype
    ) -> Tensor:
        rows_PN, recipe = grad_fp8.rows, self.recipe
        assert rows_PN is not None
        shape = (len(self.groups.ends) - 1, rows_PN.shape[1], x_PK.shape[1])
        grad_weight = torch.zeros(shape, dtype=dtype, device=grad_PN.device)
        for expert, rows in self.groups.occupied():
            grad_e, kept = Quantized(rows_PN[rows], None, grad_fp8.scale_inv), (x_PK[rows], x_scale_inv)
            if recipe.is_fp8:
                grad_e, kept = grad_e.with_columns(), (transpose(x_PK[rows]), x_scale_inv)
            grad_weight[expert] = recipe.parts.grad_weight(grad_e, grad_PN[rows], kept, dtype)
        return grad_weight

    def kept_groups(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """`ends` as the host has read them."""
        ends = torch.tensor([end for _, end in self.groups.bounds], dtype=torch.int32, device="cpu")
        return ends, self.groups.place, self.groups.order


class OneLaunch(ExpertProducts):
    """All experts' at once (ops/grouped): the loop's results but for the order of sums, and nobody waits."""

    def output(self, x_PK: Tensor, x_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        is_fast = "output" in self.recipe.fast_gemms
        scales = (x_scale_inv, weight.scale_inv)
        return grouped.rows_by_matrices(x_PK, weight.data.contiguous(), self._ends, *scales, dtype, is_fast)

    def grad_input(self, rows_PN: Tensor, grad_scale_inv: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        is_fast = "grad_input" in self.recipe.fast_gemms
        scales = (grad_scale_inv, weight.scale_inv)
        return grouped.rows_by_matrices(
            rows_PN, transpose(weight.data.contiguous()), self._ends, *scales, dtype, is_fast
        )

    def grad_weight(
        self, grad_fp8: Quantized, grad_PN: Tensor, x_PK: Tensor, x_scale_inv: Tensor, dtype: torch.dtype
    ) -> Tensor:
        assert grad_fp8.rows is not None
        is_fast = "grad_weight" in self.recipe.fast_gemms
        planes = (grouped.columns(grad_fp8.rows, self._ends), grouped.columns(x_PK, self._ends))
        scales = (grad_fp8.scale_inv, x_scale_inv)
        return grouped.columns_by_columns(*planes, self._ends, *scales, dtype, is_fast)

    def kept_groups(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.groups.ends, self.groups.place, self.groups.order

    @property
    def _ends(self) -> Tensor:
        """Without that of the rows that are nobody's."""
        return self.groups.ends[:-1]


def _expert(weight: Fp8Weight, expert: int) -> Fp8Weight:
    return Fp8Weight(weight.data[expert], weight.scale_inv)

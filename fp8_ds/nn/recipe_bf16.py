"""Recipe of a linear that is in bf16 for now: same module, Parameters and hooks, with GEMMs in high precision.

    output = x W^T,  grad_input = grad_output W,  grad_weight = grad_output^T x

x and grad_output are used as they are; W is bf16 of the masters, which ZeRO keeps beside the FP8 bytes meanwhile.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.recipe import DelayedRecipe, Fp8Weight, Kept, Recipe, as_matrix, refuse_released
from fp8_ds.ops.quantize import record_amax


class Bf16Recipe(Recipe):
    """Recipe in place of `fp8`, which comes back afterwards. Amaxes of delayed scaling are still recorded, one more
    read of each tensor. `Quantized.rows` are in high precision here."""

    name = "bf16"
    needs_grad_columns = False
    is_fp8 = False

    def __init__(self, fp8: Recipe) -> None:
        self.fp8 = fp8
        self.grad_format = fp8.grad_format
        self.backend = fp8.backend
        self.is_turned = fp8.is_turned
        self.shared = None

    def describe(self) -> str:
        return f"fp8=bf16 for now, else {self.fp8.describe()}"

    def move(self, device: torch.device) -> None:
        self.fp8.move(device)

    def read_weight(self, weight: Tensor) -> Fp8Weight:
        """Return bf16 of the master, which ZeRO keeps beside the bytes (stages 1 and 2) or has gathered (stage 3)."""
        payload = getattr(weight, "_fp8", None)
        if payload is not None and payload.hp is not None:
            return Fp8Weight(payload.hp, payload.scale_inv)
        assert payload is None or payload.data is None, f"{payload.name} is gathered in FP8 for a layer in bf16"
        if payload is not None:
            refuse_released(weight)
        with torch._C.DisableTorchFunctionSubclass():
            return Fp8Weight(weight.detach(), weight.new_ones((), dtype=torch.float32))

    def quantize_weight(self, weight: Tensor) -> Fp8Weight:
        return Fp8Weight(weight, weight.new_ones((), dtype=torch.float32))

    def adopt(self, x: Tensor, x_fp8: Quantized, *, record: bool) -> Quantized:
        return self._quantize_input(x, False, record)

    def kept(self, x: Tensor, x_fp8: Quantized) -> Kept:
        return (as_matrix(x),)

    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized:
        if record and isinstance(self.fp8, DelayedRecipe):
            record_amax(x, self.fp8.slot_x.amax_local)
        return _as_it_is(as_matrix(x))

    def quantize_grad_output(self, grad_TO: Tensor, weight: Fp8Weight | None, kept: Kept | None) -> Quantized:
        if isinstance(self.fp8, DelayedRecipe):
            record_amax(grad_TO, self.fp8.slot_grad.amax_local)
        return _as_it_is(grad_TO)

    def output(self, x_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        return self.biased_output(x_fp8, weight, None, dtype)

    def biased_output(self, x_fp8: Quantized, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute the output with one rounding, as nn.Linear does."""
        assert x_fp8.rows is not None
        own = weight.data.dtype
        bias = None if bias is None else bias.to(own)
        return F.linear(x_fp8.rows.to(own), weight.data, bias).to(dtype)

    def grad_input(self, grad_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        assert grad_fp8.rows is not None
        return (grad_fp8.rows.to(weight.data.dtype) @ weight.data).to(dtype)

    def grad_weight(self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: Kept, dtype: torch.dtype) -> Tensor:
        assert grad_TO is not None
        x_TI = kept[0].to(grad_TO.dtype)
        return (x_TI.t() @ grad_TO if self.is_turned else grad_TO.t() @ x_TI).to(dtype)


def _as_it_is(x: Tensor) -> Quantized:
    return Quantized(x, None, x.new_ones((), dtype=torch.float32))

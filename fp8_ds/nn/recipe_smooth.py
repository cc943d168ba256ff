"""Smooth-SwiGLU: outlier channels of a SwiGLU's product are divided by a power of two, which the next weight takes on.

With c[F] >= 1 of the product's channels, exact in either direction:

    output      = gemm(q(x / c), W c)
    grad_input  = gemm(q(grad_output), W.T)
    grad_weight = gemm(q(grad_output).T, q(x / c).T) c

c is the square root of how far a channel's amax lies above the median one's, down to a power of two: half of the
outlier's exponent stays with x, half goes to W, so that neither side's other values fall out of E4M3. W c is W's codes
with other exponents, and no rounding but of what becomes subnormal. Channels that are no outliers keep their bytes.

Source: M. Fishman et al., "Scaling FP8 training to trillion-token LLMs", arXiv 2409.12517, section 4.4 (it divides by
the whole amax); the square root, SmoothQuant, arXiv 2211.10438, equation 4 with alpha 0.5.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.formats import E4M3
from fp8_ds.nn.linear import Fp8Linear
from fp8_ds.nn.mlp import SwigluParts, parts_of
from fp8_ds.nn.quantized import Quantized
from fp8_ds.nn.recipe import Fp8Weight, TensorwiseRecipe, as_matrix
from fp8_ds.ops._producer import Scaling
from fp8_ds.scaling.predicted import pow2_scale_inv

_MAX_EXPONENT = 8


def channel_scale(x: Tensor) -> Tensor:
    """float32 [F], powers of two from 1 to 256: c of the module's text, for x [T, F]; ones if T is 0."""
    if x.shape[0] == 0:
        return x.new_ones(x.shape[1], dtype=torch.float32)
    amax = x.abs().amax(dim=0).float()
    exponent = (0.5 * torch.log2(amax / amax.median())).floor().nan_to_num(0.0).clamp(0, _MAX_EXPONENT)
    return torch.exp2(exponent)


class SmoothRecipe(TensorwiseRecipe):
    """Of the last linear of a SwiGLU MLP. Its input comes in high precision, and no other layer reads it."""

    name = "tensorwise, smooth"

    def producer_scaling(self) -> Scaling | None:
        return None

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        x_TF = as_matrix(x)
        scale_F = channel_scale(x_TF)
        smooth = (x_TF * scale_F.reciprocal()).to(x.dtype)
        return replace(self._quantize_input(smooth, needs_columns, record), channel_scale=scale_F)

    def kept(self, x: Tensor, x_fp8: Quantized) -> tuple[Tensor, ...]:
        assert x_fp8.channel_scale is not None
        return *super().kept(x, x_fp8), x_fp8.channel_scale

    def output(self, x_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        assert x_fp8.channel_scale is not None
        codes = weight.data.float() * x_fp8.channel_scale
        exponent = pow2_scale_inv(codes.abs().amax())
        folded = (codes * exponent.reciprocal()).to(E4M3.torch_dtype)
        return super().output(x_fp8, Fp8Weight(folded, exponent * weight.scale_inv), dtype)

    def grad_weight(
        self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        return (super().grad_weight(grad_fp8, grad_TO, kept[:2], dtype) * kept[2]).to(dtype)


def smooth_swiglus(model: nn.Module, linear_config: LinearConfig) -> str:
    """The last linears of SwiGLU MLPs have a SmoothRecipe afterwards; returns a line that says how many.

    Args:
        model: whose linears are converted, before producers are fused.
        linear_config: the "linear" block.

    Raises:
        ConfigError: there is no such MLP with its last linear in FP8.
    """
    found = []
    for fqn, module in model.named_modules():
        if sum(isinstance(child, nn.Linear) for child in module.children()) < 3:
            continue
        parts = parts_of(module)
        if not isinstance(parts, SwigluParts):
            continue
        down = module.get_submodule(parts.down)
        if type(down) is Fp8Linear:
            found.append(f"{fqn}.{parts.down}")
            down.fp8_recipe = SmoothRecipe(linear_config)
    if not found:
        raise ConfigError(
            "fp8.activations.smooth_swiglu: expected a module whose forward is down(silu(gate(x)) * up(x)), with down "
            "in FP8 and not tensor-parallel, got none. Remove the key."
        )
    return f"fp8: smooth SwiGLU in {len(found)} linears, from {found[0]} on"

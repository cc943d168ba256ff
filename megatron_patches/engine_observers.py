"""Statistics of Transformer Engine's FP8 linears, while an iteration is sampled.

Hooks take input, weight and output gradient before the cast, quantise them once more as the recipe does, and count:

    tensorwise   by the tensor's own amax, on this rank
    delayed      by the scale that the module has for this iteration
    blockwise    1x128 for inputs and output gradients, 128x128 for weights

An input is that of the GEMM: where a norm is fused before it (LayerNormLinear), the norm is computed once more. A
weight that Transformer Engine keeps in FP8 is counted as it is. Tensors are counted in every forward, a recomputed one
too, which changes no share. Sources: transformer_engine/pytorch/module/{linear,layernorm_linear}.py and quantization.py
of 2.11, names of attributes and the order of scales (input, weight; output gradient): read, not copied.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_ds.monitor.statistics import KINDS, StatisticsTable
from fp8_ds.numerics.formats import E4M3, E5M2, Float8Format
from fp8_ds.ops.blockwise import BLOCK, quantize_blockwise
from fp8_ds.ops.observe import observe_codes, observe_hp
from fp8_ds.ops.quantize import quantize, quantize_tensorwise

RECIPES = ("tensorwise", "delayed", "blockwise")
"""The values of --fp8-recipe whose casts are known here."""


def is_engine_linear(name: str, module: Any) -> bool:
    """Whether the module is a linear of Transformer Engine's, or of Megatron's extensions/transformer_engine.py."""
    return name.rsplit(".", 1)[-1].startswith("linear_") and "transformer_engine" in type(module).__module__


class EngineObservers:
    """FP8 linears of Transformer Engine, watched between `attach` and `detach`.

    Args:
        linears: name -> a module of `is_engine_linear` with one weight.
        table: has a row for each of these names, in their order.
        recipe: one of RECIPES.
        fp8_format: --fp8-format: "hybrid" or "e4m3".
    """

    def __init__(self, linears: Mapping[str, Any], table: StatisticsTable, recipe: str, fp8_format: str) -> None:
        self._linears = [(module, [table.slot(i, k) for k in KINDS]) for i, module in enumerate(linears.values())]
        self._recipe, self._grad_format = recipe, E5M2 if fp8_format == "hybrid" else E4M3
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Count forwards and backwards from here on."""
        for module, counts in self._linears:
            self._handles.append(module.register_forward_hook(functools.partial(self._after_forward, counts)))

    def detach(self) -> None:
        """Remove the hooks; those of output gradients end with their graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _after_forward(self, counts: list[Tensor], module: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        of_input, of_weight, of_grad = counts
        self._count(_normed(module, inputs[0]), E4M3, of_input, (1, BLOCK), self._scale(module, "scaling_fwd", 0))
        weight = module.weight
        if (codes := getattr(weight, "_data", None)) is not None:  # of a Float8Tensor
            observe_codes(codes.view(E4M3.torch_dtype), weight._scale_inv.view(()), of_weight, can_saturate=False)
        else:
            # Transformer Engine's other tensors leave FP8 by a method whose name torch's plain ones have, too.
            is_plain = type(weight) in (Tensor, torch.nn.Parameter)
            plain = weight if is_plain else weight.dequantize()
            self._count(plain, E4M3, of_weight, (BLOCK, BLOCK), self._scale(module, "scaling_fwd", 1))
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.register_hook(functools.partial(self._after_backward, module, of_grad))

    @torch.no_grad()
    def _after_backward(self, module: Any, counts: Tensor, grad: Tensor) -> None:
        self._count(grad, self._grad_format, counts, (1, BLOCK), self._scale(module, "scaling_bwd", 0))

    def _scale(self, module: Any, which: str, place: int) -> Tensor | None:
        """Return the module's delayed scale; None if there is none (yet)."""
        state = getattr(module, "fp8_meta", {}).get(which) if self._recipe == "delayed" else None
        return None if state is None else state.scale[place]

    def _count(
        self, x: Tensor, fmt: Float8Format, counts: Tensor, block: tuple[int, int], scale: Tensor | None
    ) -> None:
        """Count `x` before and after the recipe's cast; `scale` is of delayed scaling."""
        x = x.reshape(-1, x.shape[-1]).contiguous()
        if self._recipe == "delayed":
            if scale is not None:
                scale_inv = scale.reciprocal()
                observe_hp(x, counts, scale_inv, fmt.max)
                observe_codes(quantize(x, scale, fmt), scale_inv, counts, can_saturate=True)
            return
        observe_hp(x, counts)
        if self._recipe == "tensorwise":
            codes, scale_inv = quantize_tensorwise(x, fmt)
        else:
            quantized = quantize_blockwise(x, fmt, block, "row")
            assert quantized.x_fp8 is not None and quantized.scale_inv is not None
            codes, scale_inv = quantized.x_fp8, quantized.scale_inv
        observe_codes(codes, scale_inv, counts, can_saturate=False)


def _normed(module: Any, x: Tensor) -> Tensor:
    """Return the input of the module's GEMM, in the dtype of `x`."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return x
    factor = weight.float() + float(getattr(module, "zero_centered_gamma", False))
    bias = getattr(module, "layer_norm_bias", None)
    if bias is None and getattr(module, "normalization", "RMSNorm") == "RMSNorm":
        return F.rms_norm(x.float(), x.shape[-1:], factor, module.eps).to(x.dtype)
    return F.layer_norm(x.float(), x.shape[-1:], factor, None if bias is None else bias.float(), module.eps).to(x.dtype)

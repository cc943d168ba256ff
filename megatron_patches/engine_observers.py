"""Transformer Engine's FP8 linears, looked at while an iteration is sampled.

What Transformer Engine casts inside its modules is not to be had. Hooks take the tensors before the cast, quantise them
once more as the recipe does, and count:

    tensorwise   by the tensor's own amax, on this rank
    delayed      by the scale that the module has for this iteration
    blockwise    1x128 for inputs and output gradients, 128x128 for weights

An input is that of the GEMM: where a norm is fused before it (LayerNormLinear), the norm is computed once more. A
weight that Transformer Engine keeps in FP8 is counted as it is. With activations recomputed an input is counted twice,
which changes no share. Sources: transformer_engine/pytorch/module/{linear,layernorm_linear}.py and quantization.py of
2.11, names of attributes and the order of scales (input, weight; output gradient): read, not copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_ds.formats import E4M3, E5M2, Float8Format
from fp8_ds.monitor.statistics import KINDS, StatisticsTable
from fp8_ds.ops.blockwise import BLOCK, quantize_blockwise
from fp8_ds.ops.observe import observe_codes, observe_hp
from fp8_ds.ops.quantize import quantize, quantize_tensorwise

RECIPES = ("tensorwise", "delayed", "blockwise")
"""Of --fp8-recipe, whose casts are known here."""
_ENGINE = "transformer_engine"
_INPUT, _WEIGHT = 0, 1
"""Places in the forward scales of a module's fp8_meta; of the backward ones the output gradient has the first."""


def is_engine_linear(name: str, module: Any) -> bool:
    """Whether a module of a transformer layer is a linear of Transformer Engine's.

    Args:
        name: of it in the layer.
        module: of Megatron's class, which lies in megatron/core/extensions/transformer_engine.py, or of its own.
    """
    return name.rsplit(".", 1)[-1].startswith("linear_") and _ENGINE in type(module).__module__


class EngineObservers:
    """FP8 linears of Transformer Engine, watched between `attach` and `detach`.

    Args:
        linears: name -> a module of `is_engine_linear` with one weight.
        table: with a row for each of these names, in their order.
        recipe: one of RECIPES.
        fp8_format: --fp8-format: "hybrid" or "e4m3".
    """

    def __init__(self, linears: Mapping[str, Any], table: StatisticsTable, recipe: str, fp8_format: str) -> None:
        assert tuple(linears) == table.names and recipe in RECIPES
        grad_format = E5M2 if fp8_format == "hybrid" else E4M3
        self._linears = [
            _Linear(module, recipe, grad_format, tuple(table.slot(i, kind) for kind in KINDS))
            for i, module in enumerate(linears.values())
        ]
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Layers are counted from here on; a weight when its layer first reads it: until then it may be on its way
        from other ranks (--overlap-param-gather).

        Raises:
            RuntimeError: they are already.
        """
        if self._handles:
            raise RuntimeError("observers: expected none attached, got some. Call detach first.")
        for linear in self._linears:
            linear.has_seen_weight = False
            self._handles.append(linear.module.register_forward_pre_hook(linear.before))
            self._handles.append(linear.module.register_forward_hook(linear.after))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Linear:
    """One of them, and what its tensors are counted into."""

    has_seen_weight = False

    def __init__(self, module: Any, recipe: str, grad_format: Float8Format, counts: tuple[Tensor, ...]) -> None:
        self.module, self.recipe, self.grad_format = module, recipe, grad_format
        self.of_input, self.of_weight, self.of_grad = counts

    def before(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        if not self.has_seen_weight:
            self._see_weight()
        with torch.no_grad():
            self._see(_normed(module, inputs[0].detach()), E4M3, self.of_input, (1, BLOCK), "scaling_fwd", _INPUT)

    def after(self, module: Any, inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(self._see_grad)

    def _see_grad(self, grad: Tensor) -> None:
        with torch.no_grad():
            self._see(grad.detach(), self.grad_format, self.of_grad, (1, BLOCK), "scaling_bwd", 0)

    def _see_weight(self) -> None:
        self.has_seen_weight = True
        weight = self.module.weight
        with torch.no_grad():
            codes, scale_inv = getattr(weight, "_data", None), getattr(weight, "_scale_inv", None)
            if isinstance(codes, Tensor) and codes.dtype == torch.uint8 and isinstance(scale_inv, Tensor):
                observe_codes(codes.view(E4M3.torch_dtype), scale_inv.reshape(()), self.of_weight, can_saturate=False)
                return
            # Transformer Engine's other tensors leave FP8 by a method whose name torch's plain ones have, too.
            plain = weight.detach() if type(weight) in (Tensor, torch.nn.Parameter) else weight.dequantize()
            self._see(plain, E4M3, self.of_weight, (BLOCK, BLOCK), "scaling_fwd", _WEIGHT)

    def _see(
        self, x: Tensor, fmt: Float8Format, counts: Tensor, block: tuple[int, int], scales: str, place: int
    ) -> None:
        x = x.reshape(-1, x.shape[-1]).contiguous()
        if self.recipe == "delayed":
            scale = self._scale(scales, place)
            if scale is None:  # before the first forward of all
                return
            scale_inv = scale.reciprocal()
            observe_hp(x, counts, scale_inv, fmt.max)
            observe_codes(quantize(x, scale, fmt), scale_inv, counts, can_saturate=True)
            return
        observe_hp(x, counts)
        if self.recipe == "tensorwise":
            codes, scale_inv = quantize_tensorwise(x, fmt)
        else:
            planes = quantize_blockwise(x, fmt, block, "row")
            assert planes.x_fp8 is not None and planes.scale_inv is not None
            codes, scale_inv = planes.x_fp8, planes.scale_inv
        observe_codes(codes, scale_inv, counts, can_saturate=False)

    def _scale(self, scales: str, place: int) -> Tensor | None:
        state = getattr(self.module, "fp8_meta", {}).get(scales)
        scale: Tensor | None = None if state is None else state.scale[place].clone()  # the update writes it in place
        return scale


def _normed(module: Any, x: Tensor) -> Tensor:
    """What the module's GEMM reads, in the dtype of `x`."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return x
    factor = weight.float() + 1.0 if getattr(module, "zero_centered_gamma", False) else weight.float()
    shape = (x.shape[-1],)
    bias = getattr(module, "layer_norm_bias", None)
    if bias is None and getattr(module, "normalization", "RMSNorm") == "RMSNorm":
        return F.rms_norm(x.float(), shape, factor, module.eps).to(x.dtype)
    return F.layer_norm(x.float(), shape, factor, None if bias is None else bias.float(), module.eps).to(x.dtype)

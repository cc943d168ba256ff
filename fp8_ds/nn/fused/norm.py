"""RMSNorm modules that hand their readers FP8: recognised by what they compute, not by their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.nn.fused.module import (
    FORMAT,
    FusedModule,
    as_rows,
    bf16_argument,
    deliver,
    keep,
    recover,
)
from fp8_ds.nn.linear.fp8_linear import full_shape
from fp8_ds.nn.linear.recipe import Recipe
from fp8_ds.ops._register import once_differentiable
from fp8_ds.ops.rmsnorm import MAX_COLS, Rounding, reference, rmsnorm, rmsnorm_backward

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_PROBE_SCALES = (1.0, 1e-4, 1e-2, 30.0)
"""Scales of the probe's rows, in turn. Next to the squares of the second, eps is the larger."""
_MAX_SHARE = 2e-3
"""Share of probe values that may be one bf16 step off: sums have another order, and the wrong rounding is off in 5 %
and more."""


class _RMSNormFunction(torch.autograd.Function):
    """`x * rstd * weight`; the backward keeps x, as it is or in FP8, and rstd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: FusedRMSNorm, recipe: Recipe, record: bool) -> Any:
        scaling = recipe.producer_scaling()
        by = scaling or "rowwise"
        eps, rounding = module.fp8_parts
        output, rstd = rmsnorm(as_rows(x), weight, eps, FORMAT, by, record=record, rounding=rounding)
        if record and any(ctx.needs_input_grad):
            ctx.save_for_backward(weight, rstd, *keep(x, module.fp8_producer.nonlinear))
        return deliver(output, recipe, scaling, x.shape, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        weight, rstd, *kept = ctx.saved_tensors
        grad_x, grad_weight = rmsnorm_backward(as_rows(grad_output), recover(kept), weight, rstd)
        return grad_x.view(grad_output.shape), grad_weight.to(weight.dtype), None, None, None


class _TracedFunction(torch.autograd.Function):
    """RMSNorm in operators that a graph fuses with those around them, its output in bf16; x is kept in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, twice: bool) -> Tensor:
        rows = as_rows(x)
        rstd = torch.rsqrt(rows.float().pow(2).mean(1) + eps)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(weight, rstd, *keep(rows, "fp8"))
        output: Tensor = torch.ops.aten._unsafe_view.default(reference.normalize(rows, weight, rstd, twice), x.shape)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        weight, rstd, *kept = ctx.saved_tensors
        normed, grad = recover(kept).float() * rstd[:, None], as_rows(grad_output).float()
        grad_normed = grad * weight.float()
        grad_x = (grad_normed - normed * (grad_normed * normed).mean(1, keepdim=True)) * rstd[:, None]
        return grad_x.bfloat16().view(grad_output.shape), (grad * normed).sum(0).to(weight.dtype), None, None


class FusedRMSNorm(FusedModule):
    """Mix-in before the class of an RMSNorm.

    The forward is the class's own if none of its readers is in FP8, with anything but one bf16 tensor and a bf16
    weight, and under torch.compile, which fuses it by itself, unless its input is to be kept in FP8.
    """

    fp8_parts: tuple[float, Rounding]  # from `arithmetic_of`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_traced = torch.compiler.is_compiling()
        if is_traced and (self.fp8_producer.nonlinear == "bf16" or not torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        x, recipe = bf16_argument(args, kwargs), self.fp8_producer.recipe()
        weight: Any = self.weight
        if x is None or recipe is None or weight.dtype != torch.bfloat16 or torch._C._get_tracing_state():
            return super().forward(*args, **kwargs)
        apply: Any  # untyped in torch
        if is_traced:
            apply = _TracedFunction.apply
            eps, rounding = self.fp8_parts
            return apply(x, weight, eps, rounding == "twice")
        apply = _RMSNormFunction.apply
        return apply(x, weight, self, recipe, torch.is_grad_enabled())


def is_candidate(module: nn.Module) -> bool:
    """Whether `module` has a weight vector, an epsilon, and nothing else: a norm without a bias, or the like."""
    names = [name for name, p in module._parameters.items() if p is not None]
    has_eps = any(hasattr(module, name) for name in _EPS_NAMES)
    return names == ["weight"] and not module._modules and not module._buffers and has_eps


def arithmetic_of(module: nn.Module) -> tuple[float, Rounding] | str:
    """Return (eps, rounding) with which `rmsnorm` gives a candidate's results on a probe; or why it does not."""
    if "forward" in vars(module):
        return "its forward was replaced"
    weight = module._parameters["weight"]
    assert weight is not None
    shape = tuple(full_shape(weight))
    if len(shape) != 1 or not 0 < shape[0] <= MAX_COLS:
        return f"weight of shape {shape}"
    x, probe_weight = _probe(shape[0], weight.device if weight.device.type != "meta" else torch.device("cpu"))
    try:
        got = _call(module, probe_weight, x)
    except Exception as error:  # whatever another class's code raises
        return f"its forward raised {type(error).__name__}"
    if not isinstance(got, Tensor) or got.dtype != x.dtype or got.shape != x.shape:
        return "its forward is not that of an RMSNorm"
    for eps in _candidate_eps(module):
        rstd = reference.rstd_of(x, eps)
        for is_twice in (False, True):
            expected = reference.normalize(x, probe_weight, rstd, is_twice)
            steps = (expected.view(torch.int16).int() - got.view(torch.int16).int()).abs()
            if int(steps.max()) <= 2 and float((steps > 0).float().mean()) <= _MAX_SHARE:
                return eps, "twice" if is_twice else "once"
    return "other arithmetic"


def _probe(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return an input [T, width] and a weight, bf16: rows where eps weighs, a large element, negative weights."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor(_PROBE_SCALES, dtype=torch.float32).repeat(-(-1024 // width))
    rows = torch.randn(len(scales), width, dtype=torch.float32, generator=generator) * scales[:, None]
    rows[0, 0] = 300.0
    weight = torch.randn(width, dtype=torch.float32, generator=generator)
    return rows.to(device, torch.bfloat16), weight.to(device, torch.bfloat16)


def _call(module: nn.Module, weight: Tensor, x: Tensor) -> Any:
    """Run the forward of the module's class with that weight, without hooks, on a shell that shares all else."""
    shell = object.__new__(type(module))
    vars(shell).update(vars(module))
    vars(shell)["_parameters"] = dict.fromkeys(module._parameters) | {"weight": weight}
    with torch.no_grad():
        return type(module).forward(shell, x)


def _candidate_eps(module: nn.Module) -> list[float]:
    """Return the numbers that its attributes name; for None, torch's defaults, which differ between versions."""
    values = [getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)]
    if None in values:
        return [torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16)]
    return [float(value) for value in values if isinstance(value, (int, float))]

"""SwiGLU MLPs, `down(silu(gate(x)) * up(x))`, whose product reaches `down` in FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from fp8_ds.nn.fused.module import (
    FORMAT,
    FusedModule,
    Nonlinear,
    as_rows,
    bf16_argument,
    deliver,
    keep,
    recover,
)
from fp8_ds.nn.fused.swiglu import calls_more, function_of_sharded, is_one_function, swiglu_mlp
from fp8_ds.nn.linear.recipe import Recipe
from fp8_ds.ops._register import once_differentiable
from fp8_ds.ops.swiglu import swiglu, swiglu_backward

_TRANSFORMERS_SILU = ("transformers.activations", "SiLUActivation")
"""Module and name: transformers is not imported for it."""


@dataclass(frozen=True)
class SwigluNames:
    """Names of an MLP's linears, and the attribute path of its activation; empty if the source names a global."""

    gate: str
    up: str
    down: str
    activation: tuple[str, ...]


class _ProductFunction(torch.autograd.Function):
    """`silu(gate) * up`, rounded where eager bf16 rounds; the backward keeps gate and up, as they are or in FP8."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, nonlinear: Nonlinear, recipe: Recipe, record: bool) -> Any:
        scaling = recipe.producer_scaling()
        by = scaling or "rowwise"
        output, _ = swiglu(as_rows(gate), as_rows(up), FORMAT, by, record=record, with_hp=True)
        if record and any(ctx.needs_input_grad):
            ctx.save_for_backward(*keep(gate, nonlinear), *keep(up, nonlinear))
        return deliver(output, recipe, scaling, gate.shape, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        kept = ctx.saved_tensors
        half = len(kept) // 2
        grads = swiglu_backward(as_rows(grad_output), recover(kept[:half]), recover(kept[half:]))
        return *(grad.view(grad_output.shape) for grad in grads), None, None, None


class FusedSwiglu(FusedModule):
    """Mix-in before the class of a SwiGLU MLP.

    The forward is one function of its input and weights (nn/fused/swiglu.py), in eager and in a graph of
    torch.compile, which does not call its linears and activation as modules. If that would leave something out (see
    `is_one_function`), it calls the linears and not the activation, or in a graph the class's own forward. It calls
    the class's own forward also under autocast, if the last linear is not in FP8, if the activation is no SiLU any
    more, if all modules have a hook, and with anything but one bf16 tensor.
    """

    fp8_parts: SwigluNames

    def fp8_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Tensor] | None:
        """Return the function that computes all of it at once for these arguments; None: its linears are called."""
        return None if self._argument(args, kwargs) is None else _function_of(self._linears())

    def _argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        x = bf16_argument(args, kwargs)
        path = self.fp8_parts.activation
        if x is None or torch.is_autocast_enabled(x.device.type) or (path and not is_silu(attribute_at(self, path))):
            return None
        return x

    def _linears(self) -> list[Any]:
        parts = self.fp8_parts
        return [getattr(self, name) for name in (parts.gate, parts.up, parts.down)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = self._argument(args, kwargs)
        if x is None:
            return super().forward(*args, **kwargs)
        linears = self._linears()
        function = _function_of(linears)
        if function is not None:
            return function(x, linears, self.fp8_producer.nonlinear)
        recipe = None if torch.compiler.is_compiling() or calls_more() else self.fp8_producer.recipe()
        if recipe is None:
            return super().forward(*args, **kwargs)
        gate, up = linears[0](x), linears[1](x)
        apply: Any = _ProductFunction.apply  # untyped in torch
        hidden = apply(gate, up, self.fp8_producer.nonlinear, recipe, torch.is_grad_enabled())
        return linears[2](hidden)


def _function_of(linears: Sequence[Any]) -> Callable[..., Tensor] | None:
    return swiglu_mlp if is_one_function(linears) else function_of_sharded(linears)


def attribute_at(owner: Any, path: Sequence[str]) -> Any:
    """Follow `path` from `owner`; None if it is not there."""
    for name in path:
        owner = getattr(owner, name, None)
    return owner


def is_silu(activation: Any) -> bool:
    """Whether it is SiLU in any state: by identity or class, since another's values may change with a buffer, or with
    `training`."""
    if not isinstance(activation, nn.Module):
        return activation is silu
    kind = type(activation)
    is_known = kind is nn.SiLU or (kind.__module__, kind.__qualname__) == _TRANSFORMERS_SILU
    return is_known and "forward" not in vars(activation)


def computes_silu(activation: Any) -> bool:
    """Whether calling `activation` computes SiLU, and nothing else."""
    return is_silu(activation) and not has_hooks(activation) and not calls_more()


def has_hooks(activation: Any) -> bool:
    return any(hooks for name, hooks in vars(activation).items() if name.endswith("_hooks"))

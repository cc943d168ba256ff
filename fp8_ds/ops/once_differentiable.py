"""Hand-written backwards that raise an error when they are differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_MESSAGE = (
    b"an FP8 layer, or what fp8_ds has fused: expected its graph to be differentiated once, got a second time (a "
    b'gradient penalty, or another use of create_graph=True). Name the layers in "linear.filter_fqns", and leave '
    b'"activations" and "attention" at their defaults, in a model whose gradient is part of its loss.'
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `backward` of an autograd function: with `create_graph`, differentiating its gradients raises an error.

    torch's own (torch/autograd/function.py) hands out gradients without a graph where grad_output needs no gradient.
    That is so in `torch.autograd.grad(layer(x).sum(), x, create_graph=True)`, whose gradient by x depends on the weight
    none the less: a penalty on it would silently leave the weight out.

    Args:
        backward: takes ctx and gradients; returns a tensor or None, or a tuple of these.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        # A graph of torch.compile has its own refusal, which goes by what is saved as well.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return found
        gradients = found if isinstance(found, tuple) else (found,)
        needs: list[Any] = [None if one is None else one.detach().requires_grad_() for one in gradients]
        return torch._C._functions.DelayedError(_MESSAGE, len(needs))(*needs)

    return once

"""What is replaced in liger-kernel, for all its users in this process, until `fp8_ds.uninstall()`.

Two functions, both with Liger's results: the loss, which torch.compile calls instead of tracing it and which takes the
size of its chunks from the engine, and the loss's backward, which waits for nothing. No option of Liger's does either.
Tried with 0.7.0 and 0.8.5.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fp8_ds.engine.activation import RECORD
from fp8_ds.ops.multiply import multiply_, takes

_FUNCTIONAL = "liger_kernel.transformers.functional"
_LOSS = "liger_fused_linear_cross_entropy"
_CHUNK = "chunk_mem_const"
_OPS = "liger_kernel.ops.fused_linear_cross_entropy"
_BACKWARD = "fused_linear_cross_entropy_backward"
_BACKWARD_PARAMETERS = ["grad_output", "grad_input", "grad_weight", "grad_bias"]
_DEVICES = ("cuda",)
"""Types of device on which the backward is ours."""


def keep_out_of_graphs() -> None:
    """torch.compile calls Liger's kernel and traces nothing of it: the graph breaks there, numbers are those of eager.

    Its host code reads a count back and loops over chunks of tokens; traced (torch 2.13, liger-kernel 0.8.5) it is
    compiled in pieces. What Liger's callers see is a traced function that calls one that is not: they ask for its
    signature in the graph, which torch 2.14 breaks again for a function that it does not trace.
    """
    functional = importlib.import_module(_FUNCTIONAL)
    stock = getattr(functional, _LOSS)
    if hasattr(stock, "fp8_ds_stock"):
        return
    signature = inspect.signature(stock)
    chunk_mem_consts: Any = WeakIdKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        weight = given.arguments.get("weight")
        if weight not in chunk_mem_consts:
            return stock(*args, **kwargs)
        given.arguments[_CHUNK] = chunk_mem_consts[weight]
        return stock(*given.args, **given.kwargs)

    @functools.wraps(stock)  # with its signature: Liger's callers hand over what is in it
    def traced(*args: Any, **kwargs: Any) -> Any:
        return loss(*args, **kwargs)

    called: Any = traced
    called.fp8_ds_stock = stock
    called.fp8_ds_chunk_mem_consts = chunk_mem_consts
    RECORD.set(functional, _LOSS, called)


def calls_with_chunk_mem_const() -> bool:
    """Whether this liger-kernel can be told the size of its chunks: its function, and the autograd function behind it,
    which for some backends of Liger's is another one and is then not told."""
    functional = importlib.import_module(_FUNCTIONAL)
    behind = getattr(functional, "LigerFusedLinearCrossEntropyFunction", None)
    functions = (getattr(functional, _LOSS), getattr(behind, "forward", None))
    return all(one is not None and _CHUNK in inspect.signature(one).parameters for one in functions)


def set_chunk_mem_const(weight: Tensor, chunk_mem_const: int) -> None:
    """Losses of this head are computed with that constant, whatever their caller says; those of others as ever.

    The weight is what tells one engine's call from another's: forwards of Liger's have no place for the constant.

    Args:
        weight: the head's Parameter.
        chunk_mem_const: at least 1. This Liger takes it (`calls_with_chunk_mem_const`), and its loss is wrapped
            (`keep_out_of_graphs`).
    """
    getattr(importlib.import_module(_FUNCTIONAL), _LOSS).fp8_ds_chunk_mem_consts[weight] = chunk_mem_const


def wait_for_nothing_in_backward() -> None:
    """The loss's backward multiplies by its gradient on the device, or leaves all as it is where that is 1.

    Liger's asks `torch.equal(grad_output, 1)` first: the host waits until the device has done the whole forward, and
    the device then waits for the host (7 ms of a step of Llama-3-8B on H200s). Another function than that of 0.7.0 and
    0.8.5 is left as it is.
    """
    try:
        ops: Any = importlib.import_module(_OPS)
    except ModuleNotFoundError:
        return
    stock = getattr(ops, _BACKWARD, None)
    if stock is None or hasattr(stock, "fp8_ds_stock"):
        return
    parameters = inspect.signature(stock).parameters.values()
    if [str(one.replace(annotation=one.empty)) for one in parameters] != _BACKWARD_PARAMETERS:
        return
    # LigerFusedLinearCrossEntropyFunction.backward looks the name up in this module at every call.
    RECORD.set(ops, _BACKWARD, _without_a_wait(stock))


def _without_a_wait(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def backward(
        grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        grads = grad_input, grad_weight, grad_bias
        found = [grad for grad in grads if grad is not None]
        if grad_output.device.type not in _DEVICES or not all(takes(grad, grad_output) for grad in found):
            result: tuple[Tensor, Tensor | None, Tensor | None] = stock(grad_output, *grads)
            return result
        for grad in found:
            multiply_(grad, grad_output)  # in place, as Liger does, and without a new version of saved tensors
        return grads

    patched: Any = backward
    patched.fp8_ds_stock = stock
    return backward

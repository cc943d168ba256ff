"""Registration of this package's torch ops, rules for what they may write to, and backwards that call them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether kernels can be defined; Triton is missing where there is no GPU."""

_LIBRARIES: list[torch.library.Library] = []
"""Libraries kept alive: an op is gone when the library that defined it dies."""


def _check_written(op: str, written: dict[str, Tensor]) -> None:
    """Assert that each written tensor is the whole of a storage of its own, as `in_own_storage` makes it."""
    for name, x in written.items():
        assert x.storage_offset() == 0, f"{op}: {name}, which is written, is a view at an offset: use in_own_storage."
    storages = [x.untyped_storage()._cdata for x in written.values()]
    assert len(set(storages)) == len(storages), f"{op}: {', '.join(written)} share a storage: use in_own_storage."


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define `torch.ops.fp8_ds.<name>`, which runs `kernel` and traces with `fake` (no graph break in torch.compile).

    It uses the low-level define/impl pair: `torch.library.custom_op` adds several Python layers to each call, and a
    linear makes six calls. There is no autograd kernel: these ops are called inside autograd functions only.

    Args:
        schema: "name(arguments) -> results" in torch's schema language.
        kernel: takes the same arguments; for CPU and CUDA tensors.
        fake: takes the same arguments; returns empty results of the right shape and dtype. In tracing, tensors that the
            schema says are written are checked: each must be the whole of a storage of its own.

    Returns:
        The op to call.
    """
    library = torch.library.Library("fp8_ds", "FRAGMENT")
    library.define(schema)
    name = schema.split("(", 1)[0]
    for key in ("CPU", "CUDA"):
        library.impl(name, kernel, key)
    op = getattr(torch.ops.fp8_ds, name).default
    torch.library.register_fake(f"fp8_ds::{name}", _checked(op, fake), lib=library)
    _LIBRARIES.append(library)
    return op


def is_on_cuda(x: Tensor, *_: Any) -> bool:
    """Whether `x` is on CUDA and has elements; without them there is nothing to launch."""
    return x.is_cuda and x.numel() > 0


def register_pair(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    use_triton: Callable[..., bool] = is_on_cuda,
) -> Any:
    """Register an op that `reference` computes, or the function of its name in the package's module `triton`.

    Args:
        schema: its first argument is a tensor.
        reference: plain torch, in the package's `__init__.py` under a name that ends in `_reference`, or in its module
            `reference`. It runs without autocast, which the dispatcher skips at our op and not inside it.
        fake: as in `register`.
        use_triton: maps the op's arguments to whether Triton computes it.
    """
    name, package = reference.__name__.removesuffix("_reference"), reference.__module__.removesuffix(".reference")

    def kernel(x: Tensor, *args: Any) -> Any:
        if use_triton(x, *args):
            with torch.cuda.device_of(x):  # Triton launches on the current device
                return getattr(triton_of(package), name)(x, *args)
        with torch.autocast(x.device.type, enabled=False):
            return reference(x, *args)

    return register(schema, kernel, fake)


def triton_of(package: str) -> Any:
    """Import the module `triton` of an op's package; Triton itself is missing where there is no GPU.

    Raises:
        ImportError: Triton is missing.
    """
    try:
        return importlib.import_module(f"{package}.triton")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ImportError(
            "triton: expected the package, whose kernels run on CUDA, got none. Install triton in the version that "
            "your torch names."
        ) from error


def _checked(op: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fake` to check first what the op writes, if torch.compile traces it; lists, which no graph has, are not.

    Elsewhere (`torch.library.opcheck`) fake kernels see copies at offsets of torch's own choice.
    """
    arguments = enumerate(op._schema.arguments)
    written = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]

    @functools.wraps(fake)
    def checked(*args: Any) -> Any:
        if TracingContext.try_get() is not None:
            _check_written(op.name(), {name: args[i] for i, name in written if isinstance(args[i], Tensor)})
        return fake(*args)

    return checked if written else fake


_DIFFERENTIATED_TWICE = (
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
        return torch._C._functions.DelayedError(_DIFFERENTIATED_TWICE, len(needs))(*needs)

    return once

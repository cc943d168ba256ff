"""How an op of this package becomes a torch op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DEVICE_KEYS = ("CPU", "CUDA")


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> tuple[Any, torch.library.Library]:
    """`torch.ops.fp8_ds.<name>` exists, runs `kernel`, and traces with `fake` (no graph break under torch.compile).

    The low-level define/impl pair instead of `torch.library.custom_op`: the latter adds several Python layers to each
    call, and a linear makes six calls. No autograd kernel: these ops are called inside autograd functions only.

    Args:
        schema: "name(arguments) -> results" in torch's schema language.
        kernel: same arguments; for CPU and CUDA tensors.
        fake: same arguments; gives empty results of the right shape and dtype.

    Returns:
        The op to call, and the library handle, which must be kept: the op is gone when it dies.
    """
    make_library: Any = torch.library.Library  # untyped in torch
    library = make_library("fp8_ds", "FRAGMENT")
    library.define(schema)
    name = schema.split("(", 1)[0]
    for key in DEVICE_KEYS:
        library.impl(name, kernel, key)
    torch.library.register_fake(f"fp8_ds::{name}", fake, lib=library)
    return getattr(torch.ops.fp8_ds, name).default, library

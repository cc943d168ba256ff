"""DeepSpeed's hooks of ZeRO-3: what a call of them takes the host beside its work, made less. No bit changes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


def leave_out_of_graphs(offload: Any) -> None:
    """torch.compile calls the hooks from now on and traces nothing of them. Half of them DeepSpeed itself leaves out.

    The graph ends at a module that has them either way. Of the others it makes graphs without an operator, and looks at
    each call whether they still hold: half a thousand guards a module, some of them on what DeepSpeed's trace of the
    model says. Hooks that are registered later, as TRL does, are traced.

    Args:
        offload: of a ZeRO-3 optimizer, DeepSpeed's `parameter_offload`.
    """
    for handle in (offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = torch.compiler.disable(hooks[handle.id])


def keep_signatures(module: nn.Module) -> None:
    """`inspect.signature` of the functions that mark where a module's backward begins and ends is no more work.

    `torch.autograd.Function.apply` asks for it at every call of a function with `setup_context` (torch 2.11 to 2.14),
    three times a decoder layer; a signature that a function carries is handed out as it is.
    """
    for child in module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            if (function := child.__dict__.get(name)) is not None:
                function.forward.__signature__ = inspect.signature(function.forward)

"""Less host time for DeepSpeed's hooks of ZeRO-3. No bit changes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


def leave_out_of_graphs(offload: Any) -> None:
    """Keep torch.compile from tracing the hooks; it calls them instead, as DeepSpeed has it for half of them.

    A graph ends at a module with hooks either way. Traced hooks become graphs without an operator, with half a thousand
    guards a module that are checked in each call, some of them on DeepSpeed's trace of the model. Hooks that are
    registered later, as TRL does, are traced.

    Args:
        offload: DeepSpeed's `parameter_offload` of a ZeRO-3 optimizer.
    """
    for handle in (offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = torch.compiler.disable(hooks[handle.id])


def keep_signatures(module: nn.Module) -> None:
    """Store the signatures of the functions that mark where a module's backward begins and ends.

    `torch.autograd.Function.apply` asks `inspect.signature` for it at every call of a function with `setup_context`
    (torch 2.11 to 2.14), three times a decoder layer; a stored signature is returned as it is.
    """
    for child in module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            if (function := child.__dict__.get(name)) is not None:
                function.forward.__signature__ = inspect.signature(function.forward)

"""Rotary tables that a compiled graph makes once, and not once more in every kernel that reads them.

Inductor takes cosines and sines for cheap pointwise work: it computes them anew, in float32, for each element of each
layer's queries and keys, forward and backward, instead of reading a table of [length, head dim]. On an H200 rotary
embeddings took 3.4 ms of a step of Llama 2.0 B, 123 ms, where their bytes need 0.8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8_ds.ops._register import register


def keep_tables(model: nn.Module) -> list[RemovableHandle]:
    """Make the rotary tables of `model` results of an op that inductor neither fuses nor computes again.

    Eager mode and torch.export do not change. A second call changes nothing.

    Returns:
        Handles of the new hooks: of modules with a buffer `inv_freq`, or one for each kind of layer
        (`sliding_attention_inv_freq`), as the rotary embeddings of transformers have.
    """
    found = [module for module in model.modules() if any(map(_is_frequencies, module._buffers))]
    new = [module for module in found if _keep_outputs not in module._forward_hooks.values()]
    return [module.register_forward_hook(_keep_outputs) for module in new]


def _is_frequencies(name: str) -> bool:
    return name == "inv_freq" or (name.endswith("_inv_freq") and "original" not in name)


def _keep_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Keep the tables that a module returns (forward hook).

    It reads the flag of torch.export, because `torch.compiler.is_exporting()` is True in every graph of torch 2.11.
    """
    if not torch.compiler.is_compiling() or torch.compiler._is_exporting_flag:
        return output
    if type(output) is tuple:
        return tuple(map(_kept, output))
    return _kept(output)


def _kept(value: Any) -> Any:
    """Return `value` through the op if it is a tensor without gradient; anything else as it is."""
    return _op(value) if isinstance(value, Tensor) and not value.requires_grad else value


_op = register("table(Tensor x) -> Tensor", torch.clone, torch.empty_like)

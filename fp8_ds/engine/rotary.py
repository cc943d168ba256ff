"""In a compiled graph the tables of rotary embeddings are made once, not once more in every kernel that reads them.

Inductor takes cosines and sines for cheap pointwise work: it computes them anew, in float32, for each element of each
layer's queries and keys, forward and backward, where a table of [length, head dim] would be read. On an H200 rotary
embeddings took 3.4 ms of a step of Llama 2.0 B, 123 ms, where their bytes need 0.8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8_ds.ops._register import register


def keep_tables(model: nn.Module) -> list[RemovableHandle]:
    """Tables that modules of `model` make become results of an op that inductor neither fuses nor makes again.

    Eager and torch.export see nothing of it. A second call changes nothing.

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
    """A forward hook.

    Of torch.export the flag is read, not `torch.compiler.is_exporting()`, which is True in every graph of torch 2.11.
    """
    if not torch.compiler.is_compiling() or torch.compiler._is_exporting_flag:
        return output
    if type(output) is tuple:
        return tuple(map(_kept, output))
    return _kept(output)


def _kept(value: Any) -> Any:
    """Tables with a gradient are not tables; what is no tensor is handed on."""
    return _op(value) if isinstance(value, Tensor) and not value.requires_grad else value


_op = register("table(Tensor x) -> Tensor", torch.clone, torch.empty_like)

"""In a compiled graph the tables of rotary embeddings are made once, not once more in every kernel that reads them.

Inductor takes cosines and sines for cheap pointwise work: it computes them anew, in float32, for each element of each
layer's queries and keys, forward and backward, where a table of [length, head dim] would be read. On an H200 that made
the rotary embeddings of Llama 2.0 B cost 3.4 ms of a step of 123 ms; the bytes need 0.8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.ops._register import register


def keep_tables(model: nn.Module) -> list[str]:
    """Tables that modules of `model` make become results of an op that inductor neither fuses nor makes again.

    Values are those of eager, where nothing changes. A second call changes nothing.

    Returns:
        Names of the modules: those with a buffer `inv_freq`, as all rotary embeddings of transformers have.
    """
    names = []
    for name, module in model.named_modules():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):
            names.append(name)
            if _keep_outputs not in module._forward_hooks.values():
                module.register_forward_hook(_keep_outputs)
    return names


def _keep_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook."""
    if not torch.compiler.is_compiling():
        return output
    if isinstance(output, tuple):
        return tuple(_kept(part) for part in output)
    return _kept(output)


def _kept(value: Any) -> Any:
    """Tables with a gradient are not tables; what is no tensor is handed on."""
    return _op(value) if isinstance(value, Tensor) and not value.requires_grad else value


_op, _library = register("table(Tensor x) -> Tensor", torch.clone, torch.empty_like)

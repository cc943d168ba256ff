"""compile_as_trained: the graphs that docs/compile.md has for a stage, by the backend that counts.

| | graphs |
|---|---|
| ZeRO 1 and 2 | the whole model |
| with gradient release | each decoder layer and the final norm |
| ZeRO-3 | what lies between DeepSpeed's hooks, which are on every module that is not within a leaf |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from fp8_ds.counting_backend import CountingBackend
from fp8_ds.engine.rotary import keep_tables
from fp8_ds.errors import ConfigError


def compile_as_trained(
    model: nn.Module,
    backend: CountingBackend,
    stage: int,
    releases: bool,
    is_fp8: bool,
    leaves: Collection[str] = (),
) -> None:
    """Modules of `model` compile when they are called, and nothing that was compiled before is known any more.

    Args:
        model: gives the loss of tokens; it holds what DeepSpeed is given.
        backend: makes the graphs.
        stage: of ZeRO.
        releases: gradients are freed in the backward, so layers compile one by one.
        is_fp8: the engine is ours, which makes tables of rotary embeddings once.
        leaves: classes of "leaf_module", with their modules or without.

    Raises:
        ConfigError: there are no layers to compile one by one.
    """
    torch._dynamo.reset()  # a function of which many models were compiled would run in eager: recompile_limit
    if is_fp8:
        keep_tables(model)
    if stage == 3:
        for child in model.children():
            _end_graphs_around(child, leaves)
    if not releases or stage == 3:
        model.compile(backend=backend)
        return
    for module in _layers_and_norm(model):
        module.compile(backend=backend)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end_graph(*args: Any) -> None:
    """A hook that dynamo cannot trace, as DeepSpeed's are."""
    del args


def _end_graphs_around(module: nn.Module, leaves: Collection[str]) -> None:
    """Source: deepspeed/runtime/zero/parameter_offload.py `_register_deepspeed_module` (0.19.8)."""
    module.register_forward_pre_hook(_end_graph)
    module.register_forward_hook(_end_graph)
    kind = type(module)
    if not {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"} & set(leaves):
        for child in module.children():
            _end_graphs_around(child, leaves)


def _layers_and_norm(model: nn.Module) -> Iterator[nn.Module]:
    lists = [(parent, part) for parent in model.modules() for part in parent.children() if type(part) is nn.ModuleList]
    if not lists:
        raise ConfigError(
            "compile: expected a model with its layers in an nn.ModuleList, as gradient release compiles them one by "
            "one, got none. Leave --compile out, or set fp8.optimizer.release to false."
        )
    parent, layers = max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    yield from layers
    yield from (part for part in parent.children() if "norm" in type(part).__name__.lower())

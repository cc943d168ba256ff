"""compile_as_trained: the graphs that docs/compile.md has for a stage, by the backend that counts.

| | graphs |
|---|---|
| ZeRO 1 and 2 | the whole model |
| with gradient release | each layer of a container, and the norms beside |
| ZeRO-3 | what lies between DeepSpeed's hooks, which are on every module that is not within a leaf |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config, z3_leaf_module
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
) -> None:
    """Modules of `model` compile when they are called, and nothing that was compiled before is known any more.

    Args:
        model: gives the loss of tokens; it holds what DeepSpeed is given, whose leaves are marked.
        backend: makes the graphs.
        stage: of ZeRO.
        releases: gradients are freed in the backward, so layers compile one by one.
        is_fp8: the engine is ours, which makes tables of rotary embeddings once.

    Raises:
        ConfigError: it is not known which layers are to be compiled one by one.
    """
    torch._dynamo.reset()  # a function of which many models were compiled would run in eager: recompile_limit
    if is_fp8:
        keep_tables(model)
    if stage == 3:
        for child in model.children():
            _end_graphs_around(child)
    if not releases or stage == 3:
        model.compile(backend=backend)
        return
    for module in _layers_and_norm(model):
        module.compile(backend=backend)


def mark_leaves(model: nn.Module, leaf_module: Mapping[str, Any]) -> None:
    """As stage 3 does: of its default classes, too. DeepSpeed's log says which names there are none of.

    Args:
        model: what DeepSpeed is given.
        leaf_module: stage 3's block of that name.
    """
    apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig(**leaf_module))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end_graph(*args: Any) -> None:
    """A hook that dynamo cannot trace, as DeepSpeed's are."""
    del args


def _end_graphs_around(module: nn.Module) -> None:
    """Source: deepspeed/runtime/zero/parameter_offload.py `_register_deepspeed_module` (0.19.8)."""
    module.register_forward_pre_hook(_end_graph)
    module.register_forward_hook(_end_graph)
    if not z3_leaf_module(module):
        for child in module.children():
            _end_graphs_around(child)


def _layers_and_norm(model: nn.Module) -> list[nn.Module]:
    """Layers of all stacks, and the norms beside them.

    Raises:
        ConfigError: there are none, or others like them are in no container.
    """
    found = list(_layers(model))
    layers = [layer for layer, _ in found]
    left = _left_out(model, layers)
    if not layers or left:
        raise ConfigError(
            "compile: expected a model with its layers in an nn.ModuleList, nn.ModuleDict or nn.Sequential, as "
            f"gradient release compiles them one by one, got {left or 'none'}. Leave --compile out, or set "
            "fp8.optimizer.release to false."
        )
    places = {id(place): place for _, around in found for place in around}
    beside = (part for place in places.values() for part in place.children())
    return [*layers, *(part for part in beside if "norm" in type(part).__name__.lower())]


def _is_container(module: nn.Module) -> bool:
    """Whether it is a ModuleList or ModuleDict, which are not called, or a Sequential."""
    return type(module) is nn.Sequential or type(module).forward is nn.Module.forward


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _layers(module: nn.Module, around: tuple[nn.Module, ...] = ()) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """(layer, containers around it and what holds these): entries of the outermost containers, nested ones opened.

    Entries without parts of their own (an embedding, a head) are no layers.
    """
    is_container = _is_container(module)
    around = (*around, module) if is_container else (module,)
    for child in filter(_has_parts, module.children()):
        if is_container and not _is_container(child):
            yield child, around
        else:
            yield from _layers(child, around)


def _left_out(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    """Classes whose modules are there several times, with matrices in no layer: of layers that are attributes."""
    inside = {id(part) for layer in layers for part in layer.modules()}
    outside = [part for part in model.modules() if id(part) not in inside]
    with_matrix = {id(part) for part in outside if not isinstance(part, nn.Embedding) and _has_matrix(part)}
    blocks = (part for part in outside if _has_parts(part) and not _is_container(part))
    kinds = Counter(type(part).__name__ for part in blocks if with_matrix & set(map(id, part.modules())))
    return ", ".join(f"{num} {kind} outside of these" for kind, num in kinds.items() if num > 1)


def _has_matrix(module: nn.Module) -> bool:
    return any(p.ndim > 1 for p in module.parameters(recurse=False))

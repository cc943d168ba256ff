"""Leaf modules of ZeRO-3, each of which is gathered as a whole: `engine.compile()` names them, hints and settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES
from deepspeed.utils import set_z3_leaf_module, z3_leaf_module
from torch import Tensor
from torch.nn import Module

from fp8_ds.engine.liger_loss import with_liger_loss
from fp8_ds.nn.plan.ends import layer_lists
from fp8_ds.zero.param_hooks import InFlight

BOUND = "stage3_max_live_parameters"
LIVE_NAMES = (BOUND, "max_live_parameters")
"""Names that DeepSpeed takes for it."""
PREFETCH = "stage3_prefetch_bucket_size"
PREFETCH_NAMES = (PREFETCH, "prefetch_bucket_size")
_COORDINATOR = "_PartitionedParameterCoordinator__"
"""Prefix of its private attributes."""


class Live(NamedTuple):
    """Elements of weights that are whole at once, if every leaf can be prefetched.

    Attributes:
        held: elements outside the leaves, head and embedding as far as they stay whole.
        leaves: elements of the leaf at work, of the next one, and of those kept for the backward.
        largest: elements of the largest leaf.
    """

    held: int
    leaves: int = 0
    largest: int = 0

    @property
    def total(self) -> int:
        return self.held + self.leaves


class Leaves:
    """Modules that `engine.compile()` has made leaves; `remove()` takes the flags off again."""

    def __init__(self, modules: list[Module], inner: list[Module]) -> None:
        self.modules, self._inner = modules, inner

    def remove(self) -> None:
        for module in self.modules:
            set_z3_leaf_module(module, False)
        for module in self._inner:
            set_z3_leaf_module(module, True)


class GroupedGradHook:
    """Hook of several parameters that reduces their gradients when the last one of a backward is there.

    Args:
        reduce: reduces all of them; it takes three arguments and uses none.
        params: those that need a gradient get the hook.
    """

    def __init__(self, reduce: Callable[..., None], params: Iterable[Any]) -> None:
        self._reduce, self._params = reduce, [p for p in params if p.requires_grad]
        self._backward = self._num_left = -1
        self.handles = [p.register_post_accumulate_grad_hook(self) for p in self._params]

    def __call__(self, param: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # the one before may have ended by an error
            self._backward, self._num_left = backward, count_used_parameters_in_backward(self._params)
        self._num_left -= 1
        if self._num_left == 0:
            self._backward = -1
            self._reduce(None, None, None)


def make_leaves(engine: Any) -> Leaves | None:
    """Make the layers of a ZeRO-3 engine leaves of the forwards to come; None if that is not to be.

    Call it on all ranks alike, between steps. It does what `zero_optimization.leaf_module` with the layers' class does,
    but for gradients: DeepSpeed still reduces each as it is made, and not all of a leaf at its end. So a leaf whose
    input needs no gradient trains, too.

    Modules within a leaf lose DeepSpeed's hooks, at which graphs would end. Those of the leaf itself
    (runtime/zero/parameter_offload.py) read the flag in each call. DeepSpeed records its trace of the model anew.
    """
    if not engine.zero_optimization_partition_weights() or _names_leaves(engine):
        return None
    model, zero = engine.module, engine.optimizer
    leaves = _repeated_layers(model)
    if not leaves:
        return None
    inside = _modules_inside(model, leaves)
    made = Leaves(leaves, [module for module in inside if z3_leaf_module(module)])
    for module in made._inner:
        set_z3_leaf_module(module, False)
        _reduce_without_module(zero, module)
    for module in leaves:
        set_z3_leaf_module(module, True)
    offload = zero.parameter_offload
    tables = {id(table) for module in inside for table in (module._forward_hooks, module._forward_pre_hooks)}
    for handles in (offload.forward_hooks, offload.backward_hooks):
        for handle in [handle for handle in handles if id(handle.hooks_dict_ref()) in tables]:
            handle.remove()
            handles.remove(handle)
    _forget_trace(offload.get_param_coordinator())
    zero.fp8.shards.in_flight = InFlight(model)
    return made


def _reduce_without_module(zero: Any, module: Module) -> None:
    """Reduce the gradients of a leaf that has become part of another by hooks of its parameters.

    DeepSpeed does so by a hook of the module's backward (runtime/zero/stage3.py, `reduce_leaf_module_grads`), at which
    a graph would end.
    """
    hooks = zero._leaf_module_hooks
    for handle in [handle for handle in hooks if handle.hooks_dict_ref() is module._backward_hooks]:
        reduce = module._backward_hooks[handle.id]
        handle.remove()
        hooks.remove(handle)
        hooks += GroupedGradHook(reduce, zero.leaf_parameters[module]).handles


def describe(made: Leaves) -> str:
    return (
        f"fp8: {len(made.modules)} leaf modules of ZeRO-3: {type(made.modules[0]).__name__}, each of which is one "
        "graph and is gathered as a whole: zero_optimization.leaf_module is not set. It names others, or with no "
        "classes none"
    )


def _names_leaves(engine: Any) -> bool:
    """Whether the user has said what is a leaf, in JSON or by DeepSpeed's functions; DeepSpeed's own choice is none."""
    zero = engine._config._param_dict.get("zero_optimization", {})
    return "leaf_module" in zero or any(
        f"{type(leaf).__module__}.{type(leaf).__qualname__}" not in DEFAULT_LEAF_MODULE_CLASSES
        for leaf in leaves_in(engine.module)
    )


def _repeated_layers(model: Module) -> list[Module]:
    """Return the entries of one class, that with most weights in FP8, of the model's lists of layers."""
    lists = layer_lists(model, lambda module: any(hasattr(p, "_fp8") for p in module.parameters(recurse=False)))
    sizes: Counter[type[Module]] = Counter()
    for layer in (layer for layers in lists.values() for layer in layers):
        if type(layer).forward is not Module.forward:  # else its parts are called, and not itself
            sizes[type(layer)] += sum(getattr(p, "ds_numel", 0) for p in layer.parameters() if hasattr(p, "_fp8"))
    kind = max(sizes, key=lambda kind: sizes[kind], default=None)
    return [layer for name in lists for layer in model.get_submodule(name).children() if type(layer) is kind]


def _modules_inside(model: Module, leaves: list[Module]) -> list[Module]:
    """Return the modules that are reached through `leaves` only."""
    reached, waiting = set(leaves), [model]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += module.children()
    return [module for leaf in leaves for module in leaf.modules() if module not in reached]


def _forget_trace(coordinator: Any) -> None:
    """Let DeepSpeed record anew which modules follow each other.

    It keeps what to release after a module in a step of the trace in a cache, which outlives the trace.
    """
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    cached = getattr(type(coordinator), f"{_COORDINATOR}params_to_release")
    for function in (cached, *(cell.cell_contents for cell in cached.__closure__ or ())):
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def set_prefetch(engine: Any) -> str | None:
    """Let a ZeRO-3 engine prefetch a whole leaf, if nobody has set how much; else return a hint if that is less."""
    if not engine.zero_optimization_partition_weights():
        return None
    largest = max((_num_gathered(leaf.parameters()) for leaf in leaves_in(engine.module)), default=0)
    prefetched = engine.zero_prefetch_bucket_size()
    if not largest or prefetched == largest:
        return None
    if not _names(engine, PREFETCH_NAMES):
        engine._config.zero_config.prefetch_bucket_size = largest
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        setattr(coordinator, f"{_COORDINATOR}prefetch_bucket_sz", largest)
        return (
            f"fp8: {PREFETCH} is {largest:,}, the weights of the largest leaf module, and not {prefetched:,}: it is "
            "not set"
        )
    if prefetched > largest:
        return None
    return (
        f"fp8: zero_optimization.{PREFETCH}: expected at least {largest:,}, the weights of the largest leaf module, "
        f"got {prefetched:,}. Each leaf waits for a part of its own gather: raise it, or leave it out."
    )


def hint_on_building(engine: Any) -> str | None:
    """Return a remedy if the first leaf's input seems to need no gradient: its backward then fails in DeepSpeed."""
    model = engine.module
    find_embedding = getattr(model, "get_input_embeddings", None)
    if (
        not engine.zero_optimization_partition_weights()
        or find_embedding is None
        or next(leaves_in(model), None) is None
        or getattr(model, "is_gradient_checkpointing", False)
        or getattr(model, "_require_grads_hook", None) is not None
        or any(p.requires_grad for p in find_embedding().parameters())
    ):
        return None
    return (
        "fp8: the input embedding is frozen and zero_optimization.leaf_module is set: a leaf whose input needs no "
        "gradient releases its weights before its backward (stock DeepSpeed likewise), which then fails. Call "
        "model.enable_input_require_grads() before initialize, or use gradient checkpointing."
    )


def hint_on_live(engine: Any) -> str | None:
    """Return a warning if DeepSpeed silently does not prefetch every leaf under the configured bound."""
    if not engine.zero_optimization_partition_weights() or not names_bound(engine):
        return None
    needed, bound = needed_bound(engine), engine.zero_max_live_parameters()
    if bound >= needed:
        return None
    held = "; head and embedding are held with Liger's loss" if _holds_head(engine) else ""
    return (
        f"fp8: zero_optimization.{BOUND}: expected at least {needed:,} for every leaf_module to be prefetched, beside "
        f"what stage3_max_reuse_distance keeps{held}; got {bound:,}. Raise it, or leave it out."
    )


def live_weights(model: Module, reuse_distance: int, holds_head: bool, threshold: int = 0) -> Live:
    """Count the weights that are whole at once under a bound that lets every leaf be prefetched.

    DeepSpeed keeps after a forward what it uses again within the reuse distance R (0.18.9 to 0.19.8,
    `__params_to_release`). After a leaf it counts the leaves behind it and the head: the last ones are kept. After
    another module it counts no leaf: the embedding is kept if the head's forward and backward are less than R. With
    Liger's loss the head is not called: it is held from the model's forward to the step's end.

    Args:
        model: a model with its leaves marked; its parameters are whole, partitioned, or on the meta device.
        reuse_distance: DeepSpeed's reuse distance in elements.
        holds_head: whether the loss is Liger's.
        threshold: elements below which a parameter persists, for models that DeepSpeed has not marked yet.
    """
    inside = {id(p) for leaf in leaves_in(model) for p in leaf.parameters()}
    outside = _num_gathered((p for p in model.parameters() if id(p) not in inside), threshold)
    output = _output_weight(model)
    is_tied = bool(output) and output[0] is _weight_of(model, "input")
    head = 0 if is_tied else _num_gathered(output, threshold)
    leaves = [_num_gathered(leaf.parameters(), threshold) for leaf in leaves_in(model)]
    if not any(leaves):
        return Live(_num_gathered(output, threshold) if holds_head else 0)
    if holds_head:
        held, behind = head + (outside - head if head < reuse_distance else 0), 0
    else:
        held, behind = outside - head if 2 * head < reuse_distance else 0, head
    kept = 0
    for leaf in reversed(leaves):
        if behind >= reuse_distance:
            break
        kept += leaf
        behind += leaf
    largest = max(leaves)
    return Live(held, min(largest + max(largest, kept), sum(leaves) + outside - held), largest)


def names_bound(engine: Any) -> bool:
    return _names(engine, LIVE_NAMES)


def _names(engine: Any, names: Iterable[str]) -> bool:
    return not engine._config._param_dict.get("zero_optimization", {}).keys().isdisjoint(names)


def needed_bound(engine: Any) -> int:
    """Return the bound under which every leaf can be prefetched; 0 without leaves."""
    found = live_weights(engine.module, engine.zero_max_reuse_distance(), _holds_head(engine))
    return found.total if found.leaves else 0


def _holds_head(engine: Any) -> bool:
    return with_liger_loss(engine.module) is not None


def _output_weight(model: Any) -> list[Any]:
    """Return the weight of a Hugging Face model's head, tied or not; no weight for other models."""
    head = _weight_of(model, "output")
    return [] if head is None or _weight_of(model, "input") is None else [head]


def _weight_of(model: Any, way: str) -> Any:
    find = getattr(model, f"get_{way}_embeddings", None)
    try:
        return getattr(find() if find is not None else None, "weight", None)
    except NotImplementedError:  # transformers' base class where a model says nothing
        return None


def leaves_in(module: Module) -> Iterator[Module]:
    return (child for child in module.modules() if z3_leaf_module(child))


def _num_gathered(parameters: Iterable[Any], threshold: int = 0) -> int:
    """Count elements of parameters that are not persistent, which DeepSpeed marks only when its optimizer is built."""
    numels = (getattr(p, "ds_numel", p.numel()) for p in parameters if not getattr(p, "ds_persist", False))
    return sum(numel for numel in numels if numel >= threshold)

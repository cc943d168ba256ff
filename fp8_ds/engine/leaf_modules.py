"""Hints and a setting for leaf modules of ZeRO-3, each of which is gathered as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from deepspeed.utils import z3_leaf_module
from torch.nn import Module

from fp8_ds.engine.liger_loss import with_liger_loss

BOUND = "stage3_max_live_parameters"
LIVE_NAMES = (BOUND, "max_live_parameters")
"""Names that DeepSpeed takes for it."""


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


def hint_on_compiling(engine: Any) -> str | None:
    """Return a hint if a ZeRO-3 engine to be compiled lacks leaves, or the prefetch of a whole one."""
    if not engine.zero_optimization_partition_weights():
        return None
    largest = max((_num_gathered(leaf.parameters()) for leaf in _leaves(engine.module)), default=None)
    if largest is None:
        return (
            "fp8: under ZeRO-3 every linear compiles to a graph of its own. With the decoder layer's class in "
            "zero_optimization.leaf_module each layer is one graph, which is faster and is gathered as a whole. Let "
            "stage3_prefetch_bucket_size be at least a layer's number of weights then."
        )
    prefetched = engine.zero_prefetch_bucket_size()
    if prefetched >= largest:
        return None
    return (
        f"fp8: zero_optimization.stage3_prefetch_bucket_size: expected at least {largest:,}, the weights of the "
        f"largest leaf_module, got {prefetched:,}. Each leaf waits for a part of its own gather: raise it."
    )


def hint_on_building(engine: Any) -> str | None:
    """Return a remedy if the first leaf's input seems to need no gradient: its backward then fails in DeepSpeed."""
    model = engine.module
    find_embedding = getattr(model, "get_input_embeddings", None)
    if (
        not engine.zero_optimization_partition_weights()
        or find_embedding is None
        or next(_leaves(model), None) is None
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
    inside = {id(p) for leaf in _leaves(model) for p in leaf.parameters()}
    outside = _num_gathered((p for p in model.parameters() if id(p) not in inside), threshold)
    output = _output_weight(model)
    is_tied = bool(output) and output[0] is _weight_of(model, "input")
    head = 0 if is_tied else _num_gathered(output, threshold)
    leaves = [_num_gathered(leaf.parameters(), threshold) for leaf in _leaves(model)]
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
    return not engine._config._param_dict.get("zero_optimization", {}).keys().isdisjoint(LIVE_NAMES)


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


def _leaves(module: Module) -> Iterator[Module]:
    return (child for child in module.modules() if z3_leaf_module(child))


def _num_gathered(parameters: Iterable[Any], threshold: int = 0) -> int:
    """Count elements of parameters that are not persistent, which DeepSpeed marks only when its optimizer is built."""
    numels = (getattr(p, "ds_numel", p.numel()) for p in parameters if not getattr(p, "ds_persist", False))
    return sum(numel for numel in numels if numel >= threshold)

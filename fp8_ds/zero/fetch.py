"""Fetches of DeepSpeed's ZeRO-3 coordinator: it waits for a leaf's parameters together, not one by one."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from deepspeed.utils import z3_leaf_module
from torch import nn


class InFlight:
    """Parameters that the coordinator has requested and not waited for yet, and the leaves that they belong to.

    Attributes:
        registry: the coordinator's own, parameter -> handle.
    """

    def __init__(self, module: nn.Module) -> None:
        self.registry: MutableMapping[Any, Any] = module.ds_inflight_param_registry  # type: ignore[assignment]
        self._leaf_of: dict[int, int] = {}
        for leaf in filter(z3_leaf_module, module.modules()):
            for p in leaf.parameters():
                self._leaf_of.setdefault(id(p), getattr(leaf, "ds_id", -1))  # an inner leaf is gathered with the outer

    @property
    def has_leaves(self) -> bool:
        return bool(self._leaf_of)

    def arrived(self, fetch: Fetch) -> None:
        """Drop a leaf's other parameters from the registry, once the coordinator has waited for one in `fetch`.

        They stay if a later call has requested them, after the leaf was released, or if another module that shares the
        one waited for it: the leaf may never be used, and then entries of the registry are released.
        """
        if not self.has_leaves:
            return
        is_left = [self.registry.get(p) is fetch for p in fetch.params]
        leaves = [self._leaf_of.get(id(p)) for p in fetch.params]
        fetched = {
            leaf
            for p, leaf, left in zip(fetch.params, leaves, is_left, strict=True)
            if not left and leaf in p.ds_active_sub_modules
        }
        for p, leaf, left in zip(fetch.params, leaves, is_left, strict=True):
            if left and leaf in fetched:
                del self.registry[p]


class Fetch:
    """One request of the coordinator, as one handle: weights in FP8, and parameters that DeepSpeed gathers.

    The coordinator waits for parameters one by one, and records and polls an event for each to bound how far the host
    runs ahead: a quarter of a millisecond for a decoder layer. With leaves, waiting for the first parameter covers the
    leaf's others, and the bound counts them as one.
    """

    def __init__(self, handles: list[Any], params: list[Any], in_flight: InFlight) -> None:
        self.handles = handles
        self.params = params
        self.in_flight = in_flight
        self.complete = False

    def wait(self, handle_dependency: bool = True) -> None:
        if not self.complete:
            for handle in self.handles:  # once: in DeepSpeed 0.18.9 some make a weight available again, long released
                handle.wait(handle_dependency=handle_dependency)
            self.complete = True
        self.in_flight.arrived(self)

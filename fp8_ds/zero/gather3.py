"""Gathers of ZeRO-3 that are under way: of FP8 weights, and each fetch of DeepSpeed's coordinator as one handle."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn

from fp8_ds.comm.gather import join_shards
from fp8_ds.numerics.formats import E4M3

if TYPE_CHECKING:
    from fp8_ds.zero.sharded import ShardedWeight


class Fp8GatherHandle:
    """An FP8 gather under way; `wait` makes its weights available. It has the coordinator's handle protocol.

    Args:
        buffers: received bytes, 1-D: each weight with padding, or all of them, rank by rank; none on a single rank.
        work: the collective.
    """

    def __init__(self, weights: list[ShardedWeight], buffers: list[Tensor], work: Any, num_ranks: int) -> None:
        self.weights = weights
        self.buffers = buffers
        self.work = work
        self.num_ranks = num_ranks
        self.complete = False

    def wait(self, handle_dependency: bool = True) -> None:
        if self.complete:
            return
        if self.work is not None:
            self.work.wait()
        for weight, whole in zip(self.weights, self._whole(), strict=True):
            data = whole.view(E4M3.torch_dtype)
            if data.numel() != weight.param.ds_numel:
                data = data[: weight.param.ds_numel]
            weight.arrive(data.view(weight.param.ds_shape))
        if not get_accelerator().is_synchronized_device():
            for buffer in self.buffers:
                buffer.record_stream(get_accelerator().current_stream())
        self.buffers, self.work = [], None  # a released weight's bytes are free, whoever keeps the handle
        self.complete = True

    def _whole(self) -> list[Tensor]:
        """Return each weight's bytes with padding, 1-D; weights that share a buffer are copied, in one launch."""
        if not self.buffers:
            return [weight.shard.view(torch.uint8) for weight in self.weights]
        if len(self.buffers) == len(self.weights):
            return self.buffers
        return join_shards(self.buffers[0], [weight.shard.numel() for weight in self.weights], self.num_ranks)


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

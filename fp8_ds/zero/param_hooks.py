"""The closures of ZeRO-3 parameters, which gather and release them, and fetches under way.

DeepSpeed's coordinator calls closures that zero.Init hangs on every parameter: `all_gather_coalesced` (fetch and
prefetch), `all_gather` (readers: GatheredParameters, external parameters) and `partition` (release). It calls those of
the first parameter in its set: `ZeroParamHooks` replaces all three on every parameter of the module. Fetched weights
arrive in FP8; readers get bf16 of the masters, as in DeepSpeed.

One read may be of several engines' weights, such as those of a policy and its reference model: `GatheredParameters`
calls the closures of whichever parameter is the oldest, with all of the list, and each hands on the parameters of other
engines. DeepSpeed's own closures would read the placeholders of FP8 shards, which are NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import z3_leaf_module
from torch import nn

from fp8_ds.comm.gather import join_shards
from fp8_ds.zero.sharded import Fp8Shards, Gathered


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


class ParamHooks:
    """Closures of one ZeRO-3 parameter, replaced by bound methods; DeepSpeed's own are kept as `original_NAME`.

    Attributes:
        closures: names of the closures.
        shards: those of the engine in FP8 that has the parameter; None beside such engines.
    """

    closures: tuple[str, ...]
    shards: Any = None
    original_all_gather: Any
    original_all_gather_coalesced: Any
    original_partition: Any

    def __init__(self, param: Any) -> None:
        self.param = param
        for name in self.closures:
            setattr(self, f"original_{name}", getattr(param, name))
            setattr(param, name, getattr(self, name))

    def remove(self) -> None:
        for name in self.closures:
            setattr(self.param, name, getattr(self, f"original_{name}"))


class Bf16ParamHooks(ParamHooks):
    """Closures of a ZeRO-3 parameter beside engines in FP8; such parameters go to DeepSpeed's own closures."""

    closures = ("all_gather", "partition")

    def all_gather(self, param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        params = hand_on([self.param] if param_list is None else param_list, self.shards, "all_gather")
        return self.original_all_gather(params, async_op=async_op, hierarchy=hierarchy)

    def partition(
        self, param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
    ) -> None:
        params = [self.param] if param_list is None else param_list
        options = {"has_been_updated": has_been_updated, "free_data": free_data}
        self.original_partition(
            hand_on(params, self.shards, "partition", **options), hierarchy, has_been_updated, free_data
        )


def hand_on(params: Iterable[Any], owner: Any, method: str, **options: Any) -> list[Any]:
    """Call the closures named `method` of the parameters that are not `owner`'s, and return the others.

    Collective, in the order of `params`, which is the same on all ranks. `owner` is the shards of an engine in FP8, or
    None for DeepSpeed.
    """
    groups: dict[Any, list[Any]] = {owner: []}
    for p in params:
        groups.setdefault(getattr(hooks_of(p), "shards", None), []).append(p)
    own = groups.pop(owner)
    for theirs in groups.values():
        getattr(theirs[0], method)(theirs, **options)
    return own


def hooks_of(param: Any) -> Any:
    """Return the object that replaces the closures of a ZeRO-3 parameter; None if they are DeepSpeed's own."""
    return getattr(param.all_gather, "__self__", None)


def share_readers(module: Any) -> None:
    """Let the weights of `module`, which is not in FP8, be gathered together with those of an engine in FP8."""
    for p in module.parameters():
        if hasattr(p, "ds_id") and hooks_of(p) is None:
            Bf16ParamHooks(p)


class ZeroParamHooks(ParamHooks):
    """The three closures of one ZeRO-3 parameter of an engine in FP8."""

    closures = ("all_gather", "all_gather_coalesced", "partition")
    shards: Fp8Shards

    def __init__(self, param: Any, shards: Fp8Shards) -> None:
        if isinstance(before := hooks_of(param), Bf16ParamHooks):  # an engine without an optimizer had the model
            before.remove()
        super().__init__(param)
        self.shards = shards
        self.weight = shards.get(param)

    def all_gather_coalesced(self, params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> Any:
        """Fetch for compute: FP8 weights in FP8, the rest as DeepSpeed does."""
        params = list(params)
        weights, rest = self.shards.fetched_in_fp8(params), self.shards.fetched_in_bf16(params)
        handles: list[Any] = []
        if weights:
            handles.append(self.shards.gather(weights))
        if rest or not weights:
            self.shards.wait_until_ready()  # DeepSpeed has no such wait: its timer empties the queue for it
            handles.append(self.original_all_gather_coalesced(rest, safe_mode, quantize))
            if rest and ds_comm.get_world_size(group=rest[0].ds_process_group) > 1:
                self.shards.counter.hp += sum(p.ds_numel_aligned * p.ds_tensor.element_size() for p in rest)
        return Fetch(handles, params, self.shards.in_flight)

    def all_gather(self, param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        """Gather bf16 of the masters for reading. Weights that are gathered in FP8 (persistent) are released first."""
        if param_list is self.shards.persistent:  # DeepSpeed after a step or a checkpoint
            return gather_persistent(self.shards)
        params = [self.param] if param_list is None else hand_on(param_list, self.shards, "all_gather")
        for weight in self.shards.of(params):
            if weight.gathered is Gathered.UNSHARDED_FP8 and not weight.param.ds_active_sub_modules:
                self.partition([weight.param])
        wanted = [p for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        for p in wanted:
            num_ranks = ds_comm.get_world_size(group=p.ds_process_group)
            if num_ranks > 1:
                self.shards.counter.hp += num_ranks * p.ds_tensor.ds_numel * p.element_size()
        with self.shards.bf16_shards(self.shards.of(wanted)):
            return self.original_all_gather(params, async_op=async_op, hierarchy=hierarchy)

    def partition(
        self, param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
    ) -> None:
        """Release; with `has_been_updated`, take over the new values of a reader's bf16 weight."""
        weight, is_plain = self.weight, param_list is None and free_data and not has_been_updated
        if is_plain and weight is not None and weight.payload.data is not None and not self.param.ds_active_sub_modules:
            weight.leave()
            return
        params = [self.param]
        if param_list is not None:
            options = {"has_been_updated": has_been_updated, "free_data": free_data}
            params = hand_on(param_list, self.shards, "partition", **options)
        weights = self.shards.of(params)
        in_fp8 = [w.param for w in weights if w.gathered is Gathered.UNSHARDED_FP8]
        in_bf16 = [w for w in weights if w.gathered is Gathered.UNSHARDED_BF16]
        for weight in weights:
            weight.release()
        if not has_been_updated or not weights:
            self.original_partition(params, hierarchy, has_been_updated, free_data)
            return
        if in_fp8:  # nobody has updated these: writing into a weight that is gathered in FP8 raises
            self.original_partition(in_fp8, hierarchy, False, free_data)
        done = set(map(id, in_fp8))
        with self.shards.bf16_shards(in_bf16):
            self.original_partition([p for p in params if id(p) not in done], hierarchy, True, free_data)
            if in_bf16:
                self.shards.absorb(in_bf16)


def gather_persistent(shards: Fp8Shards) -> None:
    """Gather the missing ones of `shards.persistent`, FP8 weights in FP8, the rest in their shards' dtype.

    Collective. DeepSpeed's own gather has the same bits, after 6 ms of the host for the norms of a Llama-3-8B, while
    the device has no work.
    """
    params = [p for p in shards.persistent if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    shards.wait_until_ready()
    if weights := shards.fetched_in_fp8(params):
        shards.gather(weights).wait()
    alike: dict[Any, list[Any]] = {}  # in the order of `params`, which is that of all ranks
    for p in shards.fetched_in_bf16(params):
        alike.setdefault((p.ds_process_group, p.ds_tensor.dtype), []).append(p)
    for some in alike.values():
        shards.counter.hp += _gather(some)


@torch.no_grad()
def _gather(params: list[Any]) -> int:
    """Gather parameters of one process group and dtype in one collective; return the bytes that arrive."""
    group = params[0].ds_process_group
    num_ranks = ds_comm.get_world_size(group=group)
    sizes = [p.ds_tensor.ds_numel for p in params]
    local = torch.cat([p.ds_tensor.data for p in params])
    buffer, num_bytes = local, 0
    if num_ranks > 1:
        buffer = local.new_empty(num_ranks * local.numel())
        ds_comm.allgather_fn(buffer, local, group=group)
        num_bytes = buffer.numel() * buffer.element_size()
    for p, one in zip(params, join_shards(buffer, sizes, num_ranks), strict=True):
        p.data = one[: p.ds_numel].view(p.ds_shape)
        p.ds_status = ZeroParamStatus.AVAILABLE
    return num_bytes

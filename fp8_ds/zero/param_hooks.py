"""Readers of several engines' weights at once, such as those of a policy and its reference model.

`GatheredParameters` calls the closures of whichever parameter is the oldest, with all of the list: each hands on the
parameters of other engines. DeepSpeed's own closures would read the placeholders of FP8 shards, which are NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ParamHooks:
    """Closures of one ZeRO-3 parameter, replaced by bound methods; DeepSpeed's own are kept as `stock_NAME`.

    Attributes:
        closures: names of the closures.
        shards: those of the engine in FP8 that has the parameter; None beside such engines.
    """

    closures: tuple[str, ...]
    shards: Any = None
    stock_all_gather: Any
    stock_all_gather_coalesced: Any
    stock_partition: Any

    def __init__(self, param: Any) -> None:
        self.param = param
        for name in self.closures:
            setattr(self, f"stock_{name}", getattr(param, name))
            setattr(param, name, getattr(self, name))

    def remove(self) -> None:
        for name in self.closures:
            setattr(self.param, name, getattr(self, f"stock_{name}"))


class StockParamHooks(ParamHooks):
    """Closures of a ZeRO-3 parameter beside engines in FP8; such parameters go to DeepSpeed's own closures."""

    closures = ("all_gather", "partition")

    def all_gather(self, param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        params = hand_on([self.param] if param_list is None else param_list, self.shards, "all_gather")
        return self.stock_all_gather(params, async_op=async_op, hierarchy=hierarchy)

    def partition(
        self, param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
    ) -> None:
        params = [self.param] if param_list is None else param_list
        options = {"has_been_updated": has_been_updated, "free_data": free_data}
        self.stock_partition(
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
            StockParamHooks(p)

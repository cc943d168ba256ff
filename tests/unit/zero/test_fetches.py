"""Gathers of ZeRO-3 that are under way, and `Fetch`, one handle for what a call of DeepSpeed's coordinator asks for."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from support.threads import on_threads
from support.zero3_host import hooked_shards
from torch import nn

from fp8_ds.comm import collectives
from fp8_ds.zero.param_hooks import Fetch, InFlight


class Handle:
    def __init__(self) -> None:
        self.waits: list[bool] = []

    def wait(self, handle_dependency: bool = True) -> None:
        self.waits.append(handle_dependency)


class Leaf(nn.Linear):
    pass


def asked(kind: type[nn.Linear] = Leaf) -> tuple[list[Any], list[Handle], dict[Any, Any]]:
    """Weight and bias of two linears, all asked for in one call; the call's handles; the coordinator's registry."""
    model = nn.Sequential(kind(2, 2), kind(2, 2))
    if kind is Leaf:
        set_z3_leaf_modules(model, [Leaf])
    for number, module in enumerate(model):
        module.ds_id = number  # type: ignore[assignment]
        for p in module.parameters():
            p.ds_active_sub_modules = set()  # type: ignore[attr-defined]
    model.ds_inflight_param_registry = registry = {}  # type: ignore[assignment]
    params, handles = list(model.parameters()), [Handle(), Handle()]
    registry.update(dict.fromkeys(params, Fetch(handles, params, InFlight(model))))
    return params, handles, registry


def wait(registry: dict[Any, Any], p: Any, module: int, **keys: Any) -> None:
    """As the coordinator waits for one parameter of a module that it fetches."""
    p.ds_active_sub_modules.add(module)
    registry.pop(p).wait(**keys)


def test_the_first_of_a_leaf_that_is_waited_for_takes_the_leafs_others_out_of_the_registry() -> None:
    params, handles, registry = asked()
    wait(registry, params[1], 0, handle_dependency=False)
    assert list(registry) == params[2:]  # of a leaf that may never be used: DeepSpeed releases what is left there
    assert [handle.waits for handle in handles] == [[False], [False]]
    wait(registry, params[2], 1)
    assert not registry and [handle.waits for handle in handles] == [[False], [False]]


def test_another_module_that_shares_one_of_a_leaf_waits_for_that_alone() -> None:
    params, _, registry = asked()
    wait(registry, params[1], 17)
    assert list(registry) == [params[0], *params[2:]]


def test_what_a_later_call_asks_for_stays_in_the_registry() -> None:
    """The first leaf, used and released but for its bias, is on its way again when the second one is waited for."""
    params, _, registry = asked()
    first = registry[params[2]]
    wait(registry, params[0], 0)
    later = Fetch([Handle()], params[:1], first.in_flight)
    registry[params[0]] = later
    wait(registry, params[2], 1)
    assert list(registry.items()) == [(params[0], later)]
    wait(registry, params[0], 0)
    assert not registry


def test_without_leaves_they_are_waited_for_one_by_one() -> None:
    params, _, registry = asked(nn.Linear)
    wait(registry, params[1], 0)
    assert list(registry) == [params[0], *params[2:]]


def test_a_registry_that_is_walked_through_keeps_them() -> None:
    """As DeepSpeed clears it when a trace breaks."""
    params, handles, registry = asked()
    for handle in registry.values():
        handle.wait()
    assert list(registry) == params and len(handles[0].waits) == 1


def freed() -> None:
    _, shards = hooked_shards()
    handle = shards.gather(shards.weights)
    received = [weakref.ref(buffer) for buffer in handle.buffers]
    handle.wait()
    for weight in shards.weights:
        weight.leave()
    dist.barrier()  # until then the threads' collective may hold what it has filled
    gc.collect()
    assert received and all(buffer() is None for buffer in received)


@pytest.mark.parametrize("min_bytes", [0, 2**20], ids=["sent each", "one buffer"])
def test_a_released_weights_bytes_are_free_whoever_keeps_the_handle(
    monkeypatch: pytest.MonkeyPatch, min_bytes: int
) -> None:
    monkeypatch.setattr(collectives, "MIN_BYTES", min_bytes)
    on_threads(2, freed)


def waited_for_again() -> None:
    """A handle that was waited for makes nothing available again, long after its weight was released."""
    _, shards = hooked_shards()
    handle = shards.gather(shards.weights[:1])
    handle.wait()
    shards.weights[0].leave()
    handle.wait()
    assert shards.weights[0].payload.data is None and handle.complete


def test_a_handle_makes_its_weights_available_once() -> None:
    on_threads(2, waited_for_again)

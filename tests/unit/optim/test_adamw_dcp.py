"""Fp8AdamW under torch.distributed.checkpoint, and what its `state` is to those who look at it or write it."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.adamw import FORMATS, assert_equal, dtype_of, everything, group_of, step
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8_ds import Fp8AdamW, UnsupportedError

OPTIONS = {
    "default": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "whole, on the CPU": {"full_state_dict": True, "cpu_offload": True},
}

PAIRS = [(master, OPTIONS[name]) for master, name in zip(FORMATS, [*OPTIONS, *OPTIONS], strict=False)]
"""Each master, and each way to ask for a state."""


def make(master: str, seed: int = 0) -> tuple[nn.Module, Fp8AdamW]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
    net = net.to(dtype_of(master))
    return net, Fp8AdamW([group_of(net.parameters(), master)], lr=1e-2)


# --- torch.distributed.checkpoint ---


def through_a_checkpoint(saved: Any, other: Any, options: dict[str, Any], folder: Path) -> None:
    """Save a model and its optimizer, and load both into the others."""
    given = StateDictOptions(**options)
    model_state, state = get_state_dict(*saved, options=given)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    model_state, state = get_state_dict(*other, options=given)
    found = {"model": model_state, "optimizer": state}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(*other, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=given)


@pytest.mark.parametrize(("master", "options"), PAIRS, ids=str)
def test_a_run_that_is_saved_and_loaded_goes_on_with_the_same_bits(
    master: str, options: dict[str, Any], tmp_path: Path
) -> None:
    (net, optimizer), (other, loaded), (untouched, plain) = make(master), make(master, seed=1), make(master)
    step(net, optimizer, 3)
    through_a_checkpoint((net, optimizer), (other, loaded), options, tmp_path)
    assert_equal(everything(other, loaded), everything(net, optimizer))
    step(net, optimizer, 2, 3)
    step(other, loaded, 2, 3)
    assert_equal(everything(other, loaded), everything(net, optimizer))
    step(untouched, plain, 5)
    assert_equal(everything(untouched, plain), everything(net, optimizer))  # to read a state changes nothing


@pytest.mark.parametrize("num", [1, 8])
def test_a_run_whose_betas_a_scheduler_moves_goes_on_with_the_same_bits(num: int, tmp_path: Path) -> None:
    (net, optimizer), (other, loaded) = make("e4m19"), make("e4m19", seed=1)
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=12, base_momentum=0.3)
    schedule, _ = cycle(optimizer), cycle(loaded)
    for first in range(num):
        step(net, optimizer, 1, first)
        schedule.step()
    through_a_checkpoint((net, optimizer), (other, loaded), {}, tmp_path)
    assert_equal(everything(other, loaded), everything(net, optimizer))  # the sum that bounds an update is in it


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_checkpoint_of_fsdp2_is_loaded_into_whole_parameters(one_rank: None, tmp_path: Path) -> None:
    """Of torch's AdamW, whose states are DTensors: torch.distributed.checkpoint puts the shards together."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    stock = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    for _ in range(3):
        sharded(torch.randn(7, 12)).pow(2).sum().backward()
        stock.step()
        stock.zero_grad()
    model_state, state = get_state_dict(sharded, stock)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path / "saved")
    net, optimizer = make("own", seed=1)
    model_state, state = get_state_dict(net, optimizer)
    found = {"model": model_state, "optimizer": state}
    partly = DefaultLoadPlanner(allow_partial_load=True)  # torch's groups do not say "master"
    dcp.load(found, checkpoint_id=tmp_path / "saved", planner=partly)
    set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for p, expected in zip(net.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(p, expected.full_tensor())
        entry, wanted = optimizer.state[p], stock.state[expected]
        assert float(entry["step"]) == 3
        for key in ("exp_avg", "exp_avg_sq"):
            value = wanted[key].full_tensor()
            assert 0 < float((entry[key] - value).norm()) < 0.05 * float(value.norm())


def test_a_whole_state_is_broadcast_from_rank_0(one_rank: None) -> None:
    net, optimizer = make("e4m19")
    step(net, optimizer, 3)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(net, optimizer, options=whole)
    other, loaded = make("e4m19", seed=1)
    other.load_state_dict(get_model_state_dict(net, options=whole))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, loaded, state, options=options)
    assert_equal(everything(other, loaded), everything(net, optimizer))


def test_a_dtensor_in_a_state_dict_is_refused_by_name() -> None:
    optimizer = Fp8AdamW([nn.Parameter(torch.ones(4, 8))])
    state = torch.optim.AdamW([nn.Parameter(torch.ones(4, 8))]).state_dict()
    zeros = torch.zeros(4, 8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sharded = distribute_tensor(zeros, init_device_mesh("cpu", (2,)), [Shard(0)])
        state["state"][0] = {"step": torch.tensor(1.0), "exp_avg": sharded, "exp_avg_sq": zeros}
        with pytest.raises(UnsupportedError, match="exp_avg of parameter 0 as a plain tensor, got a DTensor"):
            optimizer.load_state_dict(state)
    finally:
        dist.destroy_process_group()


# --- state ---


@pytest.mark.parametrize("master", FORMATS)
def test_state_is_empty_before_the_first_step_and_then_what_the_state_dict_says(master: str) -> None:
    net, optimizer = make(master)
    assert not optimizer.state
    step(net, optimizer, 2)
    assert set(optimizer.state) == set(net.parameters())
    for index, p in enumerate(net.parameters()):
        expected, entry = optimizer.state_dict()["state"][index], optimizer.state[p]
        assert list(entry) == list(expected) and len(entry) == len(expected)
        assert_equal(dict(entry), expected)
        assert_equal(copy.deepcopy(entry), expected)
        assert type(copy.deepcopy(entry)) is dict
        assert "max_exp_avg_sq" not in entry and entry.get("momentum_buffer") is None
    (other, plain) = make(master)
    step(other, plain, 4)
    for entry in optimizer.state.values():  # Lightning and others so move states from device to device
        for key, value in entry.items():
            entry[key] = value.to("cpu", copy=True)
    step(net, optimizer, 2, 2)
    assert_equal(everything(net, optimizer), everything(other, plain))


def test_state_holds_no_dense_tensor() -> None:
    p = nn.Parameter(torch.randn(3, 1001).bfloat16())
    optimizer = Fp8AdamW([{"params": [p], "master": "e4m19"}])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].abs().sum() > 0
    gc.collect()
    held = [x for x in gc.get_objects() if type(x) is Tensor and x.dtype == torch.float32]
    assert held and not [x for x in held if x.numel() == p.numel()]


@pytest.mark.parametrize("master", FORMATS)
def test_an_entry_that_is_set_is_in_force(master: str) -> None:
    net, optimizer = make(master)
    step(net, optimizer, 3)
    p = next(net.parameters())
    before = everything(net, optimizer)
    optimizer.state[p]["exp_avg"] = torch.zeros(p.shape)
    optimizer.state[p]["step"] = 7
    if master != "own":
        optimizer.state[p]["master"] = torch.full(p.shape, 0.25)
    after = everything(net, optimizer)
    assert after["step 0"] == 7 and not after["exp_avg 0"].any()
    if master != "own":
        assert bool((after["master 0"] == 0.25).all() and (p == 0.25).all())
    changed = {"step 0", "exp_avg 0", "master 0", "scale_inv 0", "weight 0.weight"}
    rest = before.keys() - changed
    assert_equal({key: after[key] for key in rest}, {key: before[key] for key in rest})


RESETS: dict[str, Callable[[Fp8AdamW], Any]] = {
    "emptied": lambda optimizer: optimizer.state.clear(),
    "replaced": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "removed": lambda optimizer: [optimizer.state.pop(p) for p in optimizer.flat_params()],
    "nothing each": lambda optimizer: optimizer.state.update({p: {} for p in optimizer.flat_params()}),
}


@pytest.mark.parametrize("how", RESETS)
def test_a_state_that_is_emptied_starts_anew(how: str) -> None:
    net, optimizer = make("own")
    step(net, optimizer, 3)
    other, fresh = make("own", seed=1)
    with torch.no_grad():
        for p, value in zip(other.parameters(), net.parameters(), strict=True):
            p.copy_(value)
    RESETS[how](optimizer)
    step(net, optimizer, 2)
    step(other, fresh, 2)
    assert_equal(everything(net, optimizer), everything(other, fresh))


@pytest.mark.parametrize(("master", "num_before"), zip(FORMATS, (0, 2, 0, 2, 0), strict=True))
def test_a_dict_that_is_put_there_is_loaded(master: str, num_before: int) -> None:
    net, optimizer = make(master)
    step(net, optimizer, 3)
    other, loaded = make(master, seed=1)
    step(other, loaded, num_before)
    with torch.no_grad():
        for p, q in zip(other.parameters(), net.parameters(), strict=True):
            p.copy_(q)
            loaded.state[p] = dict(optimizer.state[q])
    step(net, optimizer, 2, 3)
    step(other, loaded, 2, 3)
    assert_equal(everything(other, loaded), everything(net, optimizer))


def test_entries_that_cannot_be_are_refused_by_name() -> None:
    net, optimizer = make("e4m19")
    step(net, optimizer)
    before, entry = everything(net, optimizer), optimizer.state[next(net.parameters())]
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 with shape \[24, 12\], got \[12, 24\]"):
        entry["exp_avg"] = torch.zeros(12, 24)
    with pytest.raises(UnsupportedError, match=r"state: expected one of .* got 'ema'"):
        entry["ema"] = torch.zeros(24, 12)
    with pytest.raises(UnsupportedError, match="expected 'exp_avg' to stay"):
        del entry["exp_avg"]
    assert_equal(everything(net, optimizer), before)

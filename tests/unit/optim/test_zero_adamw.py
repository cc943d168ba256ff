"""ZeroAdamW without ranks: which clients it takes, and the dense form of its flat tensors, padding included."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.adam_shards import clone_shard, differences, make_grad, make_shard
from torch import Tensor, nn

from fp8_ds import UnsupportedError
from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.masters import BF16_8, E4M11, FP32
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.optim.core import AdamCore, FlatBuffer
from fp8_ds.optim.zero_adamw import ZeroAdamW

CPU = torch.device("cpu")
FLATS = (400, 64)
"""Elements of the flat tensors: the first is two shards amid padding, one of them ragged, the second is one shard."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def client(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(numel))], "lr": 1e-2 / (1 + i)} for i, numel in enumerate(FLATS)]
    return kind(groups, **options)  # type: ignore[arg-type]


def make(seed: int = 0) -> ZeroAdamW:
    """Before its first step."""
    optimizer = ZeroAdamW(client(), seed=5)
    scales = PredictedScales(1, CPU)
    scales.set(torch.tensor([448 * 2.0**-14]))
    places = [[(E4M11, 10, 150, 0), (FP32, 170, 390, 37)], [(BF16_8, 0, 64, 128)]]
    flats = []
    for row, (numel, pieces) in enumerate(zip(FLATS, places, strict=True)):
        shards = [make_shard(fmt, stop - start, first, seed) for fmt, start, stop, first in pieces]
        for shard in shards:
            shard.group, shard.m, shard.v = row, *torch.empty(2, 0, dtype=torch.uint8)
        ranges = [ShardRange(start, stop) for _, start, stop, _ in pieces]
        flats.append(FlatBuffer(row, numel, list(zip(ranges, shards, strict=True))))
    optimizer.manage(AdamCore(flats, [0, 1], scales, CPU, optimizer.decoupled, optimizer.seed))
    return optimizer


def step(optimizer: ZeroAdamW, num: int = 1, first: int = 0) -> None:
    """As ZeRO does, with a gradient of its own for each step."""
    for number in range(first, first + num):
        inputs = optimizer.core.begin(optimizer.param_groups)
        optimizer.core.run([make_grad(shard, torch.float32, number) for shard in optimizer.core.shards], inputs)
        optimizer.core.end()


def assert_same(left: ZeroAdamW, right: ZeroAdamW, has_masters: bool = True) -> None:
    """Counts of steps, and every byte of the shards; masters are ZeRO's, which may not have loaded them."""
    assert torch.equal(left.core.step_count, right.core.step_count)
    for a, b in zip(left.core.shards, right.core.shards, strict=True):
        masters = [f"{a.name}.hi", f"{a.name}.lo"]
        found = [
            difference for difference in differences(a, b) if has_masters or difference.split(":")[0] not in masters
        ]
        assert found == []


# --- clients ---


class FusedAdam(torch.optim.Optimizer):
    """In the place of DeepSpeed's, which needs a GPU."""

    def __init__(self, params: Any, adam_w_mode: bool = True, bias_correction: bool = True) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.adam_w_mode = 1 if adam_w_mode else 0


FusedAdam.__module__ = "deepspeed.ops.adam.fused_adam"


@pytest.mark.parametrize(
    ("kind", "options", "decoupled"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.Adam, {}, False),
        (torch.optim.Adam, {"decoupled_weight_decay": True}, True),
        (FusedAdam, {}, True),
        (FusedAdam, {"adam_w_mode": False}, False),
    ],
)
def test_decay_is_decoupled_where_it_is_in_the_client(kind: Any, options: dict[str, Any], decoupled: bool) -> None:
    assert ZeroAdamW(client(kind, **options)).decoupled is decoupled


@pytest.mark.parametrize(("kind", "decoupled"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_groups_from_before_torch_had_the_option_decay_as_their_class_says(kind: Any, decoupled: bool) -> None:
    stock = client(kind)
    for group in stock.param_groups:
        del group["decoupled_weight_decay"]
    assert ZeroAdamW(stock).decoupled is decoupled


def adam_of_two_kinds() -> torch.optim.Optimizer:
    optimizer = client(torch.optim.Adam)
    optimizer.param_groups[1]["decoupled_weight_decay"] = True
    return optimizer


def stepped() -> torch.optim.Optimizer:
    optimizer = client()
    optimizer.param_groups[1]["params"][0].grad = torch.ones(64)
    optimizer.step()
    return optimizer


REFUSED = {
    "amsgrad": (lambda: client(amsgrad=True), "amsgrad: expected false"),
    "two kinds": (adam_of_two_kinds, r"decoupled_weight_decay: .* got \[False, True\]"),
    "another": (lambda: client(torch.optim.SGD), "got torch.optim.sgd.SGD"),
    "a class of torch's": (lambda: client(type("MyAdam", (torch.optim.Adam,), {})), "got .*MyAdam"),
    "FusedAdam of others": (lambda: client(type("FusedAdam", (torch.optim.SGD,), {})), "got .*FusedAdam"),
    "no bias correction": (lambda: client(FusedAdam, bias_correction=False), "bias_correction: expected true"),
    "one that has stepped": (stepped, "got one with state"),
}


@pytest.mark.parametrize(("found", "message"), REFUSED.values(), ids=REFUSED)
def test_another_client_is_refused(found: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ZeroAdamW(found())


def test_what_a_scheduler_of_the_client_sets_is_in_force_and_it_gives_no_warning() -> None:
    stock = client()
    scheduler = torch.optim.lr_scheduler.StepLR(stock, 1, gamma=0.5)
    optimizer = ZeroAdamW(stock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that steps before its optimizer
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 2.5e-3]


def test_nobody_steps_it() -> None:
    with pytest.raises(RuntimeError, match="expected to be called by nobody"):
        make().step()


def test_a_group_that_is_added_after_it_manages_shards_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="all groups at construction"):
        make().add_param_group({"params": [nn.Parameter(torch.zeros(4))]})


# --- states ---


def test_a_state_dict_is_torchs_with_zeros_in_the_padding() -> None:
    optimizer, stock = make(), client()
    assert optimizer.state_dict() == stock.state_dict()  # nothing has been updated
    step(optimizer, 2)
    found = optimizer.state_dict()["state"]
    assert found.keys() == {0, 1}
    for numel, entry in zip(FLATS, found.values(), strict=True):
        assert list(entry) == ["step", *MOMENTS]
        assert float(entry["step"]) == 2 and entry["step"].dtype == torch.float32
        assert all(entry[key].shape == (numel,) and entry[key].dtype == torch.float32 for key in MOMENTS)
    padding = torch.ones(400, dtype=torch.bool)
    padding[10:150], padding[170:390] = False, False
    for key in MOMENTS:
        assert not found[0][key][padding].any()
        assert float((found[0][key][~padding] != 0).float().mean()) > 0.5 and found[1][key].any()
    assert not optimizer.state  # a copy of all moments stays nowhere


def test_entries_of_nothing_that_somebody_has_looked_up_do_not_hide_the_moments() -> None:
    optimizer = make()
    step(optimizer)
    expected = optimizer.state_dict()["state"]
    for p in optimizer.flat_params():
        assert optimizer.state[p] == {}
    found = optimizer.state_dict()["state"]
    assert all(torch.equal(found[row][key], expected[row][key]) for row in (0, 1) for key in MOMENTS)
    assert not optimizer.state


def test_a_state_dict_is_loaded_without_loss_and_the_next_steps_are_the_same() -> None:
    first, second = make(), make()
    step(first, 3)
    state = first.state_dict()
    step(second, 1, first=9)
    for row, target in enumerate(second.core.shards):  # masters are loaded by ZeRO
        target.hi.copy_(first.core.shards[row].hi)
        if target.lo is not None:
            target.lo.copy_(first.core.shards[row].lo)  # type: ignore[arg-type]
    second.core.scales.set(first.core.scales.amax, first.core.scales.scale_inv)
    state["param_groups"][0]["lr"] = 0.5
    second.load_state_dict(state)
    assert [group["lr"] for group in second.param_groups] == [0.5, 5e-3] and not second.state
    assert_same(second, first)
    first.param_groups[0]["lr"] = 0.5
    step(first, 2, first=3)
    step(second, 2, first=3)
    assert_same(second, first)


def test_a_flat_tensor_that_has_no_state_starts_anew_and_groups_of_another_number_change_nothing() -> None:
    optimizer = make()
    step(optimizer, 2)
    before = [clone_shard(shard) for shard in optimizer.core.shards]
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"expected \[1, 1\] parameters by group, got \[1\]"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:1]})
    assert all(differences(*pair) == [] for pair in zip(optimizer.core.shards, before, strict=True))
    del state["state"][0]
    optimizer.load_state_dict(state)
    assert optimizer.core.step_count.tolist() == [0, 2]
    assert [bool(shard.m.any()) for shard in optimizer.core.shards] == [False, False, True]
    assert differences(optimizer.core.shards[2], before[2]) == []


def test_while_deepspeed_works_on_dense_states_what_is_loaded_stays_dense() -> None:
    source, optimizer = make(), make()
    step(source, 2)
    state = source.state_dict()
    optimizer.is_dense = True
    optimizer.load_state_dict(state)
    assert not optimizer.core.has_moments
    found = optimizer.state_dict()["state"]
    assert all(torch.equal(found[row][key], state["state"][row][key]) for row in (0, 1) for key in MOMENTS)
    optimizer.absorb_dense()
    assert not optimizer.state
    assert_same(optimizer, source, has_masters=False)


def test_dense_states_of_other_tensors_go_to_the_rows_of_their_order() -> None:
    source, optimizer = make(), make()
    step(source, 2)
    masters = [torch.zeros(numel) for numel in FLATS]
    dense: dict[int, dict[str, Tensor]] = source.state_dict()["state"]
    optimizer.state.update({masters[1]: dense[1], masters[0]: dense[0]})
    optimizer.absorb_dense(masters)
    assert not optimizer.state
    assert_same(optimizer, source, has_masters=False)

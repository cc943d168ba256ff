"""ParamState alone: which entries it has, what it reads and writes, and which states it would take."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from support.adam_shards import clone_shard, differences, make_shard
from torch import Tensor, nn

from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.masters import BF16_8, E4M11, E4M19, FP32, MasterFormat
from fp8_ds.numerics.predicted import PredictedScales, pow2_scale_inv
from fp8_ds.optim.core import AdamCore, FlatBuffer
from fp8_ds.optim.param_state import ParamState, absorb_state, amax_of, checked_state

CPU = torch.device("cpu")
SHAPE = (10, 30)
MASTERS = {"own": FP32, "fp32": FP32, "bf16_8": BF16_8, "e4m19": E4M19, "e4m11": E4M11}
FP8 = pytest.mark.parametrize("name", ["e4m19", "e4m11"])


def make(name: str, *, has_moments: bool = True) -> tuple[AdamCore, ParamState]:
    """A parameter in the middle of a run; of "own" it is its master, of the other four it is bf16."""
    fmt: MasterFormat = MASTERS[name]
    shard = make_shard(fmt, math.prod(SHAPE), 0)
    if not has_moments:
        shard.m = shard.v = torch.empty(0, dtype=torch.uint8)
    if name == "own" or fmt is BF16_8:
        values = shard.hi.view(SHAPE)
    else:
        values = (torch.zeros(SHAPE) if fmt.is_fp8 else shard.hi.view(SHAPE)).bfloat16()
    scales = PredictedScales(int(fmt.is_fp8), CPU)
    if fmt.is_fp8:
        scales.set(torch.tensor([448 * 2.0**-14]))
    flat = FlatBuffer(0, shard.numel, [(ShardRange(0, shard.numel), shard)])
    core = AdamCore([flat], [0], scales, CPU, True, seed=0)
    core.step_count.fill_(3)
    return core, ParamState(core, 0, nn.Parameter(values))


# --- as a mapping ---


@pytest.mark.parametrize("name", MASTERS)
def test_entries_are_torchs_and_what_does_not_follow_from_the_parameter(name: str) -> None:
    core, entry = make(name)
    own = [] if name == "own" else ["master"]
    scale = ["scale_inv"] if MASTERS[name].is_fp8 else []
    assert list(entry) == ["step", "exp_avg", "exp_avg_sq", *own, *scale]
    with pytest.raises(KeyError, match="bound_sum"):
        entry["bound_sum"]
    core.sums.set(0, 0.75)
    assert list(entry) == ["step", "exp_avg", "exp_avg_sq", *own, *scale, "bound_sum"]
    assert len(entry) == 4 + len(own + scale)
    assert entry["bound_sum"].dtype == torch.float64 and float(entry["bound_sum"]) == 0.75
    assert entry["step"].dtype == torch.float32 and float(entry["step"]) == 3
    assert all(entry[key].shape == SHAPE for key in ["exp_avg", "exp_avg_sq", *own])


def test_moments_are_zeros_before_a_step_and_reading_them_allocates_nothing() -> None:
    core, entry = make("e4m11", has_moments=False)
    for key in ("exp_avg", "exp_avg_sq"):
        assert entry[key].shape == SHAPE and not entry[key].any()
    assert entry["master"].any() and not core.has_moments


@pytest.mark.parametrize("name", MASTERS)
def test_an_entry_that_is_read_is_a_copy(name: str) -> None:
    core, entry = make(name)
    core.sums.set(0, 0.75)
    before = clone_shard(entry.shard)
    for key in entry:
        value = entry[key].clone()
        entry[key].add_(1)
        assert torch.equal(entry[key], value), key
    assert differences(entry.shard, before) == []


@pytest.mark.parametrize("name", MASTERS)
def test_an_entry_that_is_set_to_what_it_was_changes_no_byte(name: str) -> None:
    core, entry = make(name)
    core.sums.set(0, 0.75)
    before, scales = clone_shard(entry.shard), core.scales.scale_inv.clone()
    for key in list(entry):
        entry[key] = entry[key]
    assert differences(entry.shard, before) == []
    assert torch.equal(core.scales.scale_inv, scales)
    assert (int(core.step_count[0]), float(entry["bound_sum"])) == (3, 0.75)


@pytest.mark.parametrize("name", ["own", "e4m11"])
def test_a_pickle_is_a_plain_dict_of_tensors(name: str) -> None:
    _, entry = make(name)
    found = pickle.loads(pickle.dumps(entry))
    assert type(found) is dict and found.keys() == set(entry)
    assert all(torch.equal(found[key], entry[key]) for key in entry)


# --- a parameter and its master ---


def test_the_parameter_holds_the_master_or_its_high_part_unless_dtype_or_layout_differ() -> None:
    assert {name: make(name)[1].is_in_place for name in MASTERS} == {
        "own": True, "fp32": False, "bf16_8": True, "e4m19": True, "e4m11": True,
    }  # fmt: skip
    _, entry = make("own")
    entry.param.data = entry.param.data.t().contiguous().t()
    assert not entry.is_in_place and "master" in entry
    entry.param.data = entry.shard.hi.view(SHAPE[::-1]).t()  # the same memory in another order
    assert not entry.is_in_place and "master" in entry


@pytest.mark.parametrize("name", ["own", "bf16_8"])
def test_other_data_of_the_parameter_becomes_the_master_without_a_copy(name: str) -> None:
    _, entry = make(name)
    entry.param.data = torch.full(SHAPE, 0.25, dtype=entry.param.dtype)
    entry.follow()
    assert entry.shard.hi.data_ptr() == entry.param.data_ptr() and bool((entry.shard.hi == 0.25).all())


def test_float32_masters_stay_where_the_bf16_parameter_is_as_it_was() -> None:
    _, entry = make("fp32")
    masters = entry.shard.hi.clone()
    assert (masters != masters.bfloat16().float()).float().mean() > 0.9  # else nothing could be lost
    entry.param.data[0] = 0.3
    entry.follow()
    found = entry.shard.hi.view(SHAPE)
    assert torch.equal(found[1:], masters.view(SHAPE)[1:])
    assert bool((found[0] == torch.tensor(0.3).bfloat16().float()).all())


def test_a_master_of_another_dtype_is_written_back_and_one_in_place_costs_no_write() -> None:
    for name, changes in (("fp32", True), ("bf16_8", False)):
        _, entry = make(name)
        entry.shard.hi.mul_(4)
        version = entry.param._version
        entry.write_back()
        assert torch.equal(entry.param, entry.shard.hi.view(SHAPE).bfloat16())
        assert (entry.param._version > version) == changes


# --- states that are taken over ---


@FP8
def test_a_master_comes_with_the_scale_it_was_saved_with_or_the_smallest_that_fits(name: str) -> None:
    core, entry = make(name)
    value = 0.1 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    smallest = float(pow2_scale_inv(value.abs().max()))
    half_step = 2.0 ** -(4 + MASTERS[name].lo_bits)
    for saved, expected in ((None, 1), (4.0, 4), (0.25, 1)):
        state = {"master": value} if saved is None else {"master": value, "scale_inv": torch.tensor(saved * smallest)}
        absorb_state(core, 0, state)
        assert float(core.scales.scale_inv[0]) == expected * smallest
        floor = 2.0**-6 * expected * smallest  # FP8's smallest normal number
        assert bool(((entry["master"] - value).abs() <= half_step * value.abs().clamp(min=floor)).all())
    assert float(core.scales.amax[0]) == float(value.abs().max())


@FP8
def test_a_master_that_is_set_keeps_its_scale_and_a_scale_that_is_set_its_master(name: str) -> None:
    core, entry = make(name)
    value = entry["master"] / 8
    entry["master"] = value
    assert float(core.scales.scale_inv[0]) == 2.0**-14
    stored = entry["master"]
    entry["scale_inv"] = 2.0**-16
    assert float(core.scales.scale_inv[0]) == 2.0**-16
    is_normal = stored.abs() >= 2.0**-6 * 2.0**-14  # the others have more bits now, of which none were stored
    assert is_normal.float().mean() > 0.5 and torch.equal(entry["master"][is_normal], stored[is_normal])


def test_both_moments_end_a_sum_that_is_not_beside_them_and_one_leaves_it() -> None:
    core, _ = make("own")
    zeros = torch.zeros(SHAPE)
    found = []
    for state in (
        {"exp_avg": zeros},
        {"exp_avg": zeros, "exp_avg_sq": zeros},
        {"exp_avg": zeros, "exp_avg_sq": zeros, "bound_sum": torch.tensor(2.0)},
        {"bound_sum": torch.tensor(3.0)},
    ):
        core.sums.set(0, 0.75)
        absorb_state(core, 0, state)
        bound_sum = core.sums.get(0)
        found.append(None if bound_sum is None else float(bound_sum))
    assert found == [0.75, None, 2.0, 3.0]


def test_a_state_in_which_nothing_is_changes_nothing() -> None:
    core, entry = make("e4m11", has_moments=False)
    before = clone_shard(entry.shard)
    absorb_state(core, 0, {})
    assert differences(entry.shard, before) == [] and not core.has_moments
    absorb_state(core, 0, {"step": 8, "exp_avg_sq": torch.full(SHAPE, 4.0)})
    assert core.has_moments and int(core.step_count[0]) == 8
    assert entry["exp_avg_sq"].flatten().tolist() == pytest.approx(300 * [4.0], rel=1e-5) and not entry["exp_avg"].any()


STATE = {"step": 3, "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3)}


def test_numbers_become_tensors_and_other_entries_are_ignored() -> None:
    found = checked_state("weight", torch.Size([2, 3]), {**STATE, "max_exp_avg_sq": "anything", "lr": None})
    assert found.keys() == STATE.keys()
    assert isinstance(found["step"], Tensor) and int(found["step"]) == 3


TAKEN: dict[str, list[Any]] = {
    "step": [0, 2**31 - 1, torch.tensor([5.0])],
    "scale_inv": [2.0**-149, 1.0, 2.0**100],
    "bound_sum": [0.0, torch.tensor(1e300, dtype=torch.float64)],
    "exp_avg": [torch.full((2, 3), -3e38), torch.full((2, 3), 1e-300, dtype=torch.float64)],
    "exp_avg_sq": [torch.full((2, 3), -0.0)],
    "master": [torch.full((2, 3), -1.0, dtype=torch.float16)],
}
REFUSED: dict[str, list[Any]] = {
    "step": [-1, 2**31, 0.5, float("nan"), torch.zeros(0)],
    "scale_inv": [0.0, -1.0, 3.0, float("inf")],
    "bound_sum": [-1e-9, float("inf"), torch.ones(1, dtype=torch.int64)],
    "exp_avg": [torch.full((2, 3), 1e39, dtype=torch.float64), torch.ones(3, 2), torch.ones(2, 3, dtype=torch.bool)],
    "exp_avg_sq": [torch.full((2, 3), -1e-38)],
    "master": [torch.full((2, 3), float("-inf"))],
}


@pytest.mark.parametrize("key", TAKEN)
def test_entries_are_taken_up_to_their_limits_and_refused_by_name_beyond(key: str) -> None:
    shape = torch.Size([2, 3])
    for value in TAKEN[key]:
        assert torch.equal(checked_state("weight", shape, {**STATE, key: value})[key], torch.as_tensor(value))
    for value in REFUSED[key]:
        with pytest.raises(ValueError, match=rf"state_dict: expected {key} of weight "):
            checked_state("weight", shape, {**STATE, key: value})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([1.0, -3.0, 2.0]).bfloat16(), 3.0),
        (torch.empty(0, dtype=torch.bfloat16), 0.0),
        (torch.tensor(-2.5), 2.5),
        (torch.tensor([[1.0, float("-inf")]]), math.inf),
        (torch.tensor([1.0, float("nan")]), math.nan),
    ],
)
def test_an_amax_is_the_largest_magnitude_in_float32(value: Tensor, expected: float) -> None:
    found = amax_of(value)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert float(found) == expected or (math.isnan(expected) and bool(found.isnan()))

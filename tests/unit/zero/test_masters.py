"""What users read and write of masters and moments in FP8 states, masters12.py and masters3.py, on stub hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed import utils
from support.threads import on_threads
from support.zero_hosts import RAGGED, WEIGHTS, zero_optimizer
from support.zero_training import (
    assert_high_parts,
    different,
    fp8_states,
    gradients,
    trained,
)
from torch import Tensor

from fp8_ds.errors import UnsupportedError

PRECISION = {"e4m19": 2.0**-20, "e4m11": 2.0**-12}
"""Half a unit in the last place of a split master; of a bf16 parameter's it is 2**-16."""


def ramp(shape: Any, index: int) -> Tensor:
    """Values of both signs with a range of their own per parameter, from tiny to larger than any weight."""
    numel = torch.Size(shape).numel()
    signs = 1.0 - 2.0 * (torch.arange(numel) % 2)
    return (torch.exp2(torch.linspace(-9, 2 + index, numel)) * signs).view(shape)


def set_and_read(stage: int, master: str) -> None:
    zero = trained(stage, RAGGED, fp8_states(master), 1)
    for index, (name, p) in enumerate(zero.params.items()):
        value, precision = ramp(RAGGED[name], index), PRECISION[master] if name in WEIGHTS else 2.0**-16
        if stage == 3 and name in WEIGHTS:  # a gathered one reads as it was set, too
            p.all_gather_coalesced([p]).wait()
        utils.safe_set_full_fp32_param(p, value)
        utils.safe_set_full_optimizer_state(p, value / 16, "exp_avg")
        utils.safe_set_full_optimizer_state(p, value.square(), "exp_avg_sq")
        moments = [utils.safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq")]
        got = utils.safe_get_full_fp32_param(p).clone()
        torch.testing.assert_close(got, value, rtol=precision, atol=1e-12)
        torch.testing.assert_close(moments[0], value / 16, rtol=2.0**-4, atol=1e-12)
        torch.testing.assert_close(moments[1], value.square(), rtol=2.0**-4, atol=1e-12)
    assert_high_parts(zero, master)
    masters = zero.masters()
    zero.param_groups[0]["lr"] = 0.0
    zero.give(gradients(RAGGED, 1))
    zero.step()  # nothing moves, though every byte is written anew
    assert different(zero.masters(), masters) == []


@pytest.mark.parametrize("master", PRECISION)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_set_is_what_is_read_to_the_precision_of_the_states(stage: int, master: str) -> None:
    on_threads(2, set_and_read, stage, master)


def set_locally() -> None:
    """In stage 3 a rank writes its own part, within the scale that all ranks have chosen for the weight."""
    zero = trained(3, RAGGED, fp8_states("e4m11"), 1)
    p, scales = zero.params["up"], zero.optimizer.core.scales
    scales.wait()
    before, limit = zero.masters()["up"].flatten(), float(scales.amax[0])
    size, rank = p.ds_tensor.ds_numel, dist.get_rank()
    value = zero._get_fp32_opt_state_partition(p, False)[0]
    if rank == 1:
        value[5] = -0.999 * limit
    zero.set_local_hp_param(value, p)
    value[5] = 1.01 * limit
    with pytest.raises(UnsupportedError, match="safe_set_full_fp32_param"):
        zero.set_local_hp_param(value, p)
    zero.set_local_hp_param(torch.full_like(value, 0.25 + rank), p, "exp_avg")
    moment = utils.safe_get_full_optimizer_state(p, "exp_avg").flatten()
    torch.testing.assert_close(moment, 0.25 + (torch.arange(len(moment)) >= size).float())
    after = zero.masters()["up"].flatten()
    assert (after != before).nonzero().flatten().tolist() == [size + 5]
    assert float(after[size + 5]) == pytest.approx(-0.999 * limit, rel=2.0**-11)


def test_a_local_value_is_taken_if_the_scale_that_ranks_share_holds_it() -> None:
    on_threads(2, set_locally)


def write_back(stage: int, master: str) -> None:
    zero = trained(stage, RAGGED, fp8_states(master), 3)
    before = zero.states()
    for in_bf16 in (False, True):
        zero.fp8.set_bf16({name for name in ("up",) if in_bf16})
        for name in zero.params:
            zero.write(name, lambda value: value)
        changed = different(zero.states(), before)
        assert [name for name in changed if stage < 3 or "master" in name] == []  # in stage 3 scales fit anew


@pytest.mark.parametrize(("stage", "master"), [(2, "e4m19"), (2, "e4m11"), (3, "e4m11")])
def test_what_is_written_back_as_it_was_read_changes_no_master(stage: int, master: str) -> None:
    on_threads(2, write_back, stage, master)


def write_a_row(stage: int, master: str, factor: float) -> None:
    zero = trained(stage, RAGGED, fp8_states(master), 3)
    before = zero.masters()
    row = (factor * before["up"].abs().max() * torch.linspace(-1, 1, 50)).bfloat16()

    def with_row(value: Tensor) -> Tensor:
        value[3] = row
        return value

    zero.write("up", with_row)
    zero.write("gain", lambda value: 0 * value)
    after, scale_inv = zero.masters(), zero.weights()["up"][1]
    assert_high_parts(zero, master)
    others = torch.arange(70) != 3
    held = before["up"][others].abs() >= (9 * 2.0**-9 * scale_inv if factor > 1 else 0)  # below are FP8's subnormals
    assert torch.equal(after["up"][others][held], before["up"][others][held]) and float(held.float().mean()) > 0.8
    torch.testing.assert_close(after["up"][3], row.float(), rtol=2.0**-11, atol=2.0**-20)
    assert different({"down": after["down"]}, {"down": before["down"]}) == []
    assert float(after["gain"].abs().max()) < 1e-30


@pytest.mark.parametrize(("stage", "master", "factor"), [(2, "e4m11", 1.0), (2, "e4m19", 8.0), (3, "e4m11", 8.0)])
def test_elements_that_a_write_leaves_as_they_were_keep_their_masters(stage: int, master: str, factor: float) -> None:
    on_threads(2, write_a_row, stage, master, factor)


def read_what_is_not_there(stage: int) -> None:
    zero = zero_optimizer(stage, RAGGED, **fp8_states("e4m11"))
    p = zero.params["up"]

    def read(key: str) -> Any:
        if stage == 3:
            return zero._get_fp32_opt_state_partition(p, False, key)
        return p._hp_mapping.get_hp_fragment(key)

    for key in ("exp_avg", "no_such_state"):  # there are no moments before the first step
        with pytest.raises((KeyError, ValueError)):
            read(key)
    zero.give(gradients(RAGGED, 0))
    zero.step()
    read("exp_avg")
    with pytest.raises((KeyError, ValueError)):
        read("no_such_state")
    with pytest.raises((KeyError, ValueError)):
        utils.safe_set_full_optimizer_state(p, torch.zeros(RAGGED["up"]), "no_such_state")


@pytest.mark.parametrize("stage", [2, 3])
def test_states_that_are_not_there_are_neither_read_nor_written(stage: int) -> None:
    on_threads(1, read_what_is_not_there, stage)


def set_frozen() -> None:
    zero = trained(3, RAGGED, fp8_states("e4m11"), 1)
    p, before = zero.params["up"], zero.masters()["up"]
    p.requires_grad = False
    zero.set_full_hp_param(torch.ones(RAGGED["up"]), p)
    zero.set_local_hp_param(torch.ones(p.ds_tensor.ds_numel), p)
    p.requires_grad = True
    assert torch.equal(zero.masters()["up"], before)


def test_a_frozen_weights_master_is_not_set() -> None:
    on_threads(2, set_frozen)

"""FP8 states of all stages, on stub hosts whose ranks are threads."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from support.late_flag import flag_late
from support.threads import on_threads
from support.zero_hosts import ALIGNED, RAGGED, zero_optimizer
from support.zero_training import (
    assert_high_parts,
    different,
    fp8_states,
    gradients,
    trained,
)
from torch import Tensor

from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.numerics.masters import BY_NAME
from fp8_ds.numerics.scale import scale_from_amax
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import allocate_lo, read_dense


def after_steps(stage: int, master: str) -> dict[str, Tensor]:
    zero = trained(stage, ALIGNED, fp8_states(master), 3)
    assert_high_parts(zero, master)
    return dict(zero.states())


@pytest.mark.parametrize("master", ["e4m19", "e4m11"])
def test_gradients_give_the_same_bytes_on_1_2_and_4_ranks_in_all_stages(master: str) -> None:
    cases = [(2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 4)]
    first, *others = [found for stage, num in cases for found in on_threads(num, after_steps, stage, master)]
    assert first["step"] == 3 and different(first, on_threads(1, after_steps, 2, master)[0]) == []
    for other in others:
        assert different(first, other) == []


def skipping(stage: int, master: str, value: float, is_late: bool) -> None:
    zero = trained(stage, RAGGED, fp8_states(master, linear={"recipe": "delayed"}), 2)
    if is_late:
        flag_late(zero)
        zero.check_grad_overflow = zero.context.check_overflow = False
    before, history = zero.states(), zero.context.history
    scale = history.scale.clone()
    broken = gradients(RAGGED, 2)
    broken["gain"][7] = value  # on one rank alone
    zero.give(broken)
    history.amax_local.fill_(3e4)
    zero.step()
    assert zero.overflow is not is_late and different(zero.states(), before) == []
    assert torch.equal(history.scale, scale)
    zero.give(gradients(RAGGED, 3))
    history.amax_local.fill_(3.0)
    zero.step()
    assert zero.overflow is is_late and len(different(zero.states(), before)) > 10
    assert bool((history.scale == scale_from_amax(torch.tensor(3.0), 448.0)[0]).all())


@pytest.mark.parametrize(("master", "value"), [("e4m11", float("inf")), ("e4m19", float("nan"))])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    stage: int, is_late: bool, master: str, value: float
) -> None:
    on_threads(3, skipping, stage, master, value, is_late)


def scaled(stage: int) -> None:
    """Of gradients that a loss scale has multiplied: masters, the norm, and the scale's own count of overflows."""
    found: list[Any] = []
    for loss_scale in (1.0, 4.0):
        zero, seen = zero_optimizer(stage, RAGGED, **fp8_states("e4m11")), []
        zero.loss_scale, zero._update_scale = loss_scale, seen.append
        zero.give({name: loss_scale * grad for name, grad in gradients(RAGGED, 0).items()})
        zero.step()
        broken = gradients(RAGGED, 1)
        broken["up"][3] = float("inf")
        norm = float(zero._global_grad_norm)
        zero.give(broken)
        zero.step()
        found.append((zero.states(), norm, seen))
    assert different(found[0][0], found[1][0]) == []
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6) and found[0][2] == found[1][2] == [False, True]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_scale_is_taken_out_and_told_of_overflows(stage: int) -> None:
    on_threads(2, scaled, stage)


def clipped(stage: int) -> None:
    zero = zero_optimizer(stage, RAGGED, **fp8_states("e4m11"))
    zero.clip_grad = 0.01
    zero.give(gradients(RAGGED, 0))
    zero.step()
    first = [moment.flatten() for name, moment in zero.states().items() if name.endswith("exp_avg")]
    assert float(torch.cat(first).norm()) == pytest.approx(0.1 * 0.01, rel=0.02)  # (1 - beta1) * clip


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_clipped_to_their_norm(stage: int) -> None:
    on_threads(2, clipped, stage)


def with_other_numbers(stage: int, number: dict[str, Any], is_alike: bool) -> None:
    zero = trained(stage, RAGGED, fp8_states("e4m11"), 1)
    before = zero.states()
    if dist.get_rank() == 1:
        zero.param_groups[0].update(number)
    zero.give(gradients(RAGGED, 1))
    if is_alike:
        zero.step()
        return
    with pytest.raises(ConfigError, match="lr, betas, eps and weight_decay"):
        zero.step()
    assert different(zero.states(), before) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_no_rank_steps_with_a_number_of_its_own(stage: int) -> None:
    for number in ({"lr": 1e-3}, {"betas": (0.8, 0.999)}, {"eps": 1e-6}, {"weight_decay": 0.1}):
        on_threads(2, with_other_numbers, stage, number, False)
    on_threads(2, with_other_numbers, stage, {"lr": 1e-2 * (1 + 2**-52)}, True)  # a last bit of float64 is no other


TENSORS = {"optim_states": ("m", "v", "m_scale_inv", "v_scale_inv"), "hp_params": ("lo",)}


def offloaded(stage: int, kind: str) -> None:
    """To the meta device, which is elsewhere on a CPU, too."""
    zero = trained(stage, RAGGED, fp8_states("e4m11"), 1)
    shards = zero.optimizer.core.shards
    held = [weakref.ref(getattr(shard, name).untyped_storage()) for shard in shards for name in TENSORS[kind]]
    assert None not in [one() for one in held]
    zero.offload_states(include=[OffloadStateTypeEnum(kind)], device=SimpleNamespace(value="meta"))
    assert {one.value for one in zero.offloaded_states} == {kind}
    gc.collect()
    assert {one() for one in held} == {None}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_leaves_nothing_behind(stage: int, kind: str) -> None:
    on_threads(2, offloaded, stage, kind)


@pytest.mark.parametrize("kind", TENSORS)
def test_addresses_are_forgotten_when_states_leave_and_when_they_come_back(kind: str) -> None:
    """What the kernel knows of where they lie."""

    def moved() -> None:
        zero = trained(2, RAGGED, fp8_states("e4m11"), 1)
        prepared = zero.optimizer.core._prepared
        for move in (lambda: zero.offload_states(include=[OffloadStateTypeEnum(kind)]), zero.reload_states):
            assert len(prepared) > 0
            move()
            assert len(prepared) == 0
            zero.give(gradients(RAGGED, 1))
            zero.step()
        assert zero.offloaded_states == set()

    on_threads(1, moved)


def test_a_master_whose_low_part_is_elsewhere_is_read_where_the_high_part_is() -> None:
    """As in a save while states are offloaded. "meta" stands in for a GPU, which refuses tensors of two devices too."""
    hi = torch.zeros(200, dtype=torch.uint8, device="meta")
    shard = AdamShard("weight", 200, 0, 0, 0, 0, BY_NAME["e4m11"], hi)
    allocate_lo(shard, torch.device("cpu"))
    read_dense(shard, None, torch.empty(200, device="meta"), torch.ones(1))


def inexact(stage: int) -> None:
    zero = zero_optimizer(stage, RAGGED, **fp8_states("e4m11"))
    states, p = zero.fp8.masters.states, zero.params["up"]
    (shard,) = [one for one in zero.optimizer.core.shards if one.name == "up"]
    value = torch.full((shard.numel,), 0.25, dtype=torch.bfloat16)
    uneven = value.clone()
    uneven[5] = 129 * 2.0**-34  # eight bits, of which most lie below the last one of a master
    states.write_first(p, shard, uneven)
    states.check_stored()  # its rounding counts only if it came in FP8
    zero.context.stored = {id(p): None}
    states.write_first(p, shard, value)
    states.check_stored()
    if dist.get_rank() == 1:
        states.write_first(p, shard, uneven)
    with pytest.raises(UnsupportedError, match="sizes as in up" if dist.get_rank() == 1 else "those of other ranks"):
        states.check_stored()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_weight_that_came_in_fp8_and_would_be_rounded_on_one_rank_is_refused_on_all(stage: int) -> None:
    on_threads(2, inexact, stage)

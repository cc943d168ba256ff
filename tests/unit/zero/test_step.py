"""Steps of all stages on stub hosts whose ranks are threads: who updates, what a skipped step leaves, timers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.utils.timer import SynchronizedWallClockTimer
from support.threads import on_threads
from support.zero_hosts import RAGGED, WEIGHTS, values_of, zero_optimizer
from support.zero_training import (
    assert_follow,
    assert_same,
    different,
    fp8_states,
    gradients,
    other_values,
    quantized,
    trained,
)
from torch import Tensor, nn

from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.zero.zero12 import patched_all_gather

DELAYED = {"linear": {"recipe": "delayed"}}
BLOCKS = {"fp32": DELAYED, "fp8": fp8_states("e4m11", **DELAYED)}


@pytest.fixture(autouse=True)
def patched_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's gather, patched as `fp8_ds.install` does."""
    stock = stage_1_and_2.all_gather_dp_groups
    monkeypatch.setattr(stage_1_and_2, "all_gather_dp_groups", patched_all_gather(stock))


def adam_of(values: dict[str, Tensor], steps: list[int]) -> dict[str, Tensor]:
    """`values` after steps of torch's AdamW with the options of the stub hosts."""
    params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    adam = torch.optim.AdamW(params.values(), lr=1e-2, weight_decay=0.0, foreach=False)
    for step in steps:
        for name, grad in gradients(RAGGED, step).items():
            params[name].grad = grad.float()
        adam.step()
    return {name: p.detach() for name, p in params.items()}


# --- who updates ---


def with_adam(stage: int) -> None:
    zero = zero_optimizer(stage, RAGGED)
    for step in range(2):
        zero.give(gradients(RAGGED, step))
        zero.step()
    masters = zero.masters()
    assert_same(masters, adam_of(values_of(RAGGED), [0, 1]))
    assert_follow(zero, "tensorwise", masters)
    for name in ("embedding", "gain"):
        assert torch.equal(zero.read(name), masters[name].bfloat16()), name
    assert zero.averaged_gradients[0] is None and zero.overflow is False


@pytest.mark.parametrize("stage", [2, 3])
def test_adam_updates_float32_masters_as_torch_does_and_the_weights_follow(stage: int) -> None:
    on_threads(3, with_adam, stage)


def with_deepspeeds(stage: int, why: str) -> None:
    block = {"without_deepspeed_fixes": ["adam_step"]} if why == "left out" else {}
    zero, seen = zero_optimizer(stage, RAGGED, **block), []
    if why == "SGD":
        zero.optimizer = torch.optim.SGD(zero.flat_masters(), lr=1.0)
    zero.deepspeed_step = seen.append
    zero.give(gradients(RAGGED, 0))
    before = zero.averaged_gradients[0]
    zero.step("closure")
    assert seen == ["closure"] and zero.averaged_gradients[0] is before
    assert_same(zero.masters(), values_of(RAGGED))


@pytest.mark.parametrize("why", ["SGD", "left out"])
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_step_runs_with_another_optimizer_or_if_adam_step_is_left_out(stage: int, why: str) -> None:
    on_threads(1, with_deepspeeds, stage, why)


def with_states(stage: int, releases: bool) -> None:
    """FP8 states are updated from the gradients in the step; with gradient release they have been before."""
    zero = zero_optimizer(stage, RAGGED, optimizer={"states": "fp8", "master": "e4m11", "release": releases})
    before = zero.masters()
    if releases:
        zero.averaged_gradients[0] = None
        zero.fp8.step.release.expect(list(RAGGED))
    else:
        zero.give(gradients(RAGGED, 0))
    zero.step()
    changed = different(zero.masters(), before)
    assert changed == ([] if releases else list(RAGGED)) and zero.averaged_gradients[0] is None
    assert zero.context.counter.last is not None


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_of_fp8_states_reads_the_gradients_unless_they_are_released(stage: int, releases: bool) -> None:
    on_threads(2, with_states, stage, releases)


def with_gather_inside(fails: bool) -> None:
    """DeepSpeed's own step, which gathers in its end or fails before."""
    zero = zero_optimizer(2, RAGGED, without_deepspeed_fixes=["adam_step"], **DELAYED)
    counter, history = zero.context.counter, zero.context.history
    counter.end_step()

    def gather(closure: Any = None) -> None:
        stage_1_and_2.all_gather_dp_groups(zero.bit16_groups_flat)
        if fails:
            raise RuntimeError("failed")

    zero.deepspeed_step = gather
    history.amax_local.fill_(2.0)
    if fails:
        with pytest.raises(RuntimeError, match="failed"):
            zero.step()
    else:
        zero.step()
    assert history.num_updates == 1 and counter.last.fp8 > 0
    last = counter.last
    history.amax_local.fill_(3.0)
    stage_1_and_2.all_gather_dp_groups(zero.bit16_groups_flat)
    assert history.num_updates == 1 and counter.last is last  # outside a step


@pytest.mark.parametrize("fails", [False, True])
def test_a_gather_of_deepspeeds_step_ends_a_step_and_one_outside_does_not(fails: bool) -> None:
    on_threads(2, with_gather_inside, fails)


def with_padding() -> None:
    """DeepSpeed puts zeros that it marks between gradients of aligned parameters, and others last."""
    found = []
    for has_padding in (False, True):
        zero = zero_optimizer(2, RAGGED, **BLOCKS["fp8"])
        zero.give(gradients(RAGGED, 0))
        if has_padding:
            marked: Any = torch.zeros(6, dtype=torch.bfloat16)
            marked._zero_padding = True
            own = zero.averaged_gradients[0]
            zero.averaged_gradients[0] = [own[0], marked, *own[1:], torch.zeros(4, dtype=torch.bfloat16)]
        zero.step()
        found.append(zero.masters())
    assert_same(*found)


def test_padding_between_gradients_belongs_to_no_parameter() -> None:
    on_threads(2, with_padding)


def freed(states: str) -> None:
    zero = zero_optimizer(2, RAGGED, **BLOCKS[states])
    for p in zero.params.values():
        if not hasattr(p, "_fp8"):
            p.grad = torch.ones_like(p)
        p.grad_accum = torch.ones(3)
    zero.give(gradients(RAGGED, 0))
    zero.all_grad_tensors[0] = zero.averaged_gradients[0]
    zero.step()
    assert {(p.grad, p.grad_accum) for p in zero.params.values()} == {(None, None)}
    assert zero.averaged_gradients[0] is None and zero.all_grad_tensors[0] is None


@pytest.mark.parametrize("states", BLOCKS)
def test_a_step_leaves_no_gradient_of_own_or_others_parameters(states: str) -> None:
    on_threads(3, freed, states)


# --- skipped steps ---


def broken_gradients() -> dict[str, Tensor]:
    """Infinite in one element, which one rank has."""
    found = gradients(RAGGED, 2)
    found["gain"][7] = float("inf")
    return found


def skipping(stage: int, states: str) -> None:
    zero = trained(stage, RAGGED, BLOCKS[states], 1)
    counter, history = zero.context.counter, zero.context.history
    zero.write("up", lambda _: other_values("up"))
    if states == "fp32":  # it holds until the next step, and this is none
        assert torch.equal(zero.weights()["up"][0], quantized("tensorwise", other_values("up").float())[0])
    before, masters, scale, last = zero.weights(), zero.masters(), history.scale.clone(), counter.last
    num_updates, num_reduces = history.num_updates, counter.num_amax_reduces
    history.amax_local.fill_(3e4)
    zero.give(broken_gradients())
    zero.step()
    assert zero.overflow and (stage == 2 or zero.num_ended == 1)  # of the step before
    assert_same(zero.masters(), masters)
    for name, pair in zero.weights().items():
        assert torch.equal(pair[0], before[name][0]) and torch.equal(pair[1], before[name][1]), name
    assert history.num_updates == num_updates and torch.equal(history.scale, scale)
    assert history.amax_local.tolist() == [0.0, 0.0]
    assert counter.last is last and counter.num_amax_reduces == num_reduces


@pytest.mark.parametrize("states", BLOCKS)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_skipped_step_refreshes_no_weight_and_counts_as_none(stage: int, states: str) -> None:
    on_threads(3, skipping, stage, states)


def skipped_by_deepspeed(stage: int) -> None:
    zero = zero_optimizer(stage, RAGGED, without_deepspeed_fixes=["adam_step"], **DELAYED)
    history = zero.context.history
    for overflow, amax in ((True, 0.0), (False, 3.0)):
        history.amax_local.fill_(3.0)
        zero.deepspeed_step = lambda _, overflow=overflow: setattr(zero, "overflow", overflow)
        zero.step()
        assert history.amax_local.tolist() == [amax, amax]


@pytest.mark.parametrize("stage", [2, 3])
def test_amaxes_of_a_step_that_deepspeed_skips_are_forgotten(stage: int) -> None:
    on_threads(1, skipped_by_deepspeed, stage)


def unpatched() -> None:
    zero = zero_optimizer(2, RAGGED)
    zero.micro_step_id = 5
    zero.give(gradients(RAGGED, 0))
    before, weights = list(zero.averaged_gradients[0]), zero.weights()
    with pytest.raises(UnsupportedError, match=r"engine\.destroy\(\)"):
        zero.step()
    assert zero.micro_step_id == 5 and all(x is y for x, y in zip(before, zero.averaged_gradients[0], strict=True))
    assert_same(zero.masters(), values_of(RAGGED))
    assert all(torch.equal(zero.weights()[name][0], weights[name][0]) for name in WEIGHTS)
    assert zero.context.counter.last is None


def test_a_step_after_the_patch_is_undone_raises_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stage_1_and_2.all_gather_dp_groups.fp8_ds_original
    monkeypatch.setattr(stage_1_and_2, "all_gather_dp_groups", stock)
    on_threads(2, unpatched)


# --- timers ---


def timed(stage: int, states: str) -> dict[str, int]:
    """How often each timer has run. DeepSpeed's own raise if one is started or stopped twice."""
    zero, own = zero_optimizer(stage, RAGGED, **BLOCKS[states]), SynchronizedWallClockTimer()
    zero.timers, own.log = own, lambda names: None
    for grads in (gradients(RAGGED, 0), broken_gradients(), gradients(RAGGED, 1)):
        zero.give(grads)
        zero.step()
        assert not any(timer.started_ for timer in own.timers.values())
    return {name: len(timer.event_timers) for name, timer in own.timers.items()}


@pytest.mark.parametrize("states", BLOCKS)
@pytest.mark.parametrize("stage", [2, 3])
def test_timers_that_a_step_starts_are_stopped_whether_it_is_skipped_or_not(stage: int, states: str) -> None:
    [found, _] = on_threads(2, timed, stage, states)
    expected = {"optimizer_step": 3} | ({"optimizer_allgather": 3} if stage == 2 else {})
    assert found == expected


def step_again(stage: int) -> None:
    zero = zero_optimizer(stage, RAGGED, **BLOCKS["fp8"])
    zero.timers = SynchronizedWallClockTimer()
    zero.timers.log = lambda names: None
    rank = dist.get_rank()
    zero.param_groups[0]["lr"] = 1e-3 * (1 + rank)
    zero.give(gradients(RAGGED, 0))
    with pytest.raises(ConfigError):
        zero.step()
    zero.param_groups[0]["lr"] = 1e-3
    zero.give(gradients(RAGGED, 0))
    zero.step()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_was_refused_can_be_taken_again_with_timers_on(stage: int) -> None:
    on_threads(2, step_again, stage)

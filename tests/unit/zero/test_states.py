"""FP8 states of all stages, on stub hosts whose ranks are threads."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed import utils
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from support.late_flag import flag_late
from support.threads import on_threads
from support.zero_hosts import ALIGNED, RAGGED, WEIGHTS, zero_optimizer
from torch import Tensor

from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.numerics.masters import BY_NAME, encode
from fp8_ds.numerics.scale import scale_from_amax
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.optim.states import allocate_lo, read_dense

Shapes = dict[str, tuple[int, ...]]
PRECISION = {"e4m19": 2.0**-20, "e4m11": 2.0**-12}
"""Half a unit in the last place of a split master; of a bf16 parameter's it is 2**-16."""


def states(master: str, **more: Any) -> dict[str, Any]:
    return {"optimizer": {"states": "fp8", "master": master}, **more}


def gradients(shapes: Shapes, step: int) -> dict[str, Tensor]:
    """bf16, with a range of its own for each group of 128; some groups are zero."""
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(100 * step + i)
        groups = torch.randn(-(-torch.Size(shape).numel() // 128), 128, generator=generator)
        groups *= torch.exp2(torch.randint(-24, 4, (len(groups), 1), generator=generator).float())
        groups[5::7] = 0
        found[name] = groups.flatten()[: torch.Size(shape).numel()].view(shape).bfloat16()
    return found


def trained(stage: int, shapes: Shapes, block: dict[str, Any], num_steps: int) -> Any:
    zero = zero_optimizer(stage, shapes, **block)
    for step in range(num_steps):
        zero.give(gradients(shapes, step))
        zero.step()
    return zero


def different(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name, value in left.items() if not torch.equal(value, right[name])]


def assert_high_parts(zero: Any, master: str) -> None:
    """Every FP8 weight is its master rounded to nearest, with a power of two that does not saturate."""
    masters = zero.masters()
    for name, (codes, scale_inv) in zero.weights().items():
        assert torch.equal(encode(masters[name], BY_NAME[master], scale_inv)[0], codes), name
        assert float(masters[name].abs().max()) <= 448 * float(scale_inv) * (1 + 2**-10), name
        assert float(torch.frexp(scale_inv)[0]) == 0.5, name


def after_steps(stage: int, master: str) -> dict[str, Tensor]:
    zero = trained(stage, ALIGNED, states(master), 3)
    assert_high_parts(zero, master)
    return dict(zero.states())


@pytest.mark.parametrize("master", PRECISION)
def test_gradients_give_the_same_bytes_on_1_2_and_4_ranks_in_all_stages(master: str) -> None:
    cases = [(2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 4)]
    first, *others = [found for stage, num in cases for found in on_threads(num, after_steps, stage, master)]
    assert first["step"] == 3 and different(first, on_threads(1, after_steps, 2, master)[0]) == []
    for other in others:
        assert different(first, other) == []


def skipping(stage: int, master: str, value: float, is_late: bool) -> None:
    zero = trained(stage, RAGGED, states(master, linear={"recipe": "delayed"}), 2)
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


def clipped(stage: int) -> None:
    zero = zero_optimizer(stage, RAGGED, **states("e4m11"))
    zero.clip_grad = 0.01
    zero.give(gradients(RAGGED, 0))
    zero.step()
    first = [moment.flatten() for name, moment in zero.states().items() if name.endswith("exp_avg")]
    assert float(torch.cat(first).norm()) == pytest.approx(0.1 * 0.01, rel=0.02)  # (1 - beta1) * clip


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_clipped_to_their_norm(stage: int) -> None:
    on_threads(2, clipped, stage)


def with_other_numbers(stage: int, number: dict[str, Any], is_alike: bool) -> None:
    zero = trained(stage, RAGGED, states("e4m11"), 1)
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


# --- what users read and write ---


def ramp(shape: Any, index: int) -> Tensor:
    """Values of both signs with a range of their own per parameter, from tiny to larger than any weight."""
    numel = torch.Size(shape).numel()
    signs = 1.0 - 2.0 * (torch.arange(numel) % 2)
    return (torch.exp2(torch.linspace(-9, 2 + index, numel)) * signs).view(shape)


def set_and_read(stage: int, master: str) -> None:
    zero = trained(stage, RAGGED, states(master), 1)
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
    zero = trained(3, RAGGED, states("e4m11"), 1)
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
    zero = trained(stage, RAGGED, states(master), 3)
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
    zero = trained(stage, RAGGED, states(master), 3)
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


TENSORS = {"optim_states": ("m", "v", "m_scale_inv", "v_scale_inv"), "hp_params": ("lo",)}


def offloaded(stage: int, kind: str) -> None:
    """To the meta device, which is elsewhere on a CPU, too."""
    zero = trained(stage, RAGGED, states("e4m11"), 1)
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
        zero = trained(2, RAGGED, states("e4m11"), 1)
        prepared = zero.optimizer.core._prepared
        for move in (lambda: zero.offload_states(include=[OffloadStateTypeEnum(kind)]), zero.reload_states):
            assert len(prepared) > 0
            move()
            assert len(prepared) == 0
            zero.give(gradients(RAGGED, 1))
            zero.step()

    on_threads(1, moved)


def test_a_master_whose_low_part_is_elsewhere_is_read_where_the_high_part_is() -> None:
    """As in a save while states are offloaded. "meta" stands in for a GPU, which refuses tensors of two devices too."""
    hi = torch.zeros(200, dtype=torch.uint8, device="meta")
    shard = AdamShard("weight", 200, 0, 0, 0, 0, BY_NAME["e4m11"], hi)
    allocate_lo(shard, torch.device("cpu"))
    read_dense(shard, None, torch.empty(200, device="meta"), torch.ones(1))

"""A schedule is arithmetic on names and a step."""

from __future__ import annotations

from typing import Any

import pytest

from fp8_ds.config import ScheduleConfig
from fp8_ds.config.schedule import PrecisionSchedule, check_total, matching
from fp8_ds.errors import ConfigError

NAMES = ["layers.1.up", "layers.1.down", "layers.10.up"]


def schedule(known: int | None = None, **block: Any) -> PrecisionSchedule:
    return PrecisionSchedule.of(ScheduleConfig.model_validate(block), NAMES, known)


def steps_in_bf16(one: PrecisionSchedule, num: int) -> list[int]:
    found = {step: one.in_bf16(NAMES, step, {}) for step in range(num)}
    assert all(layers in (frozenset(), frozenset(NAMES)) for layers in found.values())
    return [step for step, layers in found.items() if layers]


def test_first_steps_and_the_last_fraction_are_bf16() -> None:
    assert schedule().is_constant and steps_in_bf16(schedule(), 5) == []
    assert steps_in_bf16(schedule(bf16_until_step=3), 6) == [0, 1, 2]
    assert steps_in_bf16(schedule(bf16_last_fraction=0.2, total_steps=10), 12) == [8, 9, 10, 11]
    assert steps_in_bf16(schedule(bf16_last_fraction=0.25, total_steps=10), 10) == [8, 9]  # 7.5 is rounded up
    assert steps_in_bf16(schedule(12, bf16_last_fraction=0.5), 12) == list(range(6, 12))
    assert steps_in_bf16(schedule(12, bf16_last_fraction=0.5, total_steps=4), 4) == [2, 3]  # the block's own number
    assert steps_in_bf16(schedule(bf16_last_fraction=1.0, total_steps=4), 2) == [0, 1]


def test_a_fraction_is_the_decimal_number_that_is_written() -> None:
    """0.7 as a float is a little less, and 1 - 0.7 a little more than 3/10: one step too late in every tenth run."""
    for total in (1, 2, 10, 30, 37, 100, 1000, 12345):
        for percent in range(1, 101):
            one = schedule(bf16_last_fraction=percent / 100, total_steps=total)
            last = -(-total * (100 - percent) // 100)
            assert one.last == min(last, total - 1), (total, percent)  # one step at least
    assert schedule(bf16_last_fraction=1e-7, total_steps=10**9).last == 10**9 - 100


@pytest.mark.parametrize("total", [0, -5, 100.0, "many"])
def test_a_fraction_of_an_unknown_number_of_steps_is_refused(total: object) -> None:
    """Also where a scheduler says what is no number; of 0 steps there was no last fraction, of -5 nothing but one."""
    config = ScheduleConfig.model_validate({"bf16_last_fraction": 0.1})
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps"):
        check_total(config, total)
    check_total(config.model_copy(update={"total_steps": 7}), total)  # the block's own number comes first
    check_total(config, "auto")
    check_total(ScheduleConfig(), total)
    with pytest.raises(ConfigError, match=r"fp8\.schedule\.total_steps"):
        schedule(bf16_last_fraction=0.1)


def test_a_run_without_a_step_in_fp8_is_known_as_such() -> None:
    def never(known: object = None, **block: Any) -> bool:
        return PrecisionSchedule.of(ScheduleConfig.model_validate(block), (), known).is_never_fp8

    assert never(bf16_until_step=5, bf16_last_fraction=0.5, total_steps=10)
    assert not never(bf16_until_step=4, bf16_last_fraction=0.5, total_steps=10)  # step 4 is in FP8
    assert never(10, bf16_last_fraction=1.0) and not never("auto", bf16_last_fraction=1.0)
    assert not never(10, bf16_until_step=10) and not never()  # a run may go on after the scheduler's last step


def test_overrides_come_before_layers_and_these_before_the_step() -> None:
    one = schedule(bf16_until_step=1, layers={"layers.1": "fp8", "layers.1.down": "bf16"})
    assert one.in_bf16(NAMES, 0, {}) == {"layers.1.down"}  # layers.10.up contains layers.1
    assert one.in_bf16(NAMES, 0, {"layers.10.up": "bf16"}) == {"layers.1.down", "layers.10.up"}
    assert one.in_bf16(NAMES, 5, {"layers.1.down": "fp8"}) == frozenset()


def test_of_two_keys_as_long_the_later_counts() -> None:
    for layers, in_bf16 in (({"1.up": "fp8", "yers": "bf16"}, 3), ({"yers": "bf16", "1.up": "fp8"}, 2)):
        assert len(schedule(layers=layers).in_bf16(NAMES, 0, {})) == in_bf16


def test_a_name_means_its_own_layer_a_part_all_that_have_it_and_what_is_in_none_is_refused() -> None:
    assert matching("layers.1.up", NAMES) == ["layers.1.up"]
    assert matching("up", NAMES) == ["layers.1.up", "layers.10.up"]
    assert (matching("", NAMES), matching("head", NAMES)) == (NAMES, [])
    both = ["encoder.layers.1.up", *NAMES]
    assert matching("layers.1.", both) == ["layers.1.up", "layers.1.down"]  # the module at the root alone
    assert matching("layers.1.up.", both) == ["layers.1.up"]  # and a layer itself
    assert matching("rs.1.", both) == both[:3]
    with pytest.raises(ConfigError, match=r"fp8\.schedule\.layers: .*'lm_head'"):
        schedule(layers={"lm_head": "bf16"})

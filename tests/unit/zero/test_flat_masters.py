"""Flat float32 masters and what is made of them, on stub hosts whose ranks are threads."""

from __future__ import annotations

import pytest
import torch
from support.threads import on_threads
from support.zero_hosts import RAGGED, WEIGHTS, values_of, zero_optimizer
from support.zero_training import (
    assert_follow,
    assert_same,
    other_values,
    refresh,
)
from torch import Tensor


def written(stage: int, recipe: str) -> None:
    zero, values = zero_optimizer(stage, RAGGED, linear={"recipe": recipe}), values_of(RAGGED)
    assert_follow(zero, recipe, values)
    for name in ("up", "gain"):
        zero.write(name, lambda _, name=name: other_values(name))
    assert_follow(zero, recipe, values | {"up": other_values("up").float()})
    assert_same(zero.masters(), values)
    for name in ("up", "down", ""):  # switched to bf16 and back
        zero.fp8.set_bf16({name})
        if stage == 3 or name == "up":
            assert torch.equal(zero.read("up") if stage == 3 else zero.params["up"]._fp8.hp, other_values("up"))
    refresh(zero, stage)
    assert_follow(zero, recipe, values)
    assert torch.equal(zero.read("gain"), values["gain"].bfloat16())
    zero._restore_from_bit16_weights()  # what was written is forgotten
    masters = zero.masters()
    assert_same({name: masters[name] for name in WEIGHTS}, values)


@pytest.mark.parametrize(("stage", "recipe"), [(2, "tensorwise"), (2, "rowwise"), (2, "blockwise"), (3, "rowwise")])
def test_what_a_user_writes_holds_until_the_next_step_whatever_is_switched(stage: int, recipe: str) -> None:
    on_threads(3, written, stage, recipe)


def refreshed(stage: int, recipe: str) -> None:
    zero, values = zero_optimizer(stage, RAGGED, linear={"recipe": recipe}), values_of(RAGGED)

    def some_rows(value: Tensor) -> Tensor:
        value[3:9] = other_values("up")[3:9]
        return value

    zero.write("up", some_rows)
    if stage < 3:  # user code may assign data, which is then outside the buffer of all
        zero.params["gain"].data = torch.zeros(RAGGED["gain"], dtype=torch.bfloat16)
    zero.write("gain", lambda _: other_values("gain"))
    zero.write("down", lambda value: value)
    zero._restore_from_bit16_weights()
    changed = {"up": values["up"].clone(), "gain": other_values("gain").float()}
    changed["up"][3:9] = other_values("up")[3:9].float()
    masters = zero.masters()
    assert_follow(zero, recipe, masters)
    for name in ("up", "gain", "down"):
        is_exact = stage < 3 and name in WEIGHTS
        pair = (masters[name], (values | changed)[name])
        assert torch.equal(*(x if is_exact else x.bfloat16() for x in pair)), name


@pytest.mark.parametrize(("stage", "recipe"), [(2, "tensorwise"), (2, "blockwise"), (3, "tensorwise")])
def test_refreshed_masters_are_what_was_written_and_not_its_rounding_to_fp8(stage: int, recipe: str) -> None:
    on_threads(2, refreshed, stage, recipe)

"""Flat float32 masters and what is made of them, on stub hosts whose ranks are threads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.threads import on_threads
from support.zero_hosts import RAGGED, WEIGHTS, values_of, zero_optimizer
from support.zero_training import (
    assert_follow,
    assert_same,
    other_values,
    refresh,
)
from torch import Tensor

from fp8_ds.nn.linear.payload import ROW
from fp8_ds.nn.linear.stored import StoredScales
from fp8_ds.zero.flat_weights import FlatMasters12


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


def kept_or_replaced(stage: int) -> None:
    """What a load reads in bf16 beside FP8 weights: a master that rounds to it keeps its low bits."""
    zero, values = zero_optimizer(stage, RAGGED), values_of(RAGGED)
    gain = values["gain"].bfloat16()
    gain[7] = 3.5
    zero.write("gain", lambda _: gain)
    if stage == 3:
        zero.fp8.restore_masters()
    else:
        with zero.fp8.load():
            pass
    master, own = zero.masters()["gain"], torch.arange(len(gain)) != 7
    assert torch.equal(master[own], values["gain"][own]) and float(master[7]) == 3.5
    assert not torch.equal(values["gain"], values["gain"].bfloat16().float())


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_that_round_to_what_is_read_keep_their_precision(stage: int) -> None:
    on_threads(3, kept_or_replaced, stage)


def restored(stage: int) -> None:
    """A weight that came in FP8: codes times scales, which bf16 has rounded, one for each row."""
    zero = zero_optimizer(stage, RAGGED)
    p = zero.params["up"]
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(RAGGED["up"], generator=generator).mul(50).to(torch.float8_e4m3fn).float()
    scale_inv = torch.linspace(1.1e-3, 2.3, RAGGED["up"][0]).view(-1, 1)
    exact = codes * scale_inv
    stored = StoredScales(scale_inv, ROW, RAGGED["up"], ())
    flat = zero.flat_masters()[0].data
    if stage == 3:
        _, start = zero.fp8.flat.place(p)
        own = p.ds_tensor.ds_numel
        part = flat[start : start + own]
        whole = torch.zeros(own * dist.get_world_size())
        whole[: exact.numel()] = exact.flatten().bfloat16().float()
        part.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])
        zero.fp8.flat.restore_stored({id(p): stored})
    else:
        with zero.fp8.load():
            zero.write("up", lambda _: exact.bfloat16())
        FlatMasters12(zero, zero.fp8.weights).restore_stored({id(p): stored})
    masters = zero.masters()
    assert not torch.equal(exact.bfloat16().float(), exact)
    torch.testing.assert_close(masters["up"], exact, rtol=2.0**-23, atol=0.0)
    assert torch.equal(masters["down"], values_of(RAGGED)["down"])


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_of_a_weight_that_came_in_fp8_are_codes_times_scales(stage: int) -> None:
    on_threads(2, restored, stage)


def written_twice() -> None:
    """An element that was written once is as it was written, though a second write leaves it as it was read."""
    zero, values = zero_optimizer(2, RAGGED), values_of(RAGGED)
    first = values["up"].bfloat16()
    first[2] = 0.3
    zero.write("up", lambda _: first)
    second = zero.read("up")
    second[5] = -0.7
    zero.write("up", lambda _: second)
    zero._restore_from_bit16_weights()
    expected = values["up"].clone()
    expected[2], expected[5] = torch.tensor(0.3).bfloat16().float(), torch.tensor(-0.7).bfloat16().float()
    others = [row for row in range(RAGGED["up"][0]) if row not in (2, 5)]
    masters = zero.masters()["up"]
    assert torch.equal(masters[[2, 5]], expected[[2, 5]])
    assert torch.equal(masters[others].bfloat16(), expected[others].bfloat16())


def test_masters_are_the_last_values_that_were_written_to_each_element() -> None:
    on_threads(2, written_twice)

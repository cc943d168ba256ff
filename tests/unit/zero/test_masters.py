"""Float32 masters of all stages and what is made of them, on stub hosts whose ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.threads import on_threads
from support.zero_hosts import RAGGED, WEIGHTS, values_of, zero_optimizer
from torch import Tensor, nn

from fp8_ds.errors import UnsupportedError
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.blockwise import quantize_blockwise
from fp8_ds.ops.quantize import quantize_rowwise


def expected(recipe: str, master: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes, scale_inv) of a weight, by definition."""
    if recipe == "blockwise":
        quantized = quantize_blockwise(master, E4M3, (128, 128), "row")
        assert quantized.x_fp8 is not None and quantized.scale_inv is not None
        return quantized.x_fp8.view(torch.uint8), quantized.scale_inv
    codes, scale_inv = quantize_rowwise(master if recipe == "rowwise" else master.view(1, -1), E4M3)
    return codes.view(torch.uint8).view(master.shape), scale_inv if recipe == "rowwise" else scale_inv.view(())


def assert_follow(zero: Any, recipe: str, values: dict[str, Tensor]) -> None:
    """FP8 weights are those of `values`."""
    for name, (codes, scale_inv) in zero.weights().items():
        assert torch.equal(codes, expected(recipe, values[name])[0]), name
        assert torch.equal(scale_inv, expected(recipe, values[name])[1]), name


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert [name for name, value in left.items() if not torch.equal(value, right[name])] == []


def new(name: str) -> Tensor:
    """bf16 values of which FP8 keeps few, with a range of its own for each row."""
    shape = RAGGED[name]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    return (values * torch.logspace(-3, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))).bfloat16()


def step(zero: Any, stage: int) -> None:
    """A step at a rate of zero."""
    if stage == 3:
        zero._post_step(None)
        for i in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(i)
    else:
        zero.fp8.refresh(is_step=True)


def written(stage: int, recipe: str) -> None:
    zero, values = zero_optimizer(stage, RAGGED, linear={"recipe": recipe}), values_of(RAGGED)
    assert_follow(zero, recipe, values)
    for name in ("up", "gain"):
        zero.write(name, lambda _, name=name: new(name))
    assert_follow(zero, recipe, values | {"up": new("up").float()})
    assert_same(zero.masters(), values)
    for name in ("up", "down", ""):  # switched to bf16 and back
        zero.fp8.set_bf16({name})
        if stage == 3 or name == "up":
            assert torch.equal(zero.read("up") if stage == 3 else zero.params["up"]._fp8.hp, new("up"))
    step(zero, stage)
    assert_follow(zero, recipe, values)
    assert torch.equal(zero.read("gain"), values["gain"].bfloat16())
    zero._restore_from_bit16_weights()  # what was written is forgotten
    masters = zero.masters()
    assert_same({name: masters[name] for name in WEIGHTS}, values)


@pytest.mark.parametrize(("stage", "recipe"), [(2, "tensorwise"), (2, "rowwise"), (2, "blockwise"), (3, "rowwise")])
def test_what_a_user_writes_holds_until_the_next_step_whatever_is_switched(stage: int, recipe: str) -> None:
    on_threads(3, written, stage, recipe)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_frozen_weight_in_fp8_is_what_was_written_to_it(recipe: str) -> None:
    def frozen() -> None:
        fixed: Any = nn.Parameter(values_of(RAGGED)["up"].bfloat16(), requires_grad=False)
        zero_optimizer(2, RAGGED, {"fixed": fixed}, linear={"recipe": recipe, "frozen": "fp8"})
        for value in (fixed.detach().clone(), new("up")):
            fixed.copy_(value)
            assert torch.equal(fixed._fp8.data.view(torch.uint8), expected(recipe, value.float())[0])
            assert torch.equal(fixed._fp8.scale_inv, expected(recipe, value.float())[1])

    on_threads(1, frozen)


def refreshed(stage: int, recipe: str) -> None:
    zero, values = zero_optimizer(stage, RAGGED, linear={"recipe": recipe}), values_of(RAGGED)

    def some_rows(value: Tensor) -> Tensor:
        value[3:9] = new("up")[3:9]
        return value

    zero.write("up", some_rows)
    if stage < 3:  # user code may assign data, which is then outside the buffer of all
        zero.params["gain"].data = torch.zeros(RAGGED["gain"], dtype=torch.bfloat16)
    zero.write("gain", lambda _: new("gain"))
    zero.write("down", lambda value: value)
    zero._restore_from_bit16_weights()
    changed = {"up": values["up"].clone(), "gain": new("gain").float()}
    changed["up"][3:9] = new("up")[3:9].float()
    masters = zero.masters()
    assert_follow(zero, recipe, masters)
    for name in ("up", "gain", "down"):
        is_exact = stage < 3 and name in WEIGHTS
        pair = (masters[name], (values | changed)[name])
        assert torch.equal(*(x if is_exact else x.bfloat16() for x in pair)), name


@pytest.mark.parametrize(("stage", "recipe"), [(2, "tensorwise"), (2, "blockwise"), (3, "tensorwise")])
def test_refreshed_masters_are_what_was_written_and_not_its_rounding_to_fp8(stage: int, recipe: str) -> None:
    on_threads(2, refreshed, stage, recipe)


def exported_and_loaded() -> None:
    zero, values = zero_optimizer(2, RAGGED), values_of(RAGGED)
    with zero.fp8.export(wanted=True):
        assert_same({n: zero.read(n).cpu() for n in RAGGED}, {n: v.bfloat16() for n, v in values.items()})
    with zero.fp8.export(wanted=False):
        assert zero.params["up"].detach().is_meta
    zero.params["gain"].data = torch.zeros(RAGGED["gain"], dtype=torch.bfloat16)  # as user code may
    with zero.fp8.load():
        for name in RAGGED:
            zero.write(name, lambda _, name=name: new(name))
    loaded = {name: new(name).float() for name in RAGGED}
    assert_same(zero.masters(), loaded)
    step(zero, 2)
    assert_follow(zero, "tensorwise", loaded)


def test_exports_give_bf16_of_the_masters_and_a_load_sets_them_bit_for_bit() -> None:
    on_threads(2, exported_and_loaded)


def assigned(states: bool, keeps: bool) -> None:
    """Data of parameters outside FP8 is replaced before a step, or before weights are moved as an offload does."""
    block = {"optimizer": {"states": "fp8", "master": "e4m11"}} if states else {}
    zero, values = zero_optimizer(2, RAGGED, **block), {n: v.bfloat16() for n, v in values_of(RAGGED).items()}
    table, gain = zero.params["embedding"], zero.params["gain"]
    table.data, gain.data = F.normalize(table.data, dim=1), gain.data.flip(0)
    now = {"embedding": table.detach().clone(), "gain": gain.detach().clone()}
    if keeps:
        zero.fp8.weights.move(torch.device("cpu"))
    elif states:  # what is assigned is the master
        zero.param_groups[0]["lr"] = 0.0
        zero.give(values)
        zero.step()
    else:
        step(zero, 2)
    assert_same({name: zero.read(name) for name in now}, now if keeps or states else values)
    zero.fp8.refresh(is_step=False)
    masters = zero.masters()
    for name in now:  # and it follows them again
        assert torch.equal(zero.read(name), masters[name].bfloat16()), name


@pytest.mark.parametrize(("states", "keeps"), [(False, False), (True, False), (False, True), (True, True)])
def test_parameters_follow_their_masters_again_after_their_data_was_replaced(states: bool, keeps: bool) -> None:
    on_threads(2, assigned, states, keeps)


def with_other_masters() -> None:
    zero = zero_optimizer(3, RAGGED)
    zero.fp32_partitioned_groups_flat = list(zero.fp32_partitioned_groups_flat)
    with pytest.raises(UnsupportedError, match="AdamW"):
        zero._post_step(None)


def test_masters_of_other_weights_in_the_middle_of_training_are_refused() -> None:
    """As BAdam makes them, which trains blocks in turns."""
    on_threads(1, with_other_masters)

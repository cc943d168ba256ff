"""Statistics say what happened to each element, whichever recipe quantised it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from support.linears import RECIPES, convert
from support.threads import on_threads
from torch import Tensor, nn

from fp8_ds.monitor.statistics import Observers, StatisticsTable, TensorStatistics, from_counts
from fp8_ds.nn.plan.convert import fp8_layers
from fp8_ds.numerics.formats import E4M3, E5M2, Float8Format
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.ops.observe import new_counts, observe_codes, observe_hp


def count(x: Tensor, scale: float, fmt: Float8Format) -> TensorStatistics:
    counts = new_counts(device="cpu")
    scale_inv = torch.tensor(1.0 / scale)
    observe_hp(x, counts, scale_inv, fmt.max)
    codes = (x * scale).clamp(-fmt.max, fmt.max).to(fmt.torch_dtype)
    observe_codes(codes, scale_inv, counts, can_saturate=True)
    return from_counts(counts)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_each_kind_of_element_is_counted_once(fmt: Float8Format) -> None:
    inside = [1.0, -1.0, fmt.smallest_normal, -fmt.max]
    small = [fmt.smallest_normal * 0.5, -fmt.smallest_subnormal, fmt.smallest_subnormal * 0.1]
    above, zeros = [fmt.max * 3, -fmt.max * 2], [0.0, -0.0]
    found = count(torch.tensor([[*inside, *small, *above, *zeros]]), 1.0, fmt)
    assert found.num == 11
    assert found.saturation == pytest.approx(2 / 11)
    assert found.underflow == pytest.approx(3 / 9)  # of those that were not zero
    assert (found.amax, found.scale) == (fmt.max * 3, 1.0)
    assert count(torch.tensor([[math.nan, 1.0]]), 1.0, fmt).saturation == 0.5
    codes = torch.tensor([[fmt.max, fmt.max, 1.0, 400.0]]).to(fmt.torch_dtype)
    counts = new_counts(device="cpu")
    for can_saturate, share in ((True, 0.5), (False, 0.25)):  # without the values before the cast: the largest code
        observe_codes(codes, torch.ones(()), counts, can_saturate=can_saturate)
        assert from_counts(counts).saturation == share
    of_two, of_codes = new_counts(device="cpu"), new_counts(device="cpu")
    for x in (torch.tensor([[math.nan, 2.0]]), torch.tensor([[1.0, 2.0]])):  # a NaN stays known
        observe_hp(x, of_two)
        observe_codes(x.to(fmt.torch_dtype), x[0, 0], of_codes, can_saturate=False)
    assert math.isnan(from_counts(of_two).amax) and of_codes[:2].isnan().all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("scales", [(), (1, 1), (130, 1), (130, 3), (2, 3)], ids=str)
def test_codes_are_counted_under_the_scale_of_their_row_or_block(scales: tuple[int, ...], fmt: Float8Format) -> None:
    codes = (torch.arange(130 * 300) * 89 % 256).to(torch.uint8).view(130, 300)
    codes[(codes & 0x7F) >= (0x7C if fmt is E5M2 else 0x7F)] = 3  # no NaN and no infinity
    x_fp8 = codes.view(fmt.torch_dtype)
    scale_inv = torch.exp2(torch.arange(max(1, math.prod(scales))).float() % 7 - 3).view(scales)
    each = scale_inv.expand(130, 1) if scale_inv.numel() == 1 else scale_inv
    each = each.repeat_interleave(1 if len(each) == 130 else 128, 0)[:130]
    each = each.repeat_interleave(128 if each.shape[1] > 1 else 300, 1)[:, :300]
    counts = new_counts(device="cpu")
    observe_codes(x_fp8, scale_inv, counts, can_saturate=True)
    size = x_fp8.float().abs()
    expected = [(size * each).max(), scale_inv.max(), size.numel(), (size == fmt.max).sum()]
    assert counts[:5].tolist() == [*map(float, expected), float((size < fmt.smallest_normal).sum())]


def test_a_bound_is_not_rounded_to_the_tensors_dtype() -> None:
    """1 + 2**-9 is no bf16 number: 1 is below it, though as bf16 it would be 1 as well; 1 + 2**-7 is above."""
    x = torch.tensor([[1.0, 1.0078125] * 8]).bfloat16()
    for bound, beyond in ((1 + 2.0**-9, 0.5), (1 - 2.0**-9, 1.0)):  # as bf16 the second is 1, too
        counts = new_counts(device="cpu")
        observe_hp(x, counts, torch.tensor(bound / 448), 448.0)
        observe_codes(x.to(torch.float8_e4m3fn), torch.ones(()), counts, can_saturate=True)
        assert from_counts(counts).saturation == beyond


def step(model: nn.Module, history: AmaxHistory | None, x: Tensor, grad: Tensor) -> None:
    out = model(x)
    out.backward(grad)
    if history is not None:
        history.update(history.amax_local.clone())


def watched(model: nn.Module, history: AmaxHistory | None, x: Tensor, grad: Tensor) -> dict[str, TensorStatistics]:
    """Statistics of the one layer in one step."""
    table = StatisticsTable(tuple(fp8_layers(model)), "cpu")
    observers = Observers(fp8_layers(model), table)
    observers.attach()
    step(model, history, x, grad)
    observers.detach()
    table.send()
    return (table.receive() or {})["0"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_are_counted_only_while_attached_and_their_bits_do_not_change(recipe: str) -> None:
    x, grad, gradients = torch.randn(192, 256).bfloat16(), torch.randn(192, 128).bfloat16(), []
    x[:, :64] = 0
    x.requires_grad_()
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 160, bias=False), nn.ReLU(), nn.Linear(160, 128, bias=False)).bfloat16()
        history = convert(model, recipe=recipe, backend="reference", grad_dtype="e4m3")
        table = StatisticsTable(tuple(fp8_layers(model)), "cpu")
        observers = Observers(fp8_layers(model), table)
        for number in range(4):  # from the second on with delayed scales
            if is_watched and number == 2:
                observers.attach()
            x.grad = None
            model.zero_grad()
            step(model, history, x, grad)
            gradients += [p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None]
            if is_watched and number == 2:
                observers.detach()
        table.send()
        found = table.receive() or {}
        assert is_watched or all(not kinds for kinds in found.values())
    half = len(gradients) // 2
    assert all(map(torch.equal, gradients[:half], gradients[half:]))
    first = found["0"]
    assert list(found) == ["0", "2"] and first["input"].num == x.numel() and first["weight"].num == 160 * 256
    assert first["input"].amax == float(x.detach().abs().max())
    assert found["2"]["grad_output"].amax == float(grad.abs().max()) and found["2"]["grad_output"].num == grad.numel()
    for one in (one for kinds in found.values() for one in kinds.values()):
        # True zeros, a quarter of x and half after ReLU, are none.
        assert one.underflow < 0.1 and one.saturation < 1e-3 and one.scale > 0
    if recipe in ("tensorwise", "delayed"):
        amax = float(model[0].weight.detach().abs().max())
        assert first["weight"].scale == pytest.approx(448 / amax, rel=1e-6)
        assert first["weight"].amax == pytest.approx(amax, rel=1e-6)


@pytest.mark.parametrize(("recipe", "value"), zip(RECIPES, [math.nan, math.inf] * 3, strict=False))
def test_a_tensor_without_a_finite_amax_has_neither_scale_nor_shares(recipe: str, value: float) -> None:
    model = nn.Sequential(nn.Linear(256, 128, bias=False)).bfloat16()
    history = convert(model, recipe=recipe, backend="reference")
    grad = torch.randn(128, 128).bfloat16()
    grad[3, 4] = value
    found = watched(model, history, torch.randn(128, 256).bfloat16().requires_grad_(), grad)
    one = found["grad_output"]
    assert one.num == grad.numel() and not math.isfinite(one.amax)
    assert all(math.isnan(number) for number in (one.scale, one.saturation, one.underflow))
    assert math.isfinite(found["input"].underflow) and math.isfinite(found["weight"].scale)


def test_a_delayed_scale_that_is_too_large_shows_as_saturation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    history = convert(model, recipe="delayed", backend="reference")
    x, grad = torch.randn(128, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    step(model, history, x, grad)
    expected = ((x * 100).float().abs() > x.abs().max()).float().mean()
    found = watched(model, history, x * 100, grad)["input"].saturation
    assert found == pytest.approx(float(expected), abs=1e-3) and found > 0.5


def table_of_all_ranks() -> dict[str, TensorStatistics]:
    """Of a tensor that has a NaN on rank 1 alone, and of one that has none."""
    table = StatisticsTable(("a",), "cpu", dist.group.WORLD)
    for kind in ("input", "weight"):
        x, scale_inv = torch.ones(4, 4), torch.ones(())
        if kind == "input" and dist.get_rank() == 1:
            x[0, 0] = scale_inv = torch.tensor(math.nan)
        observe_hp(x, table.slot(0, kind))
        observe_codes(x.to(torch.float8_e4m3fn), scale_inv, table.slot(0, kind), can_saturate=False)
    table.send()
    return (table.receive() or {})["a"]


def test_counts_are_added_up_over_ranks_and_a_nan_on_one_is_known_on_all() -> None:
    for found in on_threads(2, table_of_all_ranks):
        assert found["weight"] == TensorStatistics(amax=1.0, scale=1.0, saturation=0.0, underflow=0.0, num=32)
        assert found["input"].num == 32 and math.isnan(found["input"].scale)

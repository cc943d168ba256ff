"""What Fp8AdamW loads: states of other parameters and broken ones are refused, and then nothing has changed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adamw import FORMATS, assert_equal, dtype_of, everything, group_of, step
from torch import Tensor, nn

from fp8_ds import Fp8AdamW

Setup = tuple[nn.ParameterList, Fp8AdamW]


def make(master: str, seed: int = 0, **options: Any) -> Setup:
    torch.manual_seed(seed)
    net = nn.ParameterList([torch.randn(24, 16), torch.randn(5)]).to(dtype_of(master))
    return net, Fp8AdamW([group_of(net.parameters(), master)], **options)


def stepped(master: str, num: int = 3, **options: Any) -> Setup:
    net, optimizer = make(master, **options)
    step(net, optimizer, num)
    return net, optimizer


def refused(setup: Setup, state: Any, message: str) -> None:
    """`state` is refused, and nothing has changed."""
    before, groups = everything(*setup), copy.deepcopy(setup[1].state_dict()["param_groups"])
    state["param_groups"][0]["lr"] = 0.5
    with pytest.raises(ValueError, match=message):
        setup[1].load_state_dict(state)
    assert_equal(everything(*setup), before)
    assert setup[1].state_dict()["param_groups"] == groups


def with_one(value: float) -> Callable[[Tensor], Tensor]:
    """A change of one element."""
    return lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == t.numel() - 1, value, t)


TENSORS = ("exp_avg", "exp_avg_sq", "master")
BROKEN: dict[str, tuple[tuple[str, ...], Callable[[Any], Any], str]] = {
    "transposed": (TENSORS, lambda t: t.t().contiguous(), r"with shape \[24, 16\], got \[16, 24\]"),
    "flat": (TENSORS, torch.flatten, r"shape \[24, 16\], got \[384\]"),
    "larger": (TENSORS, lambda t: torch.cat([t, t]), r"shape \[24, 16\], got \[48, 16\]"),
    "smaller": (TENSORS, lambda t: t[:12], r"shape \[24, 16\], got \[12, 16\]"),
    "integers": (TENSORS, Tensor.int, "floating numbers, got torch.int32"),
    "FP8 codes without their scales": (
        TENSORS,
        lambda t: t.to(torch.float8_e4m3fn),
        "floating numbers, got torch.float8",
    ),
    "NaN": (TENSORS, with_one(float("nan")), "finite"),
    "infinite": (TENSORS, with_one(float("inf")), "finite"),
    "beyond float32": (TENSORS, lambda t: with_one(1e300)(t.double()), "finite"),
    "negative": (("exp_avg_sq",), with_one(-1e-9), ">= 0"),
    "a vector": (("step", "scale_inv"), lambda t: torch.stack([t, t]), r"with one element, got \[2\]"),
    "not a number": (("step", "scale_inv"), lambda t: t * float("nan"), "got nan"),
    "below 0": (("step", "scale_inv"), lambda t: -t, "got -"),
    "a fraction": (("step",), lambda t: t + 0.5, "to be a count below 2..31, got 3.5"),
    "too many": (("step",), lambda t: 2**31, "to be a count"),
    "no power of two": (("scale_inv",), lambda t: 1.5 * t, "a power of two"),
}


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        pytest.param(key, change, text, id=f"{key}-{name}")
        for name, (keys, change, text) in BROKEN.items()
        for key in keys
    ],
)
def test_a_broken_state_is_refused_by_name_and_nothing_has_changed(
    key: str, change: Callable[[Any], Any], message: str
) -> None:
    setup = stepped("e4m19", lr=1e-2)
    state = copy.deepcopy(setup[1].state_dict())
    step(*setup, first=3)
    state["state"][0][key] = change(state["state"][0][key])
    refused(setup, state, f"state_dict: expected {key} of parameter 0.*{message}")


def test_a_broken_last_parameter_and_a_lacking_entry_leave_the_others_as_they_were() -> None:
    """Else what is loaded would be mixed with what the optimizer has."""
    setup = stepped("e4m19", lr=1e-2)
    state = copy.deepcopy(setup[1].state_dict())
    step(*setup, first=3)
    state["state"][1]["exp_avg"] = torch.zeros(6)
    refused(setup, state, r"exp_avg of parameter 1 with shape \[5\], got \[6\]")
    for key in ("step", "exp_avg", "exp_avg_sq"):
        state = copy.deepcopy(setup[1].state_dict())
        del state["state"][0][key]
        refused(setup, state, "expected step, exp_avg and exp_avg_sq of parameter 0")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_states_in_other_floating_dtypes_and_counts_as_numbers_are_taken(dtype: torch.dtype) -> None:
    (_, optimizer), (_, other) = stepped("own"), make("own", seed=1)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry.update({key: entry[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")}, step=3)
    other.load_state_dict(state)
    found = other.state_dict()["state"]
    for index, entry in state["state"].items():
        assert found[index]["step"] == 3
        assert torch.allclose(found[index]["exp_avg"], entry["exp_avg"].float(), rtol=0.07, atol=1e-4)


@pytest.mark.parametrize("master", ["e4m19", "e4m11"])
def test_masters_in_float64_are_taken_to_the_bit(master: str) -> None:
    (_, optimizer), (_, loaded) = stepped(master), make(master, seed=1)
    state = copy.deepcopy(optimizer.state_dict())
    masters = {i: entry["master"] for i, entry in state["state"].items() if "master" in entry}
    assert masters
    for i, value in masters.items():
        state["state"][i]["master"] = value.double()
    loaded.load_state_dict(state)
    found = loaded.state_dict()["state"]
    assert all(torch.equal(found[i]["master"], value) for i, value in masters.items())


@pytest.mark.parametrize(("master", "skips"), zip(FORMATS, (False, True, True, False, True), strict=True))
def test_a_run_that_is_saved_before_its_first_step_goes_on_with_the_same_bits(master: str, skips: bool) -> None:
    """Also in an optimizer that has made steps, of which nothing is left."""
    (net, optimizer), (other, loaded) = make(master, seed=1), stepped(master, seed=2, num=2 * skips)
    if skips:
        net[0].grad = torch.full_like(net[0], float("nan"))
        optimizer.step()
    with torch.no_grad():
        for p, value in zip(other.parameters(), net.parameters(), strict=True):
            p.copy_(value)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for first in range(2):
        step(net, optimizer, first=first)
        step(other, loaded, first=first)
        assert_equal(everything(other, loaded), everything(net, optimizer))


# --- betas that move ---


def cycle(number: int) -> tuple[float, float]:
    """beta1 as DeepSpeed's OneCycle has it, with a beta2 that moves too; of step `number`, from 0."""
    return (0.7 if number == 0 else 0.95 - 0.02 * (number % 10), 0.99 + 0.001 * (number % 7))


def step_at_the_bound(optimizer: torch.optim.Optimizer, first: int, num: int, growth: float = 1e-8) -> float:
    """Steps with gradients that bring exact Adam's update to its bound in each; the betas are of the next step then.

    Args:
        growth: what the call before has returned.
    """
    (group,) = optimizer.param_groups
    for number in range(first, first + num):
        beta1, beta2 = group["betas"]
        growth *= beta2 / beta1
        for index, p in enumerate(group["params"]):
            sign = torch.randn(p.shape, generator=torch.Generator().manual_seed(index)).sign()
            p.grad = (sign * growth * (1 - beta1) / (1 - beta2)).to(p.dtype)
        optimizer.step()
        group["betas"] = cycle(number + 1)
    return growth


@pytest.mark.parametrize("master", FORMATS)
def test_updates_at_the_bound_are_exact_adams_while_betas_move(master: str) -> None:
    options = {"lr": 3e-2, "weight_decay": 0.1, "betas": cycle(0)}
    _, ours = make(master, **options)
    start = [p.detach().float().clone() for p in make(master)[0].parameters()]
    theirs = [nn.Parameter(value.clone()) for value in start]
    stock = torch.optim.AdamW(theirs, **options)
    step_at_the_bound(ours, 0, 25)
    step_at_the_bound(stock, 0, 25)
    for p, expected, first in zip(ours.flat_params(), theirs, start, strict=True):
        value = ours.state[p].get("master", p.detach())
        error = (value - expected.detach()).norm() / (expected.detach() - first).norm()
        assert error < 0.03, float(error)  # clamped to the bound of the present betas they are 0.2 off


@pytest.mark.parametrize(
    ("master", "way", "num"), [("own", "state_dict", 1), ("e4m11", "entries of state", 2), ("e4m11", "state_dict", 9)]
)
def test_a_run_that_is_saved_amid_a_cycle_goes_on_with_the_same_bits(master: str, way: str, num: int) -> None:
    (net, one), (other_net, other) = make(master, lr=1e-2, betas=cycle(0)), make(master, seed=1, lr=1e-2)
    growth = step_at_the_bound(one, 0, num)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        for p, value in zip(other.flat_params(), one.flat_params(), strict=True):
            p.copy_(value)
    if way == "state_dict":
        other.load_state_dict(saved)
    else:
        other.state.update({p: saved["state"][index] for index, p in enumerate(other.flat_params())})
        other.param_groups[0]["betas"] = one.param_groups[0]["betas"]
    step_at_the_bound(one, num, 5, growth)
    step_at_the_bound(other, num, 5, growth)
    assert_equal(everything(other_net, other), everything(net, one))


@pytest.mark.parametrize(
    ("value", "message"), [(-1.0, "got -1"), (float("nan"), "got nan"), ([1.0, 2.0], r"got \[2\]")]
)
def test_a_broken_sum_is_refused(value: Any, message: str) -> None:
    setup = make("own", betas=cycle(0))
    step_at_the_bound(setup[1], 0, 2)
    state = copy.deepcopy(setup[1].state_dict())
    state["state"][1]["bound_sum"] = torch.tensor(value)
    refused(setup, state, message)


def test_a_state_without_the_sum_is_that_of_steps_with_the_betas_it_was_saved_with() -> None:
    """As torch's AdamW saves it, and this class before it kept sums."""
    net, ours = stepped("own", betas=(0.5, 0.999))
    stock = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95))
    step(net, stock, 3)
    ours.load_state_dict(stock.state_dict())
    assert "bound_sum" not in ours.state_dict()["state"][0]
    ours.param_groups[0]["betas"] = (0.8, 0.98)
    step(net, ours)
    before = sum((0.1 * 0.9**age) ** 2 / (0.05 * 0.95**age) for age in range(3))
    expected = 0.8**2 / 0.98 * before + 0.2**2 / 0.02
    for entry in ours.state_dict()["state"].values():
        assert float(entry["bound_sum"]) == pytest.approx(expected, rel=1e-12)

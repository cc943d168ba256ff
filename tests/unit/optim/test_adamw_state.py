"""What Fp8AdamW loads: states of other parameters and broken ones are refused, and then nothing has changed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_ds import Fp8AdamW

MASTERS = ("own", "fp32", "bf16_8", "e4m19")
"""Of bf16 parameters, but "own": of float32 ones, which are their masters."""


def make(master: str, shape: tuple[int, ...] = (24, 16), seed: int = 0, **options: Any) -> Fp8AdamW:
    """An optimizer of two parameters."""
    torch.manual_seed(seed)
    dtype = torch.float32 if master == "own" else torch.bfloat16
    params = [nn.Parameter(torch.randn(shape).to(dtype)), nn.Parameter(torch.randn(5).to(dtype))]
    return Fp8AdamW([{"params": params, "master": None if master in ("own", "bf16_8") else master}], **options)


def step(optimizer: torch.optim.Optimizer, num: int = 1, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def everything(optimizer: Fp8AdamW) -> dict[str, Any]:
    state = copy.deepcopy(optimizer.state_dict())
    return {**state, "weights": [p.detach().clone() for p in optimizer.flat_params()]}


def assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_equal(value, right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


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
    optimizer = make("e4m19", lr=1e-2)
    step(optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    step(optimizer)
    before = everything(optimizer)
    state["param_groups"][0]["lr"] = 0.5
    state["state"][0][key] = change(state["state"][0][key])
    with pytest.raises(ValueError, match=f"state_dict: expected {key} of parameter 0.*{message}"):
        optimizer.load_state_dict(state)
    assert_equal(everything(optimizer), before)


def test_a_broken_state_of_the_last_parameter_leaves_those_before_it_as_they_were() -> None:
    optimizer = make("e4m19", lr=1e-2)
    step(optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    step(optimizer)
    before = everything(optimizer)
    state["state"][1]["exp_avg"] = torch.zeros(6)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 1 with shape \[5\], got \[6\]"):
        optimizer.load_state_dict(state)
    assert_equal(everything(optimizer), before)


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
def test_a_state_that_lacks_an_entry_is_refused(key: str) -> None:
    """It would be mixed with what the optimizer has."""
    optimizer = make("own")
    step(optimizer, 3)
    state, before = copy.deepcopy(optimizer.state_dict()), everything(optimizer)
    del state["state"][0][key]
    with pytest.raises(ValueError, match="expected step, exp_avg and exp_avg_sq of parameter 0"):
        optimizer.load_state_dict(state)
    assert_equal(everything(optimizer), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_states_in_other_floating_dtypes_and_counts_as_numbers_are_taken(dtype: torch.dtype) -> None:
    optimizer, other = make("own"), make("own", seed=1)
    step(optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry.update({key: entry[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")}, step=3)
    other.load_state_dict(state)
    found = other.state_dict()["state"]
    for index, entry in state["state"].items():
        assert found[index]["step"] == 3
        assert torch.allclose(found[index]["exp_avg"], entry["exp_avg"].float(), rtol=0.07, atol=1e-4)


# --- before the first step ---


@pytest.mark.parametrize(("master", "skips"), zip((*MASTERS, "e4m11"), (False, True) * 3, strict=False))
def test_a_run_that_is_saved_before_its_first_step_goes_on_with_the_same_bits(master: str, skips: bool) -> None:
    first, second = make(master, seed=1), make(master, seed=2)
    if skips:
        first.flat_params()[0].grad = torch.full_like(first.flat_params()[0], float("nan"))
        first.step()
    weights, state = [p.detach().clone() for p in first.flat_params()], copy.deepcopy(first.state_dict())
    with torch.no_grad():
        for p, value in zip(second.flat_params(), weights, strict=True):
            p.copy_(value)
    second.load_state_dict(state)
    for _ in range(2):
        step(first)
        step(second)
        assert_equal(everything(second), everything(first))


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


@pytest.mark.parametrize("master", [*MASTERS, "e4m11"])
def test_updates_at_the_bound_are_exact_adams_while_betas_move(master: str) -> None:
    options = {"lr": 3e-2, "weight_decay": 0.1, "betas": cycle(0)}
    ours = make(master, **options)
    start = [p.detach().float().clone() for p in make(master).flat_params()]
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
    one, other = make(master, lr=1e-2, betas=cycle(0)), make(master, seed=1, lr=1e-2)
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
    assert_equal(everything(other), everything(one))


@pytest.mark.parametrize(
    ("value", "message"), [(-1.0, "got -1"), (float("nan"), "got nan"), ([1.0, 2.0], r"got \[2\]")]
)
def test_a_broken_sum_is_refused(value: Any, message: str) -> None:
    optimizer = make("own", betas=cycle(0))
    step_at_the_bound(optimizer, 0, 2)
    before = everything(optimizer)
    state = optimizer.state_dict()
    state["state"][1]["bound_sum"] = torch.tensor(value)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_equal(everything(optimizer), before)


def test_a_state_without_the_sum_is_that_of_steps_with_the_betas_it_was_saved_with() -> None:
    """As torch's AdamW saves it, and this class before it kept sums."""
    stock = torch.optim.AdamW([nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.randn(5))], betas=(0.9, 0.95))
    ours = make("own", betas=(0.5, 0.999))
    step(ours, 2)
    step(stock, 3)
    ours.load_state_dict(stock.state_dict())
    assert "bound_sum" not in ours.state_dict()["state"][0]
    ours.param_groups[0]["betas"] = (0.8, 0.98)
    step(ours)
    before = sum((0.1 * 0.9**age) ** 2 / (0.05 * 0.95**age) for age in range(3))
    expected = 0.8**2 / 0.98 * before + 0.2**2 / 0.02
    for entry in ours.state_dict()["state"].values():
        assert float(entry["bound_sum"]) == pytest.approx(expected, rel=1e-12)

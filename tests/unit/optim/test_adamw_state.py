"""What Fp8AdamW loads: states of other parameters and broken ones are refused, and then nothing has changed."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize("master", MASTERS)
def test_a_broken_state_of_the_last_parameter_leaves_those_before_it_as_they_were(master: str) -> None:
    optimizer = make(master, lr=1e-2)
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


def test_a_number_of_the_second_group_that_is_out_of_range_leaves_the_first_as_it_was() -> None:
    optimizer = Fp8AdamW([{"params": [nn.Parameter(torch.ones(3))], "lr": lr} for lr in (1e-2, 1e-3)])
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"], state["param_groups"][1]["lr"] = 0.5, -1.0
    with pytest.raises(ValueError, match="lr"):
        optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]


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


@pytest.mark.parametrize("skips", [False, True], ids=["made", "skipped"])
@pytest.mark.parametrize("master", [*MASTERS, "e4m11"])
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


@pytest.mark.parametrize("master", ["e4m19", "e4m11"])
def test_a_state_from_before_the_first_step_is_one_that_torch_goes_on_from(master: str) -> None:
    ours = make(master, weight_decay=0.0)
    state = ours.state_dict()
    values = [state["state"][index]["master"] for index in range(2)]
    stock, fresh = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    loaded, plain = (torch.optim.AdamW(params, weight_decay=0.0) for params in (stock, fresh))
    loaded.load_state_dict({"state": state["state"], "param_groups": loaded.state_dict()["param_groups"]})
    step(loaded, 2)
    step(plain, 2)
    assert_equal([p.detach() for p in stock], [p.detach() for p in fresh])

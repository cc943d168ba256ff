"""torch's own tests of its optimizers (test/test_optim.py) that apply to Fp8AdamW, with the inputs that torch has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.adamw import dtype_of, group_of
from torch import Tensor, nn

from fp8_ds import Fp8AdamW

INPUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "non-default lr": {"lr": 0.01},
    "nonzero weight_decay": {"weight_decay": 0.1},
    "Tensor lr": {"lr": torch.tensor(0.01)},
    "Tensor lr, Tensor betas": {
        "lr": torch.tensor([0.001]),
        "betas": (torch.tensor([[[0.9]]]), torch.tensor([[0.99]])),
    },
}
FORMATS = ("own", "bf16_8", "e4m19")
SCHEDULERS = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    "warm-up": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, threshold=1.0, patience=0),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
}


def weights(master: str = "own") -> list[nn.Parameter]:
    torch.manual_seed(0)
    dtype = dtype_of(master)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((10, 5), (10,))]


def set_gradients(params: list[nn.Parameter], value: float = 1.0) -> None:
    for p in params:
        p.grad = torch.full(p.shape, value, dtype=p.dtype)


# --- numbers ---


@pytest.mark.parametrize(
    ("kwargs", "schedule", "is_contiguous"),
    [
        (kwargs, schedule, index % 2 == 0)
        for index, (kwargs, schedule) in enumerate(zip(INPUTS.values(), [*SCHEDULERS, None], strict=True))
    ],
    ids=INPUTS,
)
def test_it_goes_where_torch_goes(kwargs: dict[str, Any], schedule: str | None, is_contiguous: bool) -> None:
    found = {}
    for kind in (torch.optim.AdamW, Fp8AdamW):
        torch.manual_seed(0)
        weight, bias, x = torch.randn(10, 5), torch.randn(10), torch.randn(5)
        if not is_contiguous:
            weight, bias = torch.stack([weight] * 2, dim=-1)[..., 0], torch.stack([bias] * 2, dim=-1)[..., 0]
        params = [nn.Parameter(weight), nn.Parameter(bias)]
        assert params[0].is_contiguous() is is_contiguous
        optimizer = kind(params, **copy.deepcopy(kwargs))
        scheduler = None if schedule is None else SCHEDULERS[schedule](optimizer)
        start, losses = [p.detach().clone() for p in params], []
        for _ in range(10):
            optimizer.zero_grad()
            loss = (weight_times(params[0], x) + params[1]).pow(2).sum()
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            if schedule == "plateau":
                scheduler.step(losses[-1])
            elif scheduler is not None:
                scheduler.step()
        assert losses[-1] < losses[0]
        found[kind] = [p.detach() - first for p, first in zip(params, start, strict=True)]
    for ours, theirs in zip(found[Fp8AdamW], found[torch.optim.AdamW], strict=True):
        assert (ours - theirs).norm() < 0.07 * theirs.norm()  # the rounding of moments (test_adamw.py)


def weight_times(weight: Tensor, x: Tensor) -> Tensor:
    return (weight * x).sum(dim=1)


@pytest.mark.parametrize("master", FORMATS)
def test_gradients_are_never_written(master: str) -> None:
    params = weights(master)
    optimizer = Fp8AdamW([group_of(params, master)])
    for _ in range(3):
        set_gradients(params, 0.5)
        versions = [p.grad._version for p in params]
        optimizer.step()
        assert [p.grad._version for p in params] == versions
        assert all(bool((p.grad == 0.5).all()) for p in params)


@pytest.mark.parametrize("master", FORMATS)
def test_zero_gradients_without_decay_move_nothing(master: str) -> None:
    params = weights(master)
    optimizer = Fp8AdamW([group_of(params, master)], weight_decay=0.0)
    before = [p.detach().clone() for p in params]
    for _ in range(3):
        set_gradients(params, 0.0)
        optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(params, before, strict=True))


@pytest.mark.parametrize("master", FORMATS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (), (1,)], ids=str)
def test_parameters_without_elements_or_dims_step_and_come_back(shape: tuple[int, ...], master: str) -> None:
    dtype = dtype_of(master)
    optimizer, other = (Fp8AdamW([group_of([nn.Parameter(torch.ones(shape, dtype=dtype))], master)]) for _ in range(2))
    (p,) = optimizer.flat_params()
    assert p.shape == shape and p.dtype == dtype and bool((p == 1).all())
    for _ in range(100):
        set_gradients([p])
        optimizer.step()
    assert p.shape == shape and bool(((p - 0.9).abs() < 0.04).all())
    with torch.no_grad():
        p.fill_(0.5)
    assert p.shape == shape and bool((p == 0.5).all())
    state = optimizer.state_dict()["state"][0]
    assert state["exp_avg"].shape == shape
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["state"][0].keys() == state.keys()


def test_one_parameter_twice_in_a_group_is_an_error() -> None:
    """torch warns and updates it twice with one state; here it would have two masters."""
    p = weights()[0]
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(ValueError, match="got one twice"):
        Fp8AdamW([p, p])


# --- states ---


def test_groups_of_older_state_dicts_that_lack_options_are_loaded() -> None:
    optimizer = Fp8AdamW(weights(), weight_decay=0.25)
    state = optimizer.state_dict()
    for key in ("weight_decay", "master", "eps"):
        del state["param_groups"][0][key]
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25 and optimizer.param_groups[0]["lr"] == 0.5


def test_the_hooks_of_saving_and_stepping_are_called() -> None:
    optimizer = Fp8AdamW(weights())
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda self: called.append("before state_dict"))
    optimizer.register_state_dict_post_hook(lambda self, state: {**state, "extra": 1})
    optimizer.register_step_pre_hook(lambda self, args, kwargs: called.append("before step"))
    optimizer.register_step_post_hook(lambda self, args, kwargs: called.append("after step"))
    set_gradients(optimizer.flat_params())
    optimizer.step()
    assert optimizer.state_dict()["extra"] == 1
    assert called == ["before step", "after step", "before state_dict"]

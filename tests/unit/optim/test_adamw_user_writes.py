"""Steps of Fp8AdamW go on from what others have done to its parameters: other data, other layouts, other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adamw import FORMATS, assert_equal, dtype_of, everything, group_of, step
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fp8_ds import Fp8AdamW, UnsupportedError

PLAIN = FORMATS[:3]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(6, 4, 3, bias=False, dtype=dtype)
        self.square = nn.Parameter(torch.randn(16, 16).to(dtype))


def make(master: str, net: nn.Module | None = None) -> tuple[nn.Module, Fp8AdamW]:
    net = Net(dtype_of(master)) if net is None else net
    return net, Fp8AdamW([group_of(net.parameters(), master)], lr=1e-2, weight_decay=0.0)


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "p.data = value": lambda p, value: setattr(p, "data", value.clone()),
    "p.data.copy_": lambda p, value: p.data.copy_(value),
    "p.copy_": torch.no_grad()(lambda p, value: p.copy_(value)),
    "p.data = with other strides": lambda p, value: setattr(p, "data", torch.stack([value, value], dim=-1)[..., 0]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(("master", "num_before"), zip(FORMATS, (0, 2, 0, 2, 0), strict=True))
def test_steps_go_on_from_what_was_written(master: str, write: Any, num_before: int) -> None:
    net, optimizer = make(master)
    step(net, optimizer, num_before, value=1.0)
    for p in net.parameters():
        write(p, torch.full(p.shape, 0.5, dtype=p.dtype))
    step(net, optimizer, 10, value=1.0)
    for p in net.parameters():
        assert float((p.detach().float() - 0.4).abs().max()) < {"own": 1e-5}.get(master, 0.4 * 2.0**-4)
    for entry in optimizer.state_dict()["state"].values():
        if "master" in entry:
            bound = {"bf16_8": 2.0**-9}.get(master, 0.0)  # low parts stay: half a step of bf16
            assert float((entry["master"] - 0.4).abs().max()) < bound + 2.0**-11


@pytest.mark.parametrize("master", FORMATS)
def test_a_vector_of_parameters_comes_back_as_it_was_read(master: str) -> None:
    """Then nothing has been written: low parts of masters stay."""
    (net, optimizer), (other, plain) = make(master), make(master)
    for module, stepper in ((net, optimizer), (other, plain)):
        step(module, stepper, 2)
    vector_to_parameters(parameters_to_vector(net.parameters()).detach(), net.parameters())
    assert_equal(everything(net, optimizer), everything(other, plain))
    for module, stepper in ((net, optimizer), (other, plain)):
        step(module, stepper, 2, first=2)
    assert_equal(everything(net, optimizer), everything(other, plain))


@pytest.mark.parametrize(("master", "num_before"), zip(FORMATS, (None, 2, 0, None, 2), strict=True))
def test_the_layout_of_a_parameter_changes_no_number(master: str, num_before: int | None) -> None:
    """None: channels_last already when the optimizer is made."""
    other, plain = make(master)
    step(other, plain, 5)
    net = Net(dtype_of(master))
    if num_before is None:
        net.to(memory_format=torch.channels_last)
        assert not net.conv.weight.is_contiguous()
    net, optimizer = make(master, net)
    step(net, optimizer, num_before or 0)
    net.to(memory_format=torch.channels_last)
    step(net, optimizer, 4 - (num_before or 0), first=num_before or 0)
    assert master in ("e4m19", "e4m11") or not net.conv.weight.is_contiguous()
    net.to(memory_format=torch.contiguous_format)
    step(net, optimizer, 1, first=4)
    assert_equal(
        {k: v for k, v in everything(net, optimizer).items() if not k.startswith("master") or master != "own"},
        everything(other, plain),
    )


@pytest.mark.parametrize("master", FORMATS)
def test_a_model_that_is_loaded_after_the_optimizer_was_made_trains_on(master: str) -> None:
    source, first = make(master)
    step(source, first, 3)
    weights = {name: value.detach().clone() for name, value in source.state_dict().items()}
    for order in ("model last", "model first"):
        net, optimizer = make(master)
        step(net, optimizer, 1, first=9)
        if order == "model first":
            net.load_state_dict(weights)
        optimizer.load_state_dict(first.state_dict())
        if order == "model last":
            net.load_state_dict(weights)
        assert_equal(everything(net, optimizer), everything(source, first))


@pytest.mark.parametrize("master", PLAIN)
def test_data_of_another_shape_or_dtype_and_other_parameters_are_refused_by_name(master: str) -> None:
    net, optimizer = make(master)
    step(net, optimizer)
    p, data = net.square, net.square.data
    for change, message in (
        (data.double(), r"torch\.float64"),
        (data.reshape(8, 32), r"\[8, 32\]"),
        (data.new_empty(0), r"\[0\]"),
    ):
        p.data, p.grad = change, None
        with pytest.raises(UnsupportedError, match=rf"parameter 0: expected \[16, 16\] of .* got .*{message}"):
            optimizer.step(lambda: p.sum().backward())
        with pytest.raises(UnsupportedError, match=message):
            optimizer.state_dict()
        p.data, p.grad = data, None
    step(net, optimizer)
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.zeros(4, 6, 3, 3))
    with pytest.raises(UnsupportedError, match="param_groups: expected the 2 parameters of construction"):
        step(net, optimizer)

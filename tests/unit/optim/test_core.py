"""The numbers of a step: what they are, and how few operators on the device find them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_ds.ops.adamw import Hyper
from fp8_ds.optim.core import AdamCore
from fp8_ds.optim.states import Flat
from fp8_ds.scaling.predicted import PredictedScales, update_bound

BETAS = [(0.9, 0.95), (0.8, 0.999), (0.0, 0.99)]
NO_WORK = {"select", "slice", "view", "unbind", "detach", "lift_fresh"}
MOST = 40
"""Each is a launch, some 4 us, for which the device waits between two steps."""


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def core_of(num_groups: int, num_weights: int, *, decoupled: bool) -> AdamCore:
    device = torch.device("cpu")
    flats = [Flat(row, 0, []) for row in range(num_groups)]
    return AdamCore(flats, range(num_groups), PredictedScales(num_weights, device), device, decoupled, 0)


def groups_of(lr: Any) -> list[dict[str, Any]]:
    return [{"lr": lr, "betas": betas, "eps": 10.0**-place, "weight_decay": 0.1 * place}
            for place, betas in enumerate(BETAS)]  # fmt: skip


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("lr", [3e-4, torch.tensor(3e-4, dtype=torch.float64), torch.tensor(3e-4)])
def test_the_numbers_of_a_step_are_those_of_their_formulas(lr: Any, decoupled: bool) -> None:
    core, groups = core_of(len(BETAS), 0, decoupled=decoupled), groups_of(lr)
    for step in range(1, 4):
        rows = core.begin(groups).hyper
        core.end()
        for row, group in zip(rows, groups, strict=True):
            rate, (beta1, beta2) = float(group["lr"]), group["betas"]
            first, second = 1 - torch.tensor([beta1, beta2], dtype=torch.float64) ** step
            expected = {
                Hyper.LR: rate,
                Hyper.BETA1: beta1,
                Hyper.BETA2: beta2,
                Hyper.ONE_MINUS_BETA1: 1 - beta1,
                Hyper.ONE_MINUS_BETA2: 1 - beta2,
                Hyper.EPS: group["eps"] * float(first),
                Hyper.DECAY: 1 - rate * group["weight_decay"] if decoupled else group["weight_decay"],
                Hyper.ROOT_FACTOR: float(first / second.sqrt()),
                Hyper.BOUND: float(update_bound(torch.tensor(step), beta1, beta2)),
            }
            for column, value in expected.items():
                assert float(row[column]) == pytest.approx(value, rel=1e-6), (step, column.name)
            assert not row[len(expected) :].any()


def test_a_step_finds_its_numbers_and_scales_by_few_operators_whatever_the_number_of_weights() -> None:
    found = []
    for num_weights in (2, 50):
        core, groups = core_of(2, num_weights, decoupled=True), groups_of(1e-3)[:2]
        core.begin(groups)
        core.end()
        for group in groups:
            group["lr"] *= 0.5
        skip = torch.zeros((), dtype=torch.int32)
        with Names() as mode:
            core.begin(groups, skip=skip)
            core.end()
        found.append([name for name in mode.names if name not in NO_WORK])
    assert found[0] == found[1]
    assert len(found[0]) <= MOST, sorted(found[0])

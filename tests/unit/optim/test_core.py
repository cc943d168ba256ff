"""The numbers of a step: what they are, and how few operators on the device find them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bounds import update_bound

from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import Hyper
from fp8_ds.optim.core import AdamCore, FlatBuffer, virtual_flat

BETAS = [(0.9, 0.95), (0.8, 0.999), (0.0, 0.99)]


def core_of(num_groups: int, num_weights: int, *, decoupled: bool) -> AdamCore:
    device = torch.device("cpu")
    flats = [FlatBuffer(row, 0, []) for row in range(num_groups)]
    return AdamCore(flats, range(num_groups), PredictedScales(num_weights, device), device, decoupled, seed=7)


def groups_of(lr: Any) -> list[dict[str, Any]]:
    return [{"lr": lr, "betas": betas, "eps": 10.0**-place, "weight_decay": 0.1 * place}
            for place, betas in enumerate(BETAS)]  # fmt: skip


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("lr", [3e-4, torch.tensor(3e-4, dtype=torch.float64), torch.tensor(3e-4)])
def test_the_numbers_of_a_step_are_those_of_their_formulas(lr: Any, decoupled: bool) -> None:
    core, groups = core_of(len(BETAS), 0, decoupled=decoupled), groups_of(lr)
    for step in range(1, 4):
        inputs = core.begin(groups)
        core.end()
        assert inputs.seed == 7
        for row, group in zip(inputs.hyper, groups, strict=True):
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


# --- betas that move ---


def by_chance(step: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(step)
    first, second = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    beta2 = 0.9 + 0.0999 * second
    return (0.3 + 0.65 * first) * math.sqrt(beta2), beta2


MOVING: dict[str, Callable[[int], tuple[float, float]]] = {
    "DeepSpeed's OneCycle": lambda step: (0.8 if step == 1 else 0.9 - 0.1 * abs(math.sin(step / 20)), 0.99),
    "torch's OneCycleLR": lambda step: (0.9 + 0.05 * math.cos(step / 15), 0.999),
    "beta2 rises": lambda step: (0.9, 1 - max(0.05 * 0.9**step, 1e-3)),
    "beta2 falls": lambda step: (0.9, 0.999 - 0.06 * min(1.0, step / 40)),
    "one jump": lambda step: (0.9, 0.999) if step < 30 else (0.1, 0.95),
    "both by chance": by_chance,
    "constant": lambda step: (0.9, 0.999),
}
BOUND_STEPS = 80


class ExactAdam:
    """torch's Adam in float64 on gradients that bring its update to the largest, and on 250 other sequences."""

    def __init__(self) -> None:
        self.p = torch.nn.Parameter(torch.zeros(251, dtype=torch.float64))
        self.optimizer = torch.optim.Adam([self.p], lr=1.0, eps=0.0)
        self.generator = torch.Generator().manual_seed(0)
        self.growth = torch.exp(0.2 * torch.randn(250, generator=self.generator, dtype=torch.float64))
        self.powers, self.steps = 1.0, 0

    def step(self, beta1: float, beta2: float) -> tuple[float, float]:
        """|update| of the first element, and the largest of the others."""
        self.optimizer.param_groups[0]["betas"] = beta1, beta2
        self.steps += 1
        self.powers *= beta1 / beta2
        worst = (1 - beta1) / (1 - beta2) / self.powers  # a / c: Cauchy and Schwarz are equal where g is like it
        grad = self.growth.pow(self.steps % 37) * torch.randn(250, generator=self.generator, dtype=torch.float64)
        grad[50:100] = grad[50:100].abs()
        grad[100:150] = self.growth[100:150].pow(self.steps)
        grad[150:] *= (torch.rand(100, generator=self.generator) < 0.1) | (self.steps == 1)
        self.p.grad = torch.cat([torch.tensor([worst], dtype=torch.float64), grad])
        with torch.no_grad():
            self.p.zero_()
        self.optimizer.step()
        update = self.p.detach().abs()
        return float(update[0]), float(update[1:].max())


def test_exact_adam_reaches_its_bound_whatever_the_betas_were_and_never_passes_it() -> None:
    """In each step, but where it is skipped or takes no part: then nothing of it counts."""
    core, exact = core_of(len(MOVING), 0, decoupled=True), [ExactAdam() for _ in MOVING]
    closest = 0.0
    for step in range(1, BOUND_STEPS + 1):
        betas = [schedule(step) for schedule in MOVING.values()]
        groups = [{"lr": 1e-3, "betas": pair, "eps": 1e-8, "weight_decay": 0.0} for pair in betas]
        skips, moves = step in (2, 30, 31), torch.tensor([(step + row) % 7 != 0 for row in range(len(MOVING))])
        rows = core.begin(groups, skip=torch.tensor(int(skips), dtype=torch.int32), moves=moves).hyper
        core.end()
        for name, pair, row, adam, takes_part in zip(MOVING, betas, rows, exact, moves.tolist(), strict=True):
            if skips or not takes_part:
                continue
            reached, others = adam.step(*pair)
            bound = float(row[Hyper.BOUND])
            assert reached == pytest.approx(bound, rel=1e-6), (name, step)
            assert others <= bound * (1 + 1e-6), (name, step)
            closest = max(closest, others / bound if adam.steps > 1 else 0.0)
    assert closest > 0.9


def test_betas_of_one_group_that_move_change_no_bit_of_another() -> None:
    alone, both = core_of(1, 0, decoupled=True), core_of(2, 0, decoupled=True)
    for step in range(1, 60):
        constant = {"lr": 1e-3 / step, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
        moving = {**constant, "betas": by_chance(step)}
        assert torch.equal(both.begin([moving, constant]).hyper[1], alone.begin([constant]).hyper[0])


def test_masters_that_are_not_there_take_no_memory_and_cannot_be_written() -> None:
    flat = virtual_flat(1000, "cpu")
    assert flat.numel() == 1000 and flat.untyped_storage().nbytes() == 4 and bool(flat.isnan().all())
    with pytest.raises(RuntimeError):
        flat.detach().add_(1.0)

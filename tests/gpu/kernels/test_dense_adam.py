"""Adam on float32 states by the kernel, against the reference and torch's own AdamW."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from support.kernels import DEVICE, KERNEL

from fp8_ds.ops.dense_adam import BLOCK, SPAN, AdamNumbers, DenseStates, DenseStep, kernel_step, reference_step

pytestmark = KERNEL

NUMBERS = AdamNumbers(3e-3, (0.9, 0.95), 1e-8, 0.1, (1 - 0.9**3, 1 - 0.95**3), decoupled=True)
SIZES = (1, BLOCK, 3 * BLOCK + 5, BLOCK * SPAN + 7)


def states(device: str) -> tuple[DenseStates, list[int], list[torch.Tensor]]:
    """Flat tensors, and gradients most of which begin where no vector can, with padding of zeros behind the first."""
    torch.manual_seed(0)
    starts, total = [0, *(3 + start for start in accumulate(SIZES))][:-1], sum(SIZES) + 3
    flats = torch.randn(total), torch.randn(total) * 1e-3, torch.rand(total) * 1e-6
    for flat in flats:
        flat[1:4] = 0
    dtypes = torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16
    grads = [(torch.randn(size) * 1e-2).to(device, dtype) for size, dtype in zip(SIZES, dtypes, strict=True)]
    return DenseStates(*(flat.to(device) for flat in flats)), starts, grads


def number(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("decoupled", "beta1"), [(True, 0.9), (False, 0.3), (True, 0.0)])
def test_the_kernel_equals_the_reference_to_a_few_ulps(decoupled: bool, beta1: float) -> None:
    numbers = NUMBERS._replace(decoupled=decoupled, betas=(beta1, 0.95), corrections=(1 - beta1**3, 1 - 0.95**3))
    (expected, starts, grads), (got, _, moved) = states("cpu"), states(DEVICE)
    launches: dict = {}
    for _ in range(2):
        reference_step(DenseStep(expected, starts, grads, numbers, torch.tensor(0.3), torch.tensor(0)))
        kernel_step(DenseStep(got, starts, moved, numbers, number(0.3), number(0, torch.int32)), launches)
    assert set(launches) == {torch.bfloat16, torch.float32}
    for name, a, b in zip(expected._fields, expected, got, strict=True):
        allowed = 2e-7 * float(a.abs().max())  # where terms cancel
        torch.testing.assert_close(b.cpu(), a, rtol=5e-7, atol=allowed, msg=f"{{}} of {name}".format)
        assert not b[1:4].any()


def test_a_skipped_step_changes_nothing_and_states_may_move() -> None:
    got, starts, grads = states(DEVICE)
    before = [x.clone() for x in got]
    launches: dict = {}
    kernel_step(DenseStep(got, starts, grads, NUMBERS, number(1.0), number(1, torch.int32)), launches)
    assert all(map(torch.equal, got, before))
    moved = DenseStates(*(x.clone() for x in got))
    kernel_step(DenseStep(moved, starts, grads, NUMBERS, number(1.0), number(0, torch.int32)), launches)
    assert all(map(torch.equal, got, before)) and not any(map(torch.equal, moved, before))


@pytest.mark.parametrize(
    ("kind", "decoupled"), [(torch.optim.AdamW, True), pytest.param(torch.optim.Adam, False, marks=pytest.mark.slow)]
)
def test_many_steps_are_those_of_torch(kind: type, decoupled: bool) -> None:
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(BLOCK + 3))
    zeros = torch.zeros(BLOCK + 3)
    got = DenseStates(*(x.to(DEVICE) for x in (p.detach().clone(), zeros, zeros.clone())))
    optimizer = kind([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    launches: dict = {}
    for step in range(1, 6):
        p.grad = torch.randn(BLOCK + 3)
        corrections = 1 - 0.9**step, 1 - 0.95**step
        numbers = AdamNumbers(1e-2, (0.9, 0.95), 1e-8, 0.1, corrections, decoupled)
        kernel_step(DenseStep(got, [0], [p.grad.to(DEVICE)], numbers, number(1.0), number(0, torch.int32)), launches)
        optimizer.step()
    torch.testing.assert_close(got.master.cpu(), p.detach(), rtol=2e-6, atol=1e-6)

"""Adam on float32 states by the kernel, against the reference and torch's own AdamW."""

from __future__ import annotations

import pytest
import torch
from support.kernels import DEVICE, KERNEL

from fp8_ds.ops.dense_adam import BLOCK, SPAN, AdamNumbers, DenseShard, kernel_step, reference_step

pytestmark = KERNEL

NUMBERS = AdamNumbers(3e-3, (0.9, 0.95), 1e-8, 0.1, (1 - 0.9**3, 1 - 0.95**3), decoupled=True)
SIZES = (1, BLOCK, 3 * BLOCK + 5, BLOCK * SPAN + 7)


def shards(device: str) -> tuple[list[DenseShard], list[torch.Tensor]]:
    """Shards one after another in flat tensors, most of them at addresses that vectors cannot have, and gradients."""
    torch.manual_seed(0)
    flat = torch.randn(sum(SIZES)), torch.randn(sum(SIZES)) * 1e-3, torch.rand(sum(SIZES)) * 1e-6
    pieces = zip(*(x.to(device).split(SIZES) for x in flat), strict=True)
    grads = [torch.randn(size) * 1e-2 for size in SIZES]
    dtypes = torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16
    return [DenseShard(*piece) for piece in pieces], [g.to(device, d) for g, d in zip(grads, dtypes, strict=True)]


def number(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_kernel_equals_the_reference_to_a_few_ulps(decoupled: bool) -> None:
    numbers = NUMBERS._replace(decoupled=decoupled)
    (expected, grads), (got, moved) = shards("cpu"), shards(DEVICE)
    launches: dict = {}
    for _ in range(2):
        reference_step(expected, grads, numbers, torch.tensor(0.3), torch.tensor(0))
        kernel_step(got, moved, numbers, number(0.3), number(0, torch.int32), launches)
    assert set(launches) == {torch.bfloat16, torch.float32}
    for one, other in zip(expected, got, strict=True):
        for name, a, b in zip(one._fields, one, other, strict=True):
            allowed = 2e-7 * float(a.abs().max())  # where terms cancel
            torch.testing.assert_close(
                b.cpu(), a, rtol=5e-7, atol=allowed, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_a_skipped_step_changes_nothing_and_shards_may_move() -> None:
    got, grads = shards(DEVICE)
    before = [[x.clone() for x in shard] for shard in got]
    launches: dict = {}
    kernel_step(got, grads, NUMBERS, number(1.0), number(1, torch.int32), launches)
    for shard, old in zip(got, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(shard, old, strict=True))
    moved = [DenseShard(*(x.clone() for x in shard)) for shard in got]
    kernel_step(moved, grads, NUMBERS, number(1.0), number(0, torch.int32), launches)
    for shard, other, old in zip(got, moved, before, strict=True):
        assert torch.equal(shard.master, old[0]) and not torch.equal(other.master, old[0])


@pytest.mark.parametrize(("kind", "decoupled"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_many_steps_are_those_of_torch(kind: type, decoupled: bool) -> None:
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(BLOCK + 3))
    shard = DenseShard(*(x.to(DEVICE) for x in (p.detach().clone(), torch.zeros(BLOCK + 3), torch.zeros(BLOCK + 3))))
    optimizer = kind([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    launches: dict = {}
    for step in range(1, 6):
        p.grad = torch.randn(BLOCK + 3)
        corrections = 1 - 0.9**step, 1 - 0.95**step
        numbers = AdamNumbers(1e-2, (0.9, 0.95), 1e-8, 0.1, corrections, decoupled)
        kernel_step([shard], [p.grad.to(DEVICE)], numbers, number(1.0), number(0, torch.int32), launches)
        optimizer.step()
    torch.testing.assert_close(shard.master.cpu(), p.detach(), rtol=2e-6, atol=1e-6)

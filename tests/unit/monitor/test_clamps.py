"""How many updates a step clamps: what the step itself does, for all shards by few operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_ds.monitor.clamps import MAX_GROUPS, NUM_ELEMENTS, ClampGauge, batches, clamped
from fp8_ds.ops.adamw import AdamShard, Hyper, StepInputs
from fp8_ds.ops.adamw.reference import read_master, unclamped_update, write_master, write_moments
from fp8_ds.optim.adamw import Fp8AdamW
from fp8_ds.optim.masters import E4M11
from fp8_ds.optim.states import allocate_lo, allocate_moments

CPU = torch.device("cpu")


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_clamp_gauge_counts_what_the_step_will_clamp(decoupled: bool) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40000))
    optimizer = Fp8AdamW([p], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, decoupled=decoupled)
    for _ in range(3):
        p.grad = torch.randn(40000)
        optimizer.step()
    core, seen = optimizer.core, []
    stock = core.run

    def run(grads: Any, inputs: Any, chosen: Any = None) -> None:
        inputs.hyper[:, Hyper.BOUND] = 0.9  # below what exact Adam reaches, so that there is something to clamp
        seen.append(clamped(next(batches(core.shards)), grads, inputs))
        before = core.shards[0].hi.clone()
        stock(grads, inputs, chosen)
        decay = inputs.hyper[0, Hyper.DECAY] if decoupled else 1.0
        moved = ((before * decay - core.shards[0].hi) / inputs.hyper[0, Hyper.LR])[: 1 << 14].abs()
        seen.append((moved > 0.9 - 1e-5).sum())

    core.run = run  # type: ignore[method-assign]
    p.grad = torch.randn(40000)
    optimizer.step()
    num_clamped, num = seen[0].tolist()
    assert num == 1 << 14 and 100 < num_clamped < num
    assert num_clamped == pytest.approx(float(seen[1]), abs=2)


def make_inputs(num_weights: int, decoupled: bool = True) -> StepInputs:
    """Of two parameter groups, which differ in all; bounds are such that a part is clamped."""
    hyper = torch.zeros(2, Hyper.WIDTH)
    for row, (beta1, beta2, bound) in enumerate(((0.9, 0.95, 0.8), (0.7, 0.99, 0.3))):
        values = {Hyper.BETA1: beta1, Hyper.BETA2: beta2, Hyper.ONE_MINUS_BETA1: 1 - beta1}
        values |= {Hyper.ONE_MINUS_BETA2: 1 - beta2, Hyper.EPS: 1e-8, Hyper.DECAY: 0.1, Hyper.ROOT_FACTOR: 1.0}
        for column, value in (values | {Hyper.BOUND: bound}).items():
            hyper[row, column] = value
    ones = torch.ones(num_weights)
    step = torch.ones(2, dtype=torch.int64)
    skip = torch.zeros((), dtype=torch.int32)
    return StepInputs(
        hyper, step, torch.tensor(0.5), skip, ones / 256, ones / 256, torch.zeros(num_weights), decoupled=decoupled
    )


def make_shards(spans: list[tuple[int, int]], inputs: StepInputs) -> list[AdamShard]:
    """With masters and moments of random numbers.

    Args:
        spans: (start, elements) of each.
    """
    shards = []
    for number, (start, numel) in enumerate(spans):
        hi = torch.zeros(numel, dtype=E4M11.hi_dtype)
        shard = AdamShard(f"w{number}", numel, start, number, number % 2, number, E4M11, hi)
        allocate_moments(shard, CPU)
        allocate_lo(shard, CPU)
        if numel:
            write_master(shard, torch.randn(numel), inputs)
            write_moments(shard, torch.randn(numel), torch.rand(numel), inputs)
        shards.append(shard)
    return shards


def one_by_one(shards: list[AdamShard], grads: list[Tensor | None], inputs: StepInputs) -> list[float]:
    """By the step's own function, each shard whole."""
    total = torch.zeros(2, dtype=torch.float64)
    for shard, grad in zip(shards, grads, strict=True):
        if grad is not None and shard.numel:
            update, _, _ = unclamped_update(shard, grad, read_master(shard, inputs.scale_inv), inputs)
            first = update[:NUM_ELEMENTS]
            total += torch.tensor([(first.abs() > inputs.hyper[shard.group, Hyper.BOUND]).sum(), first.numel()])
    return total.tolist()


SPANS = [
    (0, 256),
    (100, 20),
    (128, 20000),
    (7, 300),
    (0, 0),
    (50, NUM_ELEMENTS - 50),
    (0, NUM_ELEMENTS),
    (384, 130),
    (0, 1),
    (50, NUM_ELEMENTS + 500),
]
"""Whole groups, parts of one, heads and tails, more than is sampled, nothing."""


@pytest.mark.parametrize("together", [MAX_GROUPS, 4])
@pytest.mark.parametrize("decoupled", [True, False])
def test_all_shards_together_are_each_by_itself(
    decoupled: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8_ds.monitor.clamps.MAX_GROUPS", together)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    torch.manual_seed(0)
    inputs = make_inputs(len(SPANS), decoupled)
    shards = make_shards(SPANS, inputs)
    grads: list[Tensor | None] = [
        torch.randn(numel).to((torch.float32, torch.bfloat16)[i % 2]) for i, (_, numel) in enumerate(SPANS)
    ]
    grads[3] = None
    expected = one_by_one(shards, grads, inputs)
    assert 0.1 < expected[0] / expected[1] < 0.9
    core = _Core(shards)
    gauge = ClampGauge(core, None)  # type: ignore[arg-type]
    gauge.attach()
    core.run(grads, inputs)
    gauge.detach()
    assert gauge.read() == expected[0] / expected[1]
    gauge.attach()
    for i in (2, 5):  # as released gradients come, and other shards than before
        core.run([grads[i]], inputs, [i])
    gauge.detach()
    some = one_by_one([shards[2], shards[5]], [grads[2], grads[5]], inputs)
    assert gauge.read() == some[0] / some[1]
    inputs.skip.fill_(1)
    gauge.attach()
    core.run(grads, inputs)
    gauge.detach()
    assert gauge.read() is None
    assert len(core.runs) == 4


class _Core:
    """Of an optimizer, as far as the gauge looks."""

    def __init__(self, shards: list[AdamShard]) -> None:
        self.shards, self.device = shards, CPU
        self.runs: list[Any] = []

    def run(self, grads: Any, inputs: Any, chosen: Any = None) -> None:
        self.runs.append(chosen)


class _Count(TorchDispatchMode):
    """Of operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_hundred_shards_take_no_more_operators_than_two() -> None:
    """One after another they took 51 each, for which a GPU waits: 3,800 for Llama 2.0 B."""
    nums = []
    for num_shards in (2, 100):
        inputs = make_inputs(num_shards)
        shards = make_shards([(0, 512)] * num_shards, inputs)
        (batch,) = batches(shards)
        with _Count() as count:
            clamped(batch, [torch.randn(512) for _ in shards], inputs)
        nums.append(count.num - num_shards)  # randn
    assert nums[0] == nums[1] < 50


def test_batches_of_shards_that_no_longer_come_together_are_let_go() -> None:
    """With gradient release what comes together varies, and each batch has tensors on the device."""
    inputs = make_inputs(8)
    shards = make_shards([(0, 256)] * 8, inputs)
    gauge = ClampGauge(_Core(shards), None)  # type: ignore[arg-type]
    for i in range(8):
        gauge.attach()
        gauge.core.run([torch.randn(256)], inputs, [i])
        del gauge.core.run
    assert len(gauge._batches) < 8


def test_counts_are_added_up_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks the other has clamped all of as many updates."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda counts, group: counts.add_(counts[1].clone()))
    torch.manual_seed(0)
    inputs = make_inputs(1)
    shards, grads = make_shards([(0, 512)], inputs), [torch.randn(512)]
    num_clamped, num = one_by_one(shards, list(grads), inputs)
    gauge = ClampGauge(_Core(shards), "a group")  # type: ignore[arg-type]
    gauge.attach()
    gauge.core.run(grads, inputs)
    gauge.detach()
    assert gauge.read() == (num_clamped + num) / (2 * num) != num_clamped / num

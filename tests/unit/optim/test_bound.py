"""The update never exceeds its bound, so a scale predicted from it never saturates; each claim with a control."""

import math
from collections.abc import Callable

import pytest
import torch
from support.adam_shards import hyper_row
from support.bounds import update_bound
from torch import Tensor

from fp8_ds.numerics.masters import E4M11, FP32, MasterFormat, encode
from fp8_ds.numerics.moments import quantize_root
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import AdamShard, StepInputs, reference
from fp8_ds.ops.adamw.reference import adamw_step, read_master

BETAS = [(0.9, 0.95), (0.9, 0.99), (0.9, 0.999)]
NO_SKIP = torch.zeros((), dtype=torch.int32)


def new_shard(weight: Tensor, fmt: MasterFormat, scale_inv: Tensor) -> AdamShard:
    """A shard with fresh moments; its weight is the caller's tensor where the master is float32."""
    codes = torch.zeros(2, weight.numel(), dtype=torch.uint8)
    hi, lo = encode(weight, fmt, scale_inv) if fmt.is_split else (weight, None)
    return AdamShard("w", weight.numel(), 0, 0, 0, 0, fmt, hi, lo, *codes, *torch.zeros(2, weight.numel() // 128))


def bound_of(step: int, betas: tuple[float, float]) -> float:
    return float(update_bound(torch.tensor(step), *betas))


def largest_update_of_bound(
    grads: Callable[[int], Tensor], betas: tuple[float, float], steps: int, clamp: bool = True
) -> Tensor:
    """Per step `max |update| / R_t` of the step on stored moments; `grads(step)` gives float32 [numel]."""
    weight, one, zero = torch.zeros(grads(1).numel()), torch.ones(1), torch.zeros(1)
    shard = new_shard(weight, FP32, one)
    ratios = []
    for step in range(1, steps + 1):
        limit = bound_of(step, betas)
        row = hyper_row(step, betas, 1e-15, limit if clamp else math.inf)
        weight.zero_()
        adamw_step([shard], [grads(step)], StepInputs(row, torch.tensor([step]), one[0], NO_SKIP, one, one, zero))
        ratios.append(float(weight.abs().max()) / limit)
    return torch.tensor(ratios)


def growing(betas: tuple[float, float]) -> Callable[[int], Tensor]:
    """Gradients that bring exact Adam to R_t in every step: each step larger by beta2 / beta1; 512 sizes and signs."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(torch.randn(512, generator=generator)) * torch.randn(512, generator=generator).sign() * 1e-8
    return lambda step: size * (betas[1] / betas[0]) ** step


def one_spike_then_silence(step: int) -> Tensor:
    """One element of a group spikes; its root outlives its first moment, and the others' roots fall below the codes."""
    size = 1.0 if step < 90 else 0.01
    grad = torch.full((128,), size)
    grad[7] = 1e7 if step == 50 else 0.0
    return grad


@pytest.mark.parametrize("betas", [BETAS[0], pytest.param(BETAS[1], marks=pytest.mark.slow), BETAS[2]])
def test_growing_gradients_reach_the_bound_and_only_without_the_clamp_pass_it(betas):
    ratios = largest_update_of_bound(growing(betas), betas, steps=200)
    assert ratios.max() <= 1 + 2**-23  # R_t itself is rounded to float32
    assert ratios.min() > 0.999  # the largest of 512: rounding brings some element to the bound in every step
    assert largest_update_of_bound(growing(betas), betas, steps=200, clamp=False).max() > 1.02


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_roots_below_their_groups_codes_are_harmless(rounding, monkeypatch):
    """Rounded to nearest they are lost, and the clamp is all that keeps the update in bounds."""
    betas = (0.9, 0.95)
    if rounding == "nearest":
        monkeypatch.setattr(reference, "quantize_root", lambda root, noise: quantize_root(root))
    assert largest_update_of_bound(one_spike_then_silence, betas, steps=120).max() <= 1 + 2**-23
    if rounding == "nearest":
        assert largest_update_of_bound(one_spike_then_silence, betas, steps=120, clamp=False).max() > 100


class Run:
    """What a loop of predicted scales met."""

    saturated = scale_changes = 0
    largest_of_prediction = 0.0


class Bursts:
    """Gradients of many sizes. Every 61 steps one a million times larger pushes half of the weights outward; in 40 of
    200 steps they grow outward as in `growing`."""

    def __init__(self, numel: int, betas: tuple[float, float]):
        self._generator = torch.Generator().manual_seed(0)
        self._size = 1e-4 * torch.exp(torch.randn(numel, generator=self._generator))
        self._growth = betas[1] / betas[0]

    def next(self, step: int, weight: Tensor) -> Tensor:
        noise = self._size * torch.randn(self._size.shape, generator=self._generator)
        outward = -weight.sign() * self._size
        if step % 200 >= 160:
            return outward * self._growth ** (step % 200 - 100)
        if step % 61 == 0:
            return torch.where(weight.abs() > weight.abs().median(), 1e6 * outward, noise)
        return noise


def train_with_predicted_scales(
    fmt: MasterFormat,
    betas: tuple[float, float],
    update_limit: Callable[[int, tuple[float, float]], float] = bound_of,
    steps: int = 2000,
    numel: int = 2048,
    lr: float = 2e-2,
    weight_decay: float = 1.0,
) -> Run:
    """The loop of a training run: the last amax and `update_limit` give the scale, the step writes with it and
    measures. The decay keeps weights so small that one step can change their amax by a fifth."""
    weight = 0.02 * torch.randn(numel, generator=torch.Generator().manual_seed(1))
    scales = PredictedScales(1, torch.device("cpu"))
    scales.set(weight.abs().max()[None])
    shard, bursts, run = new_shard(weight, fmt, scales.scale_inv[0]), Bursts(numel, betas), Run()
    decay = 1 - lr * weight_decay
    for step in range(1, steps + 1):
        grad = bursts.next(step, read_master(shard, scales.scale_inv))
        limit = update_limit(step, betas)
        scales.predict(*torch.tensor([[lr], [decay], [limit]]), torch.tensor(True))
        predicted = scales.amax * decay + lr * limit
        scales.commit()
        before, after = scales.previous_scale_inv, scales.next_scale_inv
        row, count = hyper_row(step, betas, 1e-15, bound_of(step, betas), lr, decay), torch.tensor([step])
        adamw_step([shard], [grad], StepInputs(row, count, torch.ones(()), NO_SKIP, before, after, scales.measured))
        scales.start_reduce()
        mag = ((shard.hi.int() & 0x7F) << fmt.lo_bits) + shard.lo.int()
        run.saturated += int((mag >= fmt.max_mag).sum())
        run.scale_changes += int(before != after)
        run.largest_of_prediction = max(run.largest_of_prediction, float(scales.measured / predicted))
    return run


def test_no_weight_saturates_in_2000_steps_with_bursts():
    fmt = E4M11
    run = train_with_predicted_scales(fmt, (0.9, 0.999))
    assert run.saturated == 0
    assert run.scale_changes >= 10  # the scale had to move
    # The prediction was needed in full, and kept but for the rounding of the master.
    assert 0.99 < run.largest_of_prediction <= 1 + 2.0 ** -(3 + fmt.lo_bits)


def test_the_last_amax_alone_saturates():
    run = train_with_predicted_scales(E4M11, (0.9, 0.95), lambda step, betas: 0.0, steps=400)
    assert run.saturated > 0 and run.largest_of_prediction > 1.1

"""Scales that move: within an octave, evenly, by name and step alone; errors of a weight are small in the mean."""

from __future__ import annotations

import pytest
import torch

from fp8_ds.formats import E4M3
from fp8_ds.ops.quantize import quantize
from fp8_ds.scaling import scale_from_amax
from fp8_ds.scaling.moving import MovingScales

NAMES = ["blocks.0.up.weight", "blocks.0.down.weight", "frozen.weight", "blocks.1.up.weight"]


def moving(*names: str | None, sizes: list[int] | None = None) -> MovingScales:
    return MovingScales(names, sizes or [1] * len(names), "cpu")


def factors(scales: MovingScales, num_steps: int) -> torch.Tensor:
    """[num_steps, num_weights], of the steps to come."""
    found = []
    for _ in range(num_steps):
        found.append(scales.factors())
        scales.advance()
    return torch.stack(found)


def test_factors_are_spread_evenly_over_an_octave_in_any_few_steps() -> None:
    scales = moving(*NAMES)
    factors(scales, 100_000)  # far into a run
    found = factors(scales, 21)
    assert found.dtype == torch.float32 and bool((found >= 1).all()) and bool((found < 2).all())
    for column in found.T:
        gaps = column.sort().values.diff()
        assert float(gaps.min()) > 0.02 and float(gaps.max()) < 0.1  # of 21 in an octave: 0.048 in the mean
    assert len(found[0].unique()) == len(NAMES)


def test_factors_follow_from_name_and_step_whatever_stands_beside() -> None:
    one, other = moving(NAMES[1], None, NAMES[0]), moving(*NAMES)
    for scales in (one, other):
        factors(scales, 5)
    assert one.step == other.step == 5
    assert one.factors()[[2, 0]].equal(other.factors()[:2])
    assert float(one.factors()[1]) == 1.0  # a frozen weight stays where it is
    later = moving(*NAMES)
    later.step = 5
    assert later.factors().equal(other.factors())


def test_all_scales_of_a_weight_move_together() -> None:
    scales = moving(*NAMES[:2], sizes=[3, 2])
    scales.advance()
    amax = torch.tensor([1.0, 2.0, 0.0, float("inf"), float("nan")])
    factor = scales.factors()
    widened = scales.widened(amax)
    assert widened[:4].equal(torch.stack([factor[0], 2 * factor[0], torch.tensor(0.0), torch.tensor(torch.inf)]))
    assert widened[4].isnan()


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_a_few_steps_is_near_the_weight_and_a_step_is_no_worse_than_with_scales_that_stay(
    seed: int,
) -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(seed)) * 0.02
    scales = moving(NAMES[seed])
    seen = []
    for factor in factors(scales, 21):
        scale, scale_inv = scale_from_amax(weight.abs().max() * factor[0], E4M3.max)
        seen.append(quantize(weight, scale, E4M3).float() * scale_inv)
        assert seen[-1].abs().max() <= weight.abs().max() * 17 / 16
    scale, scale_inv = scale_from_amax(weight.abs().max(), E4M3.max)
    stays = float((quantize(weight, scale, E4M3).float() * scale_inv - weight).square().mean())
    moves = [float((each - weight).square().mean()) for each in seen]
    assert max(moves) < 1.2 * stays and min(moves) > 0.8 * stays
    assert float((torch.stack(seen).mean(0) - weight).square().mean()) < 0.05 * stays

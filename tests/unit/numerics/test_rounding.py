"""Thresholds of stochastic rounding: what they depend on; noise over elements, evenly spread over steps."""

import math

import pytest
import torch

from fp8_ds.numerics.rounding import MOMENT_FACTOR, NEXT_PAIR, STRIDE, keys, mix, moment_noise, noise

CPU = torch.device("cpu")
COUNT = 1 << 18


def correlation(a, b):
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt())


def equally_often(counts):
    """Whether chi-squared of counts that should be equal is within 4 sigma (its mean is n - 1, its variance 2n - 2)."""
    expected = counts.double().mean()
    freedom = counts.numel() - 1
    return abs(float(((counts - expected).square() / expected).sum()) - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("noise", [noise, moment_noise])
@pytest.mark.parametrize("bits", [4, 8, 12, 16])
@pytest.mark.parametrize(("start", "numel"), [(0, 1), (1, 1), (127, 3), (128, 640), (129, 512), (999, 1)])
def test_a_slice_of_a_weight_gets_the_noise_of_the_whole(bits, start, numel, noise):
    whole = noise(5, 17, 3, 0, 1000, bits, CPU)
    part = noise(5, 17, 3, start, numel, bits, CPU)
    assert part.dtype == torch.int32
    assert torch.equal(part, whole[start : start + numel])


@pytest.mark.parametrize("shift", [0, 1, 7, 128])
def test_all_values_are_equally_likely_and_those_of_masters_and_moments_uncorrelated(shift):
    masters, moments = noise(1, 2, 3, 0, COUNT, 12, CPU), moment_noise(1, 2, 3, 0, COUNT, 12, CPU)
    assert equally_often(torch.bincount(masters, minlength=1 << 12))
    assert abs(correlation(masters[: COUNT - shift], moments[shift:])) < 4 / math.sqrt(COUNT)
    cells = (masters[: COUNT - shift] >> 8).long() * 16 + (moments[shift:] >> 8)
    assert equally_often(torch.bincount(cells, minlength=256))


def noise_of_one(seed, step, param_id, element, factor=1):
    """The definition, in Python's unbounded integers: one hash for eight elements."""
    mask = (1 << 32) - 1
    first, second = keys(seed, param_id)
    x = (element // 8 * 0x9E3779B1 + first) & mask
    x = ((x ^ x >> 16) * 0x21F0AAAD & mask) ^ second
    x = (x ^ x >> 15) * 0xD35A2D97 & mask
    x ^= x >> 15
    x = (x * NEXT_PAIR ** (element % 8 // 2) + step * STRIDE) * factor & mask
    return x >> 16 if element % 2 else x & 0xFFFF


@pytest.mark.parametrize("start", [0, 1 << 20, (1 << 31) - 4, (1 << 32) + 1])
def test_noise_is_its_definition(start):
    expected = [noise_of_one(1, 2, 3, start + element) for element in range(1000)]
    assert noise(1, 2, 3, start, 1000, 16, CPU).tolist() == expected
    expected = [noise_of_one(1, 2, 3, start + element, MOMENT_FACTOR) for element in range(1000)]
    assert moment_noise(1, 2, 3, start, 1000, 16, CPU).tolist() == expected


def test_known_values_stay():
    """A resumed run rounds as the run before it would have: another hash needs another version of the saved state."""
    assert mix(1) == 0x06D3FA73 and keys(0, 1) == (0x335AC92B, 0x6BF794D2)
    assert noise(0, 1, 0, 0, 6, 16, CPU).tolist() == [64061, 50199, 14333, 20528, 64189, 24291]
    assert moment_noise(0, 1, 0, 0, 6, 16, CPU).tolist() == [40615, 26417, 19431, 36673, 63527, 25124]


@pytest.mark.parametrize("noise", [noise, moment_noise])
@pytest.mark.parametrize("element", [0, 5])
def test_thresholds_of_an_element_are_evenly_spread_over_steps(noise, element):
    """Of n steps, those that round x up are n x within 2 log2(n), for any x and from any step on: random ones would be
    within a few sqrt(n)."""
    values = torch.stack([noise(9, step, 7, 1000 + element, 1, 12, CPU) for step in range(1, 2001)])[:, 0] / 4096
    for x in torch.linspace(0.02, 0.98, 25):
        for begin, end in ((0, 20), (0, 200), (0, 2000), (700, 900), (1500, 2000)):
            count, steps = int((values[begin:end] < x).sum()), end - begin
            assert abs(count - steps * float(x)) <= 2 * math.log2(steps), (x, begin, end, count)

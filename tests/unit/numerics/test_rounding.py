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


def test_noise_is_the_same_again_and_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = noise(5, 17, 3, 0, 1000, 12, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(noise(5, 17, 3, 0, 1000, 12, CPU), first)


def test_elements_beyond_two_to_the_31_have_noise_of_their_own():
    start = (1 << 31) - 4
    far = noise(0, 1, 0, start, 64, 16, CPU)
    assert torch.equal(far[4:], noise(0, 1, 0, 1 << 31, 60, 16, CPU))
    assert far.unique().numel() > 60
    assert far.min() >= 0 and far.max() < 1 << 16


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


@pytest.mark.parametrize("start", [0, 1 << 20, (1 << 32) + 1])
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


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_all_values_are_equally_likely(bits):
    counts = torch.bincount(noise(1, 2, 3, 0, COUNT, bits, CPU), minlength=1 << bits)
    assert counts.numel() == 1 << bits
    assert equally_often(counts)


@pytest.mark.parametrize("bits", [8, 12])
def test_pairs_of_neighbours_are_equally_likely(bits):
    """Both halves of one hash, and the neighbours in two hashes: their top 4 bits fill 16 x 16 cells alike."""
    values = (noise(1, 2, 3, 0, COUNT, bits, CPU) >> (bits - 4)).long()
    for first in (0, 1):
        pairs = values[first : COUNT - 2 + first].view(-1, 2)
        assert equally_often(torch.bincount(pairs[:, 0] * 16 + pairs[:, 1], minlength=256))


def test_every_bit_is_set_half_of_the_time():
    values = noise(1, 2, 3, 0, COUNT, 16, CPU)
    share = ((values[:, None] >> torch.arange(16)) & 1).double().mean(0)
    assert (share - 0.5).abs().max() < 4 * 0.5 / math.sqrt(COUNT)


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 6, 7, 8, 64, 128, 4096])
@pytest.mark.parametrize("noise", [noise, moment_noise])
def test_elements_are_uncorrelated(distance, noise):
    values = noise(1, 2, 3, 0, COUNT, 12, CPU)
    assert abs(correlation(values[distance:], values[:-distance])) < 4 / math.sqrt(COUNT)


@pytest.mark.parametrize("other", [(1, 2, 4), (2, 2, 3), (2, 3, 3), (1, 3, 2), (1, 2, 3 + (1 << 16)), (0, 2, 3)])
def test_seeds_and_parameters_are_uncorrelated(other):
    values, others = noise(1, 2, 3, 0, COUNT, 12, CPU), noise(*other, 0, COUNT, 12, CPU)
    assert abs(correlation(values, others)) < 4 / math.sqrt(COUNT)
    for shift in (1, 2, 128):
        assert abs(correlation(values[shift:], others[:-shift])) < 4 / math.sqrt(COUNT)


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 7, 128])
def test_thresholds_of_masters_and_moments_are_uncorrelated(shift):
    masters, moments = noise(1, 2, 3, 0, COUNT, 12, CPU), moment_noise(1, 2, 3, 0, COUNT, 12, CPU)
    assert abs(correlation(masters[: COUNT - shift], moments[shift:])) < 4 / math.sqrt(COUNT)
    cells = (masters[: COUNT - shift] >> 8).long() * 16 + (moments[shift:] >> 8)
    assert equally_often(torch.bincount(cells, minlength=256))


@pytest.mark.parametrize("noise", [noise, moment_noise])
@pytest.mark.parametrize("element", [0, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 7))])
def test_thresholds_of_an_element_are_evenly_spread_over_steps(noise, element):
    """Of n steps, those that round x up are n x within 2 log2(n), for any x and from any step on: random ones would be
    within a few sqrt(n)."""
    values = torch.stack([noise(9, step, 7, 1000 + element, 1, 12, CPU) for step in range(1, 2001)])[:, 0] / 4096
    for x in torch.linspace(0.02, 0.98, 25):
        for begin, end in ((0, 20), (0, 200), (0, 2000), (700, 900), (1500, 2000)):
            count, steps = int((values[begin:end] < x).sum()), end - begin
            assert abs(count - steps * float(x)) <= 2 * math.log2(steps), (x, begin, end, count)


def test_one_element_is_uncorrelated_over_parameters():
    values = torch.stack([noise(9, 7, param, 1000, 2, 12, CPU) for param in range(4096)])
    assert abs(correlation(values[1:, 0], values[:-1, 0])) < 4 / math.sqrt(4096)
    assert abs(correlation(values[:, 0], values[:, 1])) < 4 / math.sqrt(4096)
    assert equally_often(torch.bincount(values[:, 0] >> 8, minlength=16))


def test_no_two_keys_are_alike_over_seeds_and_parameters():
    firsts = {keys(seed, param) for seed in range(200) for param in range(200)}
    assert len(firsts) == 40000


def shortest_dual_vector(factor, bits):
    """Of the lattice of (threshold, threshold * factor) modulo 2**bits, as a share of the longest possible."""
    size = 1 << bits
    u, v = (size, 0), (-factor % size, 1)
    while True:
        if u[0] ** 2 + u[1] ** 2 < v[0] ** 2 + v[1] ** 2:
            u, v = v, u
        times = round((u[0] * v[0] + u[1] * v[1]) / (v[0] ** 2 + v[1] ** 2))
        if times == 0:
            return math.hypot(*v) / math.sqrt(2 / math.sqrt(3) * size)
        u = (u[0] - times * v[0], u[1] - times * v[1])


def test_no_short_wave_fits_two_thresholds_of_eight_elements():
    """Low halves are products modulo 2**16, high ones modulo 2**32 with the low half below them."""
    for pairs in range(-3, 4):
        for kind in (-1, 0, 1):
            if (pairs, kind) != (0, 0):
                factor = pow(NEXT_PAIR, pairs, 1 << 32) * pow(MOMENT_FACTOR, kind, 1 << 32)
                assert min(shortest_dual_vector(factor % (1 << bits), bits) for bits in (16, 32)) > 0.49
    assert STRIDE * MOMENT_FACTOR % (1 << 32) == 0x9E379E37


def test_hash_is_a_bijection_on_what_is_tried():
    assert len({mix(number) for number in range(1 << 16)}) == 1 << 16
    assert all(0 <= mix(number) < 1 << 32 for number in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF))


def test_more_bits_than_an_element_has_are_refused():
    with pytest.raises(AssertionError):
        noise(0, 0, 0, 0, 4, 17, CPU)

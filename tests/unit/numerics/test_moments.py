"""Stored moments: codes against searches, scales, ragged groups, and the way through a dense checkpoint and back."""

import pytest
import torch
from support import MANY_SCALES, many_scales

from fp8_ds.numerics.formats import E4M3, E4M4
from fp8_ds.numerics.moments import (
    GROUP,
    NOISE_BITS,
    TINY,
    TINY_ROOT,
    dequantize_m,
    dequantize_root,
    from_groups,
    group_scale_inv,
    num_groups,
    quantize_m,
    quantize_root,
    to_groups,
)
from fp8_ds.numerics.rounding import moment_noise
from fp8_ds.testing import assert_bitwise

ROOT_TABLE = torch.cat(
    [torch.arange(16) * 2.0**-10] + [(1 + torch.arange(16) / 16) * 2.0 ** (e - 7) for e in range(1, 16)]
)
"""Values of the 256 codes `eeeemmmm`, by definition."""
M_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def nearest_even(x, table):
    """Index of the nearest entry of a sorted table, ties to the even index."""
    above = torch.searchsorted(table, x).clamp(1, len(table) - 1)
    low, high = x - table[above - 1], table[above] - x
    return above - ((low < high) | ((low == high) & (above % 2 == 1))).long()


def significant_bits(x):
    """Of a float32: 24 less the zeros at the end of its mantissa."""
    mantissa = (x.view(torch.int32) & 0x7FFFFF) | 0x800000
    return 24 - (mantissa & -mantissa).double().log2().long()


def groups_of(family, num=64, seed=0):
    return many_scales(family, num, GROUP, seed) * 1e-4


def test_every_root_code_is_its_value_and_back_and_between_two_the_nearest_even_is_taken():
    codes = torch.arange(256, dtype=torch.uint8).view(2, GROUP)
    scale_inv = torch.tensor([1.0, 3 * 2.0**-30])
    values = dequantize_root(codes, scale_inv)
    assert torch.equal(values[0], ROOT_TABLE[:GROUP])
    assert torch.equal(values[1].double(), ROOT_TABLE[GROUP:].double() * scale_inv[1].double())
    assert ROOT_TABLE.max() == E4M4.max and ROOT_TABLE[1] == E4M4.smallest_subnormal
    middle = (ROOT_TABLE[1:] + ROOT_TABLE[:-1]) / 2
    # Not nearer to the middle: the smallest values first lose what is below 2**-29 (they become subnormals of float32).
    x = torch.cat([ROOT_TABLE, middle, middle * (1 + 2**-18), middle * (1 - 2**-18)])
    x = torch.nn.functional.pad(x, (0, -len(x) % (GROUP - 1))).view(-1, GROUP - 1)
    x = torch.cat([x, torch.full((len(x), 1), E4M4.max)], dim=1)
    codes, scale_inv = quantize_root(x)
    assert torch.equal(scale_inv, torch.ones(len(x)))
    assert torch.equal(codes.long(), nearest_even(x, ROOT_TABLE))


@pytest.mark.parametrize("family", MANY_SCALES)
def test_codes_are_the_nearest_of_the_scaled_values(family):
    x = groups_of(family)
    codes, scale_inv = quantize_m(x)
    table = M_TABLE[:0x7F]
    scaled = x.double() / scale_inv[:, None].double()
    distance = (dequantize_m(codes, torch.ones_like(scale_inv)).double() - scaled).abs()
    best = (table[nearest_even(scaled.abs().float(), table)].double() - scaled.abs()).abs()
    assert (distance <= best * (1 + 1e-6) + 1e-9).all()
    assert torch.equal(codes >= 0x80, x.signbit())
    root_codes, root_scale_inv = quantize_root(x.abs())
    scaled = x.abs().double() / root_scale_inv[:, None].double()
    distance = (ROOT_TABLE[root_codes.long()].double() - scaled).abs()
    assert (distance <= (ROOT_TABLE[nearest_even(scaled.float(), ROOT_TABLE)].double() - scaled).abs() + 1e-4).all()


def test_scales_have_19_bits_so_that_code_times_scale_is_exact():
    amax = torch.exp2(torch.empty(20000).uniform_(-90, 90, generator=torch.Generator().manual_seed(0)))
    for fmt in (E4M3, E4M4):
        scale_inv = group_scale_inv(amax, fmt.max)
        assert significant_bits(scale_inv).max() == 19
        assert (scale_inv.double() * fmt.max / amax.double() - 1).abs().max() <= 2**-19 + 2**-24
    codes = torch.arange(256, dtype=torch.uint8)
    for scale in scale_inv[:500]:
        exact = ROOT_TABLE.double() * scale.double()
        assert torch.equal(dequantize_root(codes.view(2, GROUP), scale.expand(2)).double().view(-1), exact)
        finite = codes[M_TABLE.isfinite()]
        padded = torch.nn.functional.pad(finite, (0, 2)).view(2, GROUP)
        exact = torch.nn.functional.pad(M_TABLE[finite.long()].double(), (0, 2)) * scale.double()
        assert torch.equal(dequantize_m(padded, scale.expand(2)).double().view(-1), exact)


@pytest.mark.parametrize(("family", "scale"), zip(MANY_SCALES, [1e-12, 1e-6, 1.0, 1e6], strict=True))
def test_dense_float32_gives_the_same_codes_and_scales_and_groups_do_not_hang_on_others(family, scale):
    """What a checkpoint does: exp_avg = m, exp_avg_sq = root * root, and the root of it again."""
    x = groups_of(family, num=256) * scale
    x[[1, 3]] = 0
    for quantize, dequantize, value in ((quantize_m, dequantize_m, x), (quantize_root, dequantize_root, x.abs())):
        codes, scale_inv = quantize(value)
        assert (codes[[1, 3]] == 0).all() and scale_inv[[1, 3]].tolist() == [0, 0]
        dense = dequantize(codes, scale_inv)
        again = quantize(dense.square().sqrt() if quantize is quantize_root else dense)
        parts = [quantize(to_groups(part.flatten(), start)) for part, start in ((value[:2], 0), (value[2:], 256))]
        for got in (again, [torch.cat(pair) for pair in zip(*parts, strict=True)]):
            assert_bitwise(got[0], codes)
            assert_bitwise(got[1], scale_inv)


def test_what_is_too_small_for_a_scale_is_stored_as_zeros_and_never_as_nan():
    for quantize, dequantize, tiny in ((quantize_m, dequantize_m, TINY), (quantize_root, dequantize_root, TINY_ROOT)):
        sizes = torch.tensor([1e-45, 1e-38, tiny / 2, tiny, tiny * 1024])
        x = sizes[:, None] * torch.linspace(0.1, 1, GROUP)
        codes, scale_inv = quantize(x)
        assert (scale_inv > 0).tolist() == [False, False, False, True, True]
        back = dequantize(codes, scale_inv)
        assert back.isfinite().all() and (back[:3] == 0).all()
        assert (back[3:] / x[3:] - 1).abs().max() < 2**-4


@pytest.mark.parametrize("beta1", [0.9, 0.95])
def test_a_first_moment_without_gradients_fades_to_zero_however_large_its_neighbours_are(beta1):
    """Far below the group's largest, too, where a step takes less than half a code."""
    m = torch.zeros(1, GROUP)
    m[0, 0], m[0, 1:121] = 448.0, (torch.arange(120) % 15 + 1) * 2.0**-9
    m[0, 61:121] *= -1
    first, sizes = m.clone(), []
    for step in range(1, 301):
        m = torch.cat([m[:, :1], m[:, 1:] * beta1], dim=1)
        bits = moment_noise(0, step, 7, 0, GROUP, NOISE_BITS, m.device).view(1, GROUP)
        m = dequantize_m(*quantize_m(m, bits))
        sizes.append(float(m[0, 1:].abs().sum() / first[0, 1:].abs().sum()))
    assert sizes[9] == pytest.approx(beta1**10, abs=0.05)
    assert not m[0, 1:].any() and m[0, 0] == 448


@pytest.mark.parametrize("start", [0, 1, 127, 128, 129, 1000])
@pytest.mark.parametrize("numel", [1, 2, 127, 128, 129, 300])
def test_ragged_ends_are_padded_with_zeros_and_come_back(start, numel):
    x = many_scales("per_tile", 1, numel).flatten()
    groups = to_groups(x, start)
    head = start % GROUP
    assert groups.shape == (num_groups(numel, start), GROUP)
    assert num_groups(numel, start) == (start + numel - 1) // GROUP - start // GROUP + 1
    flat = groups.flatten()
    assert (flat[:head] == 0).all() and (flat[head + numel :] == 0).all()
    assert_bitwise(from_groups(groups, numel, start), x)
    from_groups(groups, numel, start).zero_()
    assert (groups == 0).all()  # a view

"""Split masters: every code, against values built from the formats' definition; and how far small updates carry."""

import math

import pytest
import torch
from support.adam_shards import hyper_row
from torch import Tensor

from fp8_ds.numerics.masters import BF16_8, E4M11, E4M19, MasterFormat, decode, encode
from fp8_ds.numerics.predicted import pow2_scale_inv
from fp8_ds.numerics.rounding import noise
from fp8_ds.ops.adamw import AdamShard, StepInputs
from fp8_ds.ops.adamw.reference import adamw_step, read_master
from fp8_ds.testing import assert_bitwise

E4M7 = MasterFormat("e4m7", 4, torch.int8, torch.uint8, 16, True)
"""Not offered: shows that the construction does not hang on the number of bits."""
FP8_FORMATS = [E4M7, E4M11, E4M19]
ONE = torch.ones(())


def magnitudes(fmt: MasterFormat) -> Tensor:
    """All magnitude codes, int64; of e4m19 10**6 random ones, and all near an end of a high byte's interval."""
    if fmt.lo_bits < 16:
        return torch.arange(fmt.max_mag + 1)
    near = torch.arange(0x7F)[:, None] * 65536 + torch.tensor([-32769, -32768, -32767, -1, 0, 1, 32767])
    near = near[(near >= 0) & (near <= fmt.max_mag)]
    some = torch.randint(fmt.max_mag + 1, (10**6,), generator=torch.Generator().manual_seed(0))
    return torch.cat([near, some, torch.tensor([fmt.max_mag])])


def value_of(mag: Tensor, fmt: MasterFormat) -> Tensor:
    """float64 by definition: exponent field of 4 bits, bias 7, mantissa of 3 + lo_bits."""
    mantissa_bits = 3 + fmt.lo_bits
    exponent = mag >> mantissa_bits
    fraction = (mag & ((1 << mantissa_bits) - 1)).double() / 2**mantissa_bits
    return torch.where(
        exponent > 0, (1 + fraction) * torch.exp2(exponent.double() - 7), fraction * torch.exp2(torch.tensor(-6.0))
    )


def nearest_e4m3_ties_away(size: Tensor) -> Tensor:
    """Codes of magnitudes below 464 by search among the 127 finite ones."""
    table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return torch.searchsorted((table[1:] + table[:-1]) / 2, size, right=True)


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_every_code_is_its_value_and_back(fmt, sign):
    mag = magnitudes(fmt)
    value = (value_of(mag, fmt) * sign).float()
    assert torch.equal(value.double().abs(), value_of(mag, fmt))  # at most 20 significant bits
    hi, lo = encode(value, fmt, ONE)
    assert (hi.dtype, lo.dtype) == (torch.uint8, fmt.lo_dtype)
    assert_bitwise(decode(hi, lo, fmt, ONE), value)  # bitwise: minus zero stays minus zero
    code = hi.long() & 0x7F
    assert torch.equal((code << fmt.lo_bits) + lo, mag)
    assert torch.equal(hi >= 0x80, torch.full_like(mag, sign < 0, dtype=torch.bool))
    assert torch.equal(code, nearest_e4m3_ties_away(value_of(mag, fmt))) and code.max() == 0x7E  # never NaN
    half = 1 << (fmt.lo_bits - 1)
    assert (int(lo.min()), int(lo.max())) == (-half, half - 1)
    for bits in (0, (1 << fmt.drop_bits) - 1):  # on the grid no noise moves it
        noised = encode(value, fmt, ONE, torch.full(value.shape, bits, dtype=torch.int32))
        assert torch.equal(noised[0], hi) and torch.equal(noised[1], lo)


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=lambda fmt: fmt.name)
def test_between_two_codes_the_nearest_is_taken_ties_to_even(fmt):
    mag = magnitudes(fmt)[:-1].unique()[:-1]
    low, high = value_of(mag, fmt), value_of(mag + 1, fmt)
    for share, up in ((0.25, False), (0.5, None), (0.75, True)):
        between = (low + share * (high - low)).float()
        hi, lo = encode(between, fmt, ONE)
        got = ((hi.long() & 0x7F) << fmt.lo_bits) + lo
        assert torch.equal(got, mag + (mag % 2 if up is None else int(up)))


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shift", [-3, -1, 1, 4])
def test_another_power_of_two_scale_is_exact_on_normals(fmt, shift):
    mag = magnitudes(fmt)
    old, new = torch.tensor(2.0**-9), torch.tensor(2.0 ** (-9 + shift))
    value = value_of(mag, fmt).float() * old
    hi, lo = encode(value, fmt, new)
    size = value / new
    fits = ((size >= 2**-6) | (size == 0)) & (size < 448)
    assert fits.sum() > 0.6 * len(mag)
    assert torch.equal(decode(hi, lo, fmt, new)[fits], value[fits])
    lost = (decode(hi, lo, fmt, new) - value).abs() / new
    assert lost[size < 2**-6].max() <= 2.0 ** (-10 - fmt.lo_bits)  # subnormals: half of their step


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=lambda fmt: fmt.name)
def test_what_is_too_large_saturates_below_464(fmt):
    scale_inv = torch.tensor(2.0**-5)
    values = torch.tensor([448.0, 463.0, 464.0, 465.0, 1e4, 3e38]) * scale_inv
    full_noise = torch.full(values.shape, (1 << fmt.drop_bits) - 1, dtype=torch.int32)
    for noise_bits in (None, full_noise):
        for sign in (1, -1):
            hi, lo = encode(values * sign, fmt, scale_inv, noise_bits)
            assert hi.tolist() == [0x7E if sign > 0 else 0xFE] * 6
            decoded = decode(hi, lo, fmt, scale_inv) * sign / scale_inv
            assert decoded[0] == 448 and (decoded < 464).all()
            assert torch.equal(decoded[2:], torch.full((4,), 464 - 2.0 ** (5 - fmt.lo_bits)))


def many_float32(count: int) -> Tensor:
    """Random bit patterns: all exponents, subnormals, both signs; finite."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0)).int()
    edges = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.0, 2 - 2**-20, 3.3895313892515355e38, -3.4e38])
    values = torch.cat([edges, bits.view(torch.float32)])
    return values[values.isfinite()]


def test_bf16_8_keeps_every_float32_of_24_bits():
    bits = many_float32(10**6).view(torch.int32) & ~0xFF
    bits = bits[(bits & 0x7FFFFFFF) <= BF16_8.max_mag << 8]
    value = bits.view(torch.float32)
    hi, lo = encode(value, BF16_8)
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int8)
    assert_bitwise(decode(hi, lo, BF16_8), value)
    assert_bitwise(decode(*encode(value, BF16_8, None, torch.full_like(bits, 255)), BF16_8), value)


def test_bf16_8_high_part_is_the_nearest_bf16():
    value = many_float32(10**5)
    value = value[value.abs() < 3.38e38]
    hi, lo = encode(value, BF16_8)
    master = decode(hi, lo, BF16_8).double()
    assert ((master - value.double()).abs() <= value.double().abs() * 2**-16 + 2.0**-142).all()
    neighbours = (hi.view(torch.int16).int()[:, None] + torch.tensor([-1, 1])).to(torch.int16).view(torch.bfloat16)
    distance = (neighbours.double() - master[:, None]).abs().nan_to_num(math.inf)
    assert ((hi.double() - master).abs()[:, None] <= distance).all()
    tie = torch.tensor([1.00390625, -1.00390625])  # halfway between two bf16: away from zero
    assert encode(tie, BF16_8)[0].tolist() == [1.0078125, -1.0078125]


@pytest.mark.parametrize("fmt", [E4M11, BF16_8], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_is_unbiased_for_every_fraction(fmt):
    """16 fractions of the last bit, in normals and subnormals, both signs: 3 sigma of a binomial each."""
    count = 1 << 17
    for bucket in range(16):
        up = bucket * (1 << fmt.drop_bits) // 16 + 5  # dropped bits: this is the chance to go up, times 2**drop_bits
        chance = up / (1 << fmt.drop_bits)
        grid = torch.tensor([0.7, -200.0, 3e-3, -1e-4]).view(torch.int32) & -(1 << fmt.drop_bits)
        if fmt.is_fp8:  # where a float32 has FP8's exponent: so that subnormals drop the same bits
            grid = torch.tensor([0.7, -200.0, 3e-3, -1e-4]).mul(2.0**-120).view(torch.int32) & -(1 << fmt.drop_bits)
        exact = (grid + up).view(torch.float32)
        scale_inv = ONE if fmt.is_fp8 else None
        value = (exact * 2.0**120 if fmt.is_fp8 else exact).repeat_interleave(count // 4)
        bits = noise(7, 3, 11 + bucket, 0, count, fmt.drop_bits, value.device)
        hi, lo = encode(value, fmt, scale_inv, bits)
        got = decode(hi, lo, fmt, scale_inv)
        went_up = (got.abs() > value.abs()).double().view(4, -1).mean(1)
        assert torch.equal(got.sign(), value.sign())
        limit = 3 * math.sqrt(chance * (1 - chance) / (count // 4))
        assert ((went_up - chance).abs() <= limit).all(), (bucket, went_up, chance, limit)


def travel(fmt: MasterFormat, weight: Tensor, sign: Tensor, lr: float, steps: int = 100) -> Tensor:
    """How far each master went against gradients of one sign, as a share of float32's way."""
    numel = weight.numel()
    scale_inv = pow2_scale_inv(weight.abs().max() + lr * steps * 1.2)
    hi, lo = encode(weight, fmt, scale_inv if fmt.is_fp8 else None)
    codes, moment_scales = torch.zeros(2, numel, dtype=torch.uint8), torch.zeros(2, numel // 128)
    split = AdamShard("split", numel, 0, 3, 0, 0, fmt, hi, lo, *codes, *moment_scales)
    start = read_master(split, scale_inv[None])
    whole = start.clone()
    for step in range(1, steps + 1):
        skip = torch.zeros((), dtype=torch.int32)
        scales = (scale_inv[None], scale_inv[None], torch.zeros(1))
        adamw_step(
            [split],
            [1e-3 * sign],
            StepInputs(hyper_row(step, (0.9, 0.95), 1e-8, 1.165, lr), torch.tensor([step]), ONE, skip, *scales),
        )
        whole -= lr * sign  # Adam's update of a constant gradient is its sign
    way = (whole - start).double()
    return (read_master(split, scale_inv[None]).double() - start) * way.sign() / way.abs().mean()


@pytest.mark.parametrize("fmt", [E4M19, E4M11, BF16_8], ids=lambda fmt: fmt.name)
def test_weights_travel_within_a_percent_of_float32_at_lr_1e_5(fmt):
    """In the mean, and each near to it: a mean hides that some go twice as far and others stand still."""
    generator = torch.Generator().manual_seed(0)
    weight, sign = 0.02 * torch.randn(1 << 14, generator=generator), torch.rand(1 << 14, generator=generator).sub(0.5)
    share = travel(fmt, weight, sign.sign(), 1e-5)
    assert abs(share.mean() - 1) < 0.01
    assert (share - 1).square().mean().sqrt() < 0.1

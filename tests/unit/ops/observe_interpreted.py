"""The kernels of ops/observe in Triton's interpreter against their reference. test_interpreted.py runs this file."""

import pytest
import torch

from fp8_ds.formats import E4M3, E5M2
from fp8_ds.ops.observe import new_counts, reference, triton

pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning"
)  # NumPy's
NAN = float("nan")


def both(*steps):
    """The counts after these calls, by the reference and by the kernels: (name, arguments before the counts, after)."""
    found = []
    for module in (reference, triton):
        counts = new_counts(device="cpu")
        for name, before, after in steps:
            getattr(module, name)(*before, counts, *after)
        found.append(counts)
    return found


def assert_same(expected, found):
    assert torch.equal(expected.nan_to_num(nan=-1.0), found.nan_to_num(nan=-1.0)), (expected, found)


def all_codes(num_rows, num_cols, fmt):
    codes = (torch.arange(num_rows * num_cols) * 89 % 256).to(torch.uint8).view(num_rows, num_cols)
    codes[(codes & 0x7F) > (0x7E if fmt is E4M3 else 0x7B)] = 3  # no NaN and no infinity
    return codes.view(fmt.dtype)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((5, 7), ()),
        ((300, 1000), ()),
        ((70, 1300), (70, 1)),
        ((130, 257), (130, 3)),
        ((130, 257), (2, 3)),
        ((1, 300), (1, 3)),
    ],
    ids=str,
)
def test_codes_are_counted_as_by_the_reference(shape, scales, fmt):
    codes = all_codes(*shape, fmt)
    scale_inv = torch.exp2(torch.arange(max(1, torch.tensor(scales).prod())).float() % 7 - 3).view(scales)
    for given in [scale_inv, *([scale_inv.t().contiguous().t()] if scales else [])]:
        for can_saturate in (True, False):
            expected, found = both(("observe_codes", (codes, given), (can_saturate,)))
            assert_same(expected, found)
    assert found[2] == codes.numel() and 0 < found[4] < codes.numel() and found[0] > 0


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_what_is_not_finite_stays_so(fmt):
    codes = all_codes(40, 300, fmt)
    broken = codes.clone().view(torch.uint8)
    broken[7, 290] = 0x7F  # NaN
    infinite = codes.clone().view(torch.uint8)
    infinite[7, 290] = 0xFC  # of E5M2
    for some in (codes, broken.view(fmt.dtype), infinite.view(fmt.dtype)):
        for scale_inv in (
            torch.tensor(0.25),
            torch.tensor(NAN),
            torch.ones(40, 1),
            torch.tensor([NAN] + 39 * [2.0])[:, None],
        ):
            expected, found = both(("observe_codes", (some, scale_inv), (True,)))
            assert_same(expected, found)
    counts = both(
        ("observe_codes", (broken.view(fmt.dtype), torch.ones(())), (True,)),
        ("observe_codes", (codes, torch.ones(())), (True,)),
    )
    assert_same(*counts)
    assert counts[1][0].isnan()  # also after a tensor that has none


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_numbers_are_counted_as_by_the_reference_and_belong_to_the_codes_that_follow(dtype):
    torch.manual_seed(0)
    x = torch.randn(37, 6000).to(dtype)
    x[3, :9], x[30, 5] = 0.0, -0.0
    codes, scale_inv = all_codes(37, 6000, E4M3), torch.tensor(0.004)
    for bound in (None, scale_inv, torch.tensor(NAN)):
        steps = [("observe_hp", (x, bound, E4M3.max), ()), ("observe_hp", (x, bound, E4M3.max), ())]
        assert_same(*both(*steps))
        expected, found = both(*steps, ("observe_codes", (codes, scale_inv), (True,)))
        assert_same(expected, found)
        assert found[5] == 10 and found[7] == found[8] == 0
        x[36, 5999] = NAN if bound is None else float("inf")


def test_a_bound_is_not_rounded_to_the_tensors_dtype():
    """1 + 2**-9 is no bf16 number: 1 is below it, though as bf16 it would be 1 as well; 1 + 2**-7 is above."""
    x = torch.tensor([1.0, 1.0078125] * 8).bfloat16()
    bound = torch.tensor((1 + 2.0**-9) / 448)
    below = torch.tensor((1 - 2.0**-9) / 448)  # as bf16: 1, which would let the 1 pass
    for scale_inv, beyond in ((bound, 8), (below, 16)):
        expected, found = both(("observe_hp", (x, scale_inv, 448.0), ()))
        assert_same(expected, found)
        assert found[8] == beyond + 1

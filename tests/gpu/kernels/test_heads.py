"""The kernels of queries, keys and values against their reference."""

import pytest
import torch
from support import many_scales
from support.kernels import KERNEL, to_device

from fp8_ds.attention.heads import reference, triton
from fp8_ds.testing import assert_bitwise, sqnr_db

pytestmark = KERNEL

ENDS_Q, ENDS_K = torch.tensor([0, 70, 70, 99, 131]), torch.tensor([0, 20, 90, 90, 101])


def heads(tokens, num_heads, dim, seed=0):
    """bf16 [tokens, heads, dim], a view of something larger, its heads of very different ranges."""
    x = many_scales("per_column", num_heads, tokens * 2 * dim, seed).view(num_heads, tokens, 2 * dim)
    (x,) = to_device((x * torch.exp2(3 * torch.arange(num_heads) - 6.0)[:, None, None]).bfloat16())
    return x[..., :dim].transpose(0, 1)


def assert_kernels_equal_reference(q, k, v, *packed):
    arguments = (*packed, False)
    ours, theirs = triton.quantize(q, k, v, *arguments), reference.quantize(q, k, v, *arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert_bitwise(mine.view(torch.uint8), other.view(torch.uint8))
    places = [(packed[0], packed[2]), (packed[1], packed[3]), (packed[1], packed[3])]
    for x_fp8, scale_inv, place in zip(ours[:3], ours[3], places, strict=True):
        assert_bitwise(triton.dequantize(x_fp8, scale_inv, *place), reference.dequantize(x_fp8, scale_inv, *place))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"), [pytest.param(2, 2, 64, marks=pytest.mark.slow), (6, 2, 128), (3, 1, 80)]
)
def test_batches_equal_the_reference_bitwise(num_heads, num_kv_heads, dim):
    q = heads(2 * 150, num_heads, dim).unflatten(0, (2, 150))
    k, v = (heads(2 * 67, num_kv_heads, dim, seed).unflatten(0, (2, 67)) for seed in (1, 2))
    assert not q.is_contiguous()
    assert_kernels_equal_reference(q, k, v, None, None, 0, 0)


def test_packed_sequences_equal_the_reference_bitwise():
    """One of no queries and one of no keys among them, and a longest length that is longer than the longest."""
    q, k, v = heads(131, 4, 64), heads(101, 2, 64, 1), heads(101, 2, 64, 2)
    assert_kernels_equal_reference(q, k, v, *to_device(ENDS_Q.int(), ENDS_K.int()), 200, 70)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_is_seen_in_the_scale_of_its_heads_only(bad):
    q, k, v = heads(40, 4, 64)[None], heads(40, 2, 64, 1)[None], heads(40, 2, 64, 2)[None]
    q[0, 11, 3, 5] = bad
    descales = triton.quantize(q, k, v, None, None, 0, 0, False)[3]
    assert descales.isnan().nonzero().tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("dim", [64, 128])
def test_the_rotation_equals_the_references_up_to_the_order_of_sums(dim):
    q, k, v = heads(40, 4, dim)[None], heads(40, 2, dim, 1)[None], heads(40, 2, dim, 2)[None]
    ours, theirs = (module.quantize(q, k, v, None, None, 0, 0, True) for module in (triton, reference))
    assert_bitwise(ours[3], theirs[3])
    for mine, other, bound in zip(ours[:3], theirs[:3], (45, 45, 200), strict=True):
        assert sqnr_db(other.float(), mine.float()) > bound

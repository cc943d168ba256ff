"""Grids of scales: a part of a weight is measured and quantised as the whole is, wherever it is cut."""

import pytest
import torch
from support import many_scales
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_ds.nn.linear.payload import ROW, TENSOR, TILE, CopiedScales, Fp8Payload, per_element
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.blockwise import quantize_blockwise
from fp8_ds.ops.quantize import quantize, quantize_part, quantize_rowwise, quantize_tensorwise
from fp8_ds.testing import assert_bitwise

GRANULARITIES = [TENSOR, ROW, TILE]


def whole(weight, granularity):
    """(bytes, scale_inv) by the functions that quantise activations and weights without ZeRO."""
    if granularity == TENSOR:
        return quantize_tensorwise(weight, E4M3)
    if granularity == ROW:
        return quantize_rowwise(weight, E4M3)
    return quantize_blockwise(weight, E4M3, (128, 128), "row")[:2]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=["tensor", "row", "tile"])
@pytest.mark.parametrize("shape", [(300, 200), (17, 129), (300, 1)])
def test_its_amaxes_scales_and_bytes_are_those_of_the_plain_functions(shape, granularity):
    """Of parts that are cut anywhere: tests/unit/test_properties.py."""
    weight = many_scales("per_tile", *shape)
    expected, expected_inv = whole(weight, granularity)
    amax = granularity.amax(weight.view(-1), shape)
    assert amax.shape == granularity.grid(shape) and amax.numel() == granularity.num_scales(shape)
    scale, scale_inv = granularity.scales(amax)
    assert_bitwise(scale_inv, expected_inv)
    assert_bitwise(quantize(weight, per_element(scale, shape), E4M3), expected)


@pytest.mark.parametrize("granularity", [ROW, TILE], ids=["row", "tile"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_element_spoils_its_own_block_only(granularity, bad):
    weight = torch.ones(256, 256)
    weight[130, 200] = bad
    _, scale_inv = granularity.scales(granularity.amax(weight.view(-1), weight.shape))
    assert scale_inv.isnan().sum() == 1
    assert per_element(scale_inv, weight.shape).expand(weight.shape)[130, 200].isnan()


@pytest.mark.parametrize("shape", [(3, 256, 200), (3, 128, 100), (1, 128, 128)])
def test_a_stack_has_the_tiles_and_bytes_of_its_matrices(shape):
    """Also where a scale for each matrix, [3, 1], looks like one for each row of a matrix of 3."""
    matrices = torch.stack([many_scales("per_tile", *shape[1:]) * 10.0**-i for i in range(shape[0])])
    each = [whole(matrix, TILE) for matrix in matrices]
    codes, scale_inv = torch.stack([one for one, _ in each]), torch.cat([one for _, one in each])
    amax = TILE.amax(matrices.view(-1), shape)
    assert amax.shape == scale_inv.shape == TILE.grid(shape)
    assert_bitwise(TILE.scales(amax)[1], scale_inv)
    payload = Fp8Payload("stack", 1 / scale_inv, scale_inv, torch.bfloat16)
    payload.data = payload.quantize(matrices)
    assert_bitwise(payload.data, codes)
    values = [one.float() * per_element(own, one.shape) for one, own in each]
    with Largest() as largest:
        found = payload.dequantize()
    assert_bitwise(found, torch.stack(values).bfloat16())
    assert largest.numel < 2 * values[0].numel()


class Largest(TorchDispatchMode):
    """Largest number of elements of a tensor in float32 that is made meanwhile."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.numel = max(self.numel, result.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=["tensor", "row", "tile"])
@pytest.mark.parametrize("factor", [1.0, 0.37], ids=["full range", "a part of the range"])
def test_a_copy_in_bf16_has_the_bytes_of_the_original_until_its_largest_values_change(granularity, factor):
    """Also with a scale that leaves some of the range free, as powers of two do."""
    master = many_scales("per_tile", 300, 200)
    scale, scale_inv = granularity.scales(granularity.amax(master.view(-1), master.shape) / factor)
    data = quantize(master, per_element(scale, master.shape), E4M3)
    weight = (data.float() * per_element(scale_inv, master.shape)).bfloat16()
    copied = CopiedScales.of(weight, granularity, scale, scale_inv)
    for values in (weight, weight.float()):
        assert_bitwise(copied.quantize(values)[0], data)
        assert_bitwise(copied.quantize(values)[1], scale_inv)
    changed = weight * 2
    expected, expected_inv = whole(changed, granularity)
    assert_bitwise(copied.quantize(changed)[0], expected)
    assert_bitwise(copied.quantize(changed)[1].reshape(expected_inv.shape), expected_inv)
    if granularity == ROW:  # a scale that is still that of the values before a write is not kept
        stale = CopiedScales.of(weight, ROW, scale * 4, scale_inv / 4)
        assert_bitwise(stale.quantize(weight)[0], quantize_rowwise(weight, E4M3)[0])
        assert copied.fit(weight) and not copied.fit(weight[:30])


def test_wrong_grids_and_parts_are_refused():
    flat, grid = torch.ones(20), torch.ones(5, 1)
    with pytest.raises(ValueError, match="x: expected a contiguous vector"):
        quantize_part(flat.view(4, 5), grid, 0, 4, (1, 4), E4M3)
    with pytest.raises(ValueError, match="x: expected a contiguous vector, start >= 0"):
        quantize_part(flat, grid, -1, 4, (1, 4), E4M3)
    for wrong in (grid[:4], grid.expand(5, 2), grid.view(-1)):
        with pytest.raises(ValueError, match="grid: expected float32 with at least 5 rows of 1"):
            quantize_part(flat, wrong, 0, 4, (1, 4), E4M3)
    with pytest.raises(ValueError, match="scale: expected float32"):
        quantize_part(flat, grid.double(), 0, 4, (1, 4), E4M3)

"""Many parts cast at once: the bytes of each by itself. The kernel: tests/gpu/kernels."""

import pytest
import torch
from support import many_scales

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.quantize import quantize, quantize_part
from fp8_ds.ops.quantize.multi_tensor import MultiTensorQuantize, QuantizePart
from fp8_ds.testing import assert_bitwise

BLOCKS = {(6, 40): (1, 40), (130, 257): (128, 128), (3, 8): None}


def parts_of(dtype, fmt=E4M3):
    """Parts of matrices with a scale for each row, for each tile and for all; one of them is empty."""
    parts = []
    for shape, block in BLOCKS.items():
        x = many_scales("per_tile", *shape).to(dtype).flatten()
        size = () if block is None else (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        grid = torch.rand(size) + 0.5
        for start, end in ((0, x.numel()), (3, 17), (4, 4)):
            out = torch.zeros(end - start, dtype=fmt.dtype)
            parts.append(QuantizePart(x[start:end], out, grid, start, shape[1], block or (1, 1)))
    return parts


def alone(part, fmt=E4M3):
    if part.grid.dim() == 0:
        return quantize(part.x, part.grid, fmt)
    return quantize_part(part.x, part.grid, part.start, part.num_cols, part.block, fmt)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parts_have_the_bytes_that_each_has_by_itself(dtype, fmt):
    parts = parts_of(dtype, fmt)
    MultiTensorQuantize(parts, fmt)()
    for part in parts:
        assert_bitwise(part.out, alone(part, fmt))


def test_a_call_takes_the_values_and_scales_of_its_time_and_finds_tensors_that_have_moved():
    parts = parts_of(torch.float32)
    cast = MultiTensorQuantize(parts, E4M3)
    cast()
    tables = [launch.table for launch in cast._launches]
    cast()
    assert all(launch.table is table for launch, table in zip(cast._launches, tables, strict=True))
    for part in parts:
        part.x.mul_(-1.5)
        part.grid.mul_(0.5)
    parts[0].x.data = parts[0].x.clone()
    cast()
    assert not any(launch.table is tables[0] for launch in cast._launches)
    rows = torch.cat([launch.table for launch in cast._launches]).tolist()
    assert sorted(row[:3] for row in rows) == sorted(list(part.addresses) for part in parts if part.x.numel())
    for part in parts:
        assert_bitwise(part.out, alone(part))


def test_op_traces_with_its_fake():
    for launch in MultiTensorQuantize(parts_of(torch.bfloat16), E4M3)._launches:
        lists = launch.xs, launch.outs, launch.grids, launch.places
        arguments = (launch.table, launch.program_parts, *lists, launch.has_one_scale, launch.is_vector, E4M3.max)
        torch.library.opcheck(torch.ops.fp8_ds.quantize_parts.default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 2)}, "x: expected a contiguous vector"),
        ({"x": torch.zeros(16)[::2]}, "x: expected a contiguous vector"),
        ({"x": torch.zeros(8).double()}, "x: expected bfloat16"),
        ({"out": torch.zeros(7, dtype=E4M3.dtype)}, "out: expected a contiguous vector of 8"),
        ({"out": torch.zeros(8, dtype=E5M2.dtype)}, "out: expected torch.float8_e4m3fn"),
        ({"grid": torch.ones(()).double()}, "grid: expected float32"),
        ({"grid": torch.ones(1, 1), "num_cols": 4, "block": (1, 4)}, "grid: .* at least 2 rows of 1"),
        ({"grid": torch.ones(2, 2), "num_cols": 4, "block": (1, 4)}, "grid: .* at least 2 rows of 1"),
    ],
)
def test_what_is_no_part_is_refused(changes, message):
    part = QuantizePart(torch.zeros(8), torch.zeros(8, dtype=E4M3.dtype), torch.ones(()))
    MultiTensorQuantize([part], E4M3)
    with pytest.raises(ValueError, match=message):
        MultiTensorQuantize([part._replace(**changes)], E4M3)

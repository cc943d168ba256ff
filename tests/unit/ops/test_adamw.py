"""The Adam step's backends: which is taken; tests/gpu/kernels has the kernel."""

import pytest
import torch
from support.adam_shards import clone_shard, differences, make_grad, make_inputs, make_shard
from support.masters import every_master

from fp8_ds.numerics.masters import BY_NAME, MasterFormat, decode
from fp8_ds.ops.adamw import decode_master, prepare
from fp8_ds.ops.adamw.reference import adamw_step
from fp8_ds.testing import assert_bitwise


def test_shards_on_cpu_take_the_reference():
    shard = make_shard(BY_NAME["e4m11"], 300, 0)
    default, reference = clone_shard(shard), clone_shard(shard)
    grad = make_grad(shard, torch.bfloat16)
    prepare([default])([grad], make_inputs())
    adamw_step([reference], [grad], make_inputs())
    assert differences(default, reference) == []
    assert differences(shard, default)


SPLIT = [fmt for fmt in BY_NAME.values() if fmt.is_split]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fmt", SPLIT, ids=lambda fmt: fmt.name)
def test_masters_are_written_in_the_dtype_of_what_is_given(fmt: MasterFormat, dtype: torch.dtype) -> None:
    hi, lo = every_master(fmt)
    scale_inv = torch.tensor(2.0**-3) if fmt.is_fp8 else None
    memory = torch.full((len(hi) + 2,), 7, dtype=dtype)
    decode_master(hi, lo, fmt, scale_inv, memory[1:-1])
    assert_bitwise(memory[1:-1], decode(hi, lo, fmt, scale_inv).to(dtype))
    assert memory[0] == memory[-1] == 7

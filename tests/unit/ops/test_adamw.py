"""The Adam step's backends: which is taken; adamw_interpreted.py runs the kernel."""

import pytest
import torch
from support.adam_shards import clone_shard, differences, make_grad, make_inputs, make_shard

from fp8_ds.numerics.masters import BY_NAME
from fp8_ds.ops.adamw import prepare
from fp8_ds.ops.adamw.reference import adamw_step


def test_shards_of_several_devices_are_refused():
    shards = [make_shard(BY_NAME["e4m11"], 8, 0), make_shard(BY_NAME["e4m11"], 8, 0)]
    shards[1].hi = shards[1].hi.to("meta")
    with pytest.raises(ValueError, match=r"expected one device, got \['cpu', 'meta'\]"):
        prepare(shards)


def test_shards_on_cpu_take_the_reference():
    shard = make_shard(BY_NAME["e4m11"], 300, 0)
    default, reference = clone_shard(shard), clone_shard(shard)
    grad = make_grad(shard, torch.bfloat16)
    prepare([default])([grad], make_inputs())
    adamw_step([reference], [grad], make_inputs())
    assert differences(default, reference) == []
    assert differences(shard, default)


def test_no_shards_and_no_gradients_are_no_work():
    inputs = make_inputs()
    prepare([])([], inputs)
    shard = make_shard(BY_NAME["e4m19"], 300, 0)
    before = clone_shard(shard)
    prepare([shard])([None], inputs)
    assert differences(before, shard) == [] and not inputs.amax.any()


def test_reference_leaves_every_byte_when_skipped():
    shard = make_shard(BY_NAME["e4m11"], 300, 0)
    before, inputs = clone_shard(shard), make_inputs()
    inputs.skip.fill_(1)
    adamw_step([shard], [torch.full((300,), float("nan"))], inputs)
    assert differences(before, shard) == []

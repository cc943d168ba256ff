"""The Adam step's backends: which is taken; adamw_interpreted.py runs the kernel."""

import sys

import pytest
import torch
from support.adam_shards import clone_shard, differences, make_grad, make_inputs, make_shard

from fp8_ds.ops.adamw import prepare
from fp8_ds.optim.masters import BY_NAME


def test_triton_on_cpu_is_refused_without_the_interpreter(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"^backend='triton': expected shards on CUDA, got cpu\. "):
        prepare([make_shard(BY_NAME["e4m11"], 8, 0)], "triton")


def test_a_missing_triton_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "fp8_ds.ops.adamw.triton", raising=False)
    with pytest.raises(ImportError, match=r"^triton: expected the package"):
        prepare([make_shard(BY_NAME["e4m11"], 8, 0)], "triton")


def test_unknown_backends_and_mixed_devices_are_refused():
    shards = [make_shard(BY_NAME["e4m11"], 8, 0), make_shard(BY_NAME["e4m11"], 8, 0)]
    with pytest.raises(ValueError, match="got 'cuda'"):
        prepare(shards, "cuda")
    shards[1].hi = shards[1].hi.to("meta")
    with pytest.raises(ValueError, match=r"expected one device, got \['cpu', 'meta'\]"):
        prepare(shards)


def test_shards_on_cpu_take_the_reference():
    shard = make_shard(BY_NAME["e4m11"], 300, 0)
    default, reference = clone_shard(shard), clone_shard(shard)
    grad = make_grad(shard, torch.bfloat16)
    prepare([default])([grad], make_inputs())
    prepare([reference], "reference")([grad], make_inputs())
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
    prepare([shard], "reference")([torch.full((300,), float("nan"))], inputs)
    assert differences(before, shard) == []

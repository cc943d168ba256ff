"""Tensors that an op writes are the whole of their storage; what torch makes of others in a graph."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from fp8_ds.monitor.statistics import StatisticsTable
from fp8_ds.numerics.formats import E5M2
from fp8_ds.numerics.scale import AmaxHistory, AmaxSlot, in_own_storage
from fp8_ds.ops._register import triton_of
from fp8_ds.ops.swiglu import swiglu_backward_to_fp8


def test_own_storage_is_the_same_memory_and_keeps_it():
    matrix = torch.arange(24.0).view(4, 6)
    row = in_own_storage(matrix[2])
    assert row.storage_offset() == 0 and row._base is None and row.untyped_storage().nbytes() == 24
    version = matrix._version
    row.add_(100)
    assert matrix[2].tolist() == [112.0, 113.0, 114.0, 115.0, 116.0, 117.0] and matrix._version == version
    del matrix
    gc.collect()
    torch.full((4, 6), -1.0)  # takes freed memory of that size
    assert row.tolist() == [112.0, 113.0, 114.0, 115.0, 116.0, 117.0]


def whole(x):
    return x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_what_recipes_and_the_monitor_record_into_are_whole_storages():
    history, table = AmaxHistory(4, [448.0] * 4), StatisticsTable(("a", "b"), "cpu")
    slots = [history.slot(index) for index in range(4)]
    assert all(whole(x) for slot in slots for x in (slot.amax_local, slot.scale, slot.scale_inv))
    assert all(whole(table.slot(index, kind)) for index in (0, 1) for kind in ("input", "weight", "grad_output"))


@pytest.mark.parametrize("how", ["at an offset", "of one storage"])
def test_a_graph_that_writes_views_is_refused_while_it_is_traced(how):
    gate = torch.randn(8, 32).bfloat16()
    vector = torch.zeros(2)
    one, other = (vector[1], torch.zeros(())) if how == "at an offset" else (vector[0], vector.data[0])
    slots = [AmaxSlot(amax, torch.ones(()), torch.ones(())) for amax in (one, other)]

    def function(grad):
        return swiglu_backward_to_fp8(grad, gate, gate, E5M2, tuple(slots))[0].x_fp8.float()

    match = "a view at an offset" if how == "at an offset" else "share a storage"
    with pytest.raises(Exception, match=match):
        torch.compile(function, backend="aot_eager", fullgraph=True)(gate)
    torch._dynamo.reset()


def test_a_missing_triton_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "fp8_ds.ops.transpose.triton", raising=False)
    with pytest.raises(ImportError, match=r"^triton: expected the package"):
        triton_of("fp8_ds.ops.transpose")

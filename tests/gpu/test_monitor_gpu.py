"""Statistics on CUDA are those on the CPU, and sampling waits for nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.monitor.statistics import LayerStatistics, Observers, StatisticsTable
from fp8_ds.nn.plan.convert import apply_plan, fp8_layers
from fp8_ds.nn.plan.plan import make_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def sampled(model: nn.Module, recipe: str, x: torch.Tensor, grad: torch.Tensor) -> LayerStatistics:
    device = x.device
    config = LinearConfig.model_validate({"recipe": recipe, "backend": "reference", "grad_dtype": "e4m3"})
    apply_plan(model, make_plan(model, config), config, device)
    table = StatisticsTable(tuple(fp8_layers(model)), device)
    observers = Observers(fp8_layers(model), table)
    model(x).backward(grad)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    observers.attach()
    model(x).backward(grad)
    observers.detach()
    table.send()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    found = table.receive()
    assert found is not None
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_counts_are_the_cpus_and_nothing_waits(recipe: str, no_waiting: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 128, bias=False)).bfloat16()
    x, grad = torch.randn(384, 256).bfloat16(), torch.randn(384, 128).bfloat16()
    on_cpu = sampled(copy.deepcopy(model), recipe, x, grad)
    on_cuda = sampled(model.cuda(), recipe, x.cuda(), grad.cuda())
    for name, kinds in on_cpu.items():
        for kind, one in kinds.items():
            other = on_cuda[name][kind]
            assert one.num == other.num
            assert one.amax == pytest.approx(other.amax, rel=2e-2) and one.scale == pytest.approx(other.scale, rel=2e-2)
            assert one.underflow == pytest.approx(other.underflow, abs=2e-3)
            assert one.saturation == other.saturation == 0

"""Statistics on CUDA are those on the CPU, and sampling waits for nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.monitor.clamps import ClampGauge
from fp8_ds.monitor.observe import Observers
from fp8_ds.monitor.statistics import LayerStatistics, StatisticsTable
from fp8_ds.nn.convert import apply_plan, make_plan
from fp8_ds.nn.layers import fp8_layers
from fp8_ds.ops.adamw import Hyper
from fp8_ds.optim.adamw import Fp8AdamW

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


def test_clamped_updates_are_counted_as_on_the_cpu_and_nothing_waits(
    no_waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    torch.manual_seed(0)
    weights = [torch.randn(numel) for numel in (40000, 4096, 300)]
    grads = [[torch.randn_like(weight) for weight in weights] for _ in range(3)]
    rates = []
    for device in ("cpu", "cuda"):
        params = [nn.Parameter(weight.to(device)) for weight in weights]
        optimizer = Fp8AdamW(params, lr=0.1, betas=(0.9, 0.95))
        gauge = ClampGauge(optimizer.core, None)
        for step, of_step in enumerate(grads):
            for param, grad in zip(params, of_step, strict=True):
                param.grad = grad.to(device)
            if step == len(grads) - 1:
                break
            optimizer.step()
        inputs = optimizer.core.begin(optimizer.param_groups)
        inputs.hyper[:, Hyper.BOUND] = 0.9
        flat = [param.grad for param in params]
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        gauge.attach()
        optimizer.core.run(flat, inputs)
        gauge.detach()
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        rates.append(gauge.read())
    assert rates[0] == rates[1] and 0.1 < rates[0] < 0.9

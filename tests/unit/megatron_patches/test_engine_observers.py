"""What is counted of Transformer Engine's linears is what linears of fp8_ds count of the same tensors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import many_scales
from support.linears import convert
from torch import Tensor, nn

from fp8_ds.monitor.statistics import Observers, StatisticsTable
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.quantize import quantize_tensorwise
from megatron_patches.engine_observers import EngineObservers, is_engine_linear

TOKENS, IN, OUT = 96, 256, 128


class EngineLinear(nn.Linear):
    """In the shape of Transformer Engine's, as Megatron calls it."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return F.linear(x, self.weight), None


EngineLinear.__module__ = "megatron.core.extensions.transformer_engine"


class EngineNormLinear(EngineLinear):
    def __init__(self, normalization: str, zero_centered_gamma: bool) -> None:
        super().__init__(IN, OUT, bias=False)
        self.normalization, self.zero_centered_gamma, self.eps = normalization, zero_centered_gamma, 1e-5
        self.layer_norm_weight = nn.Parameter(torch.randn(IN))
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.randn(IN))


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, output gradient, each in ranges of its own."""
    x = many_scales("per_row", TOKENS, IN, 0) * many_scales("per_column", TOKENS, IN, 1)
    return x, many_scales("per_tile", OUT, IN, 2) * 0.02, many_scales("per_row", TOKENS, OUT, 3) * 1e-4


def table() -> StatisticsTable:
    return StatisticsTable(("0",), "cpu")


def counted(module: nn.Module, watch: Any, known: StatisticsTable, x: Tensor, grad: Tensor) -> Any:
    """By kind, of one forward and backward."""
    watch.attach()
    output = module(x.clone().requires_grad_())
    (output[0] if isinstance(output, tuple) else output).backward(grad)
    watch.detach()
    known.send()
    return (known.receive() or {})["0"]


def engine_linear(weight: Tensor) -> EngineLinear:
    module = EngineLinear(IN, OUT, bias=False)
    module.weight = nn.Parameter(weight.clone())
    return module


def ours(recipe: str, grad_dtype: str) -> Any:
    x, weight, grad = operands()
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    model[0].weight = nn.Parameter(weight.clone())
    convert(model, recipe=recipe, grad_dtype=grad_dtype, backend="reference")
    known = table()
    return counted(model, Observers({"0": model[0]}, known), known, x, grad)


@pytest.mark.parametrize(
    ("recipe", "fp8_format", "grad_dtype"),
    [("tensorwise", "hybrid", "e5m2"), ("blockwise", "e4m3", "e4m3")],
)
def test_counts_are_those_of_our_own_linear(recipe: str, fp8_format: str, grad_dtype: str) -> None:
    x, weight, grad = operands()
    module, known = engine_linear(weight), table()
    found = counted(module, EngineObservers({"0": module}, known, recipe, fp8_format), known, x, grad)
    expected = ours(recipe, grad_dtype)
    # Of its own weights ZeRO has the codes alone; here the number before the cast is there, too.
    expected["weight"] = replace(expected["weight"], amax=float(weight.abs().max()))
    assert found == expected and found.keys() == {"input", "weight", "grad_output"}
    assert found["input"].amax == float(x.abs().max()) and 0 < found["input"].underflow < 1


@pytest.mark.parametrize(("normalization", "zero_centered"), [("RMSNorm", True), ("LayerNorm", False)])
def test_the_input_of_a_fused_norm_is_what_the_gemm_reads(normalization: str, zero_centered: bool) -> None:
    x, _, grad = operands()
    module, known = EngineNormLinear(normalization, zero_centered), table()
    found = counted(module, EngineObservers({"0": module}, known, "tensorwise", "hybrid"), known, x, grad)
    norm = nn.RMSNorm(IN, eps=1e-5) if normalization == "RMSNorm" else nn.LayerNorm(IN, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(module.layer_norm_weight + zero_centered)
        if normalization == "LayerNorm":
            norm.bias.copy_(module.layer_norm_bias)
        assert found["input"].amax == pytest.approx(float(norm(x).abs().max()), rel=1e-6)
    assert found["input"].amax != float(x.abs().max())


def test_delayed_scales_are_those_of_the_module_and_can_be_too_large() -> None:
    x, weight, grad = operands()
    module, known = engine_linear(weight), table()
    watch = EngineObservers({"0": module}, known, "delayed", "hybrid")
    assert counted(module, watch, known, x, grad) == {}, "there are no scales while the module is not in FP8"
    scales = torch.tensor([E4M3.max / float(x.abs().max()) * 16, E4M3.max / float(weight.abs().max())])
    back = torch.tensor([E5M2.max / float(grad.abs().max())])
    module.fp8_meta = {"scaling_fwd": SimpleNamespace(scale=scales), "scaling_bwd": SimpleNamespace(scale=back)}
    found = counted(module, watch, known, x, grad)
    share = float((x.abs() > x.abs().max() / 16).float().mean())
    assert found["input"].saturation == pytest.approx(share, abs=2 / x.numel()) and share > 0
    assert found["input"].scale == pytest.approx(float(scales[0]))
    assert found["weight"].saturation == found["grad_output"].saturation == 0


def test_a_weight_in_fp8_is_counted_as_it_is_and_one_that_is_gathered_late_when_it_is_there() -> None:
    """Megatron's hooks wait for a weight before the layer's forward under --overlap-param-gather."""
    x, weight, grad = operands()
    module, known = engine_linear(torch.zeros_like(weight)), table()
    module.register_forward_pre_hook(lambda *_: setattr(module.weight, "data", weight.clone()))
    watch = EngineObservers({"0": module}, known, "tensorwise", "hybrid")
    assert counted(module, watch, known, x, grad)["weight"].amax == pytest.approx(float(weight.abs().max()), rel=1e-6)
    codes, scale_inv = quantize_tensorwise(weight, E4M3)
    module.weight._data = codes.view(torch.uint8)  # type: ignore[attr-defined]
    module.weight._scale_inv = 2 * scale_inv.reshape(1)  # type: ignore[attr-defined]
    found = counted(module, watch, known, x, grad)
    assert found["weight"].amax == pytest.approx(2 * float(weight.abs().max()), rel=1e-6)
    module(x.requires_grad_())[0].backward(grad)
    known.send()
    assert known.receive() == {"0": {}}, "a step that is not watched is counted"


def test_linears_are_told_by_their_name_and_their_class() -> None:
    assert is_engine_linear("self_attention.linear_qkv", EngineLinear(1, 1))
    assert not is_engine_linear("self_attention.core_attention", EngineLinear(1, 1))
    assert not is_engine_linear("mlp.linear_fc1", nn.Linear(1, 1))

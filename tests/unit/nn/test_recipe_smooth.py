"""A channel pair scaled by 30 leaves the other channels of a smooth SwiGLU as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fp8_ds.config import ActivationsConfig, LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.convert import apply_plan, make_plan
from fp8_ds.nn.linear import Fp8Linear
from fp8_ds.nn.producers import fuse_producers
from fp8_ds.nn.recipe_smooth import SmoothRecipe, channel_scale, smooth_swiglus
from fp8_ds.testing.metrics import sqnr_db

CONFIG = LinearConfig.model_validate({"backend": "reference"})


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(128, 256, bias=False)
        self.up_proj = nn.Linear(128, 256, bias=False)
        self.down_proj = nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def build(outlier: float) -> Mlp:
    torch.manual_seed(0)
    mlp = Mlp()
    with torch.no_grad():
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            linear.weight.copy_(torch.randn(linear.weight.shape) * linear.in_features**-0.5)
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight[7] *= outlier
        mlp.down_proj.weight[:, 7] = 0  # so that the output shows what became of the other channels
    return mlp.bfloat16()


def converted(mlp: nn.Module, smooth: bool) -> nn.Module:
    mlp = copy.deepcopy(mlp)
    apply_plan(mlp, make_plan(mlp, CONFIG), CONFIG, "cpu")
    if smooth:
        smooth_swiglus(mlp, CONFIG)
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.revert()  # the product's cast alone is what is compared
    return mlp


def run(mlp: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = mlp(x)
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), mlp.down_proj.weight.grad, x.grad  # type: ignore[union-attr, return-value]


def error_db(outlier: float, smooth: bool) -> tuple[float, float, float]:
    """SQNR of the output, of the last weight's gradient but for the outlier's column, and of the input's gradient."""
    torch.manual_seed(1)
    mlp = build(outlier)
    x, grad = torch.randn(512, 128).bfloat16(), torch.randn(512, 128).bfloat16()
    exact = run(mlp.float(), x.float(), grad.float())
    found = run(converted(mlp.bfloat16(), smooth), x, grad)
    others = torch.arange(256) != 7
    pairs = [(exact[0], found[0]), (exact[1][:, others], found[1][:, others]), (exact[2], found[2])]
    return tuple(float(sqnr_db(one, other.float())) for one, other in pairs)  # type: ignore[return-value]


@pytest.mark.parametrize(("outlier", "harm"), [(30, 0.1), (100, 6.0), (300, 18.0)])
def test_a_channel_pair_scaled_up_costs_nothing_when_smooth(outlier: float, harm: float) -> None:
    """E4M3's own exponents bear a pair scaled by 30 (amax 1200 times the median's); they do not bear one by 100."""
    plain, smooth, without = error_db(outlier, False), error_db(outlier, True), error_db(1, False)
    assert plain[0] < without[0] - harm and plain[1] < without[1] - harm
    assert smooth[0] > without[0] - 0.1, (plain, smooth, without)
    assert smooth[1] > without[1] - 0.1, (plain, smooth, without)
    assert smooth[2] == pytest.approx(plain[2], abs=0.01)  # the input's gradient reads the weight as it is


def test_without_outliers_not_a_byte_changes() -> None:
    torch.manual_seed(1)
    x, grad = torch.randn(512, 128).bfloat16(), torch.randn(512, 128).bfloat16()
    assert torch.equal(channel_scale(torch.randn(512, 64)), torch.ones(64))
    plain, smooth = (run(converted(build(1), is_smooth), x, grad) for is_smooth in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, smooth, strict=True))


def test_the_outliers_own_output_and_gradient_are_scaled_back() -> None:
    torch.manual_seed(1)
    mlp = build(30)
    with torch.no_grad():
        mlp.down_proj.weight[:, 7] = torch.randn(128) * 256**-0.5
    x, grad = torch.randn(512, 128).bfloat16(), torch.randn(512, 128).bfloat16()
    exact = run(mlp.float(), x.float(), grad.float())
    found = run(converted(mlp.bfloat16(), True), x, grad)
    assert float(sqnr_db(exact[0], found[0].float())) > 20
    assert float(sqnr_db(exact[1][:, 7], found[1][:, 7].float())) > 20


def test_scales_of_channels_are_powers_of_two_and_finite() -> None:
    x = torch.randn(64, 6) * torch.tensor([1.0, 1.0, 1.0, 900.0, 0.0, 1e30])
    scale = channel_scale(x)
    assert torch.equal(torch.frexp(scale)[0], torch.full((6,), 0.5))
    assert float(scale[3]) in (16.0, 32.0) and float(scale[4]) == 1.0 and float(scale[5]) == 256.0
    assert torch.equal(channel_scale(torch.zeros(4, 4)), torch.ones(4))
    assert bool(torch.isfinite(channel_scale(torch.full((4, 4), float("inf")))).all())


def test_a_fused_mlp_is_smooth_too() -> None:
    torch.manual_seed(1)
    x, grad = torch.randn(64, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    models = []
    for fused in (False, True):
        mlp = build(30)
        apply_plan(mlp, make_plan(mlp, CONFIG), CONFIG, "cpu")
        assert "1 linears" in smooth_swiglus(mlp, CONFIG)
        if fused:
            assert fuse_producers(mlp, ActivationsConfig(fused=True)).producers[0].fused
        assert isinstance(mlp.down_proj, Fp8Linear) and type(mlp.down_proj.fp8_recipe) is SmoothRecipe
        models.append(mlp)
    plain, fused_out = (run(mlp, x, grad) for mlp in models)
    assert torch.equal(plain[0], fused_out[0]) and torch.equal(plain[1], fused_out[1])


@pytest.mark.parametrize("fused", [False, True])
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(fused: bool) -> None:
    mlp = build(30)
    apply_plan(mlp, make_plan(mlp, CONFIG), CONFIG, "cpu")
    smooth_swiglus(mlp, CONFIG)
    if fused:
        fuse_producers(mlp, ActivationsConfig(fused=True))
    empty = torch.empty(0, 128).bfloat16()
    out, weight_grad, x_grad = run(mlp, empty, empty)
    assert out.shape == x_grad.shape == (0, 128) and not weight_grad.any()
    assert torch.equal(channel_scale(torch.empty(0, 6)), torch.ones(6))


def test_a_model_without_such_an_mlp_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    apply_plan(model, make_plan(model, CONFIG), CONFIG, "cpu")
    with pytest.raises(ConfigError, match="smooth_swiglu: expected a module whose forward is"):
        smooth_swiglus(model, CONFIG)

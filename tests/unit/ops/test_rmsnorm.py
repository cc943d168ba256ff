"""RMSNorm into FP8: against the modules it stands for, edges, the backward; tests/gpu/kernels has the kernels."""

import pytest
import torch
from support.producers import SCALINGS, assert_same, assert_within_steps, make_rows, make_scaling, make_slot

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.quantize import quantize, quantize_and_transpose_delayed, quantize_tensorwise
from fp8_ds.ops.rmsnorm import reference, rmsnorm, rmsnorm_backward
from fp8_ds.testing import sqnr_db

NAN, INF = float("nan"), float("inf")
T, C, EPS = 37, 152, 1e-5
X = make_rows(T, C)
WEIGHT = (torch.randn(C, generator=torch.Generator().manual_seed(1)) + 1).bfloat16()


def hp_of(x, weight, rounding):
    return rmsnorm(x, weight, EPS, E4M3, "rowwise", rounding=rounding)[0].hp


def llama_rms_norm(x, weight):
    """`LlamaRMSNorm.forward` of transformers 5.23."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bf16_is_that_of_the_modules(dtype):
    """Up to rstd's last bit: the modules sum in another order. The two roundings are told apart."""
    x, weight = make_rows(200, 512, seed=3), torch.linspace(0.1, 3, 512).to(dtype)
    torch_norm = torch.nn.functional.rms_norm(x.float(), (512,), weight.float(), EPS).bfloat16()
    llama_norm = llama_rms_norm(x, weight).bfloat16()
    assert_within_steps(torch_norm, hp_of(x, weight, "once"), share=1e-4)
    assert_within_steps(llama_norm, hp_of(x, weight, "twice"), share=1e-4)
    assert (torch_norm != llama_norm).float().mean() > 0.05


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_fp8_is_the_quantised_bf16(fmt):
    hp = hp_of(X, WEIGHT, "once")
    output, _ = rmsnorm(X, WEIGHT, EPS, fmt, "tensorwise")
    for got, expected in zip(output, quantize_tensorwise(hp, fmt), strict=False):
        assert_same(expected, got)
    slot, other = make_slot(), make_slot()
    output, _ = rmsnorm(X, WEIGHT, EPS, fmt, slot)
    scales = other.scale, other.scale_inv, other.amax_local
    x_fp8, _, scale_inv = quantize_and_transpose_delayed(hp, *scales, fmt, "row", record=True)
    assert_same(x_fp8, output.x_fp8)
    assert_same(scale_inv, output.scale_inv)
    assert slot.amax_local == other.amax_local == hp.abs().max()
    output, _ = rmsnorm(X, WEIGHT, EPS, fmt, "rowwise")
    assert output.scale_inv.shape == (T, 1)
    assert_same(hp, output.hp)
    for i in range(T):
        x_fp8, scale_inv = quantize_tensorwise(hp[i], fmt)
        assert_same(x_fp8, output.x_fp8[i])
        assert_same(scale_inv.view(1), output.scale_inv[i])


def test_evaluation_leaves_the_recorded_amax():
    slot = make_slot(amax=0.5)
    output, _ = rmsnorm(X, WEIGHT, EPS, E4M3, slot, record=False)
    assert slot.amax_local == 0.5 and output.scale_inv == slot.scale_inv
    assert_same(quantize(output.hp, slot.scale, E4M3), output.x_fp8)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_non_finite_input_is_seen_in_what_its_scale_covers(scaling, bad):
    x = X.clone()
    x[5, 7] = bad
    output, rstd = rmsnorm(x, WEIGHT, EPS, E4M3, make_scaling(scaling))
    poisoned = output.scale_inv.isnan()
    assert poisoned.sum() == 1 and poisoned.view(-1)[5 if scaling == "rowwise" else 0]
    assert not rstd[5] > 0 and (rstd[6:] > 0).all()


def test_rows_of_zeros_have_the_smallest_scale_inv_and_a_tensor_of_zeros_has_one():
    x = X.clone()
    x[3] = 0
    output, rstd = rmsnorm(x, WEIGHT, EPS, E4M3, "rowwise")
    assert output.scale_inv[3] == 2.0**-126 and not output.x_fp8[3].float().any() and rstd[3].isfinite()
    assert rmsnorm(torch.zeros_like(x), WEIGHT, EPS, E4M3, "tensorwise")[0].scale_inv == 1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_rows_are_no_work(scaling):
    output, rstd = rmsnorm(X[:0], WEIGHT, EPS, E4M3, make_scaling(scaling))
    assert output.x_fp8.shape == output.hp.shape == (0, C) and rstd.shape == (0,)
    assert output.scale_inv.shape == ((0, 1) if scaling == "rowwise" else ())
    grad_x, grad_weight = rmsnorm_backward(X[:0], X[:0], WEIGHT, rstd)
    assert grad_x.shape == (0, C) and not grad_weight.any() and grad_weight.shape == (C,)


def autograd_truth(grad, x, weight):
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    return torch.autograd.grad(torch.nn.functional.rms_norm(x, x.shape[1:], weight, EPS), (x, weight), grad.double())


@pytest.mark.parametrize("num_rows", [1, 16, 17, 600])
def test_backward_is_the_gradient(num_rows):
    """grad_x has bf16's rounding alone, about 52 dB; grad_weight is float32. Most of grad lies along x and cancels."""
    x = make_rows(num_rows, C)
    grad = (50 * x / WEIGHT.float().abs().clamp(min=0.1) * WEIGHT.sign() + x.roll(1, dims=1)).bfloat16()
    grad_x, grad_weight = rmsnorm_backward(grad, x, WEIGHT, reference.rstd_of(x, EPS))
    true_x, true_weight = autograd_truth(grad, x, WEIGHT)
    assert grad_x.dtype == torch.bfloat16 and grad_weight.dtype == torch.float32
    assert sqnr_db(true_x, grad_x) > 50
    assert sqnr_db(true_weight, grad_weight) > 120

"""FP8 linears on CUDA: the torch backend (cuBLASLt) against the reference, and fast accumulation."""

import pytest
import torch
from support.linears import RECIPES, fp8_of, step_of
from torch import nn

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import scale_from_amax
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.quantize import quantize_tensorwise
from fp8_ds.testing import sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]


@pytest.fixture(autouse=True)
def float32_stays_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_scales_are_those_of_the_cpu_bitwise():
    random_amax = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(20).exp()
    values = torch.cat([random_amax, torch.tensor([0.0, 2.0**-149, 1e-30, 3e38, float("inf"), float("nan")])])
    for a, b in zip(scale_from_amax(values, E4M3.max), scale_from_amax(values.cuda(), E4M3.max), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=0, atol=0, equal_nan=True)


def inputs(shape_x, shape_grad, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, grad_output = torch.randn(shape_x, generator=generator), torch.randn(shape_grad, generator=generator) * 1e-5
    return x.to("cuda", dtype), grad_output.to("cuda", dtype)


@pytest.mark.parametrize(("fmt_a", "fmt_b"), PAIRS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128, 96), (17, 33, 5), (1, 16, 16), (3, 1, 1), (31, 250, 7), (512, 1024, 256)])
@pytest.mark.parametrize("fast", [False, True])
def test_gemm_agrees_with_the_reference(fmt_a, fmt_b, out_dtype, shape, fast):
    num_m, num_k, num_n = shape
    generator = torch.Generator().manual_seed(0)
    a, scale_inv_a = quantize_tensorwise(torch.randn(num_m, num_k, generator=generator).cuda(), fmt_a)
    b, scale_inv_b = quantize_tensorwise(torch.randn(num_n, num_k, generator=generator).cuda(), fmt_b)
    expected = scaled_mm(a, b, scale_inv_a, scale_inv_b, torch.float32, "reference")
    got = scaled_mm(a, b, scale_inv_a, scale_inv_b, out_dtype, "torch", use_fast_accum=fast)
    assert got.dtype == out_dtype and got.shape == (num_m, num_n)
    # Hopper adds products with about 14 bits, fast or not between promotions, and bf16 keeps 8: measured against the
    # sum of magnitudes, to which accumulation errors are relative.
    magnitude = scaled_mm(a.float().abs().to(a.dtype), b.float().abs().to(b.dtype), scale_inv_a, scale_inv_b,
                          torch.float32, "reference")  # fmt: skip
    tolerance = (2.0**-8 if out_dtype == torch.bfloat16 else 0.0) + 2.0**-10
    assert ((got.float() - expected).abs() <= tolerance * magnitude).all()


@pytest.mark.parametrize("fmt_a", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(("length", "accurate", "fast"), [(1024, 70, 60), (8192, 70, 50)])
def test_fast_sums_are_shorter_and_far_below_the_rounding_of_operands(fmt_a, length, accurate, fast):
    """28 dB are what rounding leaves; measured 78 to 80 dB and 65, 54 dB (docs/recipes.md)."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(512, length, device="cuda", generator=generator) for _ in range(2))
    (a, scale_inv_a), (b, scale_inv_b) = quantize_tensorwise(a, fmt_a), quantize_tensorwise(b, E4M3)
    exact = (a.double() @ b.double().t()) * (scale_inv_a.double() * scale_inv_b.double())
    products = [
        scaled_mm(a, b, scale_inv_a, scale_inv_b, torch.float32, use_fast_accum=is_fast) for is_fast in (False, True)
    ]
    decibels = [sqnr_db(exact, product.double()) for product in products]
    assert decibels[0] > accurate > decibels[1] > fast


def test_gradients_accumulate_fast_on_the_device_where_the_configuration_says_so():
    x, grad_output = inputs((8192, 256), (8192, 256), torch.bfloat16)
    linear = nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    found = {}
    for value in ("none", "output", "output_and_grad_input", "all"):
        found[value] = step_of(fp8_of(linear, fast_accumulation=value), x, grad_output)
    differs = {
        value: [not torch.equal(a, b) for a, b in zip(results[:3], found["none"][:3], strict=True)]
        for value, results in found.items()
    }
    assert differs == {
        "none": [False, False, False],
        "output": [True, False, False],
        "output_and_grad_input": [True, True, False],
        "all": [True, True, True],
    }


RECIPE_FORMATS = [(name, grad_dtype) for name in RECIPES if name != "delayed" for grad_dtype in ("e5m2", "e4m3")]
RECIPE_FORMATS.remove(("blockwise", "e5m2"))  # no such GEMM


@pytest.mark.parametrize(("recipe", "grad_dtype"), RECIPE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "features", "outputs"), [(256, 512, 384), (33, 140, 150)])
def test_recipes_agree_with_the_reference_backend(recipe, grad_dtype, dtype, tokens, features, outputs):
    """The same bytes, so what differs is accumulation: torch's GEMM of a recipe against float32 of those bytes."""
    torch.manual_seed(0)
    linear = nn.Linear(features, outputs, device="cuda", dtype=dtype)
    x, grad_output = inputs((tokens, features), (tokens, outputs), dtype)
    results = []
    for backend in ("torch", "reference"):
        results.append(step_of(fp8_of(linear, recipe, grad_dtype=grad_dtype, backend=backend), x, grad_output))
    bound = 40 if dtype == torch.bfloat16 else 50  # bf16 results; accumulation of 14 bits in the output
    for name, got, expected in zip(("output", "grad_input", "grad_weight"), *results, strict=False):
        assert sqnr_db(expected.float().cpu(), got.float().cpu()) > bound, name

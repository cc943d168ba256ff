"""FP8 linears on CUDA: the torch backend (cuBLASLt) against the reference, and the claims of the CPU tests again."""

import copy

import pytest
import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.nn.linear.recipes import (
    BlockwiseRecipe,
    DelayedRecipe,
    RowwiseGradWeightHpRecipe,
    RowwiseRecipe,
    TensorwiseRecipe,
)
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import AmaxHistory, scale_from_amax
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.ops.quantize import quantize_and_transpose_delayed, quantize_tensorwise
from fp8_ds.testing import assert_bitwise, sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

FORMATS = [E4M3, E5M2]
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
NAN = float("nan")


@pytest.fixture(autouse=True)
def float32_stays_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_scales_are_those_of_the_cpu_bitwise():
    random_amax = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(20).exp()
    values = torch.cat([random_amax, torch.tensor([0.0, 2.0**-149, 1e-30, 3e38, float("inf"), NAN])])
    for a, b in zip(scale_from_amax(values, E4M3.max), scale_from_amax(values.cuda(), E4M3.max), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=0, atol=0, equal_nan=True)


def fp8_of(linear, **keys):
    return Fp8Linear.from_linear(copy.deepcopy(linear), TensorwiseRecipe(LinearConfig(**keys)))


def delayed_of(linear):
    history = AmaxHistory(2, [E4M3.max, E5M2.max], device="cuda")
    recipe = DelayedRecipe(LinearConfig(recipe="delayed"), history, 0, 1)
    return Fp8Linear.from_linear(copy.deepcopy(linear), recipe), history


def attach_payload(linear):
    weight = linear.weight
    weight_fp8, scale_inv = quantize_tensorwise(weight.detach(), E4M3)
    vector = torch.zeros(7, device="cuda")  # the optimizer's scale vector: the view starts at an odd element
    vector[3] = scale_inv
    payload = Fp8Payload("weight", 1 / scale_inv, vector[3], weight.dtype)
    payload.data = weight_fp8
    weight.data = torch.full((1, 1), NAN, dtype=weight.dtype, device="cuda").expand(weight.shape)
    weight._fp8 = payload


def run(function, linear, x, grad_output):
    linear.zero_grad()
    x = x.clone().requires_grad_()
    output = function(x)
    output.backward(grad_output)
    return output.detach(), x.grad, linear.weight.grad.clone(), linear.bias.grad.clone()


def inputs(shape_x, shape_grad, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, grad_output = torch.randn(shape_x, generator=generator), torch.randn(shape_grad, generator=generator) * 1e-5
    return x.to("cuda", dtype), grad_output.to("cuda", dtype)


def test_quantising_never_waits_for_the_device():
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    module, history = delayed_of(nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            module(x).sum().backward()
            history.update(history.amax_local)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


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
        module = fp8_of(linear, fast_accumulation=value)
        found[value] = run(module, module, x, grad_output)
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


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 16, 0)])
def test_empty_operands_give_zeros(shape):
    num_m, num_k, num_n = shape
    a = torch.empty(num_m, num_k, dtype=E4M3.dtype, device="cuda")
    b = torch.empty(num_n, num_k, dtype=E4M3.dtype, device="cuda")
    one = torch.ones((), device="cuda")
    assert torch.equal(scaled_mm(a, b, one, one, torch.bfloat16).cpu(), torch.zeros(num_m, num_n, dtype=torch.bfloat16))


@pytest.mark.parametrize("fast", [False, True])
def test_a_poisoned_scale_inv_poisons_the_whole_product(fast):
    a, scale_inv = quantize_tensorwise(torch.randn(32, 32, device="cuda"), E4M3)
    poison = torch.tensor(NAN, device="cuda")
    assert scaled_mm(a, a, scale_inv, poison, torch.bfloat16, use_fast_accum=fast).isnan().all()


@pytest.mark.parametrize(("grad_dtype", "bounds"), [("e5m2", (28.2, 24.2, 24.2)), ("e4m3", (28.2, 28.2, 28.0))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(512, 256, 192), (509, 250, 183)])
@pytest.mark.parametrize("with_payload", [True, False])
def test_three_gemms_keep_24_db(grad_dtype, bounds, dtype, dims, with_payload):
    """The same bounds as on CPU (tests/unit/nn/test_linear.py says where they come from)."""
    tokens, in_features, out_features = dims
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features).cuda()
    x, grad_output = inputs((tokens, in_features), (tokens, out_features), torch.float32)
    expected = run(linear, linear, x, grad_output)
    module = fp8_of(linear.to(dtype), grad_dtype=grad_dtype)
    if with_payload:
        attach_payload(module)
    got = run(module, module, x.to(dtype), grad_output.to(dtype))
    for ref, value, bound in zip(expected, got, bounds, strict=False):
        assert value.dtype == dtype
        assert 40 > sqnr_db(ref, value) >= bound
    assert sqnr_db(expected[3], got[3]) >= 45


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (1, 32), (2, 3, 32), (32,)])
def test_any_batch_shape(recipe, shape):
    linear = nn.Linear(32, 10).cuda().bfloat16()
    module = fp8_of(linear) if recipe == "tensorwise" else delayed_of(linear)[0]
    x, grad_output = inputs(shape, (*shape[:-1], 10), torch.bfloat16)
    results = run(module, module, x, grad_output)
    for result, expected in zip(results, run(linear, linear, x, grad_output), strict=True):
        assert result.shape == expected.shape and result.isfinite().all()
    if 0 in shape:
        assert (results[2] == 0).all() and (results[3] == 0).all()


def test_delayed_steps_follow_the_history():
    torch.manual_seed(0)
    linear = nn.Linear(256, 192).cuda().bfloat16()
    module, history = delayed_of(linear)
    for step in range(3):
        x, grad_output = inputs((512, 256), (512, 192), torch.bfloat16, seed=step)
        expected, got = run(linear, linear, x, grad_output), run(module, module, x, grad_output)
        assert history.amax_local.tolist() == [x.abs().max().item(), grad_output.abs().max().item()]
        history.update(history.amax_local)
    for ref, value in zip(expected[:3], got, strict=False):
        assert sqnr_db(ref, value) >= 24


def test_delayed_does_not_hide_an_infinity():
    x = torch.randn(16, 16, device="cuda")
    x[3, 3] = float("inf")
    one = torch.ones((), device="cuda")
    x_fp8, _, scale_inv = quantize_and_transpose_delayed(x, one, one.clone(), one.clone(), E4M3, "row", record=True)
    assert (x_fp8.float() * scale_inv).isnan().all()


def test_peak_memory_of_a_saved_input_is_one_byte_per_element():
    linear = nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
    kept = []
    for module in (linear, fp8_of(linear)):
        x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        module(x * 1).sum().backward()  # workspaces
        module.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = module(x * 1)
        kept.append(torch.cuda.memory_allocated() - before - output.numel() * 2)
        del output
    assert kept[0] >= 8192 * 1024 * 2
    assert kept[1] <= 0.55 * kept[0]


@pytest.mark.parametrize("with_payload", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("dims", [(64, 48), (33, 17)])
def test_compiled_equals_eager(with_payload, dtype, recipe, dims):
    in_features, out_features = dims
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features).cuda().to(dtype)
    module, history = (fp8_of(linear), None) if recipe == "tensorwise" else delayed_of(linear)
    if history is not None:
        history.update(torch.tensor([2.0, 4.0], device="cuda"))
    if with_payload:
        attach_payload(module)
    x, grad_output = inputs((2, 5, in_features), (2, 5, out_features), dtype)
    expected = run(module, module, x, grad_output)
    got = run(torch.compile(module, fullgraph=True), module, x, grad_output)
    for a, b in zip(got[:3], expected[:3], strict=True):
        assert_bitwise(a, b)
    torch.testing.assert_close(got[3], expected[3])  # the bias sum is inductor's own, in its order


FINE = {recipe.name: recipe for recipe in (RowwiseRecipe, RowwiseGradWeightHpRecipe, BlockwiseRecipe)}


FINE_FORMATS = [(name, grad_dtype) for name in FINE for grad_dtype in ("e5m2", "e4m3")]
FINE_FORMATS.remove(("blockwise", "e5m2"))  # no such GEMM


@pytest.mark.parametrize(("recipe", "grad_dtype"), FINE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "features", "outputs"), [(256, 512, 384), (33, 140, 150)])
def test_fine_recipes_agree_with_the_reference_backend(recipe, grad_dtype, dtype, tokens, features, outputs):
    """The same bytes, so what differs is accumulation: torch's GEMM of a recipe against float32 of those bytes."""
    torch.manual_seed(0)
    linear = nn.Linear(features, outputs, device="cuda", dtype=dtype)
    x, grad_output = inputs((tokens, features), (tokens, outputs), dtype)
    results = []
    for backend in ("torch", "reference"):
        config = LinearConfig(recipe=recipe, grad_dtype=grad_dtype, backend=backend)
        module = Fp8Linear.from_linear(copy.deepcopy(linear), FINE[recipe](config))
        results.append(run(module, module, x, grad_output))
    bound = 40 if dtype == torch.bfloat16 else 50  # bf16 results; accumulation of 14 bits in the output
    for name, got, expected in zip(("output", "grad_input", "grad_weight"), *results, strict=False):
        assert sqnr_db(expected.float().cpu(), got.float().cpu()) > bound, name


@pytest.mark.parametrize("recipe", FINE)
def test_fine_recipes_never_wait_for_the_device(recipe):
    module = Fp8Linear.from_linear(
        nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16), FINE[recipe](LinearConfig(recipe=recipe))
    )
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    module(x).sum().backward()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)

"""Fp8Linear: accuracy against float32, what it reads, what it saves, and its edges."""

import copy
import math

import pytest
import torch
from support import MANY_SCALES, many_scales
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.nn.linear.recipes import DelayedRecipe, TensorwiseRecipe
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.ops.gemm import BACKENDS
from fp8_ds.ops.quantize import quantize, quantize_tensorwise
from fp8_ds.testing import assert_bitwise, sqnr_db

GRAD_DTYPES = ("e5m2", "e4m3")
NAN = float("nan")


def fp8_of(linear, **keys):
    """A converted copy; `linear` stays the reference."""
    return Fp8Linear.from_linear(copy.deepcopy(linear), TensorwiseRecipe(LinearConfig(**keys)))


def delayed_of(linear, **keys):
    config = LinearConfig(recipe="delayed", **keys)
    history = AmaxHistory(2, [E4M3.max, E5M2.max])
    return Fp8Linear.from_linear(copy.deepcopy(linear), DelayedRecipe(config, history, 0, 1)), history


def attach_payload(linear, with_data=True):
    """What ZeRO does: the bytes beside the Parameter; the Parameter itself reads NaN unless a reader gathered it."""
    weight = linear.weight
    weight_fp8, scale_inv = quantize_tensorwise(weight.detach(), E4M3)
    payload = Fp8Payload("weight", 1 / scale_inv, scale_inv, weight.dtype)
    if with_data:
        payload.data = weight_fp8
        weight.data = torch.full((1, 1), NAN, dtype=weight.dtype).expand(weight.shape)
    weight._fp8 = payload
    return payload


def run(linear, x, grad_output=None):
    """(output, grad_input, grad_weight, grad_bias)"""
    linear.zero_grad()
    x = x.clone().requires_grad_()
    output = linear(x)
    output.backward(torch.ones_like(output) if grad_output is None else grad_output)
    return output.detach(), x.grad, linear.weight.grad, None if linear.bias is None else linear.bias.grad


# Two independent rounding errors meet in each product: E4M3 with E4M3 31.6 dB each, 28.6 together; E5M2 (25.6) with
# E4M3 24.6. Measured 28.7 / 24.7 / 24.6 (e5m2) and 28.7 / 28.7 / 28.5 (e4m3); the bounds leave 0.4 dB for other inputs.
NORMAL_BOUNDS = {"e5m2": (28.2, 24.2, 24.2), "e4m3": (28.2, 28.2, 28.0)}


@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_gemms_keep_24_db_on_normal_inputs(grad_dtype, backend, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(256, 192)
    x, grad_output = torch.randn(512, 256), torch.randn(512, 192) * 1e-5
    expected = run(linear, x, grad_output)
    got = run(fp8_of(linear.to(dtype), grad_dtype=grad_dtype, backend=backend), x.to(dtype), grad_output.to(dtype))
    for ref, value, bound in zip(expected, got, NORMAL_BOUNDS[grad_dtype], strict=False):
        assert value.dtype == dtype
        assert sqnr_db(ref, value) >= bound >= 24
        assert sqnr_db(ref, value) < 40  # it really went through FP8
    assert sqnr_db(expected[3], got[3]) >= 45  # the bias gradient never does; bf16 rounding alone is 50 dB


@pytest.mark.parametrize("family", MANY_SCALES)
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_many_scales_keep_the_normal_bound_in_energy(family, grad_dtype):
    """One scale per tensor suffices in energy: E4M3 has full precision over 2**14.8 below the amax, and what lies lower
    holds less than 2**-29 of the energy. Error is set against the energy of all products that were summed,
    `x**2 @ (w**2).T`, pooled over 8 seeds: a result of many-scales inputs can hang on a single element, whose own sum
    may cancel by chance (grad_weight under outlier_channel: 11 to 45 dB against its own norm).
    """
    energy, noise = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for seed in range(8):
        torch.manual_seed(seed)
        linear = nn.Linear(128, 96, bias=False)
        x, grad_output = many_scales(family, 256, 128, 2 * seed), many_scales(family, 256, 96, 2 * seed + 1)
        expected, got = run(linear, x, grad_output), run(fp8_of(linear, grad_dtype=grad_dtype), x, grad_output)
        x2, g2, w2 = (t.detach().double().square() for t in (x, grad_output, linear.weight))
        products = [x2 @ w2.t(), g2 @ w2, g2.t() @ x2]
        for i in range(3):
            weighting = products[i].sum()  # every seed counts the same
            energy[i] += 1
            noise[i] += (expected[i] - got[i]).double().square().sum() / weighting
    measured = 10 * (energy / noise).log10()
    bounds = {"e5m2": (27.5, 23.5, 23.0), "e4m3": (27.5, 27.5, 27.0)}[grad_dtype]
    assert (measured >= torch.tensor(bounds)).all(), measured


def test_rows_far_below_the_amax_lose_precision_and_near_ones_do_not():
    """The price of one scale per tensor, stated: a row is good while its values stay in E4M3's normal range, 2**14.8
    below the amax (here: 24 dB down to 2**-9), is noise at 2**-18, and zero below 2**-19."""
    torch.manual_seed(0)
    linear = nn.Linear(128, 96, bias=False)
    exponents = torch.tensor([0, 3, 6, 9, 18, 22])
    x = torch.randn(6, 128) * torch.exp2(-exponents.float())[:, None]
    expected, got = linear(x).detach(), fp8_of(linear)(x).detach()
    db = [sqnr_db(expected[i], got[i]) for i in range(6)]
    assert min(db[:4]) >= 24
    assert db[4] < 12
    assert (got[5] == 0).all()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_backends_agree(recipe):
    torch.manual_seed(0)
    linear = nn.Linear(40, 24)
    x, grad_output = torch.randn(30, 40), torch.randn(30, 24)
    results = []
    for backend in BACKENDS:
        module = fp8_of(linear, backend=backend) if recipe == "tensorwise" else delayed_of(linear, backend=backend)[0]
        results.append(run(module, x, grad_output))
    for a, b in zip(*results, strict=True):
        assert sqnr_db(a, b) > 110  # same bytes, other order of summation


def test_retyping_keeps_the_object_its_parameters_and_its_state_dict():
    linear = nn.Linear(16, 8)
    weight, bias = linear.weight, linear.bias
    keys = list(linear.state_dict())
    converted = Fp8Linear.from_linear(linear, TensorwiseRecipe(LinearConfig()))
    assert converted is linear and linear.weight is weight and linear.bias is bias
    assert list(linear.state_dict()) == keys
    assert "fp8=tensorwise, grad=e5m2, backend=torch, fast=output" in repr(linear)
    with pytest.raises(ConfigError, match="converted once"):
        Fp8Linear.from_linear(linear, TensorwiseRecipe(LinearConfig()))
    patched = nn.Linear(16, 16)
    patched.forward = lambda x: x
    with pytest.raises(ConfigError, match=r"nn\.Linear's own forward"):
        Fp8Linear.from_linear(patched, TensorwiseRecipe(LinearConfig()))


def test_payload_is_read_again_at_backward():
    """ZeRO-3 drops the gathered bytes after forward and gathers them into another tensor before backward."""
    torch.manual_seed(0)
    linear = nn.Linear(32, 16)
    x = torch.randn(8, 32, requires_grad=True)
    expected = run(fp8_of(linear), x.detach())
    module = fp8_of(linear)
    payload = attach_payload(module)
    output = module(x)
    regathered = payload.data.clone()
    payload.data.view(torch.uint8).fill_(0x7F)  # NaN: freed memory
    payload.data = regathered
    output.backward(torch.ones_like(output))
    assert_bitwise(x.grad, expected[1])


def test_payload_without_data_is_quantised_by_its_own_scale():
    torch.manual_seed(0)
    linear = nn.Linear(32, 16).bfloat16()
    module = fp8_of(linear)
    payload = attach_payload(module, with_data=False)
    payload.scale, payload.scale_inv = torch.tensor(64.0), torch.tensor(1 / 64)
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    got = run(module, x)
    payload.data = quantize(linear.weight.detach(), payload.scale, E4M3)
    for a, b in zip(got, run(module, x), strict=True):
        assert_bitwise(a, b)
    assert not torch.equal(got[0], run(fp8_of(linear), x)[0])


def test_a_poisoned_weight_scale_reaches_the_output():
    module = fp8_of(nn.Linear(16, 16))
    attach_payload(module).scale_inv = torch.tensor(NAN)
    assert module(torch.randn(4, 16)).isnan().all()


def saved_bytes(module, x):
    """Bytes that autograd keeps for backward, each storage once; parameters are not counted (they live anyway)."""
    storages = {}
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = module(x)
    return sum(storages.values()), output


@pytest.mark.parametrize("with_payload", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_one_byte_per_input_element_is_saved_for_backward(with_payload, recipe):
    linear = nn.Linear(256, 64).bfloat16()
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    stock, _ = saved_bytes(linear, x * 1)
    module = fp8_of(linear) if recipe == "tensorwise" else delayed_of(linear)[0]
    if with_payload:
        attach_payload(module)
    # `x * 1` is an activation; that nothing of autograd or of ctx keeps it alive is what the memory test below sees.
    ours, output = saved_bytes(module, x * 1)
    assert stock == x.numel() * 2
    assert x.numel() <= ours <= 0.55 * stock
    assert output.grad_fn is not None


def test_the_high_precision_input_is_freed_after_forward():
    import weakref

    module = fp8_of(nn.Linear(32, 16))
    source = torch.randn(8, 32, requires_grad=True)
    activation = source * 2
    alive = weakref.ref(activation)
    output = module(activation)
    del activation
    assert alive() is None
    output.sum().backward()


@pytest.mark.parametrize("shape", [(32,), (7, 32), (2, 3, 32), (2, 1, 3, 32), (1, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_any_leading_dims(shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(32, 10, bias=bias)
    x = torch.randn(shape)
    expected, got = run(linear, x), run(fp8_of(linear), x)
    for ref, value in zip(expected, got, strict=True):
        if ref is None:
            assert value is None
        else:
            assert value.shape == ref.shape and sqnr_db(ref, value) > 18  # few elements: wider than the bound of many


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (0, 3, 32)])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_empty_batches_give_empty_outputs_and_zero_gradients(shape, recipe):
    linear = nn.Linear(32, 10)
    module = fp8_of(linear) if recipe == "tensorwise" else delayed_of(linear)[0]
    output, grad_input, grad_weight, grad_bias = run(module, torch.empty(shape))
    assert output.shape == (*shape[:-1], 10) and grad_input.shape == shape
    assert (grad_weight == 0).all() and (grad_bias == 0).all()


@pytest.mark.parametrize(("in_features", "out_features", "tokens"), [(33, 17, 5), (1, 1, 1), (16, 50, 31)])
def test_dims_that_are_no_multiples_of_16(in_features, out_features, tokens):
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features)
    x, grad_output = torch.randn(tokens, in_features), torch.randn(tokens, out_features)
    expected = run(linear, x, grad_output)
    got = run(fp8_of(linear, grad_dtype="e4m3"), x, grad_output)
    for ref, value in zip(expected, got, strict=True):
        assert value.shape == ref.shape and sqnr_db(ref, value) > 20


def test_non_contiguous_input_and_expanded_gradient():
    torch.manual_seed(0)
    module = fp8_of(nn.Linear(32, 16))
    x = torch.randn(32, 8).t()
    got = run(module, x, torch.ones(1, 1).expand(8, 16))
    expected = run(module, x.contiguous(), torch.ones(8, 16))
    for a, b in zip(got, expected, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("value", [0.0, 2.0**-149, 1e-30])
def test_tiny_inputs_stay_finite(value):
    module = fp8_of(nn.Linear(16, 16))
    for result in run(module, torch.full((4, 16), value), torch.full((4, 16), value)):
        assert result.isfinite().all()


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_non_finite_value_is_never_hidden(bad, recipe):
    linear = nn.Linear(16, 16)
    module, history = delayed_of(linear)
    if recipe == "tensorwise":
        module = fp8_of(linear)
    else:
        history.update(torch.ones(2))  # a scale of the past, which would saturate the infinity
    x, grad_output = torch.randn(4, 16), torch.randn(4, 16)
    x[1, 3] = bad
    output, grad_input, grad_weight, _ = run(module, x, grad_output)
    assert not output.isfinite().any() and not grad_weight.isfinite().any() and grad_input.isfinite().all()
    grad_output[2, 2] = bad
    _, grad_input, grad_weight, _ = run(module, torch.randn(4, 16), grad_output)
    assert not grad_input.isfinite().any() and not grad_weight.isfinite().any()


def test_frozen_weight_gets_no_gradient_and_saves_nothing():
    linear = nn.Linear(32, 16)
    linear.weight.requires_grad_(False)
    linear.bias.requires_grad_(False)
    module = fp8_of(linear)
    x = torch.randn(8, 32, requires_grad=True)
    num_bytes, output = saved_bytes(module, x * 1)
    assert num_bytes == 0
    output.sum().backward()
    assert module.weight.grad is None and module.bias.grad is None
    assert sqnr_db(torch.ones(8, 16) @ linear.weight, x.grad) > 24


FAST = {
    None: [True, False, False],
    "none": [False, False, False],
    "output": [True, False, False],
    "output_and_grad_input": [True, True, False],
    "all": [True, True, True],
}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("value", FAST)
def test_products_accumulate_fast_where_the_configuration_says_so(value, recipe, monkeypatch):
    from fp8_ds.nn.linear import recipe as recipe_module

    if (value, recipe) == ("all", "rowwise_with_gw_hp"):
        value = "output_and_grad_input"  # as far as it goes: grad_weight is no FP8 product
    fast = []
    original = recipe_module.scaled_mm

    def spy(*args, use_fast_accum):
        fast.append(use_fast_accum)
        return original(*args, use_fast_accum=use_fast_accum)

    monkeypatch.setattr(recipe_module, "scaled_mm", spy)
    config = LinearConfig(recipe=recipe, **({} if value is None else {"fast_accumulation": value}))
    model = nn.Sequential(nn.Linear(32, 16))
    apply_plan(model, make_plan(model, config), config, torch.device("cpu"))
    run(model[0], torch.randn(8, 32))
    num_fp8 = 2 if recipe == "rowwise_with_gw_hp" else 3
    assert fast == FAST[value][:num_fp8]


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_the_input_and_gradients_keep_their_owners_dtype(weight_dtype):
    torch.manual_seed(0)
    linear = nn.Linear(32, 16).to(weight_dtype)
    x = torch.randn(8, 32, requires_grad=True)
    module = fp8_of(linear)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(x)
    output.backward(torch.ones_like(output))
    assert output.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32 and module.weight.grad.dtype == weight_dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = fp8_of(linear)(x.detach().bfloat16())
    assert_bitwise(output, expected)


def test_grad_bias_is_summed_in_float32():
    module = fp8_of(nn.Linear(16, 16).bfloat16())
    _, _, _, grad_bias = run(module, torch.randn(4096, 16, dtype=torch.bfloat16))
    assert (grad_bias == 4096).all()  # a bf16 running sum of ones stops at 256


@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_output_may_be_written_in_place(shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(16, 16, bias=bias)
    x = torch.randn(shape)
    grads = []
    for inplace in (True, False):
        module = fp8_of(linear)
        torch.nn.functional.relu(module(x), inplace=inplace).sum().backward()
        grads.append(module.weight.grad)
    assert_bitwise(*grads)


def test_a_module_used_twice_sums_its_gradients():
    torch.manual_seed(0)
    module = fp8_of(nn.Linear(16, 16))
    attach_payload(module)
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    parts = [run(module, x)[2].clone(), run(module, y)[2].clone()]
    module.zero_grad()
    (module(x) + module(y)).sum().backward()
    assert_bitwise(module.weight.grad, parts[0] + parts[1])
    module.zero_grad()
    module(module(x)).sum().backward()
    assert module.weight.grad.isfinite().all()


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_input_of_another_dtype_is_refused_and_cast_as_in_nn_linear(dtype, weight_dtype, autocast):
    linear = nn.Linear(32, 16).to(weight_dtype)
    x, dtypes = torch.randn(4, 32, dtype=dtype), []
    for module in (linear, fp8_of(linear)):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            try:
                dtypes.append(module(x).dtype)
            except RuntimeError as error:
                dtypes.append(RuntimeError)
                message = str(error)
    assert dtypes[0] == dtypes[1] and (dtypes[0] is RuntimeError) == (autocast is None and dtype != weight_dtype)
    if dtypes[0] is RuntimeError:
        assert message.startswith(f"input of a linear with a weight of shape [16, 32]: expected {weight_dtype}")
        assert f"got {dtype}. Cast it" in message


def test_the_error_names_the_weight_that_zero_holds():
    module = fp8_of(nn.Linear(32, 16).bfloat16())
    attach_payload(module).name = "layers.3.up.weight"
    with pytest.raises(RuntimeError, match=r"input of layers\.3\.up\.weight: expected torch\.bfloat16"):
        module(torch.randn(4, 32))


def test_wrong_input_dtype_is_refused():
    with pytest.raises(ValueError, match="input: expected bfloat16"):
        fp8_of(nn.Linear(16, 16))(torch.randn(4, 16).double())


def test_double_backward_is_refused():
    module = fp8_of(nn.Linear(16, 16))
    x = torch.randn(4, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="expected its graph to be differentiated once"):
        grad.sum().backward()


def test_a_penalty_on_a_gradient_that_starts_at_the_layer_leaves_no_weight_out_in_silence():
    """As of a discriminator: convolutions, and a linear head whose gradient of x is its weight and nothing else."""
    convolution, head = nn.Conv1d(1, 4, 4, 4), fp8_of(nn.Linear(16, 16))
    x = torch.randn(4, 1, 16, requires_grad=True)
    output = head(nn.functional.gelu(convolution(x)).flatten(1))
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r'got a second time .* Name the layers in "linear\.filter_fqns"'):
        grad.square().sum().backward()


def test_a_graph_of_gradients_that_nobody_differentiates_is_no_error():
    module = fp8_of(nn.Linear(16, 16))
    x = torch.randn(4, 16, requires_grad=True)
    loss = module(x).square().sum()
    kept = torch.autograd.grad(loss, x, retain_graph=True)[0]
    again = torch.autograd.grad(loss, [x, *module.parameters()], create_graph=True)
    assert_bitwise(again[0].detach(), kept)


# delayed


def test_delayed_scales_by_the_tensor_until_the_first_update():
    torch.manual_seed(0)
    linear = nn.Linear(32, 16)
    x, grad_output = torch.randn(8, 32) * 1e4, torch.randn(8, 16) * 1e-7
    module, history = delayed_of(linear)
    for a, b in zip(run(module, x, grad_output), run(fp8_of(linear), x, grad_output), strict=True):
        assert_bitwise(a, b)
    assert history.amax_local.tolist() == [x.abs().max().item(), grad_output.abs().max().item()]


def test_delayed_scales_by_the_history_after_it():
    torch.manual_seed(0)
    linear = nn.Linear(32, 16)
    module, history = delayed_of(linear)
    history.update(torch.tensor([0.5, 0.25]))
    x, grad_output = torch.randn(8, 32), torch.randn(8, 16)
    output, grad_input, _, _ = run(module, x, grad_output)
    saturated = fp8_of(linear)
    reference = run(saturated, x.clamp(-0.5, 0.5), grad_output.clamp(-0.25, 0.25))
    assert_bitwise(output, reference[0])  # what is beyond the history's amax saturates
    assert_bitwise(grad_input, reference[1])
    assert history.amax_local.tolist() == [x.abs().max().item(), grad_output.abs().max().item()]


@pytest.mark.parametrize("num_updates", [0, 1])
def test_delayed_records_nothing_without_grad(num_updates):
    module, history = delayed_of(nn.Linear(32, 16))
    for _ in range(num_updates):
        history.update(torch.ones(2))
    with torch.no_grad():
        module(torch.randn(8, 32))
    assert history.amax_local.tolist() == [0.0, 0.0]
    module(torch.randn(8, 32)).sum().backward()
    assert (history.amax_local > 0).all()


def test_delayed_maximum_is_over_all_micro_batches():
    module, history = delayed_of(nn.Linear(32, 16))
    for factor in (1.0, 50.0, 2.0):
        module(torch.full((8, 32), factor)).backward(torch.full((8, 16), factor))
    assert history.amax_local.tolist() == [50.0, 50.0]
    assert math.isclose(history.fp8_max[1].item(), E5M2.max)


def test_copies_with_delayed_scales_move_with_their_weights_and_say_that_these_stay():
    linear, history = delayed_of(nn.Linear(32, 16).bfloat16())
    x = torch.randn(4, 32).bfloat16()
    run(linear, x)
    history.update(history.amax_local.clone())
    again = copy.deepcopy(linear)
    with pytest.warns(UserWarning, match="stay those of the moment it was copied"):
        assert_bitwise(run(again, x)[0], run(linear, x)[0])
    again.to("meta")
    assert {again.fp8_recipe.slot_x.scale.device.type, again.fp8_recipe.slot_grad.scale.device.type} == {"meta"}
    scale = linear.fp8_recipe.slot_x.scale
    linear.to("cpu")
    assert linear.fp8_recipe.slot_x.scale is scale

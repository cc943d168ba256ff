"""Fp8Linear with each recipe: accuracy, what it computes and reads, what it saves, and its edges."""

import copy
import weakref

import pytest
import torch
from support import many_scales
from support.linears import RECIPES, attach_payload, fp8_of, saved_bytes, step_of
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.payload import per_element
from fp8_ds.nn.linear.recipes import Bf16Recipe, TensorwiseRecipe
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.blockwise import quantize_blockwise
from fp8_ds.ops.quantize import quantize, quantize_rowwise, quantize_tensorwise
from fp8_ds.testing import assert_bitwise, sqnr_db

FINE = ("rowwise", "rowwise_with_gw_hp", "blockwise")
NAN = float("nan")


def inputs(tokens=256, features=192, outputs=160, family=None, bias=False):
    torch.manual_seed(0)
    linear = nn.Linear(features, outputs, bias=bias)
    if family is None:
        return linear, torch.randn(tokens, features), torch.randn(tokens, outputs) * 1e-4
    with torch.no_grad():
        linear.weight.copy_(many_scales(family, outputs, features, 2))
    return linear, many_scales(family, tokens, features, 0), many_scales(family, tokens, outputs, 1)


# --- accuracy ---


# Two independent rounding errors meet in each product: E4M3 with E4M3 31.6 dB each, 28.6 together; E5M2 (25.6) with
# E4M3 24.6. Measured 28.6 to 28.9 for output; grads 24.6 to 24.7 / 28.5 to 28.7; rowwise_with_gw_hp's grad_weight is
# limited by bf16 and float32 arithmetic alone.
GRADS_DB = {"e5m2": 24.2, "e4m3": 28.0}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("grad_dtype", "backend", "dtype"),
    [("e5m2", "reference", torch.bfloat16), ("e4m3", "torch", torch.float32), ("e4m3", "torch", torch.bfloat16)],
)
def test_three_gemms_keep_24_db_on_normal_inputs(recipe, grad_dtype, backend, dtype):
    linear, x, grad_output = inputs(bias=True)
    expected = step_of(linear, x, grad_output)
    module = fp8_of(linear.to(dtype), recipe, grad_dtype=grad_dtype, backend=backend)
    got = step_of(module, x.to(dtype), grad_output.to(dtype))
    bounds = (28.0, GRADS_DB[grad_dtype], GRADS_DB[grad_dtype])
    for ref, value, bound in zip(expected, got, bounds, strict=False):
        assert value.dtype == dtype and value.shape == ref.shape
        assert sqnr_db(ref, value) >= bound
    assert max(sqnr_db(ref, value) for ref, value in zip(expected[:2], got, strict=False)) < 40  # it went through FP8
    assert (sqnr_db(expected[2], got[2]) > 45) == (recipe == "rowwise_with_gw_hp")
    assert sqnr_db(expected[3], got[3]) >= 45  # the bias gradient never does; bf16 rounding alone is 50 dB


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("grad_dtype", "std", "attached"), [("e4m3", 0.002, False), ("e5m2", 0.0002, True)])
def test_tokens_and_weight_rows_of_zeros_cost_the_others_no_precision(recipe, grad_dtype, std, attached):
    """Padding, dead units, layers that start at zero. Against float64; inputs of the weights' size, too."""
    linear, x, grad_output = inputs()
    with torch.no_grad():
        linear.weight.normal_(std=std)
        linear.weight[::32] = 0
    x = x * std
    x[::32] = 0
    expected = step_of(copy.deepcopy(linear).double(), x.double(), grad_output.double())
    backend = "reference" if (recipe, grad_dtype) == ("blockwise", "e5m2") else "torch"
    module = fp8_of(linear, recipe, grad_dtype=grad_dtype, backend=backend)
    if attached:
        attach_payload(module, granularity(recipe))
    bounds = (28.0, GRADS_DB[grad_dtype], GRADS_DB[grad_dtype])
    for ref, value, bound in zip(expected, step_of(module, x, grad_output), bounds, strict=False):
        assert sqnr_db(ref, value) >= bound


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_subnormals_have_finite_gradients(recipe):
    linear, x, grad_output = inputs()
    for value in (0.0, 2.0**-149, 1e-30):
        results = step_of(fp8_of(linear, recipe), torch.full_like(x, value), torch.full_like(grad_output, value))
        assert all(result.isfinite().all() for result in results[:3])
    assert not step_of(fp8_of(linear, recipe), torch.zeros_like(x), grad_output)[2].any()
    nn.init.zeros_(linear.weight)
    output, grad_input, grad_weight, _ = step_of(fp8_of(linear, recipe), x, grad_output)
    assert not output.any() and not grad_input.any() and sqnr_db(grad_output.t() @ x, grad_weight) > 24


# --- what it computes ---


def granularity(recipe):
    """Whose scales the weight has."""
    return "tensorwise" if recipe == "delayed" else recipe


def hp(x_fp8, scale_inv):
    return x_fp8.double() * per_element(scale_inv, x_fp8.shape).double()


@pytest.mark.parametrize("one_scale", [False, True])
def test_rowwise_is_what_it_says_with_scales_on_the_contracted_dim_folded(one_scale):
    """Each GEMM written out in float64 from the definition; rows of every operand differ by orders of magnitude."""
    linear, x, grad_output = inputs(family="per_row")
    w_fp8, w_inv = quantize_tensorwise(linear.weight, E4M3) if one_scale else quantize_rowwise(linear.weight, E4M3)
    x_fp8, x_inv = quantize_rowwise(x, E4M3)
    for_input, input_inv = quantize_rowwise(grad_output * (1 if one_scale else w_inv.reshape(1, -1)), E5M2)
    for_weight, weight_inv = quantize_rowwise((grad_output * x_inv).t().contiguous(), E5M2)
    expected = (
        hp(x_fp8, x_inv) @ hp(w_fp8, w_inv).t(),
        hp(for_input, input_inv) @ w_fp8.double() * (w_inv.double() if one_scale else 1),
        hp(for_weight, weight_inv) @ x_fp8.double(),
    )
    module = fp8_of(linear, "rowwise")
    attach_payload(module, "tensorwise" if one_scale else "rowwise")
    for ref, value in zip(expected, step_of(module, x, grad_output), strict=False):
        assert sqnr_db(ref, value) > 110  # float32 accumulation
    # and the whole is near the truth, row by row of x and of grad_output
    truth = step_of(linear, x, grad_output)
    for ref, value in zip(truth[:1], step_of(module, x, grad_output), strict=False):
        assert min(sqnr_db(a, b) for a, b in zip(ref, value, strict=True)) > 15


@pytest.mark.parametrize("one_scale", [False, True])
def test_blockwise_is_what_it_says(one_scale):
    linear, x, grad_output = inputs(family="per_tile")
    module = fp8_of(linear, "blockwise")
    payload = attach_payload(module, "tensorwise" if one_scale else "blockwise")
    quantized, grads = (quantize_blockwise(t, f, (1, 128), "both") for t, f in ((x, E4M3), (grad_output, E4M3)))

    def leave(data, inv):
        return data.double() * inv.repeat_interleave(128, 1)[:, : data.shape[1]].double()

    weight = hp(payload.data, payload.scale_inv)
    expected = (
        leave(quantized.x_fp8, quantized.scale_inv) @ weight.t(),
        leave(grads.x_fp8, grads.scale_inv) @ weight,
        leave(grads.x_fp8_t, grads.scale_inv_t) @ leave(quantized.x_fp8_t, quantized.scale_inv_t).t(),
    )
    for ref, value in zip(expected, step_of(module, x, grad_output), strict=False):
        assert sqnr_db(ref, value) > 110


@pytest.mark.parametrize(
    ("recipe", "shape"), zip(RECIPES, [(0, 32), (2, 0, 32), (0, 3, 32), (0, 32), (2, 0, 32)], strict=True)
)
def test_empty_batches_give_empty_outputs_and_zero_gradients(recipe, shape):
    output, grad_input, grad_weight, grad_bias = step_of(fp8_of(nn.Linear(32, 10), recipe), torch.empty(shape))
    assert output.shape == (*shape[:-1], 10) and grad_input.shape == shape
    assert (grad_weight == 0).all() and (grad_bias == 0).all()


FAST = {"none": (False, False, False), "output": (True, False, False), "output_and_grad_input": (True, True, False)}
FAST |= {None: FAST["output"], "all": (True, True, True)}


@pytest.mark.parametrize("value", FAST)
def test_products_accumulate_fast_where_the_configuration_says_so(value, monkeypatch):
    from fp8_ds.nn.linear import recipe as recipe_module

    fast, original = [], recipe_module.scaled_mm
    monkeypatch.setattr(
        recipe_module, "scaled_mm", lambda *args, **keys: fast.append(keys["use_fast_accum"]) or original(*args, **keys)
    )
    step_of(
        fp8_of(nn.Linear(32, 16), "delayed", **({} if value is None else {"fast_accumulation": value})),
        torch.ones(8, 32),
    )
    assert tuple(fast) == FAST[value]


@pytest.mark.parametrize(("recipe", "dtype"), zip(RECIPES, [torch.bfloat16, torch.float32] * 3, strict=False))
def test_a_layer_in_bf16_for_now_is_an_nn_linear_and_records_amaxes_all_the_same(recipe, dtype):
    linear, x, grad_output = inputs(bias=True)
    linear, x, grad_output = linear.to(dtype), x.to(dtype), grad_output.to(dtype)
    module = fp8_of(linear, recipe, backend="reference")
    in_fp8 = step_of(module, x, grad_output)
    history = getattr(module.fp8_recipe, "history", None)
    if history is not None:
        history.amax_local.zero_()
    module.fp8_recipe = Bf16Recipe(module.fp8_recipe)
    in_bf16 = step_of(module, x, grad_output)
    for ours, theirs in zip(in_bf16, step_of(linear, x, grad_output), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-5)
    assert not torch.equal(in_fp8[0], in_bf16[0])
    if history is not None:
        assert history.amax_local.tolist() == [float(one.abs().max()) for one in (x, grad_output)]


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


def test_uses_of_a_module_add_up_and_its_output_may_be_written_in_place():
    torch.manual_seed(0)
    module = fp8_of(nn.Linear(16, 16))
    attach_payload(module)
    x, y = torch.randn(4, 16), torch.randn(2, 3, 16)
    parts = [step_of(module, one, function=lambda one: torch.relu(module(one)))[2].clone() for one in (x, y)]
    module.zero_grad()
    (torch.relu_(module(x)).sum() + torch.relu_(module(y)).sum()).backward()
    assert_bitwise(module.weight.grad, parts[0] + parts[1])
    bf16 = fp8_of(nn.Linear(16, 16).bfloat16())
    assert (step_of(bf16, torch.randn(4096, 16).bfloat16())[3] == 4096).all()  # a bf16 sum of ones stops at 256


# --- what it reads ---


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_payload_bytes_are_used_and_the_parameter_is_never_read(recipe, dtype):
    linear, x, grad_output = inputs(8, 140, 150, bias=True)
    linear, x, grad_output = linear.to(dtype), x.to(dtype), grad_output.to(dtype)
    expected = step_of(fp8_of(linear, recipe), x, grad_output)
    module = fp8_of(linear, recipe)
    payload = attach_payload(module, granularity(recipe))
    assert module.weight.isnan().all()
    for a, b in zip(step_of(module, x, grad_output), expected, strict=True):
        assert_bitwise(a, b)
    payload.data, module.weight.data = None, linear.weight.detach().clone()  # a stock reader has gathered it in bf16
    for a, b in zip(step_of(module, x, grad_output), expected, strict=True):
        assert_bitwise(a, b)


def test_payload_is_read_again_at_backward_and_the_input_is_freed_before():
    """ZeRO-3 drops the gathered bytes after forward and gathers them into another tensor before backward."""
    torch.manual_seed(0)
    linear = nn.Linear(32, 16).bfloat16()
    source = torch.randn(8, 32).bfloat16().requires_grad_()
    expected = step_of(fp8_of(linear), source.detach())
    module = fp8_of(linear)
    payload, activation = attach_payload(module), source * 1
    output, alive = module(activation), weakref.ref(activation)
    del activation
    assert alive() is None
    regathered = payload.data.clone()
    payload.data.view(torch.uint8).fill_(0x7F)  # NaN: freed memory
    payload.data = regathered
    output.backward(torch.ones_like(output))
    assert_bitwise(source.grad, expected[1])
    # gathered in bf16 it is quantised by its own scale
    payload.data, module.weight.data = None, linear.weight.detach().clone()
    payload.scale, payload.scale_inv = torch.tensor(64.0), torch.tensor(1 / 64)
    got = step_of(module, source.detach())
    payload.data = quantize(linear.weight.detach(), payload.scale, E4M3)
    for a, b in zip(got, step_of(module, source.detach()), strict=True):
        assert_bitwise(a, b)
    assert not torch.equal(got[0], expected[0])


@pytest.mark.parametrize("recipe", ("tensorwise", *FINE))
def test_a_poisoned_weight_scale_reaches_what_it_scales(recipe):
    linear, x, grad_output = inputs()
    module = fp8_of(linear, recipe)
    attach_payload(module, recipe).scale_inv.view(-1)[0] = NAN
    output, grad_input, *_ = step_of(module, x, grad_output)
    num_spoiled = {"tensorwise": 160, "blockwise": 128}.get(recipe, 1)
    assert output[:, :num_spoiled].isnan().all() and output[:, num_spoiled:].isfinite().all()
    assert grad_input[:, :128].isnan().all()


def test_retyping_keeps_the_object_its_parameters_and_its_state_dict():
    linear = nn.Linear(16, 8)
    weight, bias = linear.weight, linear.bias
    keys = list(linear.state_dict())
    converted = Fp8Linear.from_linear(linear, TensorwiseRecipe(LinearConfig()))
    assert converted is linear and linear.weight is weight and linear.bias is bias
    assert list(linear.state_dict()) == keys and "fp8=tensorwise" in repr(linear)
    with pytest.raises(ConfigError, match="converted once"):
        Fp8Linear.from_linear(linear, TensorwiseRecipe(LinearConfig()))
    patched = nn.Linear(16, 16)
    patched.forward = lambda x: x
    with pytest.raises(ConfigError, match=r"nn\.Linear's own forward"):
        Fp8Linear.from_linear(patched, TensorwiseRecipe(LinearConfig()))


# --- what it saves ---


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_byte_per_input_element_is_saved_for_backward(recipe):
    linear = nn.Linear(256, 64).bfloat16()
    x = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
    module = fp8_of(linear, recipe)
    attach_payload(module, granularity(recipe))
    # `x * 1` is an activation; that nothing of autograd or of ctx keeps it alive is what the memory test below sees.
    ours, stock = (saved_bytes(one, x * 1)[0] for one in (module, linear))
    assert stock == 2 * x.numel()
    assert (ours == stock) if recipe == "rowwise_with_gw_hp" else (x.numel() <= ours <= 0.55 * stock)


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


# --- what is refused ---


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
            except RuntimeError:
                dtypes.append(RuntimeError)
    assert dtypes[0] == dtypes[1] and (dtypes[0] is RuntimeError) == (autocast is None and dtype != weight_dtype)


def test_other_inputs_are_refused_by_the_name_of_the_weight():
    module = fp8_of(nn.Linear(32, 16).bfloat16())
    attach_payload(module).name = "layers.3.up.weight"
    with pytest.raises(RuntimeError, match=r"input of layers\.3\.up\.weight: expected"):
        module(torch.randn(4, 32))
    with pytest.raises(ValueError, match="input: expected"):
        fp8_of(nn.Linear(16, 16))(torch.randn(4, 16).double())
    with pytest.raises(ValueError, match="input: expected"):
        fp8_of(nn.Linear(16, 16))(torch.randn(4, 17))


def test_a_penalty_on_a_gradient_that_starts_at_the_layer_leaves_no_weight_out_in_silence():
    """As of a discriminator: convolutions, and a linear head whose gradient of x is its weight and nothing else."""
    convolution, head = nn.Conv1d(1, 4, 4, 4), fp8_of(nn.Linear(16, 16))
    x = torch.randn(4, 1, 16, requires_grad=True)
    output = head(nn.functional.gelu(convolution(x)).flatten(1))
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"linear\.filter_fqns"):
        grad.square().sum().backward()
    (grad,) = torch.autograd.grad(head(x.flatten(1)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="expected its graph to be differentiated once"):
        grad.sum().backward()


def test_a_graph_of_gradients_that_nobody_differentiates_is_no_error():
    module = fp8_of(nn.Linear(16, 16))
    x = torch.randn(4, 16, requires_grad=True)
    loss = module(x).square().sum()
    kept = torch.autograd.grad(loss, x, retain_graph=True)[0]
    again = torch.autograd.grad(loss, [x, *module.parameters()], create_graph=True)
    assert_bitwise(again[0].detach(), kept)


# --- delayed ---


def test_delayed_scales_by_the_tensor_until_the_first_update_and_then_by_the_history():
    torch.manual_seed(0)
    linear = nn.Linear(32, 16)
    module = fp8_of(linear, "delayed")
    history = module.fp8_recipe.history
    x, grad_output = torch.randn(8, 32) * 1e4, torch.randn(8, 16) * 1e-7
    for a, b in zip(step_of(module, x, grad_output), step_of(fp8_of(linear), x, grad_output), strict=True):
        assert_bitwise(a, b)
    assert history.amax_local.tolist() == [x.abs().max().item(), grad_output.abs().max().item()]
    history.forget()
    history.update(torch.tensor([0.5, 0.25]))
    x, grad_output = torch.randn(8, 32), torch.randn(8, 16)
    reference = step_of(fp8_of(linear), x.clamp(-0.5, 0.5), grad_output.clamp(-0.25, 0.25))
    for a, b in zip(step_of(module, x, grad_output)[:2], reference, strict=False):
        assert_bitwise(a, b)  # what is beyond the history's amax saturates
    assert history.amax_local.tolist() == [x.abs().max().item(), grad_output.abs().max().item()]


@pytest.mark.parametrize("num_updates", [0, 1])
def test_delayed_records_the_maximum_of_all_micro_batches_and_nothing_without_grad(num_updates):
    module = fp8_of(nn.Linear(32, 16), "delayed")
    history = module.fp8_recipe.history
    for _ in range(num_updates):
        history.update(torch.ones(2))
    with torch.no_grad():
        module(torch.randn(8, 32))
    assert history.amax_local.tolist() == [0.0, 0.0]
    for factor in (1.0, 50.0, 2.0):
        module(torch.full((8, 32), factor)).backward(torch.full((8, 16), factor))
    assert history.amax_local.tolist() == [50.0, 50.0]
    assert history.fp8_max.tolist() == [E4M3.max, E5M2.max]


def test_copies_with_delayed_scales_move_with_their_weights_and_say_that_these_stay():
    linear = fp8_of(nn.Linear(32, 16).bfloat16(), "delayed")
    history = linear.fp8_recipe.history
    x = torch.randn(4, 32).bfloat16()
    step_of(linear, x)
    history.update(history.amax_local.clone())
    again = copy.deepcopy(linear)
    with pytest.warns(UserWarning, match="stay those of the moment it was copied"):
        assert_bitwise(step_of(again, x)[0], step_of(linear, x)[0])
    again.to("meta")
    assert {again.fp8_recipe.slot_x.scale.device.type, again.fp8_recipe.slot_grad.scale.device.type} == {"meta"}
    scale = linear.fp8_recipe.slot_x.scale
    linear.to("cpu")
    assert linear.fp8_recipe.slot_x.scale is scale

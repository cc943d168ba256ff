"""The plan: which linears convert, what is printed, and that applying it is all or nothing."""

import functools
import io

import pytest
import torch
import torch.nn.functional as F
from support.linears import convert
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipes import DelayedRecipe
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.ends import layer_lists
from fp8_ds.nn.plan.plan import LayerPlan, OtherWeights, Plan, is_layer, make_plan


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)


class Model(nn.Module):
    def __init__(self, tie=False):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(32, 50, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight


def reasons(plan):
    return {layer.fqn: layer.reason for layer in plan.layers if not layer.converted}


def converted(plan):
    return [layer.fqn for layer in plan.layers if layer.converted]


BLOCKS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


def test_default_converts_all_but_the_head_once():
    model = Model()
    plan = make_plan(model, LinearConfig())
    assert converted(plan) == BLOCKS
    assert reasons(plan) == {"lm_head": "filter_fqns"}
    assert plan.num_converted == 4
    assert plan.describe() == "fp8: 4 of 5 linears, 83.7 % of linear weights; bf16: lm_head (filter_fqns)"
    assert LayerPlan("blocks.1.down", 32, 64, True, "eligible") in plan.layers
    parameters = dict(model.named_parameters())
    assert apply_plan(model, plan, LinearConfig(), "cpu") is None
    types = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert types == {**dict.fromkeys(BLOCKS, Fp8Linear), "lm_head": nn.Linear}
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    with pytest.raises(ConfigError, match="expected one that no engine has converted, got Fp8Linear at"):
        make_plan(model, LinearConfig())


class Deep(nn.Module):
    """An encoder and a decoder, a list of heads, and experts inside of layers."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 32), nn.ModuleList([Block() for _ in range(3)]))
        self.decoder = nn.ModuleList([nn.ModuleDict({"experts": nn.ModuleList([Block(), Block()])}) for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])


@pytest.mark.parametrize(
    ("patterns", "in_bf16"),
    [
        (["decoder.-1."], [f"decoder.3.experts.{k}.{name}" for k in (0, 1) for name in ("up", "down")]),
        (["encoder.1.-3.down", "decoder.-2.experts.0.up"], ["encoder.1.0.down", "decoder.2.experts.0.up"]),
        (["-1.up"], ["encoder.1.2.up"]),
        (["heads.-3"], ["heads.0"]),
        (["decoder.-1"], [f"decoder.11.{name}" for name in ("up", "down")]),  # and not 1, of which it is a part
    ],
)
def test_negative_numbers_in_names_count_from_the_end_of_the_outermost_list(patterns, in_bf16):
    model = Deep()
    if "11" in in_bf16[0]:
        model.decoder = nn.ModuleList([Block() for _ in range(12)])
    plan = make_plan(model, LinearConfig(filter_fqns=tuple(patterns)))
    assert reasons(plan) == dict.fromkeys(in_bf16, "filter_fqns")


def test_layer_lists_are_the_outermost_ones_with_linears_inside_of_their_entries():
    lists = layer_lists(Deep(), is_layer)
    assert {name: len(layers) for name, layers in lists.items()} == {"encoder.1": 3, "decoder": 4}
    numbered = nn.ModuleDict({"0": Block(), "1": nn.ReLU(), "2": Block()})
    assert layer_lists(nn.ModuleDict({"layers": numbered}), is_layer) == {"layers": [numbered["0"], numbered["2"]]}


@pytest.mark.parametrize("pattern", ["blocks.-3.", "blocks.-1.gate", "lm_head.-1"])
def test_a_name_from_the_end_that_is_not_there_is_an_error(pattern):
    with pytest.raises(ConfigError, match=rf"filter_fqns: expected a part .* got '{pattern}', which is in none"):
        make_plan(Model(), LinearConfig(filter_fqns=("lm_head", "blocks.0", pattern)), may_be_empty=True)


def test_tied_frozen_empty_and_other_weights_stay_in_bf16_and_say_why():
    class Lora(nn.Linear):
        pass

    model = Model(tie=True)
    assert reasons(make_plan(model, LinearConfig(filter_fqns=()))) == {"lm_head": "tied weight"}
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[0].down.weight.requires_grad_(False)
    model.lora, model.attention = Lora(16, 16), nn.MultiheadAttention(16, 2)
    model.empty, model.integers, model.normed = (nn.Linear(4, 4) for _ in range(3))
    model.empty.weight = nn.Parameter(torch.zeros(0, 4))
    model.integers.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    del model.normed.weight
    model.normed.weight = torch.zeros(4, 4)  # as torch.nn.utils.weight_norm leaves it
    plan = make_plan(model, LinearConfig())
    assert converted(plan) == ["blocks.1.down"]
    found = reasons(plan)
    assert found.pop("attention.out_proj")
    assert found == {
        **dict.fromkeys(["blocks.0.up", "blocks.1.up"], "tied weight"),
        "lm_head": "filter_fqns",
        "blocks.0.down": "frozen",
        "lora": "a Lora, not exactly nn.Linear",
        "empty": "empty",
        "integers": "dtype int8",
        "normed": "weight is no Parameter of its own",
    }
    assert converted(make_plan(model, LinearConfig(frozen="fp8"))) == ["blocks.0.down", "blocks.1.down"]


def test_one_module_under_two_names_converts_once_and_obeys_the_filter_by_either():
    model = nn.ModuleDict({"first": nn.Linear(16, 16), "other": nn.Linear(16, 16)})
    model["again"] = model["first"]
    plan = make_plan(model, LinearConfig(filter_fqns=()))
    assert converted(plan) == ["first", "other"]
    apply_plan(model, plan, LinearConfig(), "cpu")
    assert type(model["again"]) is Fp8Linear
    model = nn.ModuleDict({"first": nn.Linear(16, 16), "other": nn.Linear(16, 16)})
    model["again"] = model["first"]
    assert reasons(make_plan(model, LinearConfig(filter_fqns=("again",)))) == {"first": "filter_fqns"}


def wrap_forward(module):
    stock = module.forward
    module.forward = lambda x: stock(x)


def add_accelerate_hook(module):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.ModelHook())


@pytest.mark.parametrize("wrap", [wrap_forward, add_accelerate_hook])
def test_a_linear_whose_forward_was_replaced_is_left_alone_and_named(wrap):
    """What replaced it is, or goes on with, nn.Linear's: no class would change that."""
    model = Model()
    wrap(model.blocks[1].up)
    plan = make_plan(model, LinearConfig())
    assert converted(plan) == ["blocks.0.up", "blocks.0.down", "blocks.1.down"]
    assert reasons(plan)["blocks.1.up"] == "its forward was replaced"
    apply_plan(model, plan, LinearConfig(), "cpu")
    assert type(model.blocks[1].up) is nn.Linear
    model = nn.Sequential(nn.Linear(16, 16))
    wrap(model[0])
    with pytest.raises(ConfigError, match=r"0 \(its forward was replaced\)"):
        make_plan(model, LinearConfig())


@pytest.mark.parametrize("owner", [nn.Linear, F])
def test_where_a_function_of_all_linears_was_replaced_they_stay_in_bf16(owner, monkeypatch):
    model, name = Model(), "linear" if owner is F else "forward"
    before, stock = make_plan(model, LinearConfig()), getattr(owner, name)
    monkeypatch.setattr(owner, name, functools.wraps(stock)(lambda *args: stock(*args)))
    plan = make_plan(model, LinearConfig(), may_be_empty=True)
    (reason,) = {reasons(plan)[fqn] for fqn in BLOCKS}
    assert plan.num_converted == 0 and reason.endswith(f".{name} was replaced")
    with pytest.raises(ConfigError, match="undo what replaces a function for all of them"):
        make_plan(model, LinearConfig())
    if owner is F:  # what linears will call counts, where that is another, and DeepSpeed's own are no reason
        assert make_plan(model, LinearConfig(), linear=torch._C._nn.linear) == before
        zero3 = pytest.importorskip("deepspeed.runtime.zero.linear").zero3_linear_wrap
        profiler = pytest.importorskip("deepspeed.profiling.flops_profiler.profiler")
        for linear in (zero3, profiler.wrapFunc(stock, profiler._linear_flops_compute)):
            monkeypatch.setattr(F, "linear", linear)
            assert make_plan(model, LinearConfig()) == before


def test_sharded_parameters_are_planned_by_their_true_shape():
    model = nn.Sequential(nn.Linear(16, 48))
    weight = model[0].weight
    weight.ds_shape = weight.shape
    weight.data = torch.empty(0)
    plan = make_plan(model, LinearConfig())
    assert (plan.layers[0].out_features, plan.layers[0].in_features) == (48, 16)
    apply_plan(model, plan, LinearConfig(), "cpu")
    assert type(model[0]) is Fp8Linear


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Model(), "got none of 5: blocks.0.up and 4 more (filter_fqns). Shorten"),
        (nn.Sequential(nn.ReLU()), "no nn.Linear at all"),
        (nn.Sequential(nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8)), "put nn.Linear in place of a NonDyn"),
    ],
)
def test_nothing_to_convert_is_an_error_that_says_what_was_found(model, found):
    with pytest.raises(ConfigError) as error:
        make_plan(model, LinearConfig(filter_fqns=("blocks", "lm_head")))
    assert found in str(error.value) and "filter_fqns" in str(error.value)


def test_delayed_gives_each_layer_its_two_slots():
    model = Model()
    history = convert(model, recipe="delayed", grad_dtype="e5m2")
    assert history.num_slots == 8
    assert history.fp8_max.tolist() == [448.0, 57344.0] * 4
    assert history.names == tuple(f"{fqn} {operand}" for fqn in BLOCKS for operand in ("input", "grad_output"))
    recipes = [model.get_submodule(fqn).fp8_recipe for fqn in BLOCKS]
    assert all(isinstance(recipe, DelayedRecipe) and recipe.history is history for recipe in recipes)
    scales = [history.scale[index].data_ptr() for index in range(8)]
    assert [slot.scale.data_ptr() for recipe in recipes for slot in (recipe.slot_x, recipe.slot_grad)] == scales
    assert set(history.state_dict()) & set(model.state_dict()) == set()


def test_plan_survives_a_weights_only_checkpoint():
    plan = make_plan(Model(), LinearConfig())
    file = io.BytesIO()
    torch.save(plan.to_state(), file)
    file.seek(0)
    assert Plan.from_state(torch.load(file, weights_only=True)) == plan
    with pytest.raises(ConfigError, match="version"):
        Plan.from_state({"version": 99, "layers": []})


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16))


def test_weights_outside_of_linears_count_once_and_tables_that_are_looked_up_not_at_all():
    model = nn.ModuleDict({"table": nn.Embedding(8, 16), "up": nn.Linear(16, 32), "router": Router()})
    model["again"], model["tied"] = model["router"], Router()
    model["tied"].weight = model["router"].weight
    found = OtherWeights.of(model)
    assert (found.kinds, found.numel, found.numel_model) == ((("Router", 2),), 64, 128 + 512 + 32 + 64)

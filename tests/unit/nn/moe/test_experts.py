"""Experts in one parameter: which are taken, that they compute what the stock module does, and who else sees them."""

from __future__ import annotations

import copy
import functools
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from support.linears import as_fp8_parameter
from support.linears import convert as in_fp8
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.monitor.statistics import Observers, StatisticsTable
from fp8_ds.nn.linear.recipes import Bf16Recipe
from fp8_ds.nn.moe import products as expert_products
from fp8_ds.nn.moe.experts import Fp8Experts, is_experts, stock_forward, why_not
from fp8_ds.nn.plan.convert import apply_plan, fp8_layers, revert
from fp8_ds.nn.plan.plan import OtherWeights, Plan, make_plan
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops.quantize import quantize
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.tools.estimate import weights_of
from fp8_ds.tools.estimate.activations import count_activations

mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
if not hasattr(mixtral, "MixtralExperts"):
    pytest.skip("experts are modules of their own before transformers 5", allow_module_level=True)

NUM_EXPERTS, HIDDEN, INTER = 6, 64, 80


def stock(
    kind: str = "mixtral", name: str = "Mixtral", seed: int = 0, num_experts: int = NUM_EXPERTS, **more: Any
) -> Any:
    """Experts of a family, bf16."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTER, "moe_intermediate_size": INTER, "hidden_act": "silu"}
    counts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), num_experts)
    config = getattr(transformers, f"{name}Config")(**sizes, **counts, **more)
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    experts = getattr(module, f"{name}Experts")(config)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.1)
    return experts.bfloat16()


def convert(experts: Any, **keys: Any) -> Any:
    experts.history = in_fp8(nn.ModuleDict({"experts": experts}), **keys)
    return experts


def run(experts: Any, steps: int = 2, tokens: int = 50, top_k: int = 2) -> list[torch.Tensor]:
    """Outputs and gradients, of the input, the routing weights and both parameters; expert 4 gets no token."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().requires_grad_()
        scores = torch.rand(tokens, NUM_EXPERTS, generator=generator)
        scores[:, 4] = -1
        weights, index = scores.topk(top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).requires_grad_()
        experts.zero_grad()
        output = experts(x, index, weights)
        output.backward(torch.randn(output.shape, generator=generator).bfloat16())
        if (history := getattr(experts, "history", None)) is not None:
            history.update(history.amax_local.clone())
        grads = [p.grad.clone() for p in (experts.gate_up_proj, experts.down_proj)]
        found += [output.detach(), x.grad, weights.grad, *grads]
    return found


@pytest.mark.parametrize(("recipe", "grad_dtype"), [("tensorwise", "e4m3"), ("delayed", "e5m2")])
def test_outputs_and_gradients_are_the_stock_modules_within_fp8(recipe: str, grad_dtype: str) -> None:
    experts, reference = stock(), stock()
    convert(experts, recipe=recipe, grad_dtype=grad_dtype)
    assert type(experts) is Fp8Experts and set(experts.fp8_recipes) == {"gate_up_proj", "down_proj"}
    # E4M3 has 3 mantissa bits, E5M2 2: three or four roundings follow one another here.
    lowest = {"e5m2": 15.0, "e4m3": 20.0}[grad_dtype]
    for k, (expected, found) in enumerate(zip(run(reference), run(experts), strict=True)):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        db = float(sqnr_db(expected.float(), found.float()))
        assert db > (22 if k % 5 in (0, 2) else lowest), (k, db)
        if k % 5 > 2:
            assert not found[4].any() and not expected[4].any()


def test_in_bf16_it_is_the_stock_module_up_to_the_order_of_sums() -> None:
    experts, reference = stock(), stock()
    convert(experts)
    for layer in fp8_layers(experts).values():
        layer.fp8_recipe = Bf16Recipe(layer.fp8_recipe)
    for expected, found in zip(run(reference), run(experts), strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=4e-2)
        assert float(sqnr_db(expected.float(), found.float())) > 45


def test_a_token_that_chose_none_gets_nothing() -> None:
    """Zaya's router lets tokens choose the number behind the last expert; stock code of 5.17 does not."""
    experts, reference = convert(stock()), stock()
    x, weights = torch.randn(40, HIDDEN).bfloat16(), torch.rand(40, 2)
    index = torch.randint(0, NUM_EXPERTS + 1, (40, 2))
    index[:3] = NUM_EXPERTS
    found = []
    for module in (reference, experts):
        given, scores = x.clone().requires_grad_(), weights.clone().requires_grad_()
        compute = partial(stock_forward, reference) if module is reference else module
        output = compute(given, index, scores)
        output.backward(torch.ones_like(output))
        assert not output[:3].any() and not given.grad[:3].any()
        assert not scores.grad[index == NUM_EXPERTS].any() and scores.grad[index < NUM_EXPERTS].all()
        found.append((output.detach(), given.grad, scores.grad, module.gate_up_proj.grad, module.down_proj.grad))
    for one, other in zip(*found, strict=True):
        assert float(sqnr_db(one.float(), other.float())) > 15


FAMILIES = [("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"), ("olmoe", "Olmoe"), ("phimoe", "Phimoe")]


@pytest.mark.parametrize(("kind", "name"), FAMILIES)
def test_families_with_mixtrals_text_are_taken(kind: str, name: str) -> None:
    experts = stock(kind, name)
    assert is_experts(experts) and why_not(experts) is None
    expected = run(experts)
    for one, other in zip(expected, run(convert(experts)), strict=True):
        assert float(sqnr_db(one.float(), other.float())) > 13


OTHERS = [("gpt_oss", "GptOss", "transposed weights"), ("nemotron_h", "NemotronH", "no gate")]


@pytest.mark.parametrize(("kind", "name", "reason"), OTHERS, ids=[kind for kind, *_ in OTHERS])
def test_others_stay_bf16_and_say_why(kind: str, name: str, reason: str) -> None:
    experts = stock(kind, name)
    assert not is_experts(experts) and why_not(experts) == reason
    model = nn.ModuleDict({"experts": experts, "head": nn.Linear(16, 16)})
    plan = make_plan(model, LinearConfig())
    assert [row.fqn for row in plan.layers] == ["head"]
    assert f"1 {name}Experts ({reason})" in plan.describe()


def changed(**more: Any) -> Any:
    experts = stock()
    for name, value in more.items():
        setattr(experts, name, value)
    return experts


class Clamped(mixtral.MixtralExperts):
    """A forward of its own under the same attributes."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return super().forward(hidden_states.clamp(-1, 1), top_k_index, top_k_weights)


def test_what_differs_in_anything_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clamped, gated = stock(), stock()
    clamped.__class__ = Clamped
    gated.__class__ = type("Gated", (mixtral.MixtralExperts,), {"_apply_gate": lambda self, x: x})
    narrow = changed(down_proj=nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, INTER + 1)))
    others = [
        changed(is_transposed=True),
        changed(has_bias=True),
        changed(is_concatenated=False),
        changed(_is_expert_parallel=True),
        changed(num_experts=NUM_EXPERTS // 2),
        changed(scale=nn.Parameter(torch.ones(1))),
        changed(norm=nn.LayerNorm(4)),
        changed(act_fn=None),
        narrow,
        gated,
        clamped,
    ]
    assert [is_experts(module) for module in others] == [False] * len(others)
    assert why_not(clamped) == "another forward than Mixtral's" and why_not(others[3]) == "expert-parallel"
    undecorated = nn.Module()
    undecorated.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 8))
    assert why_not(undecorated) == "another forward than Mixtral's"
    assert why_not(nn.Linear(4, 4)) is None and not is_experts(nn.Linear(4, 4))
    replaced = stock()
    replaced.forward = lambda *args: args[0]
    assert {row.reason for row in rows(replaced)} == {"its forward was replaced"}
    original = mixtral.MixtralExperts.forward
    monkeypatch.setattr(
        mixtral.MixtralExperts, "forward", functools.wraps(original)(lambda *args: 100 * original(*args))
    )
    assert not is_experts(stock())


def rows(experts: Any, **keys: Any) -> Any:
    return make_plan(nn.ModuleDict({"experts": experts}), LinearConfig.model_validate(keys), may_be_empty=True).layers


def test_each_weight_has_a_row_with_its_number_of_experts() -> None:
    gate_up, down = rows(stock())
    assert (gate_up.fqn, gate_up.shape) == ("experts.gate_up_proj", (NUM_EXPERTS, 2 * INTER, HIDDEN))
    assert (down.fqn, down.shape) == ("experts.down_proj", (NUM_EXPERTS, HIDDEN, INTER))
    assert gate_up.weight_name == gate_up.fqn and gate_up.numel == NUM_EXPERTS * 2 * INTER * HIDDEN
    assert gate_up.converted and down.converted
    (alone, _) = make_plan(stock(), LinearConfig()).layers
    assert alone.fqn == alone.weight_name == "gate_up_proj"
    assert OtherWeights.of(stock()).kinds == ()


def test_more_than_16_stay_bf16_where_they_would_be_a_loop() -> None:
    """What is faster on the device."""
    loop = [(False, "more than 16 experts, which would be a loop")] * 2
    cpu = torch.device("cpu")

    def verdicts(experts: Any, device: torch.device | None, **keys: Any) -> list[tuple[bool, str]]:
        config = LinearConfig.model_validate(keys)
        plan = make_plan(nn.ModuleDict({"experts": experts}), config, may_be_empty=True, device=device)
        return [(row.converted, row.reason) for row in plan.layers]

    assert verdicts(stock(num_experts=17), None) == verdicts(stock(num_experts=16), cpu) == [(True, "eligible")] * 2
    assert verdicts(stock(num_experts=17), cpu) == verdicts(stock(num_experts=17), None, backend="reference") == loop
    assert verdicts(stock(num_experts=17), None, filter_fqns=["down_proj"]) == [loop[0], (False, "filter_fqns")]
    assert [weight.is_fp8 for weight in weights_of(stock(num_experts=17))] == [True] * 2  # of a run on such a GPU
    with pytest.raises(ConfigError, match=r"1 more \(more than 16 experts, which would be a loop\)"):
        make_plan(nn.ModuleDict({"experts": stock(num_experts=17)}), LinearConfig(), device=cpu)


def test_filters_frozen_weights_scales_of_rows_and_autotp_leave_them_in_bf16() -> None:
    for recipe in ("rowwise", "rowwise_with_gw_hp", "blockwise"):
        assert {row.reason for row in rows(stock(), recipe=recipe)} == {"experts, which can be tensorwise or delayed"}
    assert [row.reason for row in rows(stock(), filter_fqns=["experts.down"])] == ["eligible", "filter_fqns"]
    assert [row.reason for row in rows(stock(), filter_fqns=["experts"])] == ["filter_fqns"] * 2
    frozen = stock().requires_grad_(False)
    assert [row.reason for row in rows(frozen)] == ["frozen"] * 2
    assert all(row.converted for row in rows(frozen, frozen="fp8"))
    foreign: Any = {nn.Conv2d: None}
    plan = make_plan(nn.ModuleDict({"experts": stock()}), LinearConfig(), True, foreign)
    assert {row.reason for row in plan.layers} == {"experts under AutoTP"}


def test_first_and_last_layers_are_left_with_their_experts_and_a_plan_survives_a_checkpoint() -> None:
    layers = nn.ModuleList(nn.ModuleDict({"experts": stock()}) for _ in range(3))
    ends = LinearConfig(filter_fqns=("layers.0.", "layers.-1."))
    plan = make_plan(nn.ModuleDict({"layers": layers}), ends)
    assert [row.converted for row in plan.layers] == [False, False, True, True, False, False]
    model = nn.ModuleDict({"experts": stock(), "head": nn.Linear(16, 16)})
    plan = make_plan(model, LinearConfig())
    assert Plan.from_state(plan.to_state()) == plan
    assert plan.to_state()["layers"][2] == ["head", 16, 16, True, "eligible"]  # as before there were experts
    apply_plan(model, plan, LinearConfig(), "cpu")
    with pytest.raises(ConfigError, match="got Fp8Experts at 'experts'"):
        make_plan(model, LinearConfig())


def test_one_weight_alone_can_be_in_fp8_and_reverted_ones_are_what_they_were() -> None:
    model, config = nn.ModuleDict({"experts": stock()}), LinearConfig(filter_fqns=("down_proj",))
    expected = run(stock())
    plan = make_plan(model, config)
    apply_plan(model, plan, config, "cpu")
    assert list(fp8_layers(model)) == ["experts.gate_up_proj"]
    for one, other in zip(expected, run(model["experts"]), strict=True):
        assert float(sqnr_db(one.float(), other.float())) > 15
    assert revert(model, plan, ["experts.gate_up_proj"], "small").layers[0].reason == "small"
    assert type(model["experts"]) is mixtral.MixtralExperts and "fp8_recipes" not in vars(model["experts"])
    for one, other in zip(expected, run(model["experts"]), strict=True):
        assert_bitwise(one, other)


def test_estimates_count_their_weights_as_bytes_and_run_them_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import MixtralConfig

    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTER, "num_local_experts": NUM_EXPERTS}
    config = MixtralConfig(**sizes)
    config._experts_implementation = "grouped_mm"  # transformers' own choice in whole models
    with torch.device("meta"):
        block = mixtral.MixtralSparseMoeBlock(config).bfloat16()
    assert [weight.is_fp8 for weight in weights_of(block)] == [False, True, True]
    tokens, kept = 1024, []  # the zeros behind an expert's are few
    for recipe, is_loop in (("tensorwise", False), ("tensorwise", True), ("rowwise", False)):
        if is_loop:  # as before Hopper
            monkeypatch.setattr(expert_products, "can_be_one_launch", lambda features, device: False)
        model, linear = copy.deepcopy(block), LinearConfig.model_validate({"recipe": recipe})
        plan = make_plan(model, linear, may_be_empty=True)
        if plan.num_converted:
            apply_plan(model, plan, linear, "cpu")
        x = torch.randn(1, tokens, HIDDEN).bfloat16()
        kept.append(count_activations(model, lambda model, x=x: model(x).float().sum()))  # type: ignore[misc]
    fp8, looped, bf16 = kept
    assert max(fp8.peaks) == max(looped.peaks) == max(bf16.peaks) == sum(p.numel() for p in block.parameters())
    assert 2 * tokens * 2 * INTER < fp8.kept < min(bf16.kept, looped.kept)
    assert looped.peak(lambda num: 2 * num) > looped.kept


def at_once(patch: pytest.MonkeyPatch) -> None:
    """All experts are computed in one launch, which is the references' loop on a CPU."""
    patch.setattr(expert_products.grouped, "can_run", lambda device: True)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_at_once_they_are_the_loop(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for roundings of sums."""
    looped = run(convert(stock(), recipe=recipe))
    at_once(monkeypatch)
    found = run(convert(stock(), recipe=recipe))
    for one, other in zip(looped, found, strict=True):
        assert one.shape == other.shape and float(sqnr_db(one.float(), other.float())) > 35


def test_at_once_other_activations_and_those_with_hooks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch)
    called: list[int] = []
    gelu, hooked = stock(), stock()
    gelu.act_fn = nn.GELU()
    hooked.act_fn.register_forward_hook(lambda *args: called.append(1))
    expected, found = run(copy.deepcopy(gelu)), run(convert(gelu))
    assert float(sqnr_db(expected[0].float(), found[0].float())) > 22
    run(convert(hooked))
    assert len(called) == 2
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(1))
    run(convert(stock()), steps=1)
    handle.remove()
    assert len(called) == 4  # the activation and the module itself


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_float32_input_is_what_it_is_to_the_stock_implementation(implementation: str) -> None:
    """transformers' grouped_mm casts what it reads, and its output back."""
    x, index, weights = torch.randn(4, HIDDEN), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    found = []
    for experts in (stock(), convert(stock())):
        experts.config._experts_implementation = implementation
        try:
            found.append(experts(x, index, weights))
        except RuntimeError:
            found.append(None)
        with torch.autocast("cpu", torch.bfloat16):
            assert experts(x, index, weights).dtype == torch.float32
    expected, got = found
    assert (expected is None) == (got is None) == (implementation == "eager")
    if expected is not None:
        assert got.dtype == expected.dtype == torch.float32 and float(sqnr_db(expected, got)) > 22


def test_a_copy_of_experts_in_fp8_multiplies_by_their_bytes() -> None:
    """Whose scale is a power of two, and would be another by the copy's values."""
    experts = convert(stock())
    for p in experts.parameters():
        as_fp8_parameter(p)
        payload = p._fp8
        scale = torch.exp2(payload.scale.log2().floor() - 1)
        payload.scale, payload.scale_inv, payload.data = scale, 1 / scale, quantize(payload.dequantize(), scale, E4M3)
    expected = run(experts, steps=1)
    for again in (copy.deepcopy(experts), copy.deepcopy(copy.deepcopy(experts)), pickle.loads(pickle.dumps(experts))):
        assert all(type(p) is nn.Parameter for p in again.parameters())
        for one, other in zip(expected, run(again, steps=1), strict=True):
            assert_bitwise(one, other)


def test_recomputed_or_compiled_it_is_the_same() -> None:
    experts = convert(stock())
    expected, forward = run(experts), Fp8Experts.forward
    for reentrant in (False, True):
        experts.forward = partial(checkpoint, forward, experts, use_reentrant=reentrant)
        for one, other in zip(expected, run(experts), strict=True):
            assert_bitwise(one, other)
    del experts.forward
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: experts(*args) * 2, backend=counter)
    x, index, weights = torch.randn(9, HIDDEN).bfloat16(), torch.randint(0, NUM_EXPERTS, (9, 2)), torch.rand(9, 2)
    num_graphs = []
    for shift in range(3):  # other numbers of tokens an expert make no other graphs
        chosen = (index + shift) % NUM_EXPERTS
        assert_bitwise(compiled(x, chosen, weights), experts(x, chosen, weights) * 2)
        num_graphs.append(counter.frame_count)
    assert num_graphs[0] == num_graphs[-1]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_monitor_counts_each_token_once_and_all_weights(recipe: str) -> None:
    expected = run(convert(stock(), recipe=recipe))
    watched = convert(stock(), recipe=recipe)
    found = fp8_layers(watched)
    table = StatisticsTable(tuple(found), "cpu")
    observers = Observers(found, table)
    observers.attach()
    for one, other in zip(expected, run(watched), strict=True):
        assert_bitwise(one, other)
    observers.detach()
    table.send()
    counts: Any = table.receive()
    gate_up, down = counts["gate_up_proj"], counts["down_proj"]
    assert gate_up["input"].num == 2 * 50 * HIDDEN  # in two steps
    assert gate_up["weight"].num == 2 * NUM_EXPERTS * 2 * INTER * HIDDEN
    assert down["weight"].num == 2 * NUM_EXPERTS * HIDDEN * INTER
    rows = gate_up["grad_output"].num // (2 * INTER)
    assert rows % 16 == 0 and rows > 2 * 2 * 50 and down["input"].num == rows * INTER
    for kinds in (gate_up, down):
        for one in kinds.values():
            assert one.amax > 0 and 0 <= one.underflow < 0.1 and one.saturation < 0.01

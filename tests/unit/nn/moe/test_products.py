"""The product of all experts is that of each expert by itself, to the bit; in one launch, but for the order of sums."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.nn.linear.recipes import Bf16Recipe, BlockwiseRecipe, DelayedRecipe, TensorwiseRecipe
from fp8_ds.nn.moe.products import Groups, grouped_linear, has_one_launch
from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.ops import grouped
from fp8_ds.ops.quantize import quantize_tensorwise
from fp8_ds.testing import assert_bitwise

NUM_EXPERTS, NUM_OUT, NUM_IN = 5, 48, 80
CHOICES = [[0, 2], [2, 0], [2, 4], [4, 2], [2, 0], [0, 4], [2, 4]]  # 4, 0, 6, 0 and 4 tokens
MANY = [[0, 1], *[[2, 4]] * 17]  # 1, 1, 17, 0, 17: more than 16, and not a multiple of it


def experts(choices: list[list[int]], is_packed: bool = False) -> tuple[Groups, Tensor, Tensor, Tensor]:
    """Groups, x [T, K] whose tokens differ in size, weight [E, N, K], grad_output [P, N], 0 where no token is."""
    torch.manual_seed(0)
    groups = Groups.of(torch.tensor(choices, dtype=torch.long).view(-1, 2), NUM_EXPERTS, is_packed=is_packed)
    x = torch.randn(len(choices), NUM_IN) * torch.logspace(-2, 1, len(choices))[:, None]
    weight = torch.randn(NUM_EXPERTS, NUM_OUT, NUM_IN) * torch.logspace(-2, 0, NUM_EXPERTS)[:, None, None]
    grad = groups.dispatch(torch.randn(len(choices), NUM_OUT).bfloat16())
    return groups, x.bfloat16(), weight.bfloat16(), grad


def tokens_of(expert: int, choices: list[list[int]]) -> list[int]:
    """Tokens in the order in which they chose it."""
    return [t for t, row in enumerate(choices) for chosen in row if chosen == expert]


def run(x: Tensor, weight: Tensor, groups: Groups, recipe: Any, grad: Tensor, is_dispatched: bool) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), nn.Parameter(weight.clone())
    output = grouped_linear(x, weight, groups, recipe, is_dispatched=is_dispatched)
    output.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return [output.detach(), x.grad, weight.grad]


def test_a_weight_that_is_a_sum_is_not_kept_until_the_backward() -> None:
    """That of PEFT's `target_parameters`: a checkpoint frees what the graph has saved, and nothing else."""
    groups, x, weight, grad = experts(CHOICES)
    recipe, made = TensorwiseRecipe(LinearConfig()), list[weakref.ref[Any]]()
    reference = run(x, weight, groups, recipe, grad, is_dispatched=False)
    x, p = x.clone().requires_grad_(), nn.Parameter(weight.clone())

    def layer(given: Tensor) -> Tensor:
        summed = p * 1
        made.append(weakref.ref(summed))
        return grouped_linear(given, summed, groups, recipe, is_dispatched=False)

    for run_layer in (layer, partial(checkpoint, layer, use_reentrant=False)):
        x.grad = p.grad = None
        output = run_layer(x)
        assert [one() for one in made] == [None] * len(made)
        output.backward(grad)
        for one, other in zip(reference, (output.detach(), x.grad, p.grad), strict=True):
            assert_bitwise(one, other)
    assert len(made) == 3


@pytest.mark.parametrize("choices", [CHOICES, MANY], ids=["few", "many"])
def test_rows_are_the_tokens_by_expert_each_from_a_multiple_of_16_on(choices: list[list[int]]) -> None:
    groups, x, _, _ = experts(choices)
    rows = groups.dispatch(x)
    counts = [len(tokens_of(expert, choices)) for expert in range(NUM_EXPERTS)]
    assert [end - start for start, end in groups.bounds] == [-(-count // 16) * 16 for count in (*counts, 0)]
    assert groups.num_rows == len(rows)
    for expert, (start, end) in enumerate(groups.bounds[:-1]):
        assert_bitwise(rows[start : start + counts[expert]], x[tokens_of(expert, choices)])
        assert not rows[start + counts[expert] : end].any()
    assert_bitwise(groups.collect(rows), x[:, None].expand(-1, 2, -1).contiguous())
    codes = x.to(torch.float8_e4m3fn)
    assert_bitwise(groups.dispatch(codes).float(), groups.dispatch(codes.float()))


def with_payload(weight: Tensor, codes: Tensor, scale_inv: Tensor) -> nn.Parameter:
    """As ZeRO leaves it: NaN, and FP8 bytes beside it."""
    p: Any = nn.Parameter(torch.full((1,), float("nan")).bfloat16().expand(weight.shape))
    p._fp8 = Fp8Payload("weight", 1 / scale_inv, scale_inv, torch.bfloat16)
    p._fp8.data = codes
    return p


def delayed() -> DelayedRecipe:
    """With scales of an earlier step, by which some elements saturate."""
    history = AmaxHistory(2, [E4M3.max, E5M2.max], device="cpu")
    recipe = DelayedRecipe(LinearConfig.model_validate({"recipe": "delayed"}), history, 0, 1)
    history.update(torch.tensor([20.0, 3.0]))
    return recipe


@pytest.mark.parametrize(("choices", "is_dispatched"), [(CHOICES, False), (MANY, False), (MANY, True)])
def test_it_is_the_fp8_linears_of_the_experts_where_scales_are_the_same(
    choices: list[list[int]], is_dispatched: bool
) -> None:
    groups, x, weight, grad = experts(choices)
    codes, scale_inv = quantize_tensorwise(weight, E4M3)
    p, recipe = with_payload(weight, codes, scale_inv), delayed()
    given = (groups.dispatch(x) if is_dispatched else x.clone()).requires_grad_()
    output = grouped_linear(given, p, groups, recipe, is_dispatched=is_dispatched)
    output.backward(grad)
    assert given.grad is not None and p.grad is not None
    expected_x, amaxes = torch.zeros(groups.num_rows, NUM_IN).bfloat16(), []
    for expert, (start, end) in enumerate(groups.bounds[:-1]):
        own = tokens_of(expert, choices)
        assert not output[start + len(own) : end].any() and bool(own) == bool(p.grad[expert].any())
        if not own:
            continue
        linear: Any = nn.Linear(NUM_IN, NUM_OUT, bias=False).bfloat16()
        linear.weight = with_payload(weight[expert], codes[expert], scale_inv)
        own_recipe = delayed()
        Fp8Linear.from_linear(linear, own_recipe)
        x_e = x[own].clone().requires_grad_()
        rows = slice(start, start + len(own))
        own_output = linear(x_e)
        assert_bitwise(output[rows].detach(), own_output.detach())
        own_output.backward(grad[rows])
        assert x_e.grad is not None
        expected_x[rows] = x_e.grad
        assert_bitwise(p.grad[expert], linear.weight.grad)
        amaxes.append(own_recipe.history.amax_local)
    assert_bitwise(given.grad, expected_x if is_dispatched else groups.collect(expected_x).sum(1))
    assert_bitwise(recipe.history.amax_local, torch.stack(amaxes).amax(0))


@pytest.mark.parametrize("is_dispatched", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_it_is_the_fp8_linears_of_frozen_experts_with_the_blocks_of_a_folder(
    is_packed: bool, is_dispatched: bool
) -> None:
    """Their scales are no powers of two, and blocks are cut at the last columns; packed is what one launch reads."""
    num_out, num_in, generator = 256, 200, torch.Generator().manual_seed(0)
    groups = Groups.of(torch.tensor(MANY), NUM_EXPERTS, is_packed=is_packed)
    codes = (torch.randn(NUM_EXPERTS, num_out, num_in, generator=generator) * 100).to(torch.float8_e4m3fn)
    scale_inv = torch.rand(NUM_EXPERTS * 2, 2, generator=generator) * torch.logspace(-3, 1, NUM_EXPERTS * 2)[:, None]
    x = torch.randn(len(MANY), num_in, generator=generator) * torch.logspace(-2, 1, len(MANY))[:, None]
    grad = groups.dispatch(torch.randn(len(MANY), num_out, generator=generator).bfloat16())
    config = LinearConfig.model_validate({"recipe": "blockwise", "grad_dtype": "e4m3"})
    p, recipe = with_payload(codes.bfloat16(), codes, scale_inv).requires_grad_(False), BlockwiseRecipe(config)
    recipe.is_stored = True
    assert not has_one_launch(x, (num_out, num_in), [recipe])
    given = (groups.dispatch(x.bfloat16()) if is_dispatched else x.bfloat16()).requires_grad_()
    output = grouped_linear(given, p, groups, recipe, is_dispatched=is_dispatched)
    output.backward(grad)
    assert given.grad is not None and p.grad is None
    expected_x = torch.zeros(groups.num_rows, num_in).bfloat16()
    for expert, (start, _) in enumerate(groups.bounds[:-1]):
        own = tokens_of(expert, MANY)
        linear: Any = nn.Linear(num_in, num_out, bias=False).bfloat16()
        of_expert = with_payload(codes[expert].bfloat16(), codes[expert], scale_inv[2 * expert : 2 * expert + 2])
        linear.weight = of_expert.requires_grad_(False)
        Fp8Linear.from_linear(linear, BlockwiseRecipe(config))
        x_e, rows = x[own].bfloat16().requires_grad_(), slice(start, start + len(own))
        own_output = linear(x_e)
        assert_bitwise(output[rows].detach(), own_output.detach())
        own_output.backward(grad[rows])
        assert x_e.grad is not None
        expected_x[rows] = x_e.grad
    if is_dispatched:
        assert_bitwise(given.grad, expected_x)
    else:
        assert_bitwise(given.grad, groups.combine(expected_x))


@pytest.mark.parametrize("recipe", [TensorwiseRecipe(LinearConfig()), delayed()], ids=["tensorwise", "delayed"])
def test_without_tokens_there_is_a_gradient_of_zeros(recipe: Any) -> None:
    groups, _, weight, _ = experts([])
    empty = torch.empty(0, NUM_IN).bfloat16()
    output, grad_x, grad_weight = run(empty, weight, groups, recipe, torch.empty(0, NUM_OUT).bfloat16(), False)
    assert output.shape == (0, NUM_OUT) and grad_x.shape == (0, NUM_IN)
    assert grad_weight.shape == weight.shape and not grad_weight.any()


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_is_kept_for_backward_is_one_byte_an_element_of_each_token_once_and_whose_rows_are_whose(
    is_packed: bool,
) -> None:
    groups, x, weight, _ = experts(CHOICES, is_packed)
    whose = [(torch.int32, NUM_EXPERTS + 1), *[(torch.int64, 2 * len(CHOICES))] * (1 + is_packed)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        recipe = TensorwiseRecipe(LinearConfig())
        p = nn.Parameter(weight)
        grouped_linear(x.requires_grad_(), p, groups, recipe, is_dispatched=False)
    assert kept.pop(0) is p
    assert [(t.dtype, t.numel()) for t in kept] == [*whose, (torch.float8_e4m3fn, x.numel()), (torch.float32, 1)]
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        frozen = nn.Parameter(weight, requires_grad=False)
        grouped_linear(x.requires_grad_(), frozen, groups, recipe, is_dispatched=False)
    assert kept.pop(0) is frozen
    assert [(t.dtype, t.numel()) for t in kept] == whose


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_checkpoint_keeps_no_groups_and_goes_by_those_of_the_forward_that_is_done_again(is_packed: bool) -> None:
    """A router that noise reaches may choose otherwise then: rows of one choice are not those of the other."""
    _, x, weight, _ = experts(CHOICES)
    other = [[4, 0], *CHOICES[:-1]]  # as many rows with zeros behind, so that a checkpoint sees no other shapes
    grad = torch.randn(len(CHOICES), NUM_OUT, generator=torch.Generator().manual_seed(0)).bfloat16()
    recipe, made = TensorwiseRecipe(LinearConfig()), list[weakref.ref[Any]]()

    def grads(routing: list[list[list[int]]], through: Any) -> list[Tensor]:
        given, p, left = x.clone().requires_grad_(), nn.Parameter(weight.clone()), list(routing)

        def layer(given: Tensor) -> Tensor:
            chosen = torch.tensor(left.pop(0))
            groups = Groups.of(chosen, NUM_EXPERTS, is_packed=is_packed)
            made.append(weakref.ref(groups.place))
            return groups.collect(grouped_linear(given, p, groups, recipe, is_dispatched=False)).sum(1)

        output = through(layer, given)
        if len(routing) > 1:
            assert made[-1]() is None
        output.backward(grad)
        assert given.grad is not None and p.grad is not None and not left
        return [given.grad, p.grad]

    expected = grads([other], lambda layer, given: layer(given))
    found = grads([CHOICES, other], partial(checkpoint, use_reentrant=False))
    for one, two in zip(expected, found, strict=True):
        assert_bitwise(one, two)


NOBODYS = [[0, NUM_EXPERTS], *[[2, 4]] * 9, [NUM_EXPERTS, NUM_EXPERTS], [3, 0]]
"""Some choose no expert."""


@pytest.mark.parametrize("choices", [CHOICES, MANY, NOBODYS, []], ids=["few", "many", "nobodys", "none"])
def test_packed_rows_are_the_tokens_by_expert_and_the_host_knows_their_number(choices: list[list[int]]) -> None:
    groups, x, _, _ = experts(choices, is_packed=True)
    rows = groups.dispatch(x)
    assert groups.num_rows == len(rows) == 2 * len(choices)
    assert "bounds" not in vars(groups), "the host has read whose rows are whose"
    own = [tokens_of(expert, choices) for expert in range(NUM_EXPERTS + 1)]
    assert_bitwise(rows, x[[token for tokens in own for token in tokens]])
    assert_bitwise(groups.collect(rows), x[:, None].expand(-1, 2, -1).contiguous())
    assert [end - start for start, end in groups.bounds] == [len(tokens) for tokens in own]
    for width in (NUM_IN, NUM_IN - 3):
        codes = x[:, :width].to(torch.float8_e4m3fn).contiguous()
        assert_bitwise(groups.dispatch(codes).float(), groups.dispatch(codes.float()))


def whole_numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """bf16 whose codes are small whole numbers under a scale that is a power of two: sums are exact in any order."""
    values = torch.tensor([-7.0, -2.0, -1.0, 1.0, 2.0, 7.0])
    return values[torch.randint(6, shape, generator=torch.Generator().manual_seed(seed))].bfloat16()


@pytest.mark.parametrize(
    ("choices", "is_dispatched", "in_bf16"),
    [
        (CHOICES, False, False),
        (MANY, True, False),
        (NOBODYS, False, False),
        (NOBODYS, True, False),
        (MANY, False, True),
    ],
)
def test_one_launch_is_the_loop_to_the_bit_where_sums_are_exact(
    choices: list[list[int]], is_dispatched: bool, in_bf16: bool
) -> None:
    """7 is 448 / 64, E4M3's largest: such codes are whole numbers. So are E5M2's, of 57344 / 8192."""
    found = []
    for is_packed in (False, True):
        groups, x, weight, grad = experts(choices, is_packed)
        x, weight = whole_numbers(x.shape, 0), whole_numbers(weight.shape, 1)
        x[0], weight[0] = 7, 7
        grad = groups.dispatch(whole_numbers((len(choices), NUM_OUT), 2))
        given = groups.dispatch(x) if is_dispatched else x
        fp8 = TensorwiseRecipe(LinearConfig())  # a weight of a layer may be in bf16 for now, and another one in FP8
        output, grad_x, grad_weight = run(
            given, weight, groups, Bf16Recipe(fp8) if in_bf16 else fp8, grad, is_dispatched
        )
        found.append([groups.collect(output), groups.collect(grad_x) if is_dispatched else grad_x, grad_weight])
    for one, other in zip(*found, strict=True):
        assert one.any()
        assert torch.equal(one, other)  # zeros may differ in their signs


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choices", [MANY, NOBODYS, []], ids=["many", "nobodys", "none"])
def test_packed_rows_are_weighted_and_added_up_as_others_are_but_for_roundings(
    choices: list[list[int]], weight_dtype: torch.dtype
) -> None:
    generator, found = torch.Generator().manual_seed(0), []
    whole = torch.randn(len(choices), 2, 24, generator=generator).bfloat16()
    routing, grad = torch.rand(len(choices), 2, generator=generator), torch.randn(len(choices), 24, generator=generator)
    for is_packed in (False, True):
        groups, _, _, _ = experts(choices, is_packed)
        rows = torch.zeros(groups.num_rows, 24).bfloat16()
        rows[groups.place] = whole.flatten(0, 1)
        weights = routing.to(weight_dtype).t().contiguous().t().requires_grad_()
        assert torch.equal(groups.combine(rows), whole.sum(1))
        rows.requires_grad_()
        output = groups.combine_weighted(rows, weights, torch.bfloat16)
        output.backward(grad.bfloat16())
        assert rows.grad is not None and weights.grad is not None
        found.append([output, rows.grad[groups.place], weights.grad])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one, rtol=2**-6, atol=0.05)  # sums of 24 that were rounded each


def test_one_launch_is_for_experts_of_kernels_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = TensorwiseRecipe(LinearConfig())
    bf16, slow = Bf16Recipe(fp8), TensorwiseRecipe(LinearConfig(backend="reference"))
    like = torch.zeros(1)
    assert not has_one_launch(like, [64, 32], [fp8]), "on a CPU"
    monkeypatch.setattr(grouped, "can_run", lambda device: True)
    assert has_one_launch(like, [64, 32], [fp8]) and has_one_launch(like, [64, 32], [bf16, fp8])
    for features, recipes in (([64, 40], [fp8]), ([64, 32], [bf16]), ([64, 32], [slow])):
        assert not has_one_launch(like, features, recipes)

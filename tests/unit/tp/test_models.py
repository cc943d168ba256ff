"""Models that `parallelize` has sharded beside whole ones, without an engine; ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
import torch.distributed as dist
import training
from support.models import MIXER_PLAN, MIXTRAL_PLAN, WIDTH, Llama, MixerModel
from support.threads import on_threads
from torch import Tensor, nn

from fp8_ds.config import ActivationsConfig, TensorParallelConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.tp import LLAMA, QWEN3, TensorParallelPlan, configure, mlp, parallelize
from fp8_ds.tp.group import new_host_group

pytest.importorskip("transformers.integrations.moe")

TOKENS = training.micro_batches(0, 1)[0]
MOE_SIZES = {"num_local_experts": 5, "num_experts_per_tok": 2, "hidden_size": 48, "intermediate_size": 40}


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def batch(num: int, length: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(num, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def checkpointed() -> nn.Module:
    model = tpar.llama()
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def qwen3() -> nn.Module:
    return Llama("Qwen3", num_attention_heads=8, num_key_value_heads=4, head_dim=8, num_hidden_layers=1)


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    return Llama("Mixtral", **MOE_SIZES)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Tensor
    plan: TensorParallelPlan
    num_ranks: int = 2
    sequence_parallel: bool = True


CASES = {
    "mixer": Case(MixerModel, batch(3), MIXER_PLAN),
    "mixer, recomputed": Case(lambda: MixerModel(recomputes=True), batch(3), MIXER_PLAN),
    "mixer, one norm in two layers": Case(lambda: MixerModel(shares_norm=True), batch(3), MIXER_PLAN),
    "llama with biases": Case(lambda: tpar.llama(bias=True), TOKENS, LLAMA),
    "llama with biases, whole tokens": Case(lambda: tpar.llama(bias=True), TOKENS, LLAMA, sequence_parallel=False),
    "llama on four ranks": Case(tpar.llama, TOKENS, LLAMA, num_ranks=4),
    "llama, recomputed": Case(checkpointed, TOKENS, LLAMA),
    "norms of heads": Case(qwen3, TOKENS, QWEN3),
    "norms of heads, whole tokens": Case(qwen3, TOKENS, QWEN3, sequence_parallel=False),
    "experts": Case(mixtral, TOKENS, MIXTRAL_PLAN),
    "experts, whole tokens": Case(mixtral, TOKENS, MIXTRAL_PLAN, sequence_parallel=False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_that_of_the_whole_model(name: str) -> None:
    case = CASES[name]
    results = on_threads(
        case.num_ranks, tpar.gradients_beside_whole, case.build(), case.batch, case.plan, False, case.sequence_parallel
    )
    for found in results:
        assert min(found.values()) > 85, found  # sums in another order; biases of q and k cancel


@pytest.mark.parametrize(("name", "bound"), [("mixer", 14), ("experts", 10)])
def test_in_fp8_they_are_two_roundings_apart(name: str, bound: float) -> None:
    """And a token here and there has other experts; 3 dB were half of a gradient."""
    case = CASES[name]
    for found in on_threads(2, tpar.gradients_beside_whole, case.build(), case.batch, case.plan, True):
        assert found["loss"] > 40 and min(found.values()) > bound, found


def what_is_replicated_comes_from_the_first_rank() -> None:
    model = MixerModel()
    expected = model.head.weight.detach().clone()
    if dist.get_rank() > 0:
        with torch.no_grad():
            model.head.weight.zero_()
    parallelize(model, MIXER_PLAN, group())
    assert_bitwise(model.head.weight, expected)


def what_is_frozen_when_it_is_sharded_has_its_whole_gradient_once_it_trains() -> None:
    reference, model = MixerModel(), MixerModel()
    late = [name for name, _ in model.named_parameters() if name.endswith(("down.bias", ".norm.weight"))]
    for name in late:
        model.get_parameter(name).requires_grad_(False)
    parallelize(model, MIXER_PLAN, group())
    model(batch(2)).backward()
    assert len(late) == 4 and all(model.get_parameter(name).grad is None for name in late)
    model.zero_grad()
    for name in late:
        model.get_parameter(name).requires_grad_(True)
    for one in (reference, model):
        one(batch(2)).backward()
    for name in late:
        assert sqnr_db(reference.get_parameter(name).grad, model.get_parameter(name).grad) > 85, name


def a_block_that_is_computed_again_knows_its_sequences_or_raises() -> None:
    """After forwards of other shapes."""
    model = MixerModel(recomputes=True)
    parallelize(model, MIXER_PLAN, group())
    loss = model(batch(2))
    for num, length in ((3, 8), (2, 16)):
        model(batch(num, length))
    loss.backward()
    loss = model(batch(2))
    model(batch(1, 16))  # as many tokens
    with pytest.raises((ValueError, RuntimeError), match=r"\(1, 16\), \(2, 8\)"):
        loss.backward()


def a_view_with_tokens_in_other_places_is_an_error() -> None:
    model = MixerModel(turned=True)
    parallelize(model, MIXER_PLAN, group())
    tpar.to_fp8(model)
    with pytest.raises(ValueError, match=r"\(8, 2, 32\)"):
        model(batch(2))


def later_batches_may_change_together_and_not_apart() -> None:
    model, rank = MixerModel(), dist.get_rank()
    parallelize(model, MIXER_PLAN, group())
    for length in (8, 16, 8):
        model(batch(2, length)).backward()
    for x in (batch(2, 16 if rank else 8), batch(2, seed=rank)):
        with pytest.raises(ConfigError, match="batch: "):
            model(x)


@pytest.mark.parametrize(
    "claim",
    [
        what_is_replicated_comes_from_the_first_rank,
        what_is_frozen_when_it_is_sharded_has_its_whole_gradient_once_it_trains,
        a_block_that_is_computed_again_knows_its_sequences_or_raises,
        a_view_with_tokens_in_other_places_is_an_error,
        later_batches_may_change_together_and_not_apart,
    ],
)
def test_on_two_ranks(claim: Callable[[], None]) -> None:
    on_threads(2, claim)


def with_a_first_batch(case: str) -> None:
    model, rank = MixerModel(), dist.get_rank()
    parallelize(model, MIXER_PLAN, group())
    x, expected = {
        "shapes": (batch(2, 16 if rank else 8), "first batch"),
        "values": (batch(2, seed=rank), "'values "),
        "does not divide": (batch(3, 3), "divisible by"),
    }[case]
    with pytest.raises(ValueError, match=expected):
        model(x)


@pytest.mark.parametrize("case", ["shapes", "values", "does not divide"])
def test_a_first_batch_that_does_not_fit_is_an_error_on_every_rank(case: str) -> None:
    on_threads(4, with_a_first_batch, case)


def wrong(case: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    tp_group: Any = group()
    model = MixerModel()
    if case == "one rank left out":
        tp_group = dist.new_group(list(range(world - 1)))
    elif case == "no group on one rank":
        tp_group = None if rank == 0 else tp_group
    elif case == "overlapping groups":
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 3])]
        tp_group = pairs[{0: 0, 1: 1, 2: 1, 3: 2}[rank]]
    elif case == "another width on one rank" and rank == 1:
        model.layers[1].mixer.up = nn.Linear(WIDTH, 128)
    elif case == "another model in one group":
        tp_group = tpar.ParallelGroups(2).tp_group
        if rank == 3:
            model.layers[0].mixer.down.bias = None
    before = [p.shape for p in model.parameters()]
    with pytest.raises(ConfigError, match="model: " if "another" in case else "tp_group: "):
        parallelize(model, MIXER_PLAN, tp_group)
    assert before == [p.shape for p in model.parameters()]


@pytest.mark.parametrize(
    "case",
    [
        "one rank left out",
        "no group on one rank",
        "overlapping groups",
        "another width on one rank",
        "another model in one group",
    ],
)
def test_a_model_or_group_that_does_not_fit_is_an_error_on_every_rank(case: str) -> None:
    on_threads(4, wrong, case)


def host_group() -> Any:
    made = new_host_group(tpar.ParallelGroups(2).tp_group)
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=made)
    return dist.get_process_group_ranks(made), int(total)


def test_ranks_of_a_group_that_is_not_gloos_get_one_to_compare_in_by_themselves() -> None:
    assert on_threads(4, host_group) == 2 * [([0, 1], 1)] + 2 * [([2, 3], 5)]


# --- a SwiGLU MLP as one function ---


CALLS: list[Any] = []
"""Of the one function, on all ranks."""


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = mlp._apply
    monkeypatch.setattr(mlp, "_apply", lambda *args: CALLS.append(None) or stock(*args))


def fused(model: nn.Module, frozen: tuple[str, ...], hooked: bool, nonlinear: str = "bf16") -> dict[str, Any]:
    """The loss and gradients of a sharded copy; `hooked`: its MLPs' linears are called by themselves."""
    model = copy.deepcopy(model)
    tp = parallelize(model, LLAMA, group())
    configure(model, TensorParallelConfig(), "tensorwise")
    tpar.to_fp8(model)
    fuse_producers(model, ActivationsConfig(fused=True, nonlinear=nonlinear))
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith(frozen))
    for layer in model.model.model.layers if hooked else ():
        layer.mlp.gate_proj.register_forward_hook(lambda *_: None)
    loss = model(TOKENS)
    loss.backward()
    assert len(tp.inputs) == 0
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


FROZEN = [
    (),
    ("gate_proj.weight",),
    ("up_proj.weight", "down_proj.weight", "up_proj.bias"),
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
]


@pytest.mark.parametrize(("num_ranks", "bias", "frozen"), [(4, False, ()), *((2, True, names) for names in FROZEN)])
def test_one_function_has_the_bits_of_its_linears(
    spied: None, num_ranks: int, bias: bool, frozen: tuple[str, ...]
) -> None:
    model = tpar.llama(torch.bfloat16, bias=bias)
    CALLS.clear()
    one = on_threads(num_ranks, fused, model, frozen, False)
    assert len(CALLS) == 2 * num_ranks
    linears = on_threads(num_ranks, fused, model, frozen, True)
    assert len(CALLS) == 2 * num_ranks
    for found, expected in zip(one, linears, strict=True):
        for name, grad in expected.items():
            assert (grad is None) == name.endswith(frozen or "nothing"), name
            assert found[name] is None if grad is None else torch.equal(found[name], grad), name


def test_with_inputs_kept_in_fp8_gradients_are_as_close_as_their_rounding() -> None:
    model = tpar.llama(torch.bfloat16, bias=True)
    one, linears = (on_threads(2, fused, model, (), hooked, "fp8")[0] for hooked in (False, True))
    assert_bitwise(one["loss"], linears["loss"])
    assert any(not torch.equal(one[name], linears[name]) for name in one)  # the product is made again
    assert min(sqnr_db(linears[name], one[name]) for name in one) > 20


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_of_it_changes_no_bit(use_reentrant: bool) -> None:
    plain, recomputed = tpar.llama(torch.bfloat16), tpar.llama(torch.bfloat16)
    recomputed.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    expected, found = (on_threads(2, fused, one.train(), (), False)[0] for one in (plain, recomputed))
    for name, grad in expected.items():
        assert_bitwise(found[name], grad)

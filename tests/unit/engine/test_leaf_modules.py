"""What a bound on ZeRO-3's live weights must leave room for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_ds.engine import deepspeed_fixes, leaf_modules


def ligers_forward() -> None:
    """Stands in for the forward that liger-kernel gives a causal LM."""


ligers_forward.__module__ = "liger_kernel.transformers.model.llama"


def engine(
    loss: str,
    live: int,
    reuse: int,
    stage: int = 3,
    has_leaves: bool = True,
    key: str = "stage3_max_live_parameters",
    tied: bool = False,
) -> Any:
    """Of a model with an embedding of 5,000 weights, a head of 4,000, or the embedding's, four layers of 1,000 and a
    norm that persists."""
    model: Any = nn.Module()
    model.embedding, model.norm = nn.Linear(50, 100, bias=False), nn.Linear(1, 1)
    model.lm_head = model.embedding if tied else nn.Linear(50, 80, bias=False)
    model.layers = nn.ModuleList(nn.Linear(50, 20, bias=False) for _ in range(4))
    model.get_input_embeddings, model.get_output_embeddings = lambda: model.embedding, lambda: model.lm_head
    for p in model.parameters():
        p.ds_numel, p.ds_persist = p.numel(), p.numel() < 10
    for layer in model.layers:
        layer._z3_leaf = has_leaves
    if loss == "liger":
        model.forward = ligers_forward
    config = SimpleNamespace(
        zero_config=SimpleNamespace(max_live_parameters=live), _param_dict={"zero_optimization": {key: live}}
    )
    return SimpleNamespace(
        module=model,
        _config=config,
        zero_optimization_partition_weights=lambda: stage == 3,
        zero_max_live_parameters=lambda: config.zero_config.max_live_parameters,
        zero_max_reuse_distance=lambda: reuse,
    )


@pytest.mark.parametrize(
    ("loss", "tied", "reuse", "needed"),
    [
        ("stock", False, 0, 2_000),  # two leaves
        ("stock", False, 5_500, 3_000),  # the last two are kept, whose backward is 4,000 and 5,000 away
        ("stock", False, 9_000, 10_000),  # all four, and the embedding, between whose uses the head's two are
        ("stock", True, 1, 7_000),
        ("stock", True, 10**9, 9_000),  # all that there is
        ("liger", False, 0, 6_000),  # the head is held
        ("liger", False, 1_500, 7_000),
        ("liger", False, 10**9, 13_000),
    ],
)
def test_two_leaves_what_is_kept_and_what_is_held(loss: str, tied: bool, reuse: int, needed: int) -> None:
    assert leaf_modules.hint_on_live(engine(loss, needed, reuse, tied=tied)) is None
    line = leaf_modules.hint_on_live(engine(loss, needed - 1, reuse, tied=tied))
    assert line is not None and f"expected at least {needed:,} " in line and f"got {needed - 1:,}." in line
    assert ("Liger" in line) == (loss == "liger")


@pytest.mark.parametrize("loss", ["stock", "liger"])
def test_a_bound_that_nobody_has_set_is_one_that_suffices(loss: str) -> None:
    needed = 2_000 if loss == "stock" else 6_000
    for key in ("stage3_max_live_parameters", "max_live_parameters"):
        one = engine(loss, needed - 1, 0, key=key)
        assert deepspeed_fixes.raise_max_live_parameters(one) is None and one.zero_max_live_parameters() == needed - 1
    one = engine(loss, needed - 1, 0, key="stage")
    assert deepspeed_fixes.raise_max_live_parameters(one) is not None and one.zero_max_live_parameters() == needed
    assert deepspeed_fixes.raise_max_live_parameters(one) is None
    one.zero_max_live_parameters = lambda: 1
    assert leaf_modules.hint_on_live(one) is None  # nobody has set it: as for leaves that DeepSpeed itself makes later


@pytest.mark.parametrize("options", [{"live": 20_000}, {"live": 5, "stage": 2}, {"live": 5, "has_leaves": False}])
def test_a_bound_that_suffices_stays_and_nothing_is_said_without_leaves_or_shards(options: dict[str, Any]) -> None:
    one = engine("liger", reuse=10**9, key="stage", **options)
    assert leaf_modules.hint_on_live(one) is None and deepspeed_fixes.raise_max_live_parameters(one) is None
    assert one.zero_max_live_parameters() == options["live"]


class Block(nn.Module):
    """A layer of a list, with a linear that is in FP8 or not."""

    def __init__(self, is_fp8: bool, width: int = 4) -> None:
        super().__init__()
        self.linear: Any = nn.Linear(width, width, bias=False)
        if is_fp8:
            self.linear.weight._fp8 = None
        self.linear.weight.ds_numel = width * width

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Wide(Block):
    pass


def test_leaves_are_the_layers_of_one_class_with_most_weights_in_fp8() -> None:
    model: Any = nn.Module()
    model.vision, model.text = nn.Module(), nn.Module()
    model.vision.layers = nn.ModuleList(Block(True) for _ in range(5))
    model.text.layers = nn.ModuleList([Wide(False, 8), Wide(True, 8), Wide(True, 8), Block(True)])  # the first in bf16
    assert leaf_modules._repeated_layers(model) == list(model.text.layers)[:3]
    model.text.layers[2].linear.weight.ds_numel = 1
    assert leaf_modules._repeated_layers(model) == [*model.vision.layers, model.text.layers[3]]
    assert leaf_modules._repeated_layers(nn.Sequential(Block(True), Block(True))) == []


def test_a_list_whose_entries_are_not_called_has_no_leaves() -> None:
    model: Any = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"linear": Block(True)}) for _ in range(2))
    assert leaf_modules._repeated_layers(model) == []


def test_modules_that_are_used_outside_of_the_leaves_too_are_not_inside() -> None:
    model: Any = nn.Module()
    shared, blocks = nn.Identity(), [Block(True), Block(True)]
    blocks[1].shared = shared
    model.layers, model.shared = nn.ModuleList(blocks), shared
    assert leaf_modules._modules_inside(model, blocks) == [blocks[0].linear, blocks[1].linear]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("a backward that fails")


def test_gradients_of_a_block_are_reduced_with_the_last_one_of_a_backward() -> None:
    """Of those that it uses; and after a backward that failed between two of them as well."""
    first, second = (nn.Parameter(torch.ones(3, dtype=torch.float32)) for _ in range(2))
    frozen = nn.Parameter(torch.ones(3, dtype=torch.float32), requires_grad=False)
    seen: list[list[bool]] = []

    def reduce(*args: Any) -> None:
        seen.append([p.grad is not None for p in (first, second)])
        first.grad = second.grad = None

    hook = leaf_modules.GroupedGradHook(reduce, [first, second, frozen])
    (first * second * frozen).sum().backward()
    (2 * first).sum().backward()
    assert seen == [[True, True], [True, False]] and len(hook.handles) == 2
    failing = Fails.apply(second).sum()
    with pytest.raises(RuntimeError, match="that fails"):
        (failing + (2 * first).sum()).backward()
    assert len(seen) == 2 and first.grad is not None
    first.grad = None
    (first * second).sum().backward()
    assert seen[2:] == [[True, True]]

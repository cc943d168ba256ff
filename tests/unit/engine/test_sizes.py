"""How many tokens a batch has, and which linears that leaves in bf16, on all ranks alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8_ds.config import Fp8Config, ScheduleConfig
from fp8_ds.engine.precision import LayerPrecision
from fp8_ds.engine.sizes import SizeDecision, num_tokens_of
from fp8_ds.nn.plan import flops
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan

IDS, ROWS = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 5, 16)


@pytest.mark.parametrize(
    ("batch", "num"),
    [
        (((IDS,), {}), 21),
        (((), {"attention_mask": None, "input_ids": IDS}), 21),
        (((ROWS,), {"labels": torch.zeros(3, dtype=torch.long)}), 15),  # a class for each of the batch
        (((), {"inputs_embeds": ROWS, "labels": torch.zeros(3, 5, dtype=torch.long)}), 15),
        ((({"rows": [ROWS]},), {}), 15),
        (((torch.zeros(4),), {}), 4),
        (((torch.zeros(4, 0),), {}), 0),
        (((3, "text"), {}), 0),
    ],
)
def test_tokens_are_counted_by_the_shapes_of_a_batch(batch: Any, num: int) -> None:
    assert num_tokens_of(batch) == num


class Rank:
    """An engine with linears of 16 x 16 and 32 x 64, beside another rank whose batch has `others` tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, min_size: int | None, others: int = 0, device: str = "cpu"):
        def all_gather_object(everyone: list[Any], mine: Any) -> None:
            everyone[:] = [mine, (others, "")]

        monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        config = Fp8Config.model_validate({"enabled": True, "linear": {"min_size": min_size}})
        self.model = nn.ModuleDict({"small": nn.Linear(16, 16), "large": nn.Linear(32, 64)})
        apply_plan(self.model, make_plan(self.model, config.linear), config.linear, "cpu")
        self.said: list[str] = []
        self.precision = LayerPrecision(self.model, lambda names: None, ScheduleConfig(), None, self.said.append)
        self.engine = SimpleNamespace(
            module=self.model,
            optimizer=SimpleNamespace(fp8=SimpleNamespace(step=SimpleNamespace(adam=None))),
            device=torch.device(device),
            is_compiled=False,
            global_steps=0,
            fp8=SimpleNamespace(config=config),
        )
        self.sizes = SizeDecision(self.engine, self.precision)

    def decide(self, batch: Any = IDS) -> set[str]:
        self.sizes.see(((batch,), {}))
        self.sizes.decide()
        return set(self.precision.in_bf16)


def test_a_linear_whose_product_is_too_small_stays_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    for min_size, left in (
        (21 * 16 * 16, set()),
        (21 * 16 * 16 + 1, {"small"}),
        (21 * 32 * 64 + 1, {"small", "large"}),
    ):
        rank = Rank(monkeypatch, min_size)
        assert rank.sizes.is_open and rank.decide() == left == rank.precision.plain
        assert not rank.sizes.is_open and len(rank.said) == bool(left)


def test_the_rank_with_the_most_tokens_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Rank(monkeypatch, 22 * 16 * 16, others=22).decide() == set()
    assert Rank(monkeypatch, 22 * 16 * 16, others=21).decide() == {"small"}


def test_the_measured_rule_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Rank(monkeypatch, None).sizes.is_open
    assert not Rank(monkeypatch, 0, device="cuda").sizes.is_open
    assert Rank(monkeypatch, None, device="cuda").decide() == {"small", "large"}


def test_a_batch_without_tensors_leaves_all_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, 1 << 40)
    assert rank.decide("text") == set() and not rank.sizes.is_open


def test_a_compiled_models_linears_are_in_fp8_if_they_are_large_enough_in_the_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fp8_ds.nn.plan.flops.MIN_FEATURES", 0)
    monkeypatch.setitem(flops.MIN_MACS, "compiled", 21 * 16 * 16)
    mean = 21 * (16 * 16 + 32 * 64) // 2
    for least, left in ((mean, set()), (mean + 1, {"small"}), (21 * 32 * 64 + 1, {"small", "large"})):
        monkeypatch.setattr("fp8_ds.nn.plan.flops.MIN_MEAN_MACS", least)
        rank = Rank(monkeypatch, None, device="cuda")
        rank.engine.is_compiled = True
        assert rank.decide() == left
        assert not left or f"all of them from {least:.3g} in the mean" in rank.said[0]


def test_experts_that_end_the_graph_of_a_checkpointed_layer_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(hidden_size=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    rank = Rank(monkeypatch, None, device="cuda")
    layer = nn.Module()
    layer.experts, layer.gradient_checkpointing = mixtral.MixtralExperts(config), False
    model = nn.ModuleDict({"layer": layer})
    model.gradient_checkpointing = True  # of layers by themselves it says nothing
    linear = rank.engine.fp8.config.linear
    apply_plan(model, make_plan(model, linear), linear, "cpu")
    rank.engine.module = model
    rank.precision = LayerPrecision(model, lambda names: None, ScheduleConfig(), None, rank.said.append)
    monkeypatch.setattr("fp8_ds.nn.plan.flops.MIN_FEATURES", 0)
    monkeypatch.setitem(flops.MIN_MACS, "eager", 21 * 2 * 16 * 32)
    monkeypatch.setattr(flops, "MIN_CHECKPOINTED_MACS", 21 * 2 * 16 * 64 + 1)
    names = {"layer.experts.gate_up_proj", "layer.experts.down_proj"}
    for is_compiled, is_checkpointed, left in ((True, False, set()), (False, True, set()), (True, True, names)):
        rank.engine.is_compiled, layer.gradient_checkpointing = is_compiled, is_checkpointed
        rank.sizes = SizeDecision(rank.engine, rank.precision)
        assert rank.decide() == left
    assert "experts of checkpointed layers from 4.3e+04" in rank.said[0]


def wrap_forward(model: nn.Module) -> None:
    model["large"].forward = torch.compile(model["large"].forward)  # type: ignore[index]


@pytest.mark.parametrize("compile_some", [lambda model: model["small"].compile(), wrap_forward])
def test_a_model_of_which_a_user_has_compiled_a_part_is_a_compiled_one(
    monkeypatch: pytest.MonkeyPatch, compile_some: Any
) -> None:
    tokens = torch.zeros(1, 6_000_000, dtype=torch.long)  # enough for a compiled linear of 32 x 64, by its product
    for other in ("MIN_FEATURES", "MIN_MEAN_MACS"):
        monkeypatch.setattr(f"fp8_ds.nn.plan.flops.{other}", 0)
    eager, compiled = (Rank(monkeypatch, None, device="cuda") for _ in range(2))
    compile_some(compiled.model)
    assert eager.decide(tokens) == {"small", "large"} and compiled.decide(tokens) == {"small"}
    eager.engine.is_compiled = True
    eager.sizes.reopen()
    assert eager.decide(tokens) == {"small"}


def test_an_override_and_the_schedule_come_before_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, 1 << 40)
    rank.precision.overrides = {"small": "fp8", "large": "bf16"}
    assert rank.decide() == {"large"} and rank.precision.plain == frozenset()
    rank.precision.overrides = {}
    rank.precision.update(1)
    assert rank.precision.plain == {"small", "large"}

"""Numbers under fire: gradients that are not finite, outliers, zeros, weights that a user sets between steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import test_checkpoint as base
import torch
import torch.distributed as dist
import training
from support.ranks import on_ranks
from torch import Tensor

pytestmark = pytest.mark.distributed

DELAYED: dict[str, Any] = {"linear": {"recipe": "delayed"}}
IN_FP8: dict[str, Any] = {"zero": {"reduce_scatter": "fp8"}}
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")


def states(master: str) -> dict[str, Any]:
    return {"optimizer": {"states": "fp8", "master": master}}


def build(stage: int, fp8: dict[str, Any] | None, **overrides: Any) -> Any:
    return training.build(training.ds_config(stage, fp8, **overrides), base.MODEL)


# --- gradients ---


def poisoned(
    stage: int, fp8: dict[str, Any], accumulation: int, poison: float, everywhere: bool = False, **overrides: Any
) -> dict[str, Any]:
    """State before and after a step in which one element of one gradient is `poison` on the last rank, or on all."""
    engine = build(stage, fp8, gradient_accumulation_steps=accumulation, **overrides)
    training.train(engine, 2)
    before = base.snapshot(engine)

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[5] = poison
        return grad

    is_spoiled = everywhere or dist.get_rank() == dist.get_world_size() - 1
    handle = engine.module.blocks[1].down.weight.register_hook(spoil if is_spoiled else lambda grad: grad)
    training.train(engine, 1, first_step=2)
    handle.remove()
    after, skipped = base.snapshot(engine), engine.skipped_steps
    losses = training.train(engine, 2, first_step=3)
    moved = base.snapshot(engine)
    training.destroy(engine)
    return {"before": before, "after": after, "skipped": skipped, "losses": losses, "moved": moved}


UNCHECKED: dict[str, Any] = {"bf16": {"enabled": True, "check_grad_overflow": False}}
SKIPPED: list[Any] = [
    (1, states("e4m11"), 1, math.nan, {}),
    (2, states("e4m19"), 1, math.inf, UNCHECKED),
    (3, states("e4m19") | DELAYED, 1, -math.inf, {}),
    pytest.param(2, DELAYED, 1, math.inf, {}, marks=pytest.mark.slow),
    (3, DELAYED, 1, math.nan, {}),
    (2, {}, 4, 3e38, {}),  # each micro-batch's gradient is finite in bf16; their sum is not
    (2, IN_FP8, 2, math.inf, {}),
    pytest.param(3, IN_FP8, 2, math.nan, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("stage", "fp8", "accumulation", "poison", "overrides"), SKIPPED)
@on_ranks(2)
def test_all_ranks_skip_the_same_step_and_keep_every_bit(
    stage: int, fp8: dict[str, Any], accumulation: int, poison: float, overrides: dict[str, Any]
) -> None:
    assert_skipped(poisoned(stage, fp8, accumulation, poison, **overrides))


def assert_skipped(result: dict[str, Any]) -> None:
    assert result["skipped"] == 1
    base.assert_same(result["after"], result["before"])
    moved = [name for name, value in result["before"].items() if not torch.equal(result["moved"][name], value)]
    assert any(name.startswith("master") for name in moved)
    assert all(math.isfinite(loss) and loss < 6 for loss in result["losses"])


@on_ranks(2)
def test_unchecked_gradients_that_are_not_finite_show_as_nan() -> None:
    """In stage 1, as in stock: FP8's saturation does not hide them. Stage 3 checks always."""
    result = poisoned(1, DELAYED, 1, math.nan, **UNCHECKED)
    assert result["skipped"] == 0 and math.isnan(result["losses"][0])


IN_FP16 = {"communication_data_type": "fp16"}
WHOLE = {**IN_FP16, "zero_optimization": {"reduce_scatter": False}}
"""DeepSpeed adds up first and divides by the number of ranks then; else the other way about."""


@pytest.mark.parametrize(
    ("stage", "fp8", "gradient", "overflows", "holds"),
    [(1, {}, 5e4, WHOLE, IN_FP16), (3, states("e4m11"), 1e6, IN_FP16, {})],
    ids=["1-sum", "3-e4m11-sent"],
)
@on_ranks(2)
def test_a_gradient_that_only_its_reduction_over_ranks_makes_infinite_is_skipped_too(
    stage: int, fp8: dict[str, Any], gradient: float, overflows: dict[str, Any], holds: dict[str, Any]
) -> None:
    """Finite on each rank; fp16 (at most 65504) does not hold the sum of both ranks, or what each of them sends."""
    assert_skipped(poisoned(stage, fp8, 1, gradient, True, **overflows))
    assert poisoned(stage, fp8, 1, gradient, True, **holds)["skipped"] == 0


# --- activations ---


def outlier(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    factor = torch.ones_like(inputs[0])
    factor[0, 0, 3] = 1e4
    return (inputs[0] * factor, *inputs[1:])


def zeros(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0] * 0, *inputs[1:])


HOOKS: dict[str, Callable[..., Any]] = {"outlier": outlier, "zeros": zeros}


def trained_with(kind: str, recipes: tuple[str, ...], num_steps: int) -> dict[str, list[float]]:
    """Losses by recipe, and of stock bf16, of a run whose every input of one linear is spoiled."""
    found = {}
    for recipe in ("bf16", *recipes):
        fp8 = None if recipe == "bf16" else {"linear": {"recipe": recipe}}
        engine = build(2, fp8)
        engine.module.blocks[0].down.register_forward_pre_hook(HOOKS[kind])
        found[recipe] = training.train(engine, num_steps)
        assert engine.skipped_steps == 0
        masters = training.full_masters(engine)
        assert all(bool(torch.isfinite(master).all()) for master in masters.values())
        training.destroy(engine)
    return found


@pytest.mark.parametrize("kind", HOOKS)
def test_outliers_of_1e4_and_zeros_stay_finite_and_train_as_bf16(ranks: Any, kind: str) -> None:
    for found in ranks(2).run(trained_with, kind, RECIPES, 5):
        stock = found.pop("bf16")
        for recipe, losses in found.items():
            assert losses[-1] < losses[0], recipe
            # A tensor's one scale loses everything beside the outlier; rows and blocks lose what shares its own.
            bound = 0.15 if recipe in ("tensorwise", "delayed") and kind == "outlier" else 0.03
            assert max(abs(a - b) for a, b in zip(losses, stock, strict=True)) < bound, (recipe, losses, stock)


@pytest.mark.parametrize(("stage", "recipe"), zip((3, 2, 3, 1), RECIPES, strict=True))
@on_ranks(2)
def test_a_batch_of_zeros_is_a_batch(stage: int, recipe: str) -> None:
    engine = build(stage, {"linear": {"recipe": recipe}})
    losses = training.train(engine, 1)
    tokens = torch.zeros(training.MICRO_BATCH, training.LENGTH + 1, dtype=torch.int64)
    for _ in range(2):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    losses += training.train(engine, 1, first_step=1)
    training.destroy(engine)
    assert all(math.isfinite(loss) for loss in losses) and losses[2] < losses[1]


@patch("fp8_ds.engine.step_callbacks.GUARD_EVERY", 2)
@patch("fp8_ds.monitor.overshoot.NUM_UPDATES_TO_SETTLE", 3)
def spiked() -> dict[str, Any]:
    """Losses of ten steps, from the sixth of which on the head's inputs are 300 times as large on the last rank;
    layers in bf16 after each; what the guard says, which judges every two steps."""

    with training.log_lines() as said:
        fp8 = {
            "linear": {"recipe": "delayed", "filter_fqns": []},
            "guard": {"action": "bf16"},
        }
        engine = build(3, fp8)
        losses, in_bf16 = [], []
        for step in range(10):
            if step == 5 and dist.get_rank() == 1:
                engine.module.lm_head.register_forward_pre_hook(lambda _, inputs: (300 * inputs[0],))
            losses += training.train(engine, 1, first_step=step)
            in_bf16.append(sorted(engine.fp8.precision.in_bf16))
        training.destroy(engine)
    return {"losses": losses, "in_bf16": in_bf16, "said": [line for line in said if "guard, step" in line]}


def test_where_inputs_jump_the_loss_spikes_and_the_guard_sends_their_layer_to_bf16_on_all_ranks(ranks: Any) -> None:
    for rank, result in enumerate(ranks(2).run(spiked)):
        losses = result["losses"]
        # The first such step saturates; in the second the scale has followed, and the loss jumps.
        assert losses[6] > losses[4] + 5 and all(math.isfinite(loss) for loss in losses)
        assert len(result["said"]) == (1 if rank == 0 else 0), result["said"]
        for line in result["said"]:
            assert "guard, step 6: 1 layers" in line and "lm_head: input up to 3e+02 times" in line, line
        # An interval is judged one step after it.
        assert result["in_bf16"] == [[]] * 6 + [["lm_head"]] * 4


# --- weights ---


@pytest.mark.parametrize(("stage", "recipe", "factor"), [(3, "tensorwise", 64.0), (1, "delayed", 0.0)])
@on_ranks(2)
def test_a_weight_set_between_steps_has_the_scale_of_its_new_values(stage: int, recipe: str, factor: float) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    engine = build(stage, {"linear": {"recipe": recipe}}, optimizer={"params": {"lr": 1e-6, "torch_adam": True}})
    training.train(engine, 2)
    p = engine.module.blocks[1].up.weight
    before = safe_get_full_fp32_param(p).clone()
    safe_set_full_fp32_param(p, before * factor)
    losses = training.train(engine, 2, first_step=2)
    masters, state = training.full_masters(engine), training.fp8_state(engine)
    training.destroy(engine)
    torch.testing.assert_close(masters["blocks.1.up.weight"], before * factor, rtol=1e-3, atol=1e-4)
    training.assert_fp8_follows_masters(state, masters)
    assert all(math.isfinite(loss) for loss in losses)

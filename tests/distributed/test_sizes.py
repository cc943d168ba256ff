"""Linears that are too small to gain are in bf16 from the first forward on, as a schedule would put them there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from support.models import Llama
from support.ranks import on_ranks

pytestmark = pytest.mark.distributed

TOKENS = training.MICRO_BATCH * (training.LENGTH + 1)
MODEL = {"num_blocks": 2, "tiny": True}
BLOCKS = [f"blocks.{i}.{name}" for i in range(2) for name in ("down", "up")]  # 64 x 192
SMALL = ["lm_head", "tiny"]  # 64 x 96, 1 x 5
SOME, ALL = TOKENS * 64 * 192, TOKENS * 64 * 192 + 1
"""Least sizes that leave these in bf16, and all of them."""
STATES = {"optimizer": {"states": "fp8"}}


def block_of(recipe: str, min_size: int, **others: Any) -> dict[str, Any]:
    return {"linear": {"recipe": recipe, "filter_fqns": [], "min_size": min_size}, **others}


def in_bf16(engine: Any) -> list[str]:
    assert engine.fp8_report()["num_layers_in_bf16"] == len(engine.fp8.precision.in_bf16)
    return sorted(engine.fp8.precision.in_bf16)


def trained(stage: int, fp8: dict[str, Any], evaluates: bool, **config: Any) -> tuple[Any, ...]:
    """Losses of 4 steps, the masters, and the layers in bf16 after them."""
    engine = training.build(training.ds_config(stage, fp8, **config), MODEL)
    if evaluates:
        engine.eval()
        engine(training.micro_batches(99, 1)[0][:1])  # not under no_grad: by its mode alone an evaluation
        engine.train()
        assert in_bf16(engine) == ([] if "schedule" not in fp8 else in_bf16(engine))
    found = training.train(engine, 4), training.full_masters(engine), in_bf16(engine)
    training.destroy(engine)
    return found


@pytest.mark.parametrize(
    ("stage", "recipe", "others", "min_size", "evaluates"),
    [
        pytest.param(1, "delayed", {}, SOME, False, marks=pytest.mark.slow),
        pytest.param(2, "tensorwise", STATES, SOME, True, marks=pytest.mark.slow),
        (2, "delayed", STATES, ALL, False),
        (3, "delayed", {}, SOME, True),
    ],
)
@on_ranks(2)
def test_small_layers_have_the_bits_of_layers_that_a_schedule_puts_into_bf16(
    stage: int, recipe: str, others: dict[str, Any], min_size: int, evaluates: bool
) -> None:
    small = SMALL if min_size == SOME else sorted(SMALL + BLOCKS)
    layers = {"schedule": {"layers": dict.fromkeys(small, "bf16")}}
    config = {"gradient_accumulation_steps": 2}
    by_size = trained(stage, block_of(recipe, min_size, **others), evaluates, **config)
    by_name = trained(stage, block_of(recipe, 0, **others, **layers), evaluates, **config)
    assert by_size[0] == by_name[0] and by_size[2] == by_name[2] == small
    assert all(torch.equal(master, by_name[1][name]) for name, master in by_size[1].items())
    assert by_size[0] != trained(stage, block_of(recipe, 0, **others), False, **config)[0]


@on_ranks(2)
def test_the_longest_batch_decides_and_rank_0_says_so() -> None:
    engine = training.build(training.ds_config(2, block_of("tensorwise", SOME + 1)), {"num_blocks": 2})
    rows = 5 if dist.get_rank() else 4
    with training.log_lines() as said:
        engine(torch.zeros(rows, training.LENGTH + 1, dtype=torch.long))
    assert in_bf16(engine) == ["lm_head"]
    told = [line for line in said if "too small to gain" in line]
    assert len(told) == (dist.get_rank() == 0) and all("1 of 5" in line and "165 tokens" in line for line in told)
    training.destroy(engine)


@pytest.mark.parametrize(
    ("stage", "optimizer", "others", "words"),
    [
        (2, "AdamW", STATES, "by its FP8 states alone"),
        (2, "AdamW", {}, "by its step of Adam alone: set"),
        (3, "AdamW", {"without_deepspeed_fixes": ["adam_step"]}, "nothing is gained: set"),
        (2, "Adagrad", {}, "nothing is gained: set"),
    ],
)
@on_ranks(1)
def test_where_none_is_left_in_fp8_rank_0_says_what_may_still_gain(
    stage: int, optimizer: str, others: dict[str, Any], words: str
) -> None:
    config = training.ds_config(stage, block_of("tensorwise", ALL, **others), zero_allow_untested_optimizer=True)
    if optimizer != "AdamW":
        config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-3}}
    engine = training.build(config, {"num_blocks": 2})
    with training.log_lines() as said:
        training.train(engine, 1)
    assert in_bf16(engine) == sorted(["lm_head", *BLOCKS])
    (line,) = [line for line in said if "too small to gain" in line]
    assert "5 of 5 linears" in line and words in line
    training.destroy(engine)


@pytest.mark.parametrize(("stage", "fp8"), [(1, STATES), pytest.param(2, {}, marks=pytest.mark.slow), (3, {})])
@on_ranks(2)
def test_resume_is_exact_and_evaluates_as_before(stage: int, fp8: dict[str, Any], folder: str) -> None:
    config = training.ds_config(stage, block_of("delayed", SOME, **fp8))
    engine = training.build(config, MODEL)
    training.train(engine, 3)
    engine.save_checkpoint(folder)
    loss, through = evaluate(engine), training.train(engine, 3, 3)
    training.destroy(engine)
    engine = training.build(config, MODEL, seed=7)
    engine.load_checkpoint(folder)
    assert in_bf16(engine) == SMALL and evaluate(engine) == loss
    assert training.train(engine, 3, 3) == through
    training.destroy(engine)


@on_ranks(2)
def test_layers_that_come_back_with_a_checkpoint_scale_by_what_they_see(folder: str) -> None:
    """Nobody has recorded their amaxes: the first step is as one without a history, and not by a scale of 1."""
    engine = training.build(training.ds_config(2, block_of("delayed", SOME)), MODEL)
    training.train(engine, 3)
    engine.save_checkpoint(folder)
    training.destroy(engine)
    found = []
    for recipe in ("delayed", "tensorwise"):
        engine = training.build(training.ds_config(2, block_of(recipe, 0)), MODEL, seed=7)
        engine.load_checkpoint(folder)
        found.append((training.train(engine, 1, 3), training.full_masters(engine)))
        assert in_bf16(engine) == []
        training.destroy(engine)
    (loss, masters), (expected, expected_masters) = found
    assert loss == expected
    assert all(torch.equal(master, expected_masters[name]) for name, master in masters.items())


def evaluate(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(training.micro_batches(500, 1)[0]))
    engine.train()
    return loss


def compiled(min_size: int, layers: dict[str, str], at: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Losses of 4 steps, compiled before step `at`; a compiled linear pays from a tenth of `min_size` on."""
    import fp8_ds.nn.plan.flops as flops
    from fp8_ds.engine.sizes import SizeRule

    monkeypatch.setattr(
        SizeRule, "of", lambda size, *, is_compiled: flops.SizeRule(size // 10 if is_compiled else size)
    )
    schedule = {"schedule": {"layers": layers}} if layers else {}
    engine = training.build(training.ds_config(2, block_of("tensorwise", min_size, **schedule)), MODEL)
    losses = training.train(engine, at)
    before = in_bf16(engine)
    torch._dynamo.reset()
    engine.compile(backend="aot_eager")
    losses += training.train(engine, 4 - at, at)
    assert layers or (before, in_bf16(engine)) == (sorted(SMALL + BLOCKS) if at else [], ["tiny"])
    training.destroy(engine)
    return losses


@on_ranks(1)
def test_compiling_decides_again_and_a_compiled_layer_has_the_same_bits() -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_once = compiled(ALL, {}, 0, patch)
        assert at_once == compiled(0, {"tiny": "bf16"}, 0, patch)
        assert len(set(compiled(ALL, {}, 2, patch)) | set(at_once)) == 8  # two steps in bf16 come first


def llama(fp8: dict[str, Any] | None, stage: int = 2) -> tuple[list[float], list[str]]:
    """Losses of 4 steps of a Llama with norms and MLPs that are fused where a reader is in FP8; layers in bf16."""
    torch.manual_seed(0)
    block = None if fp8 is None else {"activations": {"fused": True}, **fp8}
    engine = training.start(Llama(num_key_value_heads=1), training.ds_config(stage, block))
    found = training.train(engine, 4), [] if fp8 is None else in_bf16(engine)
    training.destroy(engine)
    return found


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@on_ranks(2)
def test_linears_and_fused_modules_have_the_bits_of_stock_bf16_where_none_gains(stage: int) -> None:
    block = {"linear": {"recipe": "delayed", "min_size": 1 << 40}}
    # Stage 3 clips by a norm in float64.
    losses, names = llama({**block, "without_deepspeed_fixes": ["adam_step"]}, stage)
    assert len(names) == 14
    assert losses == llama(None, stage)[0] != llama({"linear": {"recipe": "delayed"}}, stage)[0]


@on_ranks(2)
def test_in_stage_3_linears_with_biases_are_deepspeeds_own_where_none_gains() -> None:
    """Its own function of a linear rounds before the bias, as `F.linear` does not."""
    fp8 = block_of("tensorwise", ALL, without_deepspeed_fixes=["adam_step"])
    losses = []
    for block in (fp8, None):
        engine = training.build(training.ds_config(3, block), MODEL)
        losses.append(training.train(engine, 3))
        training.destroy(engine)
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_fused_norm_serves_the_readers_that_gain() -> None:
    small = [f"model.model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "kv"]
    by_size = llama({"linear": {"recipe": "delayed", "min_size": TOKENS * 64 * 16 + 1}})
    by_name = llama({"linear": {"recipe": "delayed"}, "schedule": {"layers": dict.fromkeys(small, "bf16")}})
    assert by_size[1] == small
    assert by_size == by_name

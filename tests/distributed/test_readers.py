"""Who reads and writes weights past the engine: GatheredParameters, safe_* functions, other modules, evaluation."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
import training
from support.ranks import on_ranks

import fp8_ds

pytestmark = pytest.mark.distributed

SPLIT = {"optimizer": {"states": "fp8", "master": "e4m11"}}


def max_difference(left: list[float], right: list[float]) -> float:
    assert all(math.isfinite(loss) for loss in left + right)
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def gathered(fp8: dict[str, Any] | None, threshold: int) -> dict[str, Any]:
    """Weights are read between steps; then rank 0 zeroes `down` of every block, so that the blocks add nothing, and
    other ranks write what must be ignored; a step at a rate of zero follows."""
    import deepspeed

    zero = {"stage3_param_persistence_threshold": threshold}
    engine = training.build(training.ds_config(3, fp8, zero_optimization=zero))
    training.train(engine, 2)
    params, batch = dict(engine.module.named_parameters()), training.micro_batches(0, 1)[0]
    masters, state = training.full_masters(engine), training.fp8_state(engine) if fp8 is not None else {}
    wrong = []
    for chosen in (list(params), ["blocks.0.up.weight"]):
        with deepspeed.zero.GatheredParameters([params[name] for name in chosen], modifier_rank=0):  # but writes none
            wrong += [n for n in chosen if not torch.equal(params[n].detach().clone(), masters[n].bfloat16())]
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0

    def loss() -> float:
        with torch.no_grad():
            return float(engine(batch))

    losses, weights = [loss()], [block.down.weight for block in engine.module.blocks]
    with deepspeed.zero.GatheredParameters(weights, modifier_rank=0), torch.no_grad():
        for weight in weights:
            weight.mul_(0.0 if torch.distributed.get_rank() == 0 else 7.0)
    with deepspeed.zero.GatheredParameters(weights[:1]):
        wrong += [] if bool((weights[0] == 0).all()) else ["zeros"]
    losses.append(loss())
    training.train(engine, 1, first_step=2)
    losses.append(loss())
    if fp8 is not None:
        training.assert_fp8_equals(training.fp8_state(engine), state)
    training.destroy(engine)
    return {"wrong": wrong, "losses": losses}


@pytest.mark.parametrize("threshold", [0, 100_000], ids=["sharded", "persistent"])
def test_gathered_parameters_read_bf16_of_masters_and_write_until_the_next_step(ranks: Any, threshold: int) -> None:
    stock = ranks(2).run(gathered, None, threshold)
    for ours, theirs in zip(ranks(2).run(gathered, {}, threshold), stock, strict=True):
        assert ours["wrong"] == theirs["wrong"] == []
        for before, written, after_step in (ours["losses"], theirs["losses"]):  # the masters win, as in stock
            assert after_step == before != written
        assert max_difference(ours["losses"], theirs["losses"]) < 0.02


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_moving_a_model_to_where_it_is_changes_no_weight(stage: int) -> None:
    """As `deepspeed.init_inference(engine.module)` does, whose scales were rounded; in stage 3 it was an error."""
    engine = training.build(training.ds_config(stage, {}))
    training.train(engine, 2)
    batch, state = training.micro_batches(9, 1)[0], training.fp8_state(engine)
    with torch.no_grad():
        before = float(engine(batch))  # and stage 3 keeps weights gathered behind it
        engine.module.to(engine.device, torch.bfloat16)
        assert float(engine(batch)) == before
    training.assert_fp8_equals(training.fp8_state(engine), state)
    training.destroy(engine)


def safe_functions(stage: int, fp8: dict[str, Any] | None) -> dict[str, Any]:
    from deepspeed import utils

    adam = {"params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}}
    engine = training.build(training.ds_config(stage, fp8, optimizer=adam, gradient_clipping=0.0))
    name = "blocks.1.up.weight"
    weight = dict(engine.module.named_parameters())[name]
    first = utils.safe_get_full_fp32_param(weight).clone()
    result: dict[str, Any] = {"first": first}

    def backward(step: int) -> None:
        engine.backward(engine(training.micro_batches(step, 2)[torch.distributed.get_rank()]))

    backward(0)
    result["grad"] = utils.safe_get_full_grad(weight).float().clone()
    utils.safe_set_full_grad(weight, GRADIENT.expand_as(first).bfloat16())
    engine.step()
    result["moved"] = first - utils.safe_get_full_fp32_param(weight)
    result["moment"] = utils.safe_get_full_optimizer_state(weight, "exp_avg").clone()
    value = torch.linspace(-3, 5, first.numel()).view_as(first)
    utils.safe_set_full_fp32_param(weight, value)
    for key in ("exp_avg", "exp_avg_sq"):
        utils.safe_set_full_optimizer_state(weight, torch.full_like(value, 0.5), key)
    result["moments"] = utils.safe_get_full_optimizer_state(weight, "exp_avg_sq").clone()
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    backward(1)
    engine.step()
    result["set"] = (utils.safe_get_full_fp32_param(weight).clone(), value)
    if fp8 is not None:
        result["bytes"] = training.fp8_state(engine)[name]
    if stage == 3:
        size = weight.ds_tensor.ds_numel
        mine = value.flatten()[torch.distributed.get_rank() * size :][:size]
        local = [utils.safe_get_local_fp32_param(weight).flatten()[: mine.numel()] - mine]
        utils.safe_set_local_fp32_param(weight, torch.full((size,), 2.0))
        utils.safe_set_local_optimizer_state(weight, torch.full((size,), 0.25), "exp_avg")
        local += [utils.safe_get_full_fp32_param(weight) - 2.0]
        local += [utils.safe_get_full_optimizer_state(weight, "exp_avg") - 0.25]
        result["local"] = max(float(one.abs().max()) for one in local)
    training.destroy(engine)
    return result


GRADIENT = torch.tensor([1.0, -0.5]).repeat(32)
"""Of one row."""


@pytest.mark.parametrize(
    ("stage", "fp8"),
    [pytest.param(1, {}, marks=pytest.mark.slow), (2, SPLIT), (3, {}), pytest.param(3, SPLIT, marks=pytest.mark.slow)],
)
def test_safe_functions_see_and_set_masters_gradients_and_states(ranks: Any, stage: int, fp8: dict[str, Any]) -> None:
    from fp8_ds.testing import sqnr_db

    stock = ranks(2).run(safe_functions, stage, None)
    for ours, theirs in zip(ranks(2).run(safe_functions, stage, fp8), stock, strict=True):
        assert torch.equal(ours["first"].bfloat16(), theirs["first"].bfloat16())
        assert sqnr_db(theirs["grad"], ours["grad"]) > 15
        step = 1e-3 * GRADIENT.sign().expand_as(ours["moved"])
        torch.testing.assert_close(ours["moved"], step, rtol=1e-2, atol=5e-5)
        torch.testing.assert_close(ours["moment"], 0.1 * GRADIENT.expand_as(step), rtol=2.0**-4, atol=0)
        torch.testing.assert_close(ours["moments"], torch.full_like(step, 0.5), rtol=2.0**-4 if fp8 else 0, atol=0)
        got, value = ours["set"]
        torch.testing.assert_close(got, value, rtol=2.0**-12 if fp8 else 0, atol=1e-12)
        assert ours.get("local", 0.0) <= (2.0**-12 * 5 if fp8 else 0)
        if not fp8:
            data, scale_inv = training.expected_fp8(value)
            assert torch.equal(ours["bytes"][0], data) and torch.equal(ours["bytes"][1], scale_inv)


def external(stage: int, fp8: dict[str, Any] | None) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_grad

    zero, checkpointing = {}, ""
    if stage == 3:  # released after the forward, so that the backward gathers anew
        zero, checkpointing = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}, "non-reentrant"
    config = training.ds_config(stage, fp8, zero_optimization=zero, gradient_clipping=0.0)
    engine = training.build(config, {"external": True, "checkpointing": checkpointing})
    engine.backward(engine(training.micro_batches(0, 2)[torch.distributed.get_rank()]))
    grads = {n: safe_get_full_grad(p).float().clone() for n, p in engine.module.named_parameters()}
    engine.step()
    losses = training.train(engine, 6, first_step=1)
    assert engine.skipped_steps == 0
    training.destroy(engine)
    return {"losses": losses, "grads": grads}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_weight_used_by_another_module_has_its_true_value_and_gradient(ranks: Any, stage: int) -> None:
    from fp8_ds.testing import sqnr_db

    ours, stock = (ranks(2).run(external, stage, fp8)[0] for fp8 in ({}, None))
    for name, grad in stock["grads"].items():
        assert sqnr_db(grad, ours["grads"][name]) > 15, name
    assert max_difference(ours["losses"], stock["losses"]) < 0.02
    assert ours["losses"][-1] < 0.9 * ours["losses"][0]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@on_ranks(2)
def test_evaluation_has_the_loss_of_training_and_leaves_no_trace(stage: int) -> None:
    batch, found = training.micro_batches(77, 1)[0], []
    for evaluates in (False, True):
        engine = training.build(training.ds_config(stage, {}))
        losses = training.train(engine, 2)
        if evaluates:
            evaluated = {float(engine(batch))}  # training mode, no backward after it
            for in_training, context in ((True, torch.no_grad), (False, torch.no_grad), (False, torch.inference_mode)):
                engine.train(in_training)
                with context():
                    evaluated.add(float(engine(batch)))
            assert len(evaluated) == 1
            engine.train()
        found.append(losses + training.train(engine, 2, first_step=2))
        training.destroy(engine)
    assert found[0] == found[1]


@pytest.mark.parametrize(("layers", "num_lines"), [("lm_head", 1), ("blocks", 0)])
@on_ranks(1)
def test_state_dict_says_once_that_it_holds_fp8_values_if_there_are_any(layers: str, num_lines: int) -> None:
    fp8 = SPLIT | {"linear": {"filter_fqns": ["lm_head", layers]}}
    engine = training.build(training.ds_config(2, fp8))
    with training.log_lines() as said:
        for _ in range(2):
            engine.module.state_dict()
    training.destroy(engine)
    assert len(said) == num_lines


@on_ranks(2)
def test_a_copy_of_the_model_computes_what_it_did_and_has_no_engine() -> None:
    """As moving averages and reference models start."""
    engine = training.build(training.ds_config(2, SPLIT | {"linear": {"recipe": "delayed"}}))
    engine.set_layer_precision("blocks.1", "bf16")
    training.train(engine, 2)
    batch = training.micro_batches(77, 1)[0]
    copied = copy.deepcopy(engine.module)
    for (name, p), of_copy in zip(engine.module.named_parameters(), copied.parameters(), strict=True):
        assert type(of_copy) is torch.nn.Parameter and torch.equal(p.detach(), of_copy), name
    buffer = io.BytesIO()
    torch.save(copied.blocks, buffer)  # not the whole: a hook that DeepSpeed gives the model is no global
    buffer.seek(0)
    loaded = copy.deepcopy(copied)
    loaded.blocks = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        losses = {float(model(batch)) for model in (engine, copied, loaded, copy.deepcopy(loaded).float().bfloat16())}
    training.train(engine, 2, first_step=2)
    with training.log_lines() as said:
        copied.load_state_dict({name: value.clone() for name, value in copied.state_dict().items()})
    assert said == []
    training.destroy(engine)
    optimizer, alone = torch.optim.AdamW(copied.parameters(), lr=3e-3), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = copied(batch)
        loss.backward()
        optimizer.step()
        alone.append(float(loss))
    assert losses == {alone[0]} and alone[-1] < alone[0] - 0.1


@on_ranks(2)
def test_a_second_backward_through_a_graph_of_stage_3_names_the_weight_that_is_not_there() -> None:
    config = training.ds_config(3, {"linear": {"filter_fqns": []}})
    engine = training.build(config, {"width": 32, "hidden": 64, "num_blocks": 1})
    loss = engine(training.micro_batches(0, 1)[0])
    engine.backward(loss, retain_graph=True)
    with pytest.raises(fp8_ds.UnsupportedError, match=r"^lm_head\.weight:"):
        loss.backward()
    training.destroy(engine)

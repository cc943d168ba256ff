"""Layers go to bf16 of their masters and come back, in every stage, on all ranks alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from support.ranks import on_ranks

from fp8_ds.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.distributed

SPLIT = {"optimizer": {"states": "fp8", "master": "e4m19"}}
ALWAYS = {"schedule": {"bf16_until_step": 1000}}


def losses_of(fp8: dict[str, Any] | None, stage: int, model: dict[str, Any], num: int = 4) -> list[float]:
    engine = training.build(training.ds_config(stage, fp8), model)
    losses = training.train(engine, num)
    training.destroy(engine)
    return losses


@pytest.mark.parametrize(
    ("stage", "model"),
    [
        (2, {"width": 50, "hidden": 70, "num_blocks": 2, "tiny": True}),
        (3, {"external": True, "checkpointing": "non-reentrant", "bias": False}),
    ],
)
def test_all_layers_in_bf16_is_stock_bf16_bit_for_bit(ranks: Any, stage: int, model: dict[str, Any]) -> None:
    ours, stock, fp8 = (ranks(2).run(losses_of, block, stage, model) for block in (ALWAYS, None, {}))
    assert ours == stock != fp8


def weights_as_read(engine: Any) -> dict[str, torch.Tensor]:
    """What any reader of the FP8 weights sees now, on this rank. Collective in stage 3."""
    import deepspeed

    found = {}
    for name, p in engine.fp8.weights.items():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone().float().cpu()
    return found


def phases(stage: int, fp8: dict[str, Any]) -> dict[str, Any]:
    """bf16 for 2 steps, FP8 for 2, bf16 for the last 2."""
    schedule = {"bf16_until_step": 2, "bf16_last_fraction": 0.34, "total_steps": 6}
    engine = training.build(training.ds_config(stage, {**fp8, "schedule": schedule}))
    result: dict[str, Any] = {"losses": [], "bytes": [], "num": []}
    for step in range(6):
        result["num"].append(engine.fp8_report()["num_layers_in_bf16"])
        result["losses"] += training.train(engine, 1, step)
        report = engine.fp8_report()
        result["bytes"].append((report["gathered_fp8_bytes"], report["gathered_bytes"]))
        if step == 0:  # the next one is in bf16
            result["read"] = weights_as_read(engine)
            result["masters"] = {name: training.full_masters(engine)[name] for name in engine.fp8.weights}
    engine.set_layer_precision("", "fp8")
    result["back"], result["last_masters"] = training.fp8_state(engine), training.full_masters(engine)
    training.destroy(engine)
    return result


@pytest.mark.parametrize(("stage", "fp8"), [(1, {}), (3, {}), (2, SPLIT)])
def test_a_schedule_moves_bf16_of_the_masters_then_fp8_then_bf16(ranks: Any, stage: int, fp8: dict[str, Any]) -> None:
    results = ranks(2).run(phases, stage, fp8)
    for result in results:
        assert result["num"] == [6, 6, 0, 0, 6, 6]
        assert result["losses"] == results[0]["losses"]
        for name, master in result["masters"].items():
            assert torch.equal(result["read"][name], master.bfloat16().float()), name
        if not fp8:
            training.assert_fp8_follows_masters(result["back"], result["last_masters"])
        training.assert_fp8_equals(result["back"], results[0]["back"])
        # Stages 1 and 2 gather when a step ends, by what the layers computed in; then they are switched.
        weights = sum(master.numel() for master in result["masters"].values())
        fp8_bytes, hp_bytes = zip(*((fp8, all_ - fp8) for fp8, all_ in result["bytes"]), strict=True)
        assert fp8_bytes[0] == fp8_bytes[1] == fp8_bytes[5] == 0
        assert fp8_bytes[3] == pytest.approx(weights, rel=0.03)
        assert hp_bytes[5] - hp_bytes[3] == pytest.approx(2 * weights, rel=0.03)


def evaluate(engine: Any, step: int) -> float:
    engine.eval()
    with torch.no_grad():
        loss = engine(training.micro_batches(step, 1)[0].to(engine.device)).float()
    engine.train()
    return float(loss)


@on_ranks(2)
def test_a_switch_makes_no_jump_in_the_loss_and_the_way_back_is_exact() -> None:
    config = training.ds_config(1, {"linear": {"recipe": "delayed"}})
    engine = training.build(config)
    training.train(engine, 15)
    in_fp8 = evaluate(engine, 500)
    assert engine.set_layer_precision("up", "bf16") == [f"blocks.{i}.up" for i in range(3)]
    some = evaluate(engine, 500)
    engine.set_layer_precision("", "bf16")
    in_bf16 = evaluate(engine, 500)
    engine.set_layer_precision("", "schedule")
    assert engine.fp8_report()["num_layers_in_bf16"] == 0
    assert evaluate(engine, 500) == in_fp8 < 4.0  # trained: log(96) is 4.56
    assert len({in_fp8, some, in_bf16}) == 3
    assert max(abs(in_fp8 - in_bf16), abs(in_fp8 - some)) < 0.005 * in_bf16
    after = training.train(engine, 2, 15)
    training.destroy(engine)
    engine = training.build(config)
    assert training.train(engine, 17)[15:] == after
    training.destroy(engine)


@pytest.mark.parametrize(
    ("stage", "fp8", "save_at"), [pytest.param(2, {}, 1, marks=pytest.mark.slow), (3, {}, 5), (1, SPLIT, 7)]
)
@on_ranks(2)
def test_resume_is_exact_in_every_phase(stage: int, fp8: dict[str, Any], save_at: int, folder: str) -> None:
    """An override is in force from step 1 on."""
    schedule = {"bf16_until_step": 2, "bf16_last_fraction": 0.25, "total_steps": 8, "layers": {"blocks.2": "fp8"}}
    config = training.ds_config(stage, {**fp8, "schedule": schedule})
    engine = training.build(config)
    training.train(engine, 1)
    engine.set_layer_precision("blocks.1.down", "bf16")
    training.train(engine, save_at - 1, 1)
    engine.save_checkpoint(folder)
    through = training.train(engine, 8 - save_at, save_at)
    training.destroy(engine)
    engine = training.build(config, seed=7)
    engine.load_checkpoint(folder)
    low = [f"blocks.{i}.{name}" for i in range(2) for name in ("down", "up")]
    in_bf16 = low if save_at < 2 or save_at >= 6 else ["blocks.1.down"]
    assert sorted(engine.fp8.precision.in_bf16) == in_bf16
    assert engine.fp8.precision.overrides == {"blocks.1.down": "bf16"}
    assert training.train(engine, 8 - save_at, save_at) == through
    training.destroy(engine)


def compiled(backend: str) -> tuple[list[float], list[Any]]:
    """Losses of 2 steps in bf16, 2 in FP8, and 2 with one layer in bf16, and what the monitor sees of layers."""
    block = {"schedule": {"bf16_until_step": 2}, "monitor": {"every": 2, "sink": "/dev/null"}}
    engine = training.build(training.ds_config(2, block), {"num_blocks": 1})  # to compile a block takes seconds
    if backend:
        torch._dynamo.reset()
        engine.compile(backend=backend)
    reports = training.reports_of(engine)
    losses = training.train(engine, 4)
    engine.set_layer_precision("blocks.0.up", "bf16")
    losses += training.train(engine, 2, 4)
    training.destroy(engine)
    return losses, [report["layers"] for report in reports]


@on_ranks(1)
def test_compiled_layers_change_and_are_watched_as_eager_ones_are() -> None:
    losses, layers = compiled("aot_eager")
    assert len(layers) == 3 and (losses, layers) == compiled("")


@on_ranks(2)
def test_a_call_that_cannot_be_followed_is_refused_on_all_ranks() -> None:
    """Another call than that of other ranks, a name of no layer, and calls between a forward and its step on any rank.
    A call that names layers in another order than on the other rank, as sets do, is none of them."""
    engine = training.build(training.ds_config(2, {}, gradient_accumulation_steps=2))
    rank, batch = dist.get_rank(), training.micro_batches(0, 1)[0]

    def refused(names: Any, precision: Any, match: str, kind: type[Exception] = ConfigError) -> None:
        before = sorted(engine.fp8.precision.in_bf16)
        with pytest.raises(kind, match=match):
            engine.set_layer_precision(names, precision)
        assert sorted(engine.fp8.precision.in_bf16) == before

    refused("blocks.0", "bf16" if rank else "fp8", "same call on all ranks")
    refused(["blocks.0", "lm_head"], "bf16", "lm_head")
    refused("blocks.0", "int8", "int8")
    names = ["blocks.0.up", "blocks.2.down"]
    engine.set_layer_precision(names[:: 1 if rank else -1], "bf16")
    assert sorted(engine.fp8.precision.in_bf16) == names
    engine.backward(engine(batch))
    engine.step()
    refused("blocks.1", "bf16", "between optimizer steps", UnsupportedError)
    loss = engine(batch) if rank else None
    refused("blocks.1", "bf16", "between optimizer steps", UnsupportedError)  # a forward on one rank
    engine.backward(engine(batch) if loss is None else loss)
    refused("blocks.1", "bf16", "between optimizer steps", UnsupportedError)
    engine.step()
    engine.eval()
    with torch.no_grad():
        engine(batch)
    engine.train()
    assert len(engine.set_layer_precision("blocks.1", "bf16")) == 2
    assert all(map(math.isfinite, training.train(engine, 1, 1)))
    training.destroy(engine)


@pytest.mark.parametrize("how", ["set", "unmanaged"])
@on_ranks(2)
def test_layers_change_after_every_step_where_a_user_says_when_gradients_are_accumulated(how: str) -> None:
    """Two steps of three micro-batches, where the configuration accumulates four."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if how == "unmanaged" and not hasattr(DeepSpeedEngine, "managed_gradient_accumulation"):
        return  # DeepSpeed has it since 0.19.8
    managed = {"managed_gradient_accumulation": False} if how == "unmanaged" else {}
    engine = training.build(training.ds_config(2, {}, gradient_accumulation_steps=4, **managed))
    for step in range(2):
        for number, batch in enumerate(training.micro_batches(step, 3)):
            if how == "set":
                engine.set_gradient_accumulation_boundary(number == 2)
            engine.backward(engine(batch))
        engine.step()
        assert len(engine.set_layer_precision(f"blocks.{step}", "bf16")) == 2
    training.destroy(engine)

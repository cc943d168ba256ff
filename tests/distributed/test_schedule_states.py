"""FP8 optimizer states become fp32 in the middle of a run, in place, as by a checkpoint between two runs."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as dense
import test_pipeline
import test_states as base
import test_tp_llama as tp_llama
import torch
import training

pytestmark = pytest.mark.distributed

FROM = 3
"""The step since which states are fp32."""


def scheduled(master: str, **more: Any) -> dict[str, Any]:
    schedule = {"fp32_states_from_step": FROM, **more.pop("schedule", {})}
    return base.states(master, schedule=schedule, **more)


def evaluated(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(training.micro_batches(500, 1)[0].to(engine.device)).float())
    engine.train()
    return loss


def in_place_and_by_checkpoint(folder: str, stage: int, master: str, more: dict[str, Any]) -> dict[str, Any]:
    """Both ways from FP8 to fp32 states: what the optimizer holds then, and three steps further."""
    overrides = more.pop("overrides", {})
    blocks = {"in_place": scheduled(master, **more), "fp8": base.states(master, **more), "fp32": more}
    result: dict[str, Any] = {}
    one = dense.build(stage, blocks["in_place"], **overrides)
    training.train(one, FROM)
    result["in_place"] = dense.snapshot(one), evaluated(one), training.train(one, 3, FROM), dense.snapshot(one)
    result["classes"] = [type(one.optimizer).__name__, type(one.optimizer.optimizer).__name__]
    training.destroy(one)
    before = dense.build(stage, blocks["fp8"], **overrides)
    training.train(before, FROM)
    before.save_checkpoint(folder)
    result["before"] = evaluated(before)
    training.destroy(before)
    after = dense.build(stage, blocks["fp32"], seed=1, **overrides)
    after.load_checkpoint(folder)
    result["by_checkpoint"] = (
        dense.snapshot(after),
        evaluated(after),
        training.train(after, 3, FROM),
        dense.snapshot(after),
    )
    result["expected"] = [type(after.optimizer).__name__, type(after.optimizer.optimizer).__name__]
    training.destroy(after)
    return result


DELAYED = {"linear": {"recipe": "delayed"}}
COVERING = [
    (1, 2, "e4m11", DELAYED),
    (2, 2, "fp32", {"linear": {"recipe": "rowwise"}}),
    (2, 2, "e4m19", {"overrides": {"zero_optimization": {"round_robin_gradients": True}}}),
    (3, 2, "e4m11", DELAYED),
    (3, 1, "e4m19", {"overrides": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.0}}),
    (3, 2, "e4m19", {"overrides": {"zero_optimization": {"stage3_param_persistence_threshold": 10_000}}}),
]
OTHERS = [
    (2, 2, "e4m19", {}),
    (2, 1, "e4m11", {}),
    (2, 2, "e4m19", {"zero": {"reduce_scatter": "fp8"}}),
    (3, 2, "e4m19", {"linear": {"recipe": "rowwise"}}),
    (3, 3, "fp32", {}),
]


@pytest.mark.parametrize(
    ("stage", "world", "master", "more"),
    [*COVERING, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_states_that_widen_in_place_are_those_of_a_checkpoint_between_two_runs(
    ranks: Any, tmp_path: Path, stage: int, world: int, master: str, more: dict[str, Any]
) -> None:
    for result in ranks(world).run(in_place_and_by_checkpoint, str(tmp_path), stage, master, more):
        assert result["classes"] == result["expected"]
        for got, expected in zip(result["in_place"], result["by_checkpoint"], strict=True):
            if isinstance(expected, dict):
                dense.assert_same(got, expected)
            else:
                assert got == expected
        assert abs(result["in_place"][1] - result["before"]) < 0.005 * result["before"]  # no jump


def resumed(folder: str, stage: int, master: str, save_at: int) -> dict[str, Any]:
    """A run with the switch, saved once and resumed from there; layers are in bf16 when states change."""
    fp8 = scheduled(master, schedule={"bf16_until_step": 4, "layers": {"blocks.1.down": "fp8"}}, **DELAYED)
    engine = dense.build(stage, fp8)
    training.train(engine, save_at)
    engine.save_checkpoint(folder)
    saved = base.everything(engine) if save_at < FROM else dense.snapshot(engine)
    through = training.train(engine, 6 - save_at, save_at)
    end = dense.snapshot(engine)
    training.destroy(engine)
    other = dense.build(stage, fp8, seed=1)
    training.train(other, 1)
    other.load_checkpoint(folder)
    loaded = base.everything(other) if save_at < FROM else dense.snapshot(other)
    again = training.train(other, 6 - save_at, save_at)
    result = {"saved": (saved, loaded), "losses": (through, again), "end": (end, dense.snapshot(other))}
    training.destroy(other)
    return result


@pytest.mark.parametrize(
    ("stage", "master", "save_at"),
    [
        (3, "e4m19", 2),
        (2, "e4m19", 3),
        (1, "e4m11", 5),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((2, "e4m11", 2), (3, "e4m11", 3), (3, "fp32", 5))),
    ],
)
def test_a_run_resumes_exactly_before_at_and_after_the_switch(
    ranks: Any, tmp_path: Path, stage: int, master: str, save_at: int
) -> None:
    for result in ranks(2).run(resumed, str(tmp_path), stage, master, save_at):
        assert result["losses"][0] == result["losses"][1]
        same = base.assert_same_everything if save_at < FROM else dense.assert_same
        same(*result["saved"])
        dense.assert_same(*result["end"])


def later(folder: str, stage: int) -> dict[str, Any]:
    """What a checkpoint of FP8 states holds, what a run whose step is past has of it; losses before and after it loads
    one of its own, in the same engine."""
    plain = dense.build(stage, base.states("e4m11"))
    training.train(plain, 5)
    plain.save_checkpoint(folder, tag="past")
    held = training.full_masters(plain) | dense.moments(plain)
    training.destroy(plain)
    fresh = dense.build(stage, scheduled("e4m11"), seed=1)
    fresh.load_checkpoint(folder, tag="past")
    got = training.full_masters(fresh) | dense.moments(fresh)
    assert fresh.fp8.config.optimizer.states == "fp32"
    training.train(fresh, 1, 5)
    fresh.save_checkpoint(folder, tag="wide")
    losses = []
    for _ in range(2):
        losses.append(training.train(fresh, 2, 6))
        fresh.load_checkpoint(folder, tag="wide")
    training.destroy(fresh)
    return {"held": held, "got": got, "losses": losses}


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_checkpoint_past_the_step_is_loaded_without_an_fp8_rounding(ranks: Any, tmp_path: Path, stage: int) -> None:
    for result in ranks(2).run(later, str(tmp_path), stage):
        dense.assert_same(result["got"], result["held"])
        assert result["losses"][0] == result["losses"][1]


def with_clients(folder: str, stage: int) -> dict[str, Any]:
    """A client optimizer with a torch scheduler (of it, or made by DeepSpeed of what took it over), the monitor, the
    guard and the readers, across the switch."""
    net = {"width": 32, "hidden": 72, "num_blocks": 2}
    torch.manual_seed(0)
    model = training.TinyLM(**net)
    import deepspeed

    client = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def make(one: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1.0 / (1 + step))

    fp8 = scheduled("e4m19", monitor={"every": 1, "sink": "/dev/null"}, guard={"action": "report", "underflow": 0.9})
    config = training.ds_config(stage, fp8)
    del config["optimizer"]
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=client, lr_scheduler=make(client) if stage == 2 else make, config=config
    )
    inner = optimizer.optimizer
    core = weakref.ref(inner.core)
    reports: list[Any] = []
    engine._fp8_health.sinks.append(reports.append)
    training.train(engine, 6)
    gc.collect()
    lrs = [group["lr"] for one in (engine.optimizer, client, inner) for group in one.param_groups]
    from deepspeed.utils import safe_set_full_optimizer_state

    p = model.blocks[0].up.weight
    safe_set_full_optimizer_state(p, torch.full(p.ds_shape if stage == 3 else p.shape, 0.25), "exp_avg")
    moment = dense.moments(engine)["blocks.0.up.weight.exp_avg"]
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)  # stock code gives an optimizer new groups here
    training.train(engine, 1, 6)
    lrs += [group["lr"] for one in (engine.optimizer, client, inner) for group in one.param_groups]
    result = {
        "states": (len(inner.state), len(client.state)),
        "same": engine.optimizer is optimizer and optimizer.optimizer is inner and engine.basic_optimizer is inner,
        "freed": core() is None,
        "lrs": lrs,
        "clamped": ["clamp_rate" in report.numbers for report in reports],
        "gathered": [report.numbers["gathered_fp8_bytes"] for report in reports[1:]],
        "moment": (float(moment.min()), float(moment.max())),
        "class": isinstance(inner, torch.optim.AdamW),
    }
    training.destroy(engine)
    return result


@pytest.mark.parametrize("stage", [2, 3])
def test_whoever_holds_the_optimizer_goes_on_with_it(ranks: Any, tmp_path: Path, stage: int) -> None:
    for result in ranks(2).run(with_clients, str(tmp_path), stage):
        assert result["states"] == (1, 0)
        assert result["same"] and result["class"] and result["freed"]
        assert result["lrs"] == pytest.approx([3e-3 / 7] * 3 + [3e-3 / 8] * 3)  # the scheduler steps, and all see it
        assert result["clamped"] == [True, True, False, False, False, False]
        assert len(set(result["gathered"])) == 1 and result["gathered"][0] > 0  # the switch's own gather is no step's
        assert result["moment"] == (0.25, 0.25)


def compiled(stage: int, backend: str) -> list[float]:
    engine = dense.build(stage, scheduled("e4m19", linear={"recipe": "rowwise"}))
    if backend:
        torch._dynamo.reset()
        engine.compile(backend=backend)
    losses = training.train(engine, 6)
    training.destroy(engine)
    return losses


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_compiled_layers_read_the_new_scales(ranks: Any, stage: int) -> None:
    assert ranks(2).run(compiled, stage, "aot_eager") == ranks(2).run(compiled, stage, "")


def test_pipelines_and_tensor_parallel_layers_have_it_too(ranks: Any) -> None:
    early, late = ({**base.states("e4m19"), "schedule": {"fp32_states_from_step": step}} for step in (2, 6))
    # `pipeline` looks at the end whether FP8 weights are those of fp32 masters.
    pipelines = [ranks(2).run(test_pipeline.pipeline, one, "balanced", 7) for one in (early, late)]
    cut = [ranks(2).run(tp_llama.trained, 2, one, 2, 7) for one in (early, late)]
    for one, other in (pipelines, cut):
        for left, right in zip(one, other, strict=True):
            assert left["losses"][:2] == right["losses"][:2] and left["losses"][3:] != right["losses"][3:]
            assert left["losses"] == pytest.approx(right["losses"], abs=0.02)


def build_error(fp8: dict[str, Any]) -> str:
    from fp8_ds.errors import ConfigError

    try:
        training.destroy(dense.build(2, fp8))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_switch_that_cannot_be_is_refused(ranks: Any) -> None:
    fp32 = {"schedule": {"fp32_states_from_step": 3}}
    assert 'expected null with optimizer.states "fp32", got 3' in ranks(1).run(build_error, fp32)[0]
    release = {"optimizer": {"states": "fp8", "release": True}, **fp32}
    assert "expected null with optimizer.release true, got 3" in ranks(1).run(build_error, release)[0]

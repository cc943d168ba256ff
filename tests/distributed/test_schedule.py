"""Layers go to bf16 of their masters and come back, in every stage, on all ranks alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training

pytestmark = pytest.mark.distributed

SPLIT = {"optimizer": {"states": "fp8", "master": "e4m19"}}
ALWAYS = {"schedule": {"bf16_until_step": 1000}}


def losses_of(fp8: dict[str, Any] | None, stage: int, model: dict[str, Any], num: int = 4) -> list[float]:
    engine = training.build(training.ds_config(stage, fp8), model)
    losses = training.train(engine, num)
    training.destroy(engine)
    return losses


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ragged": {"width": 50, "hidden": 70, "num_blocks": 2, "tiny": True},
    "external": {"external": True, "checkpointing": "non-reentrant", "bias": False},
    "ragged, no bias": {"width": 50, "hidden": 70, "num_blocks": 2, "tiny": True, "bias": False},
}


@pytest.mark.parametrize(
    ("stage", "model"),
    [
        (2, "ragged"),
        (3, "external"),
    ],
)
def test_all_layers_in_bf16_is_stock_bf16_bit_for_bit(ranks: Any, stage: int, model: str) -> None:
    ours = ranks(2).run(losses_of, ALWAYS, stage, MODELS[model])
    stock = ranks(2).run(losses_of, None, stage, MODELS[model])
    fp8 = ranks(2).run(losses_of, {}, stage, MODELS[model])
    assert ours == stock
    assert fp8 != stock


def weights_as_read(engine: Any) -> dict[str, torch.Tensor]:
    """What any reader of the FP8 weights sees now, on this rank. Collective in stage 3."""
    import deepspeed

    found = {}
    for name, p in engine.fp8.weights.items():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone().float().cpu()
    return found


def gathered(engine: Any) -> tuple[float, float]:
    """(FP8 bytes, others) gathered in the last step."""
    report = engine.fp8_report()
    return report["gathered_fp8_bytes"], report["gathered_bytes"] - report["gathered_fp8_bytes"]


def phases(stage: int, fp8: dict[str, Any]) -> dict[str, Any]:
    """bf16 for 2 steps, FP8 for 2, bf16 for the last 2."""
    schedule = {"bf16_until_step": 2, "bf16_last_fraction": 0.34, "total_steps": 6}
    engine = training.build(training.ds_config(stage, {**fp8, "schedule": schedule}))
    result: dict[str, Any] = {"losses": [], "bytes": [], "read": [], "masters": [], "num": []}
    for step in range(6):
        result["num"].append(engine.fp8_report()["num_layers_in_bf16"])
        result["losses"] += training.train(engine, 1, step)
        result["bytes"].append(gathered(engine))
        if step in (0, 2):  # the next one is in bf16, in FP8
            result["read"].append(weights_as_read(engine))
            result["masters"].append({n: training.full_masters(engine)[n] for n in engine.fp8.weights})
    engine.set_layer_precision("", "fp8")
    result["back"] = training.fp8_state(engine)
    result["last_masters"] = training.full_masters(engine)
    result["sizes"] = sum(m.numel() for m in result["masters"][0].values())
    training.destroy(engine)
    return result


def check_phases(results: list[dict[str, Any]], stage: int, fp8: dict[str, Any]) -> None:
    """Of `phases` on all ranks: layers, weights and gathered bytes are what each phase asks for."""
    for result in results:
        assert result["num"] == [6, 6, 0, 0, 6, 6]
        assert result["losses"] == results[0]["losses"]
        in_bf16 = [result["masters"][0], result["read"][0]]
        for name, master in in_bf16[0].items():
            assert torch.equal(in_bf16[1][name], master.bfloat16().float()), name  # bf16 of the masters, bitwise
        if stage < 3:  # in stage 3 a reader gathers bf16 of the masters in both
            read = result["read"][1]
            assert not any(torch.equal(m.bfloat16().float(), read[name]) for name, m in result["masters"][1].items())
        if not fp8:
            training.assert_fp8_follows_masters(result["back"], result["last_masters"])
        if len(results) == 1:  # nothing is gathered
            continue
        weights = result["sizes"]  # of which stage 3 gathers each once a step, too: it keeps what is so small
        # Stages 1 and 2 gather when a step ends, by what the layers computed in; then they are switched.
        fp8_bytes = [one[0] for one in result["bytes"]]
        hp_bytes = [one[1] for one in result["bytes"]]
        assert fp8_bytes[0] == fp8_bytes[1] == fp8_bytes[5] == 0
        assert fp8_bytes[3] == pytest.approx(weights, rel=0.03)
        assert hp_bytes[1] - hp_bytes[3] == pytest.approx(2 * weights, rel=0.03)
    for name in results[0]["back"]:
        assert torch.equal(results[0]["back"][name][0], results[-1]["back"][name][0])


@pytest.mark.parametrize(
    ("stage", "fp8"),
    [(1, {}), (3, {}), (2, SPLIT)],
)
def test_a_schedule_moves_bf16_of_the_masters_then_fp8_then_bf16(ranks: Any, stage: int, fp8: dict[str, Any]) -> None:
    check_phases(ranks(2).run(phases, stage, fp8), stage, fp8)


def evaluate(engine: Any, step: int) -> float:
    engine.eval()
    with torch.no_grad():
        loss = engine(training.micro_batches(step, 1)[0].to(engine.device)).float()
    engine.train()
    return float(loss)


def jump(stage: int, recipe: str) -> dict[str, Any]:
    config = training.ds_config(stage, {"linear": {"recipe": recipe}})
    engine = training.build(config)
    training.train(engine, 15)
    in_fp8 = evaluate(engine, 500)
    layers = engine.set_layer_precision("up", "bf16")
    some = evaluate(engine, 500)
    engine.set_layer_precision("", "bf16")
    in_bf16 = evaluate(engine, 500)
    engine.set_layer_precision("", "schedule")
    again = evaluate(engine, 500)
    report = engine.fp8_report()["num_layers_in_bf16"]
    after = training.train(engine, 2, 15)
    training.destroy(engine)
    engine = training.build(config)
    straight = training.train(engine, 17)[15:]
    training.destroy(engine)
    return {"losses": (in_fp8, some, in_bf16, again), "layers": layers, "left": report, "after": (after, straight)}


def check_jump(results: list[dict[str, Any]]) -> None:
    for result in results:
        in_fp8, some, in_bf16, again = result["losses"]
        assert result["layers"] == [f"blocks.{i}.up" for i in range(3)] and result["left"] == 0
        assert in_fp8 == again
        assert len({in_fp8, some, in_bf16}) == 3
        assert in_fp8 < 4.0  # trained: log(96) is 4.56
        assert abs(in_fp8 - in_bf16) < 0.005 * in_bf16
        assert abs(in_fp8 - some) < 0.005 * in_bf16
        after, straight = result["after"]
        assert len(after) == 2 and after == straight


def test_a_switch_makes_no_jump_in_the_loss_and_the_way_back_is_exact(ranks: Any) -> None:
    check_jump(ranks(2).run(jump, 1, "delayed"))


def resume(stage: int, fp8: dict[str, Any], directory: str, save_at: int) -> dict[str, Any]:
    """Losses after a resume at `save_at` and without; an override is in force from step 1 on."""
    schedule = {"bf16_until_step": 2, "bf16_last_fraction": 0.25, "total_steps": 8, "layers": {"blocks.2": "fp8"}}
    config = training.ds_config(stage, {**fp8, "schedule": schedule})
    engine = training.build(config)
    before = training.train(engine, 1)
    engine.set_layer_precision("blocks.1.down", "bf16")
    before += training.train(engine, save_at - 1, 1)
    engine.save_checkpoint(directory)
    through = training.train(engine, 8 - save_at, save_at)
    training.destroy(engine)
    engine = training.build(config, seed=7)
    engine.load_checkpoint(directory)
    held = sorted(engine.fp8.precision.in_bf16), dict(engine.fp8.precision.overrides)
    resumed = training.train(engine, 8 - save_at, save_at)
    training.destroy(engine)
    return {"through": through, "resumed": resumed, "held": held}


def check_resume(results: list[dict[str, Any]], save_at: int) -> None:
    for result in results:
        assert result["resumed"] == result["through"]
        layers, overrides = result["held"]
        assert overrides == {"blocks.1.down": "bf16"}
        low = [f"blocks.{i}.{name}" for i in range(2) for name in ("down", "up")]
        assert layers == (low if save_at < 2 or save_at >= 6 else ["blocks.1.down"])


@pytest.mark.parametrize(
    ("stage", "fp8", "save_at"),
    [
        (2, {}, 1),
        (3, {}, 5),
        (1, SPLIT, 7),
    ],
)
def test_resume_is_exact_in_every_phase(
    ranks: Any, stage: int, fp8: dict[str, Any], save_at: int, tmp_path: Any
) -> None:
    check_resume(ranks(2).run(resume, stage, fp8, str(tmp_path), save_at), save_at)


def compiled(stage: int, backend: str, fp8: dict[str, Any]) -> list[float]:
    """Losses of 2 steps in bf16, 2 in FP8, and 2 with one layer in bf16."""
    config = training.ds_config(stage, {**fp8, "schedule": {"bf16_until_step": 2}})
    engine = training.build(config, {"num_blocks": 1})  # to compile a block takes seconds
    if backend:
        torch._dynamo.reset()
        engine.compile(backend=backend)
    losses = training.train(engine, 4)
    engine.set_layer_precision("blocks.0.up", "bf16")
    losses += training.train(engine, 2, 4)
    training.destroy(engine)
    return losses


def test_compiled_layers_change_as_eager_ones_do(ranks: Any) -> None:
    assert ranks(2).run(compiled, 2, "aot_eager", {}) == ranks(2).run(compiled, 2, "", {})


def released(stage: int) -> tuple[list[float], list[float]]:
    """Losses with updates during the backward, and with all of them after it; in bf16, then in FP8."""
    both = []
    for release in (True, False):
        states = {"states": "fp8", "release": release}
        fp8 = {"optimizer": states, "schedule": {"bf16_until_step": 3}}
        engine = training.build(training.ds_config(stage, fp8, gradient_clipping=0.0))
        both.append(training.train(engine, 5))
        training.destroy(engine)
    return both[0], both[1]


def test_gradient_release_knows_layers_in_bf16(ranks: Any) -> None:
    for with_release, without in ranks(2).run(released, 3):
        assert with_release == without


def refused() -> list[str]:
    """What calls raise on this rank. A call that names layers in another order than on the other rank, as sets do, is
    none of them."""
    from fp8_ds.errors import Fp8DsError

    engine = training.build(training.ds_config(2, {}, gradient_accumulation_steps=2))
    rank, found = dist.get_rank(), []

    def call(names: Any, precision: Any) -> None:
        with pytest.raises(Fp8DsError) as caught:
            engine.set_layer_precision(names, precision)
        found.append(str(caught.value))

    call("blocks.0", "bf16" if rank else "fp8")
    call(["blocks.0", "lm_head"], "bf16")
    call("blocks.0", "int8")
    assert not engine.fp8.precision.in_bf16
    names = ["blocks.0.up", "blocks.2.down"]
    engine.set_layer_precision(names[:: 1 if rank else -1], "bf16")
    assert sorted(engine.fp8.precision.in_bf16) == names
    engine.backward(engine(training.micro_batches(0, 1)[0]))
    engine.step()
    call("blocks.1", "bf16")
    assert sorted(engine.fp8.precision.in_bf16) == names
    training.destroy(engine)
    return found


def test_a_call_that_cannot_be_followed_is_refused_on_all_ranks(ranks: Any) -> None:
    for disagree, layer, precision, micro_batch in ranks(2).run(refused):
        assert "the same call on all ranks" in disagree
        assert "lm_head" in layer and "int8" in precision and "micro-batch 1 of 2" in micro_batch


def interrupted(case: str) -> tuple[str, list[str]]:
    """A call with accumulation 1, and what it left in bf16; then the step is taken, and the call is good."""
    from fp8_ds.errors import UnsupportedError

    engine = training.build(training.ds_config(2, {}))
    batch = training.micro_batches(0, 1)[0]
    engine.eval()
    with torch.no_grad():
        engine(batch)
    engine.train()
    loss = None
    if case != "on one rank" or dist.get_rank() == 1:
        loss = engine(batch)
    if case == "after the backward":
        engine.backward(loss)
    try:
        engine.set_layer_precision("blocks.0", "bf16")
        message = ""
    except UnsupportedError as error:
        message = str(error)
    left = sorted(engine.fp8.precision.in_bf16)
    if case != "after the backward":
        engine.backward(engine(batch) if loss is None else loss)
    engine.step()
    assert len(engine.set_layer_precision("blocks.0", "bf16")) == 2
    assert all(map(math.isfinite, training.train(engine, 1, 1)))
    training.destroy(engine)
    return message, left


@pytest.mark.parametrize("case", ["before the backward", "after the backward", "on one rank"])
def test_a_call_between_a_forward_and_its_step_is_refused_on_all_ranks(ranks: Any, case: str) -> None:
    for rank, (message, left) in enumerate(ranks(2).run(interrupted, case)):
        where = "on another rank" if case == "on one rank" and rank == 0 else "between a forward and its step"
        assert f"expected a call between optimizer steps, got one {where}" in message
        assert not left


def own_boundaries(how: str) -> list[int]:
    """Layers sent after each of two steps of three micro-batches, where the configuration accumulates four."""
    managed = {"managed_gradient_accumulation": False} if how == "unmanaged" else {}
    engine = training.build(training.ds_config(2, {}, gradient_accumulation_steps=4, **managed))
    found = []
    for step in range(2):
        for number, batch in enumerate(training.micro_batches(step, 3)):
            if how == "set":
                engine.set_gradient_accumulation_boundary(number == 2)
            engine.backward(engine(batch))
        engine.step()
        found.append(len(engine.set_layer_precision(f"blocks.{step}", "bf16")))
    training.destroy(engine)
    return found


@pytest.mark.parametrize("how", ["set", "unmanaged"])
def test_layers_change_after_every_step_where_a_user_says_when_gradients_are_accumulated(ranks: Any, how: str) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    if how == "unmanaged" and not hasattr(DeepSpeedEngine, "managed_gradient_accumulation"):
        pytest.skip("DeepSpeed has it since 0.19.8")
    assert ranks(2).run(own_boundaries, how) == [[2, 2]] * 2


def written(stage: int, path: tuple[str, ...], fp8: dict[str, Any]) -> list[tuple[float, float]]:
    """(largest magnitude, mean) of a weight as read after 1.5 was written into it, and after each switch."""
    import deepspeed

    engine = training.build(training.ds_config(stage, fp8))
    training.train(engine, 1)
    name = "blocks.1.up.weight"
    weight = engine.fp8.weights[name]
    found = []
    for action in path:
        if action == "write":
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0, enabled=stage == 3), torch.no_grad():
                weight.fill_(1.5)
        else:
            engine.set_layer_precision("blocks.1", action)
        read = weights_as_read(engine)[name]
        found.append((float(read.abs().max()), float(read.mean())))
    losses = training.train(engine, 1, 1)
    assert all(map(math.isfinite, losses))
    training.destroy(engine)
    return found


@pytest.mark.parametrize(("stage", "fp8"), [(1, {}), (3, SPLIT)])
def test_what_a_user_wrote_holds_until_the_next_step_whatever_is_switched(
    ranks: Any, stage: int, fp8: dict[str, Any]
) -> None:
    for path in (("write", "bf16", "fp8", "bf16"), ("bf16", "write", "fp8", "bf16")):
        start = path.index("write")
        for found in ranks(2).run(written, stage, path, fp8):
            assert found[start:] == [pytest.approx((1.5, 1.5), rel=1e-3)] * (4 - start), (path, found)

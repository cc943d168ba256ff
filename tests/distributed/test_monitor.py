"""The monitor on real engines: the same numbers on all ranks, no bit of the training changed, nothing left behind."""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import test_autotp as autotp
import test_tp_llama as tp_llama
import torch
import training
from support.ranks import RankPool, on_ranks

from fp8_ds.errors import ConfigError
from fp8_ds.monitor.health import HealthMonitor

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}


def run(stage: int, fp8: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Four steps; losses, the reports of all ranks as this one saw them, and the classes of recipes afterwards."""
    engine = training.build(training.ds_config(stage, fp8), model)
    reports = training.reports_of(engine)
    losses = training.train(engine, 4)
    names = {type(m.fp8_recipe).__name__ for m in engine.module.modules() if hasattr(m, "fp8_recipe")}
    training.destroy(engine)
    return {"losses": losses, "reports": reports, "classes": names}


@pytest.mark.parametrize(
    ("stage", "fp8", "model"),
    [
        pytest.param(1, STATES | {"linear": {"recipe": "delayed"}}, {}, marks=pytest.mark.slow),
        (3, {"linear": {"recipe": "rowwise"}}, {"checkpointing": "reentrant"}),
    ],
)
def test_watching_changes_no_loss_and_all_ranks_see_the_same(
    ranks: Any, stage: int, fp8: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "health.jsonl"
    watched = ranks(2).run(run, stage, {**fp8, "monitor": {"every": 2, "sink": str(path)}}, model)
    plain = ranks(2).run(run, stage, fp8, model)
    assert watched[0]["losses"] == plain[0]["losses"]
    assert watched[0]["classes"] == plain[0]["classes"]
    assert watched[0]["reports"] == watched[1]["reports"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["health.jsonl"]  # one rank writes
    tokens = 2 * training.MICRO_BATCH * training.LENGTH
    for line in lines:
        assert line["skipped_steps"] == 0 and 0.5 < line["coverage"] < 1 and line["gathered_fp8_bytes"] > 0
        assert len(line["layers"]) == 6
        for name, kinds in line["layers"].items():
            width = 64 if name.endswith("up") else 192
            # A checkpointed forward runs twice.
            assert kinds["input"]["num"] == tokens * width * (2 if model else 1), name
            assert kinds["grad_output"]["num"] == tokens * (256 - width)
            assert kinds["weight"]["num"] == 2 * 64 * 192 * (2 if model else 1)
            for one in kinds.values():
                assert one["amax"] > 0 and one["scale"] > 0 and 0 <= one["underflow"] < 0.5
                assert one["saturation"] < 0.01


@on_ranks(2)
def test_a_report_is_of_its_own_step_where_layers_change_after_it() -> None:
    """Five steps: bf16 in the first two, and in the fifth one layer by a call, one by the longest key."""
    fp8 = {"monitor": {"every": 1, "sink": "/dev/null"}, "schedule": {"bf16_until_step": 2, "layers": {"0.up": "bf16"}}}
    engine = training.build(training.ds_config(2, fp8))
    reports = training.reports_of(engine)
    training.train(engine, 4)
    engine.set_layer_precision("blocks.1.down", "bf16")
    training.train(engine, 1, 4)
    training.destroy(engine)
    assert [report["layers_in_bf16"] for report in reports] == [6, 6, 1, 1, 2]
    for report in reports:
        assert sum(not kinds for kinds in report["layers"].values()) == report["layers_in_bf16"]
    coverage = [report["coverage"] for report in reports]
    assert coverage[:2] == [0, 0] and coverage[2] == coverage[3] > coverage[4] > 0


def evaluating(trains_in_eval: bool) -> list[list[int]]:
    """Elements of inputs and weights in each of three reports, with an evaluation before every step."""
    engine = training.build(training.ds_config(2, {"monitor": {"every": 1, "sink": "/dev/null"}}))
    reports = training.reports_of(engine)
    engine.train(not trains_in_eval)
    for step in range(3):
        training.train(engine, 1, step)
        if not trains_in_eval:
            engine.eval()
            with torch.no_grad():
                engine.module(training.micro_batches(9, 1)[0].to(engine.device) * 0)
            engine.train()
    training.destroy(engine)
    return [[one["num"] for kinds in r["layers"].values() for one in kinds.values()] for r in reports]


@on_ranks(2)
def test_evaluations_between_steps_are_no_part_of_a_sample() -> None:
    """They were counted as if they were micro-batches, and generation, token by token, was slowed down by it."""
    evaluated = evaluating(False)
    assert len(evaluated) == 3 and evaluated[0] == evaluated[1] == evaluated[2] and min(evaluated[0]) > 0
    assert evaluating(True) == evaluated  # a model that nobody has put into training mode


def what_ran(fp8: dict[str, Any]) -> set[str]:
    """Names of the monitor's functions, hooks among them, that an engine calls from its building to its end."""
    import fp8_ds.monitor.statistics

    own = tuple(str(Path(fp8_ds.__file__).parent / part) for part in ("monitor", "ops/observe.py"))
    called: set[str] = set()

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(own):
            called.add(frame.f_code.co_name)

    sys.setprofile(seen)
    try:
        engine = training.build(training.ds_config(2, fp8), {"num_blocks": 1})
        training.train(engine, 2)
        training.destroy(engine)
    finally:
        sys.setprofile(None)
    return called


@on_ranks(1)
def test_a_monitor_that_is_off_runs_nothing() -> None:
    assert not (called := what_ran({})), called  # before the other, whose end comes when it is collected
    assert what_ran({"monitor": {"every": 2, "sink": "/dev/null"}})


def until_the_process_ends(folder: str) -> list[str]:
    """What is said at the end of a process that has destroyed its group, and not its engines.

    Both reach step 4. One reports steps 2 and 4 to DeepSpeed's CSV monitor, the other step 4 to a disk that is full.
    """
    csv = {"enabled": True, "output_path": folder, "job_name": "csv"}
    configs = [
        training.ds_config(2, {"monitor": {"every": 2}}, csv_monitor=csv),
        training.ds_config(2, {"monitor": {"every": 4, "sink": "/dev/full"}}),
    ]
    engines = [training.build(config) for config in configs]
    for engine in engines:
        training.train(engine, 4)
    torch.distributed.destroy_process_group()
    with training.log_lines() as said:
        atexit._run_exitfuncs()
    return said


def test_the_last_report_is_written_where_the_group_is_gone_before_the_process_ends(tmp_path: Path) -> None:
    pool = RankPool(1)
    try:
        [said] = pool.run(until_the_process_ends, str(tmp_path))
    finally:
        pool.close()
    assert sum("JsonLines('/dev/full') failed (OSError: [Errno 28]" in line for line in said) == 1
    files = list((tmp_path / "csv").glob("fp8_*.csv"))
    assert len(files) > 6 * 3 * 4
    for file in files:
        samples = [int(row.split(",")[0]) for row in file.read_text().splitlines()[1:]]
        assert samples == [step * training.MICRO_BATCH for step in (2, 4)]


def tensor_parallel(fp8: dict[str, Any]) -> dict[str, Any]:
    """Of a Llama that is cut: losses, the reports as this rank saw them, and the classes of recipes afterwards."""
    engine = tp_llama.tp_engine(tp_llama.engine_config(3, fp8, 2), 2)
    reports = training.reports_of(engine)
    losses, _ = tp_llama.train(engine, 2, 4)
    classes = {type(m.fp8_recipe).__name__ for m in engine.module.modules() if hasattr(m, "fp8_recipe")}
    tp_llama.destroy(engine)
    return {"losses": losses, "reports": reports, "classes": classes}


def test_two_by_two_ranks_report_the_sums_over_data_parallel_ranks_each_of_its_part(ranks: Any, tmp_path: Path) -> None:
    watched = ranks(4).run(tensor_parallel, {"monitor": {"every": 2, "sink": str(tmp_path / "health.jsonl")}})
    plain = ranks(4).run(tensor_parallel, {})
    assert [one["losses"] for one in watched] == [one["losses"] for one in plain]
    assert [one["classes"] for one in watched] == [one["classes"] for one in plain]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["health.jsonl", "health.rank1.jsonl"]
    for rank in range(4):
        assert watched[rank]["reports"] == watched[rank % 2]["reports"]
    assert watched[0]["reports"] != watched[1]["reports"]
    tokens = tp_llama.NUM_BATCHES * training.MICRO_BATCH * training.LENGTH  # of both data-parallel ranks
    for report in watched[0]["reports"]:
        assert len(report["layers"]) == 7 * tp_llama.LAYERS
        for name, kinds in report["layers"].items():
            out, into = TP_SHAPES[name.rpartition(".")[2]]
            assert kinds["weight"]["num"] % (out * into) == 0, name
            assert kinds["input"]["num"] == tokens * into, name
            assert kinds["grad_output"]["num"] == tokens * out, name
            for kind, one in kinds.items():
                assert one["amax"] > 0 and one["scale"] > 0 and one["saturation"] < 0.01, (name, kind)
                assert 0 <= one["underflow"] < 0.5, (name, kind, one)


TP_SHAPES = {"q_proj": (32, 64), "k_proj": (16, 64), "v_proj": (16, 64), "o_proj": (64, 32)}
"""[out, in] of one rank's part of two."""
TP_SHAPES |= {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}


def autotp_run(fp8: dict[str, Any]) -> tuple[list[float], list[dict[str, Any]]]:
    engine = autotp.autotp_engine(2, fp8, 2)
    reports = training.reports_of(engine)
    losses, _ = autotp.train(engine, 2, 5)
    autotp.destroy(engine)
    return losses, reports


def test_autotps_layers_are_watched(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "health.jsonl")
    watched = ranks(2).run(autotp_run, {"monitor": {"every": 2, "sink": path}, "guard": {"action": "report"}})
    assert [losses for losses, _ in watched] == [losses for losses, _ in ranks(2).run(autotp_run, {})]
    for _, reports in watched:
        assert len(reports) == 2
        for report in reports:
            assert [len(kinds) for kinds in report["layers"].values()] == [3] * 7 * autotp.LAYERS


@on_ranks(1)
def test_an_engine_whose_last_report_fails_is_destroyed_all_the_same() -> None:
    from deepspeed.utils.z3_leaf_module import z3_leaf_module

    def hooked(module: torch.nn.Module) -> list[bool]:
        """Modules below the root, where DeepSpeed leaves one of its own, that have hooks or are leaves."""
        return [z3_leaf_module(one) or bool(one._forward_hooks) for one in list(module.modules())[1:]]

    def fails(monitor: HealthMonitor) -> None:
        raise ZeroDivisionError

    engine = training.build(training.ds_config(3, {"monitor": {"every": 1, "sink": "/dev/null"}}))
    engine.compile(backend="eager")  # which makes leaves
    training.train(engine, 1)
    module = engine.module
    assert any(map(z3_leaf_module, module.modules()))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(HealthMonitor, "flush", fails)
        engine.destroy()
    assert not any(hooked(module))


@on_ranks(2)
def test_a_monitor_that_nobody_reads_and_a_listener_that_nobody_would_call_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp8\.monitor\.sink"):
        training.build(training.ds_config(2, {"monitor": {"every": 2}}))
    engine = training.build(training.ds_config(2, {}))
    with pytest.raises(ConfigError, match="add_fp8_listener"):
        engine.add_fp8_listener(print)
    training.destroy(engine)


@pytest.mark.parametrize(("stage", "fp8", "waits"), [(2, {}, True), (1, STATES, False)])
@on_ranks(2)
def test_three_skipped_steps_in_a_row_are_said_once_by_rank_0(stage: int, fp8: dict[str, Any], waits: bool) -> None:
    """A step late where the host does not wait for the flag of a step."""
    config = training.ds_config(stage, fp8, bf16={"enabled": True, "check_grad_overflow": waits})
    is_first, told = torch.distributed.get_rank() == 0, []
    with training.log_lines() as said:
        engine = training.build(config, {"width": 32, "hidden": 64, "num_blocks": 1})
        if not waits:
            training.flag_late(engine.optimizer)
        for step in range(10):
            factor = float("inf") if is_first and step in (1, 2, 4, 5, 6, 7) else 1.0
            handle = engine.module.norm.bias.register_hook(lambda grad, factor=factor: grad * factor)
            training.train(engine, 1, step)
            handle.remove()
            told.append(sum("steps in a row were skipped" in line for line in said))
        training.destroy(engine)
    due = 6 if waits else 7
    assert told == [int(is_first and step >= due) for step in range(10)]

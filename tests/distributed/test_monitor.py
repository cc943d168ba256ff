"""The monitor on real engines: the same numbers on all ranks, no bit of the training changed, nothing left behind."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import test_autotp as autotp
import test_tp_llama as tp_llama
import torch
import training
from support.ranks import on_ranks

from fp8_ds.errors import ConfigError

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}


def run(stage: int, fp8: dict[str, Any], model: dict[str, Any], compiled: bool = False) -> dict[str, Any]:
    """Four steps; losses, the reports of all ranks as this one saw them, and the classes of recipes afterwards."""
    engine = training.build(training.ds_config(stage, fp8), model)
    reports: list[Any] = []
    if engine._fp8_step_callbacks.monitor is not None:
        engine._fp8_step_callbacks.monitor.sinks.append(lambda report: reports.append(report.to_json()))
    if compiled:
        torch._dynamo.reset()
        engine.compile(backend="aot_eager")
    losses = training.train(engine, 4)
    layers = [m for m in engine.module.modules() if hasattr(m, "fp8_recipe")]
    names = {type(m.fp8_recipe).__name__ for m in layers}
    training.destroy(engine)
    return {"losses": losses, "reports": reports, "classes": names}


@pytest.mark.parametrize(
    ("stage", "fp8", "model"),
    [
        (1, STATES, {}),
        (2, {"linear": {"recipe": "delayed"}}, {}),
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
    reports: list[Any] = []
    engine._fp8_step_callbacks.monitor.sinks.append(lambda report: reports.append(report.to_json()))
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
    reports: list[Any] = []
    engine._fp8_step_callbacks.monitor.sinks.append(lambda report: reports.append(report.to_json()))
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


def test_evaluations_between_steps_are_no_part_of_a_sample(ranks: Any) -> None:
    """They were counted as if they were micro-batches, and generation, token by token, was slowed down by it."""
    evaluated = ranks(2).run(evaluating, False)[0]
    assert len(evaluated) == 3 and evaluated[0] == evaluated[1] == evaluated[2] and min(evaluated[0]) > 0
    in_eval_mode = ranks(2).run(evaluating, True)[0]  # a model that nobody has put into training mode
    assert in_eval_mode == evaluated


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


def table_of(bad: int) -> dict[str, Any]:
    """What a table says of a tensor that has a NaN on rank `bad` alone, and of one that has none."""
    import torch.distributed as dist

    from fp8_ds.monitor.statistics import StatisticsTable
    from fp8_ds.ops.observe import observe_codes, observe_hp

    table = StatisticsTable(("a",), "cpu", dist.group.WORLD)
    for kind in ("input", "weight"):
        x, scale_inv = torch.ones(4, 4), torch.ones(())
        if kind == "input" and dist.get_rank() == bad:
            x[0, 0] = scale_inv = torch.tensor(math.nan)
        observe_hp(x, table.slot(0, kind))
        observe_codes(x.to(torch.float8_e4m3fn), scale_inv, table.slot(0, kind), can_saturate=False)
    table.send()
    return {kind: asdict(one) for kind, one in (table.receive() or {})["a"].items()}


def test_a_nan_on_one_rank_is_known_on_all(ranks: Any) -> None:
    for found in ranks(2).run(table_of, 1):
        assert found["weight"] == {"amax": 1.0, "scale": 1.0, "saturation": 0.0, "underflow": 0.0, "num": 32}
        assert found["input"]["num"] == 32
        assert not any(math.isfinite(value) for key, value in found["input"].items() if key != "num")


@pytest.mark.slow
def test_compiled_layers_are_watched_with_the_same_numbers(ranks: Any) -> None:
    fp8 = {"monitor": {"every": 2, "sink": "/dev/null"}}
    eager, compiled = (ranks(2).run(run, 2, fp8, {}, is_compiled)[0] for is_compiled in (False, True))
    assert compiled["losses"] == eager["losses"]
    assert len(compiled["reports"]) == 2
    for one, other in zip(compiled["reports"], eager["reports"], strict=True):
        assert one["layers"] == other["layers"]


def to_two_sinks(folder: str) -> None:
    csv = {"enabled": True, "output_path": folder, "job_name": "run"}
    fp8 = {"monitor": {"every": 2, "sink": ["deepspeed", f"{folder}/health.jsonl"]}}
    engine = training.build(training.ds_config(2, fp8, csv_monitor=csv))
    training.train(engine, 3)
    training.destroy(engine)


def test_deepspeeds_csv_monitor_gets_a_file_for_each_number_of_the_report(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(to_two_sinks, str(tmp_path))
    (report,) = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert report["samples"] == 2 * 2 * training.MICRO_BATCH  # after 2 steps
    amax = report["layers"]["blocks.0.up"]["input"]["amax"]
    for name, value in (("coverage", report["coverage"]), ("blocks.0.up_input_amax", amax)):
        rows = (tmp_path / "run" / f"fp8_{name}.csv").read_text().splitlines()
        assert [row.split(",") for row in rows[1:]] == [[str(report["samples"]), str(value)]]


def test_the_last_report_is_written_where_the_group_is_gone_before_the_process_ends(
    start_ranks: Any, tmp_path: Path
) -> None:
    output = start_ranks(Path(__file__).with_name("last_reports.py"), tmp_path, ranks=1)
    assert "Exception ignored" not in output and "Traceback" not in output, output
    assert output.count("fp8: monitor, step 4: JsonLines('/dev/full') failed (OSError: [Errno 28]") == 1
    files = list((tmp_path / "csv").glob("fp8_*.csv"))
    assert len(files) > 6 * 3 * 4
    for file in files:
        samples = [int(row.split(",")[0]) for row in file.read_text().splitlines()[1:]]
        assert samples == [step * training.MICRO_BATCH for step in (2, 4)]


def tensor_parallel(fp8: dict[str, Any]) -> dict[str, Any]:
    """Of a Llama that is cut: losses, the reports as this rank saw them, and the classes of recipes afterwards."""
    engine = tp_llama.tp_engine(tp_llama.engine_config(3, fp8, 2), 2)
    reports: list[Any] = []
    if engine._fp8_step_callbacks.monitor is not None:
        engine._fp8_step_callbacks.monitor.sinks.append(lambda report: reports.append(report.to_json()))
    losses, _ = tp_llama.train(engine, 2, 4)
    classes = {type(m.fp8_recipe).__name__ for m in engine.module.modules() if hasattr(m, "fp8_recipe")}
    tp_llama.destroy(engine)
    return {"losses": losses, "reports": reports, "classes": classes}


def test_tensor_parallel_layers_are_watched_each_rank_its_part(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "health.jsonl"
    watched = ranks(2).run(tensor_parallel, {"monitor": {"every": 2, "sink": str(path)}})
    plain = ranks(2).run(tensor_parallel, {})
    assert watched[0]["losses"] == plain[0]["losses"]
    assert [one["classes"] for one in watched] == [one["classes"] for one in plain]
    assert watched[0]["reports"] != watched[1]["reports"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["health.jsonl", "health.rank1.jsonl"]
    tokens = tp_llama.NUM_BATCHES * training.MICRO_BATCH * training.LENGTH
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


def test_two_by_two_ranks_report_the_sums_over_data_parallel_ranks(ranks: Any) -> None:
    found = ranks(4).run(tensor_parallel, {"monitor": {"every": 2, "sink": "/dev/null"}})
    for rank in range(4):
        assert found[rank]["reports"] == found[rank % 2]["reports"] and found[rank]["reports"]
    assert found[0]["reports"] != found[1]["reports"]
    tokens = tp_llama.NUM_BATCHES * training.MICRO_BATCH * training.LENGTH  # of both data-parallel ranks
    for name, kinds in found[0]["reports"][0]["layers"].items():
        assert kinds["input"]["num"] == tokens * TP_SHAPES[name.rpartition(".")[2]][1], name


TP_SHAPES = {"q_proj": (32, 64), "k_proj": (16, 64), "v_proj": (16, 64), "o_proj": (64, 32)}
"""[out, in] of one rank's part of two."""
TP_SHAPES |= {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}


def test_autotps_layers_are_watched(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "health.jsonl")
    watched = ranks(2).run(autotp_run, {"monitor": {"every": 2, "sink": path}, "guard": {"action": "report"}})
    plain = ranks(2).run(autotp_run, {})
    assert [losses for losses, _ in watched] == [losses for losses, _ in plain]
    for _, names in watched:
        assert len(names) == 7 * autotp.LAYERS
    assert sorted(one.name for one in tmp_path.iterdir()) == ["health.jsonl", "health.rank1.jsonl"]


def autotp_run(fp8: dict[str, Any]) -> tuple[list[float], set[str]]:
    """(losses, names of the layers with all three tensors in each report)."""
    engine = autotp.autotp_engine(2, fp8, 2)
    names: list[set[str]] = []
    if engine._fp8_step_callbacks.monitor is not None:
        health = engine._fp8_step_callbacks.monitor
        health.sinks.append(lambda one: names.append({name for name, kinds in one.layers.items() if len(kinds) == 3}))
    losses, _ = autotp.train(engine, 2, 5)
    autotp.destroy(engine)
    assert not names or (len(names) == 2 and names[0] == names[1])
    return losses, names[0] if names else set()


@on_ranks(2)
def test_a_monitor_that_nobody_reads_and_a_listener_that_nobody_would_call_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp8\.monitor\.sink"):
        training.build(training.ds_config(2, {"monitor": {"every": 2}}))
    engine = training.build(training.ds_config(2, {}))
    with pytest.raises(ConfigError, match="add_fp8_listener"):
        engine.add_fp8_listener(print)
    training.destroy(engine)


def lines_of_skipped_steps(stage: int, fp8: dict[str, Any], waits: bool, bad: set[int]) -> list[int]:
    """How many lines on skipped steps were said after each of ten. Those of `bad` have an infinite gradient."""
    config = training.ds_config(stage, fp8, bf16={"enabled": True, "check_grad_overflow": waits})
    with training.log_lines() as said:
        engine, told = training.build(config, {"width": 32, "hidden": 64, "num_blocks": 1}), []
        if not waits:
            engine.optimizer.fp8_flag = training.late_flag()
        for step in range(10):
            factor = float("inf") if torch.distributed.get_rank() == 0 and step in bad else 1.0
            handle = engine.module.norm.bias.register_hook(lambda grad, factor=factor: grad * factor)
            training.train(engine, 1, step)
            handle.remove()
            told.append(sum("steps in a row were skipped" in line for line in said))
        training.destroy(engine)
    return told


@pytest.mark.parametrize(("stage", "fp8", "waits"), [(2, {}, True), (1, STATES, False)])
def test_three_skipped_steps_in_a_row_are_said_once_by_rank_0(
    ranks: Any, stage: int, fp8: dict[str, Any], waits: bool
) -> None:
    """A step late where the host does not wait for the flag of a step."""
    first, second = ranks(2).run(lines_of_skipped_steps, stage, fp8, waits, {1, 2, 4, 5, 6, 7})
    due = 6 if waits else 7
    assert first == [int(step >= due) for step in range(10)] and second == [0] * 10

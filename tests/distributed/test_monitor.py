"""The monitor on real engines: the same numbers on all ranks, no bit of the training changed, nothing left behind."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import test_autotp as autotp
import test_tp_llama as tp_llama
import torch
import training

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
BLOCKWISE = {"linear": {"recipe": "blockwise", "backend": "reference"}}


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


CASES = [
    (1, STATES, {}),
    pytest.param(1, {}, {}, marks=pytest.mark.slow),
    (2, {"linear": {"recipe": "delayed"}}, {}),
    (3, {"linear": {"recipe": "rowwise"}}, {"checkpointing": "reentrant"}),
    (2, BLOCKWISE, {}),
    pytest.param(3, STATES, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("stage", "fp8", "model"), CASES)
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


def switching() -> list[Any]:
    """Reports of five steps: bf16 in the first two, and in the fifth one layer by a call, one by the longest key."""
    fp8 = {"monitor": {"every": 1, "sink": "/dev/null"}, "schedule": {"bf16_until_step": 2, "layers": {"0.up": "bf16"}}}
    engine = training.build(training.ds_config(2, fp8))
    reports: list[Any] = []
    engine._fp8_step_callbacks.monitor.sinks.append(lambda report: reports.append(report.to_json()))
    training.train(engine, 4)
    engine.set_layer_precision("blocks.1.down", "bf16")
    training.train(engine, 1, 4)
    training.destroy(engine)
    return reports


def test_a_report_is_of_its_own_step_where_layers_change_after_it(ranks: Any) -> None:
    """It counted the layers of the step after, beside the statistics of this one."""
    for reports in ranks(2).run(switching):
        assert [report["layers_in_bf16"] for report in reports] == [6, 6, 1, 1, 2]
        for report in reports:
            assert sum(not kinds for kinds in report["layers"].values()) == report["layers_in_bf16"]
        coverage = [report["coverage"] for report in reports]
        assert coverage[:2] == [0, 0] and coverage[2] == coverage[3] > coverage[4] > 0


def evaluating(trains_in_eval: bool, compiled: bool) -> list[list[int]]:
    """Elements of inputs and weights in each of three reports, with an evaluation before every step."""
    engine = training.build(training.ds_config(2, {"monitor": {"every": 1, "sink": "/dev/null"}}))
    if compiled:
        torch._dynamo.reset()
        engine.compile(backend="aot_eager")
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


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_evaluations_between_steps_are_no_part_of_a_sample(ranks: Any, compiled: bool) -> None:
    """They were counted as if they were micro-batches, and generation, token by token, was slowed down by it."""
    evaluated = ranks(2).run(evaluating, False, compiled)[0]
    assert len(evaluated) == 3 and evaluated[0] == evaluated[1] == evaluated[2] and min(evaluated[0]) > 0
    in_eval_mode = ranks(2).run(evaluating, True, compiled)[0]  # a model that nobody has put into training mode
    assert in_eval_mode == evaluated


def what_ran(fp8: dict[str, Any]) -> set[str]:
    """Names of the monitor's functions, hooks among them, that an engine calls from its building to its end."""
    import fp8_ds.monitor.statistics

    parts = ("monitor", "ops/observe.py")
    own = tuple(str(Path(fp8_ds.__file__).parent / part) for part in parts)
    called: set[str] = set()

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(own):
            called.add(frame.f_code.co_name)

    sys.setprofile(seen)
    try:
        engine = training.build(training.ds_config(2, fp8))
        training.train(engine, 3)
        assert ("monitor" in fp8) == (engine._fp8_step_callbacks.monitor is not None)
        training.destroy(engine)
    finally:
        sys.setprofile(None)
    return called


def test_a_monitor_that_is_off_runs_nothing(ranks: Any) -> None:
    for off in ranks(2).run(what_ran, {}):
        assert off == set()
    for on in ranks(2).run(what_ran, {"monitor": {"every": 2, "sink": "/dev/null"}}):
        assert on >= {"attach", "_observe", "after_step", "send", "receive"}


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


@pytest.mark.parametrize("bad", [0, 1])
def test_a_nan_on_one_rank_is_known_on_all(ranks: Any, bad: int) -> None:
    for found in ranks(2).run(table_of, bad):
        assert found["weight"] == {"amax": 1.0, "scale": 1.0, "saturation": 0.0, "underflow": 0.0, "num": 32}
        assert found["input"]["num"] == 32
        assert not any(math.isfinite(value) for key, value in found["input"].items() if key != "num")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_layers_are_watched_with_the_same_numbers(ranks: Any, stage: int) -> None:
    fp8 = {"monitor": {"every": 2, "sink": "/dev/null"}}
    eager = ranks(2).run(run, stage, fp8, {})[0]
    compiled = ranks(2).run(run, stage, fp8, {}, True)[0]
    assert compiled["losses"] == eager["losses"]
    assert len(compiled["reports"]) == 2
    for one, other in zip(compiled["reports"], eager["reports"], strict=True):
        assert one["layers"] == other["layers"]


def events(directory: str, sink: str | list[str] = "deepspeed") -> list[str]:
    csv = {"enabled": True, "output_path": directory, "job_name": "run"}
    config = training.ds_config(2, {"monitor": {"every": 2, "sink": sink}}, csv_monitor=csv)
    engine = training.build(config)
    training.train(engine, 3)
    training.destroy(engine)
    return sorted(path.name for path in Path(directory, "run").iterdir())


def test_deepspeeds_csv_monitor_gets_a_file_for_each_number(ranks: Any, tmp_path: Path) -> None:
    names = ranks(2).run(events, str(tmp_path))[0]
    assert "fp8_coverage.csv" in names
    assert "fp8_blocks.0.up_grad_output_underflow.csv" in names
    rows = (tmp_path / "run" / "fp8_blocks.0.up_input_amax.csv").read_text().splitlines()
    assert len(rows) == 2 and rows[1].split(",")[0] == str(2 * 2 * training.MICRO_BATCH)  # samples after 2 steps


def test_deepspeeds_monitor_and_json_lines_get_the_same_reports_in_one_run(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "health.jsonl"
    names = ranks(2).run(events, str(tmp_path), ["deepspeed", str(path)])[0]
    (report,) = [json.loads(line) for line in path.read_text().splitlines()]
    amax = report["layers"]["blocks.0.up"]["input"]["amax"]
    assert "fp8_coverage.csv" in names
    rows = (tmp_path / "run" / "fp8_blocks.0.up_input_amax.csv").read_text().splitlines()
    assert [row.split(",") for row in rows[1:]] == [[str(report["samples"]), str(amax)]]


def services() -> tuple[list[Any], list[Any], list[Any]]:
    """(events of the reports; what Weights & Biases was handed; what Comet was), with modules in their places."""
    wandb, comet = ModuleType("wandb"), ModuleType("comet_ml")
    logged: list[Any] = []
    measured: list[Any] = []

    def log(data: dict[str, float], step: int, commit: bool | None) -> None:
        logged.extend((label, value, step) for label, value in data.items())

    def log_metric(name: str, value: float, step: int) -> None:
        measured.append((name, value, step))

    wandb.init, wandb.log = lambda **_: None, log  # type: ignore[attr-defined]
    comet.__version__ = "3.41.0"  # type: ignore[attr-defined]
    comet.start = lambda **_: SimpleNamespace(__internal_api__log_metric__=log_metric)  # type: ignore[attr-defined]
    sys.modules |= {"wandb": wandb, "comet_ml": comet}
    try:
        monitors = {"wandb": {"enabled": True}, "comet": {"enabled": True, "samples_log_interval": 1}}
        engine = training.build(training.ds_config(2, {"monitor": {"every": 2}}, **monitors))
        events: list[Any] = []
        engine._fp8_step_callbacks.monitor.sinks.append(lambda report: events.extend(report.events()))
        training.train(engine, 4)
        training.destroy(engine)
    finally:
        del sys.modules["wandb"], sys.modules["comet_ml"]
    return (events, *([one for one in found if one[0].startswith("fp8/")] for found in (logged, measured)))


def test_weights_and_biases_and_comet_get_each_number_over_samples(ranks: Any) -> None:
    (events, logged, measured), (other_events, *nothing) = ranks(2).run(services)
    assert logged == measured == events
    assert {samples for _, _, samples in events} == {step * 2 * training.MICRO_BATCH for step in (2, 4)}
    assert len(events) == len(other_events) > 2 * 6 * 3 * 4
    assert nothing == [[], []]  # rank 0 alone writes


@pytest.mark.parametrize("num", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_last_report_is_written_where_the_group_is_gone_before_the_process_ends(
    start_ranks: Any, tmp_path: Path, num: int
) -> None:
    output = start_ranks(Path(__file__).with_name("last_reports.py"), tmp_path, ranks=num)
    assert "Exception ignored" not in output and "Traceback" not in output, output
    assert output.count("rank 0: fp8: monitor, step 4: JsonLines('/dev/full') failed (OSError: [Errno 28]") == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    (events,) = (tmp_path / "tensorboard").iterdir()
    read = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    for label in (tag for tag in read.Tags()["scalars"] if tag.startswith("fp8/")):
        found[label] = {event.step: event.value for event in read.Scalars(label)}
    both = [step * num * training.MICRO_BATCH for step in (2, 4)]
    assert {label.rpartition("/")[2] for label in found} >= {"coverage", "amax", "scale", "underflow"}
    for label, values in found.items():
        assert list(values) == both, label
        rows = (tmp_path / "csv" / f"{label.replace('/', '_')}.csv").read_text().splitlines()
        assert [int(row.split(",")[0]) for row in rows[1:]] == both
        assert [float(row.split(",")[1]) for row in rows[1:]] == pytest.approx(list(values.values()), rel=1e-6)
    assert len(list((tmp_path / "csv").glob("fp8_*.csv"))) == len(found)


def on_a_full_disk(stage: int, fp8: dict[str, Any]) -> tuple[list[float], list[str], list[int]]:
    """(losses, what this rank's log says, steps of the reports that another sink has got)."""

    with training.log_lines() as said:
        engine = training.build(training.ds_config(stage, fp8))
        steps: list[int] = []
        if engine._fp8_step_callbacks.monitor is not None:
            engine._fp8_step_callbacks.monitor.sinks.append(lambda report: steps.append(report.step))
        losses = training.train(engine, 7)
        training.destroy(engine)
    return losses, [line for line in said if "gets no more reports" in line], steps


def test_a_full_disk_ends_the_reports_to_it_and_not_the_training(ranks: Any) -> None:
    fp8 = {"monitor": {"every": 2, "sink": "/dev/full"}, "guard": {"action": "report"}}
    full = ranks(2).run(on_a_full_disk, 2, fp8)
    plain = ranks(2).run(on_a_full_disk, 2, {})
    assert [losses for losses, _, _ in full] == [losses for losses, _, _ in plain]
    assert [steps for _, _, steps in full] == [[2, 4, 6]] * 2
    assert [len(said) for _, said, _ in full] == [1, 0]
    assert "rank 0: fp8: monitor, step 2: JsonLines('/dev/full') failed (OSError: [Errno 28]" in full[0][1][0]


def raising() -> str:
    """A listener that raises on all ranks; afterwards the engine still knows that it is within a step."""
    from fp8_ds.errors import UnsupportedError

    fp8 = {"monitor": {"every": 1, "sink": "/dev/null"}}
    engine = training.build(training.ds_config(2, fp8, gradient_accumulation_steps=2))

    def listener(report: Any) -> None:
        raise KeyError("a user's own")

    handle = engine.add_fp8_listener(listener)
    training.train(engine, 1)
    with pytest.raises(KeyError, match="a user's own"):
        training.train(engine, 1, 1)
    engine.micro_steps += 1  # stock counts it after the step
    handle.remove()
    engine.backward(engine(training.micro_batches(2, 1)[0]))
    engine.step()
    try:
        engine.set_layer_precision("blocks.0", "bf16")
    except UnsupportedError as error:
        return str(error)
    finally:
        training.destroy(engine)
    return ""


def test_after_a_listener_has_raised_layers_still_cannot_change_within_a_step(ranks: Any) -> None:
    assert all("after micro-batch 1 of 2" in message for message in ranks(2).run(raising))


def tensor_parallel(stage: int, fp8: dict[str, Any], tp_size: int) -> dict[str, Any]:
    """Of a Llama that is cut: losses, the reports as this rank saw them, and the classes of recipes afterwards."""
    engine = tp_llama.tp_engine(tp_llama.engine_config(stage, fp8, tp_size), tp_size)
    reports: list[Any] = []
    if engine._fp8_step_callbacks.monitor is not None:
        engine._fp8_step_callbacks.monitor.sinks.append(lambda report: reports.append(report.to_json()))
    losses, _ = tp_llama.train(engine, tp_size, 4)
    classes = {type(m.fp8_recipe).__name__ for m in engine.module.modules() if hasattr(m, "fp8_recipe")}
    tp_llama.destroy(engine)
    return {"losses": losses, "reports": reports, "classes": classes}


TP_CASES: list[tuple[int, int, dict[str, Any]]] = [
    (4, 3, {}),
    (2, 2, {"linear": {"recipe": "delayed"}, "tensor_parallel": {"gather": "bf16"}}),
]
SLOW_TP_CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 2, {}),
    (2, 2, {"linear": {"recipe": "rowwise"}}),
    (2, 1, {"linear": {"recipe": "blockwise", "backend": "reference"}}),
]


@pytest.mark.parametrize(
    ("world", "stage", "fp8"), [*TP_CASES, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_TP_CASES)]
)
def test_tensor_parallel_layers_are_watched_each_rank_its_part(
    ranks: Any, world: int, stage: int, fp8: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "health.jsonl"
    watched = ranks(world).run(tensor_parallel, stage, {**fp8, "monitor": {"every": 2, "sink": str(path)}}, 2)
    plain = ranks(world).run(tensor_parallel, stage, fp8, 2)
    assert watched[0]["losses"] == plain[0]["losses"]
    assert [one["classes"] for one in watched] == [one["classes"] for one in plain]
    for rank in range(world):
        assert watched[rank]["reports"] == watched[rank % 2]["reports"]  # ranks 0 and 2 hold the same parts
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


def refused() -> str:
    from fp8_ds.errors import ConfigError

    try:
        training.destroy(training.build(training.ds_config(2, {"monitor": {"every": 2}})))
    except ConfigError as error:
        return str(error)
    return ""


def listened_without_a_monitor() -> str:
    from fp8_ds.errors import ConfigError

    engine = training.build(training.ds_config(2, {}))
    try:
        engine.add_fp8_listener(print)
    except ConfigError as error:
        return str(error)
    finally:
        training.destroy(engine)
    return ""


def test_a_listener_that_nobody_would_call_is_refused(ranks: Any) -> None:
    messages = ranks(2).run(listened_without_a_monitor)
    assert all("add_fp8_listener: expected" in one and '"monitor": {"every": 100}' in one for one in messages)


def test_a_monitor_that_nobody_reads_is_refused(ranks: Any) -> None:
    assert all("fp8.monitor.sink: expected a path" in message for message in ranks(2).run(refused))


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


@pytest.mark.parametrize(
    ("stage", "fp8", "waits"),
    [(2, {}, True), (1, STATES, False), (3, {}, True), pytest.param(3, STATES, False, marks=pytest.mark.slow)],
)
def test_three_skipped_steps_in_a_row_are_said_once_by_rank_0(
    ranks: Any, stage: int, fp8: dict[str, Any], waits: bool
) -> None:
    """A step late where the host does not wait for the flag of a step."""
    first, second = ranks(2).run(lines_of_skipped_steps, stage, fp8, waits, {1, 2, 4, 5, 6, 7})
    due = 6 if waits else 7
    assert first == [int(step >= due) for step in range(10)] and second == [0] * 10

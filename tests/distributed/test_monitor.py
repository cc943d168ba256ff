"""The monitor on real engines: the same numbers on all ranks, no bit of the training changed, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import training

pytestmark = pytest.mark.distributed

BLOCKWISE = {"linear": {"recipe": "blockwise", "backend": "reference"}}


def run(stage: int, fp8: dict[str, Any], model: dict[str, Any], compiled: bool = False) -> dict[str, Any]:
    """Four steps; losses, the reports of all ranks as this one saw them, and the classes of recipes afterwards."""
    engine = training.build(training.ds_config(stage, fp8), model)
    reports: list[Any] = []
    if engine._fp8_health is not None:
        engine._fp8_health.sinks.append(lambda report: reports.append(report.to_json()))
    if compiled:
        torch._dynamo.reset()
        engine.compile(backend="aot_eager")
    losses = training.train(engine, 4)
    layers = [m for m in engine.module.modules() if hasattr(m, "fp8_recipe")]
    names = {type(m.fp8_recipe).__name__ for m in layers}
    training.destroy(engine)
    for report in reports:
        report.pop("gather_ms")  # this rank's own
    return {"losses": losses, "reports": reports, "classes": names}


CASES = [
    (1, {}, {}),
    (2, {"linear": {"recipe": "delayed"}}, {}),
    (3, {"linear": {"recipe": "rowwise"}}, {"checkpointing": "reentrant"}),
    (2, BLOCKWISE, {}),
    (3, {"optimizer": {"states": "fp8", "master": "e4m11"}}, {}),
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
        assert line["gather_ms"] > 0
        assert ("clamp_rate" in line) == ("optimizer" in fp8)
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


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_compiled_layers_are_watched_with_the_same_numbers(ranks: Any, stage: int) -> None:
    fp8 = {"monitor": {"every": 2, "sink": "/dev/null"}}
    eager = ranks(2).run(run, stage, fp8, {})[0]
    compiled = ranks(2).run(run, stage, fp8, {}, True)[0]
    assert compiled["losses"] == eager["losses"]
    assert len(compiled["reports"]) == 2
    for one, other in zip(compiled["reports"], eager["reports"], strict=True):
        assert one["layers"] == other["layers"]


def events(directory: str) -> list[str]:
    csv = {"enabled": True, "output_path": directory, "job_name": "run"}
    config = training.ds_config(2, {"monitor": {"every": 2}}, csv_monitor=csv)
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


def refused() -> str:
    from fp8_ds.errors import ConfigError

    try:
        training.destroy(training.build(training.ds_config(2, {"monitor": {"every": 2}})))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_monitor_that_nobody_reads_is_refused(ranks: Any) -> None:
    assert all("fp8.monitor.sink: expected a path" in message for message in ranks(2).run(refused))

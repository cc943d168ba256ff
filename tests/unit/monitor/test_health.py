"""A sampled step is reported one step later, once, and nothing is attached in between."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.monitor.gauges import Gauge, clamped
from fp8_ds.monitor.health import HealthMonitor
from fp8_ds.monitor.observe import ObservedRecipe, Observers, layers
from fp8_ds.monitor.plot import main, matrix, read_reports
from fp8_ds.monitor.sinks import DeepSpeedEvents, JsonLines, Report
from fp8_ds.monitor.statistics import StatisticsTable, TensorStatistics
from fp8_ds.nn.convert import apply_plan, make_plan
from fp8_ds.ops.adamw import Hyper
from fp8_ds.optim.adamw import Fp8AdamW


class Calls(Gauge):
    name = "calls"

    def __init__(self) -> None:
        self.log: list[str] = []

    def attach(self) -> None:
        self.log.append("attach")

    def detach(self) -> None:
        self.log.append("detach")

    def read(self) -> float:
        return float(len(self.log))


def build(every: int) -> tuple[nn.Module, HealthMonitor, list[Report], Calls]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).bfloat16()
    config = LinearConfig()
    apply_plan(model, make_plan(model, config), config, "cpu")
    table = StatisticsTable(tuple(layers(model)), "cpu")
    gauge, reports = Calls(), []
    health = HealthMonitor(every, table, Observers(model, table), [gauge], lambda: {"coverage": 1.0})
    health.sinks.append(reports.append)
    return model, health, reports, gauge


def train(model: Any, health: HealthMonitor, steps: range) -> list[bool]:
    watched = []
    for step in steps:
        watched.append(isinstance(model[0].fp8_recipe, ObservedRecipe))
        model(torch.randn(64, 32).bfloat16()).float().square().sum().backward()
        with torch.no_grad():
            if step < 7:
                model[0].weight.mul_(1.1)
        health.after_step(step + 1, 4 * (step + 1))
    return watched


def test_every_third_step_is_sampled_and_reported_one_step_later() -> None:
    model, health, reports, gauge = build(3)
    health.start(0)
    assert train(model, health, range(3)) == [False, False, True]
    assert not reports and gauge.log == ["attach", "detach"]
    assert train(model, health, range(3, 11)) == [False, False, True, False, False, True, False, False]
    assert [report.step for report in reports] == [3, 6, 9]
    health.after_step(12, 48)
    assert [report.samples for report in reports] == [12, 24, 36]
    assert reports[0].layers["0"]["input"].num == 64 * 32
    health.flush()
    health.flush()
    assert [report.step for report in reports] == [3, 6, 9, 12]


def test_the_last_report_of_a_run_goes_to_sinks_only() -> None:
    model, health, written, _ = build(2)
    acted: list[Report] = []
    health.listeners.append(acted.append)
    health.start(0)
    train(model, health, range(4))
    health.flush()
    assert [report.step for report in written] == [2, 4] and [report.step for report in acted] == [2]


def test_the_age_of_a_scale_counts_from_the_last_sample_that_saw_it_change() -> None:
    model, health, reports, _ = build(1)
    health.start(0)
    train(model, health, range(12))
    health.flush()
    ages = [report.ages["0", "weight"] for report in reports]
    assert ages == [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert sum(report.ages["0", "input"] == 0 for report in reports) > 6  # new data; in bf16 amaxes may coincide
    assert [report.ages["1", "weight"] for report in reports] == list(range(12))


def report(step: int, underflow: float = 0.25) -> Report:
    one = TensorStatistics(amax=2.0, scale=math.nan, saturation=0.0, underflow=underflow, num=8)
    layers = {"a.up": {"input": one, "weight": one}, "b.down": {"weight": one}}
    ages = {(name, kind): 7 for name, kinds in layers.items() for kind in kinds}
    return Report(step, 4 * step, layers, ages, {"coverage": 0.5, "gather_ms": None})  # type: ignore[arg-type]


def test_json_lines_are_json_and_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "new" / "health.jsonl")
    for one in (report(10), report(20), report(20, 0.5)):
        sink(one)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in sink.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 20]
    assert lines[0]["layers"]["a.up"]["weight"] == {
        "amax": 2.0,
        "scale": None,
        "saturation": 0.0,
        "underflow": 0.25,
        "num": 8,
        "scale_age": 7,
    }
    assert (lines[0]["coverage"], lines[0]["gather_ms"]) == (0.5, None)
    reports = read_reports(sink.path)
    assert [one["step"] for one in reports] == [10, 20]
    assert matrix(reports, "weight", "underflow") == (["a.up", "b.down"], [[0.25, 0.5], [0.25, 0.5]])
    names, rows = matrix(reports, "input", "underflow")
    assert math.isnan(rows[names.index("b.down")][0])


def test_events_have_labels_values_and_samples() -> None:
    class Monitor:
        def write_events(self, events: list[Any]) -> None:
            self.events = events

    monitor = Monitor()
    DeepSpeedEvents(monitor)(report(10))
    labels = {label: value for label, value, samples in monitor.events if samples == 40}
    assert labels["fp8/coverage"] == 0.5 and "fp8/gather_ms" not in labels
    assert labels["fp8/a.up/weight/underflow"] == 0.25 and labels["fp8/b.down/weight/scale_age"] == 7
    assert len(monitor.events) == 1 + 3 * 5


def test_a_heat_map_is_drawn_of_each_statistic(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for step in range(1, 5):
        JsonLines(tmp_path / "health.jsonl")(report(step))
    for statistic in ("underflow", "scale", "amax"):
        out = tmp_path / f"{statistic}.png"
        main([str(tmp_path / "health.jsonl"), str(out), "--statistic", statistic])
        assert out.read_bytes()[:4] == b"\x89PNG" and out.stat().st_size > 5000


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    path.write_text('{"loss": 3}\n')
    with pytest.raises(ConfigError, match=r"loss\.jsonl:1: expected a report"):
        read_reports(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="expected at least one report"):
        read_reports(path)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_clamp_gauge_counts_what_the_step_will_clamp(decoupled: bool) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40000))
    optimizer = Fp8AdamW([p], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, decoupled=decoupled)
    for _ in range(3):
        p.grad = torch.randn(40000)
        optimizer.step()
    core, seen = optimizer.core, []
    stock = core.run

    def run(grads: Any, inputs: Any, chosen: Any = None) -> None:
        inputs.hyper[:, Hyper.BOUND] = 0.9  # below what exact Adam reaches, so that there is something to clamp
        seen.append(clamped(core.shards[0], grads[0], inputs))
        before = core.shards[0].hi.clone()
        stock(grads, inputs, chosen)
        decay = inputs.hyper[0, Hyper.DECAY] if decoupled else 1.0
        moved = ((before * decay - core.shards[0].hi) / inputs.hyper[0, Hyper.LR])[: 1 << 14].abs()
        seen.append((moved > 0.9 - 1e-5).sum())

    core.run = run  # type: ignore[method-assign]
    p.grad = torch.randn(40000)
    optimizer.step()
    num_clamped, num = seen[0].tolist()
    assert num == 1 << 14 and 100 < num_clamped < num
    assert num_clamped == pytest.approx(float(seen[1]), abs=2)

"""A sampled step is reported one step later, once, and nothing is attached in between."""

from __future__ import annotations

import json
import math
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.monitor.health import HealthMonitor
from fp8_ds.monitor.sinks import Change, DeepSpeedEvents, JsonLines, Report
from fp8_ds.monitor.statistics import ObservedRecipe, Observers, StatisticsTable, TensorStatistics
from fp8_ds.nn.plan.convert import apply_plan, fp8_layers
from fp8_ds.nn.plan.plan import make_plan


def build(every: int) -> tuple[nn.Module, HealthMonitor, list[Report]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).bfloat16()
    config = LinearConfig()
    apply_plan(model, make_plan(model, config), config, "cpu")
    table = StatisticsTable(tuple(fp8_layers(model)), "cpu")
    reports: list[Report] = []
    health = HealthMonitor(every, table, Observers(fp8_layers(model), table), lambda: {"coverage": 1.0})
    health.sinks.append(reports.append)
    return model, health, reports


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
    model, health, reports = build(3)
    flag, acted = torch.zeros((), dtype=torch.int32), list[int]()
    health.skip_flag = lambda: flag
    health.listen(lambda report: acted.append(report.step))
    health.start(0)
    assert train(model, health, range(3)) == [False, False, True]
    assert not reports
    assert train(model, health, range(3, 8)) == [False, False, True, False, False]
    flag.fill_(1)  # of step 9 alone
    assert train(model, health, range(8, 9)) == [True]
    flag.fill_(0)
    assert train(model, health, range(9, 11)) == [False, False]
    assert [report.step for report in reports] == [3, 6, 9]
    health.after_step(12, 48)
    assert [report.samples for report in reports] == [12, 24, 36]
    assert reports[0].layers["0"]["input"].num == 64 * 32
    health.flush()
    health.flush()
    assert [report.step for report in reports] == [3, 6, 9, 12]
    assert acted == [3, 6, 9]  # the last one of a run goes to sinks only
    assert [report.numbers["step_skipped"] for report in reports] == [0.0, 0.0, 1.0, 0.0]


def test_a_listener_is_called_until_it_is_removed_and_only_once_a_report() -> None:
    model, health, written = build(1)
    first: list[int] = []
    second: list[int] = []

    def once(report: Report) -> None:
        first.append(report.step)
        handle.remove()

    def stop(one: Report) -> None:
        raise KeyError(one.step)

    handle, other = health.listen(once), health.listen(lambda report: second.append(report.step))
    with pytest.raises(ConfigError, match=r"listener: expected one that is not called yet, got .*once"):
        health.listen(once)
    health.start(0)
    train(model, health, range(3))
    assert (first, second) == ([1], [1, 2])
    other.remove()
    other.remove()
    train(model, health, range(3, 5))
    assert second == [1, 2]
    handle = health.listen(stop)
    with pytest.raises(KeyError):
        train(model, health, range(5, 7))
    handle.remove()
    train(model, health, range(7, 9))
    assert [one.step for one in written] == [1, 2, 3, 4, 5, 8]  # nothing is attached twice


def test_a_tensor_with_a_nan_has_no_shares_in_that_step_alone() -> None:
    model, health, reports = build(1)
    health.start(0)
    gradient = torch.ones(64, 16).bfloat16()
    for step in range(1, 5):
        factor = math.nan if step == 3 else 1.0
        model(torch.ones(64, 32).bfloat16()).backward(gradient * factor)
        health.after_step(step, step)
    health.flush()
    found = [report.to_json()["layers"]["1"] for report in reports]
    unknown = {"amax": None, "scale": None, "saturation": None, "underflow": None, "num": 64 * 16}
    assert found[2]["grad_output"] == unknown
    assert found[2]["input"]["underflow"] is not None
    assert [one["grad_output"]["scale"] is None for one in found] == [False, False, True, False]
    events = {label: value for label, value, _ in reports[2].events()}
    assert math.isnan(events["fp8/1/grad_output/underflow"])


def report(step: int) -> Report:
    one = TensorStatistics(amax=2.0, scale=math.nan, saturation=0.0, underflow=0.25, num=8)
    layers = {"a.up": {"input": one, "weight": one}, "b.down": {"weight": one}}
    return Report(step, 4 * step, layers, {"coverage": 0.5, "gathered_bytes": None})  # type: ignore[arg-type]


def test_a_sample_of_another_step_and_of_layers_elsewhere_is_not_taken_over() -> None:
    model, health, _ = build(2)
    health.start(0)
    train(model, health, range(2))
    state = health.state_dict()
    state["waiting"]["layers"]["of.another.stage"] = state["waiting"]["layers"]["0"]
    _, other, reports = build(2)
    for saved, step, num in ((state, 3, 0), (state, 2, 1), (None, 2, 1)):  # 3: of a load that took weights alone
        other.load_state_dict(saved, step)
        other.flush()
        assert [sorted(one.layers) for one in reports] == [["0", "1"]] * num


def test_reports_are_lines_of_json_and_events_with_samples(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "new" / "health.jsonl")
    for one in (report(10), report(20)):
        sink(one)
    sink.path.write_bytes(sink.path.read_bytes()[:-30])  # half a line of a run that was killed takes none with it
    for step in (20, 30):
        JsonLines(sink.path)(report(step))
    first, half, *others = sink.path.read_text().splitlines()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (first, *others)]
    assert [line["step"] for line in lines] == [10, 20, 30] and half
    one = {"amax": 2.0, "scale": None, "saturation": 0.0, "underflow": 0.25, "num": 8}
    assert lines[0]["layers"]["a.up"]["weight"] == one
    assert (lines[0]["coverage"], lines[0]["gathered_bytes"]) == (0.5, None)
    written: list[Any] = []
    DeepSpeedEvents(SimpleNamespace(write_events=written.extend))(report(10))
    labels = {label: value for label, value, samples in written if samples == 40}
    assert labels["fp8/coverage"] == 0.5 and "fp8/gathered_bytes" not in labels
    assert labels["fp8/a.up/weight/underflow"] == 0.25 and labels["fp8/b.down/weight/amax"] == 2.0
    assert len(written) == 1 + 3 * 4


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_lines_before_it(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "health.jsonl")
    sink(report(10))
    before, limits = sink.path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            sink(report(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sink.path.read_bytes() == before


def test_what_the_guard_changed_is_in_the_next_report_and_in_no_other() -> None:
    model, health, reports = build(2)
    health.start(0)
    train(model, health, range(2))
    health.changes.append(Change(2, "0"))
    other = build(2)[1]
    other.load_state_dict(json.loads(json.dumps(health.state_dict())), 2)
    assert other.changes == health.changes
    train(model, health, range(2, 4))
    assert health.changes == []
    other.load_state_dict(json.loads(json.dumps(health.state_dict())), 4)
    again: list[Report] = []
    other.sinks.append(again.append)
    other.flush()
    health.changes.append(Change(4, "1", "schedule"))
    train(model, health, range(4, 8))
    sent = [{"step": 2, "layer": "0", "to": "bf16"}], [{"step": 4, "layer": "1", "to": "schedule"}]
    assert [one.to_json().get("guard") for one in reports] == [None, *sent]
    assert again[0].to_json()["guard"] == sent[0]
    assert ("fp8/0/sent_to_bf16", 1.0, 16) in list(reports[1].events())
    assert ("fp8/1/sent_to_bf16", 0.0, 24) in list(reports[2].events())


def test_a_resumed_monitor_reports_what_waited() -> None:
    """Saved after step 6 (sampled, not reported) and after step 8 (reported; step 9 is a sampled one)."""
    for save_at, waits in ((6, True), (8, False)):
        model, health, reports = build(3)
        health.start(0)
        train(model, health, range(save_at))
        state = json.loads(json.dumps(health.state_dict()))  # nothing but builtin types
        assert (state["waiting"] is not None) == waits
        num = len(reports)
        train(model, health, range(save_at, 13))
        through = [one.to_json() for one in reports[num:]]

        again, other, resumed = build(3)
        again.load_state_dict(model.state_dict())
        other.start(0)
        train(again, other, range(2))
        again(torch.randn(64, 32).bfloat16()).float().sum().backward()  # a sample is under way, and is dropped
        assert isinstance(again[0].fp8_recipe, ObservedRecipe)
        other.load_state_dict(state, save_at)
        other.start(save_at)
        watched = train(again, other, range(save_at, 13))
        assert watched == [(step + 1) % 3 == 0 for step in range(save_at, 13)]
        assert [one.step for one in resumed] == [one["step"] for one in through] == ([6, 9, 12] if waits else [9, 12])
        if waits:
            assert resumed[0].to_json() == through[0]
        assert all(one.layers["0"]["input"].num == 64 * 32 for one in resumed)


def test_a_sink_that_fails_is_named_once_and_left_out_and_the_others_go_on() -> None:
    model, health, written = build(1)
    said: list[str] = []
    acted: list[int] = []
    health.warn = said.append

    def broken(one: Report) -> None:
        raise ConnectionError("no route")

    health.sinks.insert(0, broken)
    health.listen(lambda one: acted.append(one.step))
    health.start(0)
    train(model, health, range(4))
    health.flush()
    assert [one.step for one in written] == [1, 2, 3, 4] and acted == [1, 2, 3]
    assert len(said) == 1 and "step 1: " in said[0] and "ConnectionError: no route" in said[0]
    assert broken not in health.sinks

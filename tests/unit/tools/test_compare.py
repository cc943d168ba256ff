from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from typer.testing import CliRunner

from fp8_ds.cli.app import app
from fp8_ds.errors import ConfigError
from fp8_ds.tools.compare import (
    T_975,
    Curve,
    Group,
    Paired,
    compare,
    describe,
    read_curve,
    read_groups,
)


def curve(name: str, steps: Iterable[int], losses: Iterable[float]) -> Curve:
    return Curve(name, dict(zip(steps, losses, strict=True)))


def group(name: str, *levels: float) -> Group:
    """Runs whose last ten of a hundred losses are one level each."""
    return Group(name, tuple(curve(name, range(100), [9.0] * 90 + [level] * 10) for level in levels))


def test_the_interval_is_students() -> None:
    assert Paired((1.0, 2.0, 3.0)).half_width == pytest.approx(4.303 / math.sqrt(3))
    assert Paired((1.0,)).half_width == math.inf and math.isnan(Paired((1.0, math.nan)).half_width)
    many = Paired(tuple(map(float, range(99))))
    assert many.half_width == pytest.approx(2.131 * statistics.stdev(range(99)) / math.sqrt(99))  # of 15 degrees
    for degrees, quantile in enumerate(T_975, 1):  # the density, integrated to each of them, has 0.475 of the whole
        scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
        x = (np.arange(2_000) + 0.5) * quantile / 2_000
        area = float((scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2) * quantile / 2_000).sum())
        assert area == pytest.approx(0.475, abs=3e-5), degrees


@pytest.mark.parametrize(
    ("percent", "verdict"),
    [
        ((0.05, 0.06, 0.04), "parity"),
        ((-1.0, -1.1, -0.9), "parity"),  # better is fine
        ((0.2, 0.21, 0.19), "worse"),
        ((0.05, 0.4, -0.3), "undecided"),
        ((0.0,), "undecided"),
    ],
)
def test_verdicts(percent: tuple[float, ...], verdict: str) -> None:
    assert Paired(percent).verdict() == verdict


def test_runs_are_paired_in_order_and_the_end_of_their_common_steps_is_compared() -> None:
    found = compare([group("base", 2.0, 3.0), group("fp8", 2.002, 3.003)], 0.1)
    assert found["results"][0]["percent_by_pair"] == pytest.approx([0.1, 0.1])
    assert found["compared_steps"] == 10
    assert found["noise_percent"] == pytest.approx(100 * math.sqrt(0.5) / 2.5)
    assert compare([group("base", 2.0), group("below 0", -1.0)], 0.1)["results"][0]["percent"] == -150
    short = curve("short", range(0, 50, 5), [1.0] * 10)
    long = curve("long", range(100), [1.0] * 50 + [5.0] * 50)
    found = compare([Group("a", (short,)), Group("b", (long,))], 0.3)
    assert found["results"][0]["percent"] == 0.0 and found["compared_steps"] == 3


@pytest.mark.parametrize(
    ("end", "until", "verdict"),
    [
        (1000, None, "parity"),
        (990, None, "parity"),  # one logging interval
        (980, None, "undecided"),
        (500, 500, "parity"),
        (500, 509, "parity"),
        (500, 700, "undecided"),
    ],
)
def test_a_run_that_ended_early_is_no_parity_unless_that_part_is_meant(
    end: int, until: int | None, verdict: str
) -> None:
    """Nor is any other, for which it leaves nothing but its own steps."""

    def runs(name: str, last: int) -> Group:
        steps = tuple(range(0, last + 1, 10))
        return Group(name, tuple(curve(name, steps, [level] * len(steps)) for level in (2.0, 3.0)))

    for base, other in ((1000, end), (end, 1000)):
        found = compare([runs("base", base), runs("fp8", other), runs("same", 1000)], 0.1, until)
        judged = {(one["verdict"], one["ends_early"]) for one in found["results"]}
        assert judged == {(verdict, verdict == "undecided")}
        assert ("--until" in describe(found)) == (verdict == "undecided")


APART = Group("apart", (curve("apart", (1000, 1001), (1.0, 1.0)),))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([group("base", 1.0, 1.0), group("other", 1.0)], "expected 2 runs"),
        ([group("base", 1.0)], "expected a base and another"),
        ([group("base", 1.0), APART], "expected at least 2 steps that all have"),
        *(([group("base", *levels), group("fp8", 1.0, 1.0)], "base: ") for levels in ((-2, -3), (0, 0), (2, -3))),
    ],
)
def test_what_cannot_be_compared_is_refused(groups: list[Group], words: str) -> None:
    """Differences are relative to the base, which must be above 0."""
    with pytest.raises(ConfigError, match=words):
        compare(groups, 0.1)


def diverged(name: str, step: int, value: float = math.nan) -> Curve:
    return curve(name, range(100), [2.0] * step + [value] * (100 - step))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_run_that_diverged_is_worse_and_the_other_groups_are_judged(value: float) -> None:
    base, same = group("base", 2.0, 2.5), group("same", 2.0, 2.5)
    bad = Group("bad", (diverged("bad0", 97, value), diverged("bad1", 50, value)))
    found = compare([base, bad, same], 0.1)
    assert [one["verdict"] for one in found["results"]] == ["worse", "parity"]
    data = json.loads(json.dumps(found), parse_constant=pytest.fail)["results"]
    assert (data[0]["diverged_at"], data[0]["percent"], data[0]["half_width"], data[0]["loss"]) == (50, *[None] * 3)
    assert data[1]["diverged_at"] is None and data[1]["percent"] == 0.0
    for until, at in ((49, None), (50, 50)):  # until there it is whole
        assert compare([base, bad], 0.1, until)["results"][0]["diverged_at"] == at
    assert compare([bad, base], 0.1, 49)["results"][0]["percent"] is not None
    with pytest.raises(ConfigError, match="bad0: "):
        compare([bad, base], 0.1)


def write(folder: Path, name: str, level: float, until: int = 60) -> str:
    """A run whose losses from step `until` on are NaN."""
    path = folder / f"{name}.csv"
    rows = (f"{step},{level + 1 / (step + 1) if step < until else math.nan}\n" for step in range(60))
    path.write_text("step,loss\n" + "".join(rows))
    return str(path)


def test_a_run_is_called_by_its_path_or_by_what_stands_before_the_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, folder in enumerate(("a", "lr=1", "lr=2")):
        Path(folder).mkdir()
        write(Path(folder), "log", 2.0 + number / 10)
    found = read_groups(["a/log.csv", "lr=1/log.csv", "fp8=lr=2/log.csv"], None)
    assert [one.name for one in found] == ["a/log.csv", "lr=1/log.csv", "fp8"]
    with pytest.raises(ConfigError, match="expected a name of its own"):
        read_groups(["fp8=a/log.csv", "fp8=lr=1/log.csv"], None)


def test_a_file_in_two_runs_is_refused_by_whatever_path(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    one, other = write(tmp_path / "out", "one", 2.0), write(tmp_path, "other", 2.1)
    link, copy = tmp_path / "link.csv", write(tmp_path, "copy", 2.0)
    link.symlink_to(one)
    for again in (one, str(tmp_path / "out"), str(tmp_path / "out/../out/one.csv"), str(link)):
        with pytest.raises(ConfigError, match="fp8: expected a run of its own"):
            read_groups([f"bf16={one},{other}", f"fp8={again},{other}"], None)
    for seeds in (f"{one},{one}", f"{one},{other},{copy}"):
        with pytest.raises(ConfigError, match="fp8: expected a run of its own"):
            read_groups([f"fp8={seeds}"], None)
    copies = f"{copy},{write(tmp_path, 'other_copy', 2.1)}"
    assert len(read_groups([f"bf16={one},{other}", f"fp8={copies}"], None)) == 2  # of numbers alone nothing is known


def test_the_exit_code_is_the_verdict(tmp_path: Path) -> None:
    base, same = (
        ",".join(write(tmp_path, f"{name}{i}", 2.0 + i / 10 + i * more) for i in range(3))
        for name, more in (("base", 0), ("same", 1e-4))
    )
    result = CliRunner().invoke(app, ["compare", f"bf16={base}", f"fp8={same}", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["results"][0]["verdict"] == "parity"
    assert json.loads(result.output)["ends"] == {"bf16": [59] * 3, "fp8": [59] * 3}
    bad, one = write(tmp_path, "bad", 2.0, until=41), write(tmp_path, "one", 2.0)
    result = CliRunner().invoke(app, ["compare", one, bad])
    assert result.exit_code == 1 and "diverged at step 41" in result.stdout
    assert CliRunner().invoke(app, ["compare", bad, one, "--until", "40"]).exit_code == 1  # one pair


def test_csv_of_deepspeeds_monitor(tmp_path: Path) -> None:
    from deepspeed.monitor.config import CSVConfig
    from deepspeed.monitor.csv_monitor import csvMonitor

    monitor = csvMonitor.__new__(csvMonitor)  # its constructor asks for the rank of a process group
    monitor.filenames, monitor.enabled = [], True
    config = CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job")
    monitor.log_dir = str(Path(config.output_path, config.job_name))
    Path(monitor.log_dir).mkdir()
    with patch("deepspeed.comm.get_rank", return_value=0):
        for step, loss in ((16, 2.5), (32, 2.25)):
            monitor.write_events([("Train/Samples/train_loss", loss, step), ("Train/Samples/lr", 1e-3, step)])
    found = read_curve(tmp_path)  # lr's file has no loss
    assert found.losses == {16: 2.5, 32: 2.25}


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """TensorBoard's file of a loss of three steps, in the older form and in the newer, and of a learning rate."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as writer:
        for step in range(130, 133):
            writer.add_scalar("Train/Samples/train_loss", 134.0 - step, step)
            writer.add_scalar("Train/Samples/lr", 1e-3, step)
            writer.add_scalar("Train/loss_as_tensor", 7.0 - step, step, new_style=True)
        writer.add_text("note", "a loss of nothing")
        writer.add_histogram("weights", np.arange(9.0))
    (path,) = (tmp_path / "events").iterdir()
    return path


def test_event_file_of_tensorboard_and_one_that_is_being_written(events: Path) -> None:
    found = read_curve(events.parent, "Train/Samples/train_loss")
    assert found == Curve(str(events), {130: 4.0, 131: 3.0, 132: 2.0})
    assert read_curve(events, "Train/loss_as_tensor").losses == {130: -123.0, 131: -124.0, 132: -125.0}
    with pytest.raises(ConfigError, match=r"expected one loss in .*, got \['Train/Samples/train_loss', 'Train/loss_as"):
        read_curve(events)
    half = events.read_bytes()[: events.read_bytes().rindex(b"Train/Samples/train_loss") + 3]
    events.write_bytes(half)
    assert read_curve(events, "Train/Samples/train_loss").losses == {130: 4.0, 131: 3.0}


def test_of_a_resumed_run_the_last_attempt_counts(tmp_path: Path) -> None:
    """It died behind its checkpoint of step 4, went on from there, and has not come as far as before."""
    path = tmp_path / "loss.csv"
    first, second = [(step, 10 - step) for step in range(1, 9)], [(5, 4.5), (6, 3.5)]
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in first + second))
    found = read_curve(path)
    assert found.losses == {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 4.5, 6: 3.5}
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in reversed(first)))
    assert list(read_curve(path).losses) == list(range(1, 9))  # rows in another order are no second attempt


def test_json_lines_and_trainer_state(tmp_path: Path) -> None:
    rows = [{"step": 2, "loss": 2.0, "eval_loss": 9.0}, {"step": 1, "loss": 3.0}, {"step": 2, "held_out_loss": 8.0}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_curve(tmp_path / "log.jsonl") == Curve(str(tmp_path / "log.jsonl"), {1: 3.0, 2: 2.0})
    assert read_curve(tmp_path / "log.jsonl", "eval_loss").losses == {2: 9.0}
    for name, history in (("checkpoint-1", rows[1:2]), ("checkpoint-2", rows[:2])):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert list(read_curve(tmp_path / "run").losses) == [1, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step,loss_a,loss_b\n1,2,3\n", "expected one loss "),
        ("step,loss\n0.5,2\n1.0,1\n", "expected steps and losses"),
        ("when,loss\n1,2\n", "without one of step, global_step"),
    ],
)
def test_what_is_no_curve_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_curve(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match="expected one file with a loss"):
        read_curve(tmp_path)

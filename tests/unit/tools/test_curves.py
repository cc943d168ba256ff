from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fp8_ds.errors import ConfigError
from fp8_ds.tools.compare.curves import Curve, read_curve


def test_csv_of_deepspeeds_monitor(tmp_path: Path) -> None:
    from deepspeed.monitor.config import CSVConfig
    from deepspeed.monitor.csv_monitor import csvMonitor

    monitor = csvMonitor.__new__(csvMonitor)  # its constructor asks for the rank of a process group
    monitor.filenames, monitor.enabled = [], True
    config = CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job")
    monitor.log_dir = str(Path(config.output_path, config.job_name))
    Path(monitor.log_dir).mkdir()
    from unittest.mock import patch

    with patch("deepspeed.comm.get_rank", return_value=0):
        monitor.write_events([("Train/Samples/train_loss", 2.5, 16), ("Train/Samples/lr", 1e-3, 16)])
        monitor.write_events([("Train/Samples/train_loss", 2.25, 32), ("Train/Samples/lr", 1e-3, 32)])
    found = read_curve(tmp_path)  # lr's file has no loss
    assert found.losses == {16: 2.5, 32: 2.25}


@pytest.mark.parametrize("name", ["empty.csv", "empty.jsonl", "events.out.tfevents.1"])
def test_a_file_without_values_is_named_as_such(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"step,loss\n" if name.endswith("csv") else b"")
    with pytest.raises(ConfigError, match=rf'{name}: expected a column with "loss" in its name, got no rows\. '):
        read_curve(tmp_path / name)


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


def test_without_tensorboard_its_files_are_refused(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(ConfigError, match=r"expected tensorboard, to read it, got none\. `pip install tensorboard`"):
        read_curve(events)


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


def test_a_file_without_a_loss_is_refused_with_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "Train_Samples_lr.csv"
    path.write_text("step,name,nll,lr\n1,x,2.5,1e-3\n2,y,,1e-3\n")
    for named in (path, tmp_path):
        with pytest.raises(ConfigError, match=r'expected a column with "loss" in its name, got lr, name, nll, step\. '):
            read_curve(named)
    assert read_curve(path, "nll").losses == {1: 2.5}
    with pytest.raises(ConfigError, match=r"expected numbers in the column 'nil', got none\."):
        read_curve(path, "nil")
    path.write_text("step," + ",".join(f"fp8_{n}" for n in range(99)) + "\n1" + ",2" * 99)
    with pytest.raises(ConfigError) as refused:
        read_curve(path)
    assert len(str(refused.value)) < 400 + len(str(tmp_path))


def test_what_is_no_curve_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss_a,loss_b\n1,2,3\n")
    with pytest.raises(ConfigError, match=r"expected one loss .*got \['loss_a', 'loss_b'\]"):
        read_curve(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("step,loss\n0.5,2\n1.0,1\n")
    with pytest.raises(ConfigError, match=r"expected steps and losses, got ValueError: '0\.5' as a step"):
        read_curve(tmp_path / "b.csv")
    with pytest.raises(ConfigError, match="expected one file with a loss, got 0"):
        read_curve(tmp_path)
    (tmp_path / "c.csv").write_text("when,loss\n1,2\n")
    with pytest.raises(ConfigError, match="without one of step, global_step"):
        read_curve(tmp_path / "c.csv")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", "step,loss\n1.0,3\n2,2\n"), ("a.jsonl", '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}')],
)
def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_curve(tmp_path / name) == Curve(str(tmp_path / name), {1: 3.0, 2: 2.0})


def test_a_curve_says_where_it_diverged(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n1,2\n2,inf\n3,nan\n")
    curve = read_curve(tmp_path / "a.csv")
    assert (curve.diverged_at(), curve.diverged_at(2), curve.diverged_at(1)) == (2, 2, None)

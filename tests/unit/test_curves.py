from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from fp8_ds.curves import Curve, read_curve, read_events, smooth
from fp8_ds.errors import ConfigError


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
    assert (found.steps, found.losses) == ((16, 32), (2.5, 2.25))


@pytest.mark.parametrize("name", ["empty.csv", "empty.jsonl", "events.out.tfevents.1"])
def test_a_file_without_values_is_named_as_such(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"step,loss\n" if name.endswith("csv") else b"")
    with pytest.raises(ConfigError, match=rf"{name}: expected losses, got a file without values"):
        read_curve(tmp_path / name)


def test_event_file_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            writer.add_scalar("Train/Samples/train_loss", 4.0 - step, step)
            writer.add_scalar("Train/Samples/lr", 1e-3, step)
        writer.add_scalar("Train/loss_as_tensor", 7.0, 1, new_style=True)
    assert read_curve(tmp_path, "Train/Samples/train_loss").losses == (4.0, 3.0, 2.0)
    assert read_curve(tmp_path, "Train/loss_as_tensor").losses == (7.0,)


def record(tag: bytes, step: int, value: float) -> bytes:
    scalar = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(scalar)]) + scalar
    event = (
        b"\x09" + struct.pack("<d", 1.0) + b"\x10" + bytes([step | 128, 1]) + b"\x2a" + bytes([len(summary)]) + summary
    )
    return struct.pack("<Q", len(event)) + bytes(4) + event + bytes(4)


def test_event_file_byte_by_byte_and_one_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    whole = record(b"loss", 5, 1.5) + record(b"loss", 6, 1.25)
    path.write_bytes(whole)
    assert list(read_events(path)) == [("loss", 133, 1.5), ("loss", 134, 1.25)]  # steps of two bytes
    path.write_bytes(whole[:-20])
    assert list(read_events(path)) == [("loss", 133, 1.5)]


def test_of_a_resumed_run_the_last_attempt_counts(tmp_path: Path) -> None:
    """It died behind its checkpoint of step 4, went on from there, and has not come as far as before."""
    path = tmp_path / "loss.csv"
    first, second = [(step, 10 - step) for step in range(1, 9)], [(5, 4.5), (6, 3.5)]
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in first + second))
    found = read_curve(path)
    assert (found.steps, found.losses) == ((1, 2, 3, 4, 5, 6), (9.0, 8.0, 7.0, 6.0, 4.5, 3.5))
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in reversed(first)))
    assert read_curve(path).steps == tuple(range(1, 9))  # rows in another order are no second attempt


def test_json_lines_and_trainer_state(tmp_path: Path) -> None:
    rows = [{"step": 2, "loss": 2.0, "eval_loss": 9.0}, {"step": 1, "loss": 3.0}, {"step": 2, "held_out_loss": 8.0}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_curve(tmp_path / "log.jsonl") == Curve(str(tmp_path / "log.jsonl"), (1, 2), (3.0, 2.0))
    assert read_curve(tmp_path / "log.jsonl", "eval_loss").losses == (9.0,)
    for name, history in (("checkpoint-1", rows[1:2]), ("checkpoint-2", rows[:2])):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert read_curve(tmp_path / "run").steps == (1, 2)


END_OF_A_RUN = {"step": 100, "train_runtime": 9.0, "train_loss": 2.5, "total_flos": 0.0}


@pytest.mark.parametrize("history", [[], [END_OF_A_RUN]])
def test_a_trainer_that_logged_no_step_is_told_which_option_to_lower(
    tmp_path: Path, history: list[dict[str, float]]
) -> None:
    path = tmp_path / "checkpoint-100/trainer_state.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"log_history": history}))
    for named in (path, tmp_path):
        with pytest.raises(ConfigError, match=r"^\S*trainer_state.json: .* Trainer has logged no step\. Run"):
            read_curve(named)
    evaluated = [{"step": step, "eval_loss": 3.0 - step} for step in (1, 2)]
    path.write_text(json.dumps({"log_history": [*evaluated, *history]}))
    with pytest.raises(ConfigError, match=r"lower `--logging_steps`.*or compare .* by `--column eval_loss`\."):
        read_curve(path)
    assert read_curve(path, "eval_loss").losses == (2.0, 1.0)
    path.write_text(json.dumps({"log_history": [{"step": 10, "loss": 3.0}, *history]}))
    assert read_curve(path).steps == (10,)


def test_a_folder_of_deepspeeds_monitor_without_a_loss_is_told_how_to_write_one(tmp_path: Path) -> None:
    write = r"Write it after each step: `engine\.monitor\.write_events\("
    (tmp_path / "Train_Samples_lr.csv").write_text("step,lr\n16,0.001\n")
    for number in range(40):
        (tmp_path / f"fp8_layers.{number}_input_amax.csv").write_text("step,amax\n16,1.0\n")
    with pytest.raises(ConfigError, match=f"expected one file with a loss, got none.*{write}") as refused:
        read_curve(tmp_path)
    assert len(str(refused.value)) < 400 + len(str(tmp_path))
    (tmp_path / "Train_Samples_lr.csv").unlink()
    with pytest.raises(ConfigError, match=r"; and 37 more files\)\. Name the file\."):
        read_curve(tmp_path)
    events = tmp_path / "events.out.tfevents.1"
    events.write_bytes(record(b"Train/Samples/lr", 5, 0.5))
    with pytest.raises(ConfigError, match=f"{events.name}: expected a loss, got none.*{write}"):
        read_curve(events)


def test_a_file_without_a_loss_is_refused_with_the_columns_that_have_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,name,nll,lr\n1,x,2.5,1e-3\n2,y,,1e-3\n")
    with pytest.raises(ConfigError) as refused:
        read_curve(path)
    assert str(refused.value) == (
        f'{path}: expected a column with "loss" in its name, got none. Name one by --column. '
        "With numbers there are: lr, nll."
    )
    assert read_curve(path, "nll").losses == (2.5,)
    with pytest.raises(ConfigError, match=r"got 'nil'\. With numbers there are: lr, nll\."):
        read_curve(path, "nil")
    path.write_text("step,name\n1,x\n")
    with pytest.raises(ConfigError, match=r"No column has numbers: name another file\."):
        read_curve(path)
    events = tmp_path / "events.out.tfevents.1"
    events.write_bytes(b"".join(record(f"fp8/layers.{n}".encode(), 5, 0.5) for n in range(10, 40)))
    with pytest.raises(ConfigError, match=r"there are: fp8/layers\.10, .*fp8/layers\.29 and 10 more\.$"):
        read_curve(events)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_health_file_is_said_to_hold_no_loss(tmp_path: Path, is_folder: bool) -> None:
    layers = {"a": {"input": {"amax": 1.0}}}
    path = tmp_path / "health.jsonl"
    path.write_text(json.dumps({"step": 2, "samples": 8, "coverage": 1.0, "layers": layers}) + "\n")
    with pytest.raises(ConfigError, match=r"expected a loss, got reports of fp8\.monitor, which hold none\. Name"):
        read_curve(tmp_path if is_folder else path)
    assert read_curve(path, "coverage").losses == (1.0,)
    path.write_text(json.dumps({"step": 2, "layers": layers | {f"layers.{n}": {} for n in range(99)}}) + "\n")
    with pytest.raises(ConfigError, match=r"health\.jsonl: expected numbers, got \{'a': .{,80} \.\.\.\. Name a file"):
        read_curve(path, "layers")


def test_what_is_no_curve_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss_a,loss_b\n1,2,3\n")
    with pytest.raises(ConfigError, match=r"expected one loss .*got \['loss_a', 'loss_b'\]"):
        read_curve(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("step,loss\n0.5,2\n1.0,1\n")
    with pytest.raises(ConfigError, match=r"expected whole numbers as steps, got '0\.5'"):
        read_curve(tmp_path / "b.csv")
    with pytest.raises(ConfigError, match="expected one file with a loss, got 0"):
        read_curve(tmp_path)
    (tmp_path / "c.csv").write_text("when,loss\n1,2\n")
    with pytest.raises(ConfigError, match="expected one of step"):
        read_curve(tmp_path / "c.csv")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", "step,loss\n1.0,3\n2,2\n"), ("a.jsonl", '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}')],
)
def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_curve(tmp_path / name) == Curve(str(tmp_path / name), (1, 2), (3.0, 2.0))


def test_a_curve_says_where_it_diverged(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n1,2\n2,inf\n3,nan\n")
    curve = read_curve(tmp_path / "a.csv")
    assert (curve.diverged_at(), curve.diverged_at(2), curve.diverged_at(1)) == (2, 2, None)


def test_smoothing_is_centred_and_shorter_at_the_ends() -> None:
    assert smooth([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0]
    assert smooth([0.0, 2.0, 4.0, 8.0], 2) == [0.0, 1.0, 3.0, 6.0]  # of two, not of three

"""Loss curves from the files that training leaves: CSV, JSON lines, transformers' trainer_state.json, TensorBoard."""

from __future__ import annotations

import csv
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fp8_ds import json_text
from fp8_ds.errors import ConfigError

Logged = TypeVar("Logged")

_STEP_NAMES = ("step", "global_step", "iteration", "steps")
_LOSS = "loss"
_TRAINER_STATE = "trainer_state.json"
_LR_OF_DEEPSPEED = "Train/Samples/lr"
_NO_LOSS_OF_DEEPSPEED = (
    "DeepSpeed writes no loss into its monitors, since 0.18.3. Write it after each step: "
    '`engine.monitor.write_events([("Train/Samples/train_loss", loss.item(), engine.global_samples)])`.'
)
"""Pipelines write one. Source: deepspeedai/DeepSpeed 53e91a0, deepspeed/runtime/engine.py."""
_NUM_SHOWN = 3
_NUM_COLUMNS_SHOWN = 20
_WIDTH = 60
_FLOAT32_MAX = 3.4028235e38


@dataclass(frozen=True)
class Curve:
    """A loss by step, steps ascending; NaN or infinite where a run has diverged."""

    name: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]

    def at(self, steps: Sequence[int]) -> list[float]:
        """Losses of these steps, all of which it has."""
        by_step = dict(zip(self.steps, self.losses, strict=True))
        return [by_step[step] for step in steps]

    def diverged_at(self, until: int | None = None) -> int | None:
        """The first step without a finite loss; None: there is none, or later than `until` only."""
        pairs = zip(self.steps, self.losses, strict=True)
        found = next((step for step, loss in pairs if not math.isfinite(loss)), None)
        return None if found is None or (until is not None and found > until) else found


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Means over `window` steps, centred (an even number looks back one further), shorter at both ends."""
    half = window // 2
    parts = [losses[max(0, i - half) : i - half + window] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


def read_curve(path: Path, column: str | None = None) -> Curve:
    """The curve in a file, or in the file of a folder that has one.

    Args:
        path: .csv (a header, with a step and a loss; what DeepSpeed's csv_monitor writes too), .jsonl,
            trainer_state.json or a TensorBoard event file; or a folder with just one of them that holds a loss.
        column: name of the loss; by default the one whose name has "loss" in it, not "eval" or "held".

    Raises:
        ConfigError: there is no curve, there are several, or a step is no whole number.
        OSError: it cannot be read.
    """
    if path.is_dir():
        return _of_folder(path, column)
    path.stat()  # a name without an ending may be that of a folder which is not there: no kind of file is wrong then
    rows = list(_rows(path))
    if path.name == _TRAINER_STATE and column is None:
        _refuse_unlogged(path, {key for _, row in rows for key in row})
    if not rows:
        raise ConfigError(f"{path}: expected losses, got a file without values. Was the run still starting?")
    name = column or _loss_name(path, rows)
    points = last_attempt((step, _number(row[name], path)) for step, row in rows if row.get(name) not in ("", None))
    if not points:
        raise ConfigError(f"--column: expected a column of {path}, got {name!r}. {_columns(rows)}")
    steps = tuple(sorted(points))
    return Curve(str(path), steps, tuple(points[step] for step in steps))


def last_attempt(pairs: Iterable[tuple[int, Logged]]) -> dict[int, Logged]:
    """By step. A step that comes again is that of a run which was resumed: what came after it before is gone."""
    found: dict[int, Logged] = {}
    newest = -1
    for step, logged in pairs:
        if step in found and step < newest:
            found = {before: value for before, value in found.items() if before < step}
            newest = step
        found[step] = logged
        newest = max(newest, step)
    return found


def _columns(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """What to name: the columns that have numbers, but for steps; an event file has hundreds with `fp8.monitor`."""
    names = sorted({key for _, row in rows for key, value in row.items() if _is_number(value)})
    names = [name for name in names if name.lower() not in _STEP_NAMES]
    more = f" and {len(names) - _NUM_COLUMNS_SHOWN} more" if len(names) > _NUM_COLUMNS_SHOWN else ""
    if not names:
        return "No column has numbers: name another file."
    return f"With numbers there are: {', '.join(names[:_NUM_COLUMNS_SHOWN])}{more}."


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


def _refuse_unlogged(path: Path, names: set[str]) -> None:
    """Raises: ConfigError: no loss of a step is among what Trainer has logged; `train_loss` is the mean of a run."""
    losses = {name for name in names if _LOSS in name.lower() and name != "train_loss"}
    evaluations = sorted(name for name in losses if name.startswith("eval"))
    if losses - set(evaluations):
        return
    instead = f", or compare its evaluations by `--column {evaluations[0]}`" if evaluations else ""
    raise ConfigError(
        f"{path}: expected losses of steps, got none: Trainer has logged no step. Run it with a lower "
        f"`--logging_steps`, whose default is 500{instead}."
    )


def _number(value: Any, path: Path) -> float:
    """Infinite beyond float32's range: no loss is larger, and sums of such numbers may overflow."""
    try:
        found = float(value)
    except OverflowError:  # an integer of hundreds of digits
        found = math.inf
    except (TypeError, ValueError) as error:
        shown = repr(value)
        shown = shown if len(shown) < _WIDTH else f"{shown[:_WIDTH]} ..."
        raise ConfigError(f"{path}: expected numbers, got {shown}. Name a file of steps and losses.") from error
    return math.copysign(math.inf, found) if abs(found) > _FLOAT32_MAX else found


def _of_folder(folder: Path, column: str | None) -> Curve:
    files = [*folder.rglob("*.csv"), *folder.rglob("*.jsonl"), *folder.rglob(_TRAINER_STATE)]
    files += [file for file in folder.rglob("*tfevents*") if file.is_file()]
    found, reasons = [], []
    for file in sorted(files):
        try:
            found.append(read_curve(file, column))
        except ConfigError as error:
            reasons.append(str(error))
    states = [curve for curve in found if curve.name.endswith(_TRAINER_STATE)]
    if states and len(states) == len(found):  # one for each checkpoint, the last has all steps
        return max(states, key=lambda curve: len(curve.steps))
    if not found and reasons and all(file.name == _TRAINER_STATE for file in files):
        raise ConfigError(reasons[-1])  # of the last checkpoint as of the others
    if len(found) != 1:
        if not found and any(reason.endswith(_NO_LOSS_OF_DEEPSPEED) for reason in reasons):
            raise ConfigError(f"{folder}: expected one file with a loss, got none. {_NO_LOSS_OF_DEEPSPEED}")
        detail = ", ".join(curve.name for curve in found) or _shown(reasons) or "no such file"
        raise ConfigError(f"{folder}: expected one file with a loss, got {len(found)} ({detail}). Name the file.")
    return found[0]


def _shown(reasons: Sequence[str]) -> str:
    """The first of them: DeepSpeed's csv_monitor leaves a file of each number, hundreds with `fp8.monitor`."""
    more = f"; and {len(reasons) - _NUM_SHOWN} more files" if len(reasons) > _NUM_SHOWN else ""
    return "; ".join(reason.rstrip(".") for reason in reasons[:_NUM_SHOWN]) + more


def _loss_name(path: Path, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    keys = {key for _, row in rows for key in row}
    names = sorted(key for key in keys if _LOSS in key.lower())
    if not names and (_LR_OF_DEEPSPEED in keys or path.name == f"{_LR_OF_DEEPSPEED.replace('/', '_')}.csv"):
        raise ConfigError(f"{path}: expected a loss, got none. {_NO_LOSS_OF_DEEPSPEED}")
    if not names and any(isinstance(row.get("layers"), Mapping) for _, row in rows):
        raise ConfigError(
            f"{path}: expected a loss, got reports of fp8.monitor, which hold none. Name the file that your training "
            "writes its loss into; examples/deepspeed/heatmap.py draws this one."
        )
    if not names:
        raise ConfigError(
            f'{path}: expected a column with "loss" in its name, got none. Name one by --column. {_columns(rows)}'
        )
    train = [name for name in names if not any(part in name.lower() for part in ("eval", "held", "valid", "test"))]
    chosen = [name for name in train if name.lower() == _LOSS] or train or names
    if len(chosen) != 1:
        raise ConfigError(f"--column: expected one loss in {path}, got {chosen}. Name the column.")
    return chosen[0]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(step, values by name)"""
    if "tfevents" in path.name:
        try:
            for tag, step, value in read_events(path):
                yield step, {tag: value}
        except (IndexError, ValueError, struct.error) as error:
            raise ConfigError(f"{path}: expected TensorBoard's records, got others ({error}). Name another.") from error
    elif path.name == _TRAINER_STATE or path.suffix == ".jsonl":
        yield from _json_rows(path)
    elif path.suffix == ".csv":
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
                rows = list(csv.DictReader(file, skipinitialspace=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path}: expected a CSV in UTF-8, got {error}. Name another.") from error
        for number, row in enumerate(rows, 2):
            if None in row:
                raise ConfigError(
                    f"{path}: expected as many values as names in the first line, got {row[None]} more in row "
                    f"{number}. Repair the file."
                )
            yield _step_of(row, path), row
    else:
        raise ConfigError(
            f"run: expected .csv, .jsonl, trainer_state.json, an event file or a folder, got {path}. Convert it."
        )


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for row in _lines(path) if path.suffix == ".jsonl" else _log_history(path):
        if not isinstance(row, dict):
            raise ConfigError(
                f"{path}: expected JSON objects, got {row!r}. Name a file with a step and a loss in each."
            )
        yield _step_of(row, path), row


def _lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            if line.strip():
                yield json_text.parse(line)
        except ValueError as error:
            raise ConfigError(
                f"{path}:{number}: expected a line of JSON, got {line[:60]!r}. A run that was killed may have left "
                "half a line: remove it, or name a file of JSON lines."
            ) from error


def _log_history(path: Path) -> list[Any]:
    try:
        found = json_text.parse(_text(path))
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got {error}. Name what Trainer has written.") from error
    history = found.get("log_history") if isinstance(found, dict) else None
    if not isinstance(history, list):
        raise ConfigError(f'{path}: expected a list "log_history" in it, got none. Name what Trainer has written.')
    return history


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected JSON in UTF-8, got {error}. Name another.") from error


def _step_of(row: Mapping[str, Any], path: Path) -> int:
    name = next((key for key in row if key.lower() in _STEP_NAMES), None)
    if name is None:
        raise ConfigError(f"{path}: expected one of {', '.join(_STEP_NAMES)} in each row, got {list(row)}. Add it.")
    step = _number(row[name], path)
    if not step.is_integer():
        raise ConfigError(f"{path}: expected whole numbers as steps, got {row[name]!r}. Repair the file.")
    return int(step)


# --- TensorBoard's event files, without TensorBoard ---


def read_events(path: Path) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of all scalars in an event file; an incomplete record at its end is left out.

    Source: tensorflow's record format (length, its checksum, data, its checksum) around event.proto and summary.proto.
    """
    data = path.read_bytes()
    place = 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        record = data[place + 12 : place + 12 + length]
        place += length + 16
        if len(record) < length:
            return
        event = list(_fields(record))
        step = next((value for number, value in event if number == 2), 0)
        for number, summary in event:
            if number == 5:
                yield from ((tag, step, value) for tag, value in _scalars(summary))


def _scalars(summary: bytes) -> Iterator[tuple[str, float]]:
    for _, content in _fields(summary):
        fields = dict(_fields(content))
        tag = fields.get(1, b"").decode()
        if 2 in fields:  # simple_value
            yield tag, struct.unpack("<f", fields[2])[0]
        elif 8 in fields:  # a tensor, as newer writers have it: its float_val, or its bytes
            tensor = dict(_fields(fields[8]))
            if tensor.get(1) == 1 and len(raw := tensor.get(5) or tensor.get(4) or b"") == 4:
                yield tag, struct.unpack("<f", raw)[0]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protobuf message: integers as such, all else as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            return
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place

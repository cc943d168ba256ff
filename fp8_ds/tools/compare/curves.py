"""Loss curves from the files that training leaves: CSV, JSON lines, transformers' trainer_state.json, TensorBoard."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8_ds.config import json_text
from fp8_ds.errors import ConfigError

_STEP_NAMES = ("step", "global_step", "iteration", "steps")
_TRAINER_STATE = "trainer_state.json"
_NOT_OF_TRAINING = ("eval", "held", "valid", "test")
_NUM_SHOWN = 20
_FLOAT32_MAX = 3.4028235e38


@dataclass(frozen=True)
class Curve:
    """A loss by step, steps ascending; NaN or infinite where a run has diverged."""

    name: str
    losses: Mapping[int, float]

    def diverged_at(self, until: int | None = None) -> int | None:
        """Return the first step without a finite loss, of those up to `until`; None: there is none."""
        bad = (step for step, loss in self.losses.items() if not math.isfinite(loss))
        return next((step for step in bad if until is None or step <= until), None)


def read_curve(path: Path, column: str | None = None) -> Curve:
    """Read the curve in a file, or in the file of a folder that has one.

    Args:
        path: .csv (a header, with a step and a loss; what DeepSpeed's csv_monitor writes too), .jsonl,
            trainer_state.json or a TensorBoard event file; or a folder with just one of them that holds a loss.
        column: name of the loss; by default the one whose name has "loss" in it, not "eval" or "held".

    Raises:
        ConfigError: there is no curve, there are several, or a step is no whole number.
        OSError: the file cannot be read.
    """
    if path.is_dir():
        return _of_folder(path, column)
    path.stat()  # a name without an ending may be that of a folder which is not there: no kind of file is wrong then
    try:
        rows = [(_step_of(row), row) for row in _rows(path)]
        name = column or _loss_name(path, {key for _, row in rows for key in row})
        values = _last_attempt((step, float(row[name])) for step, row in rows if row.get(name) not in ("", None))
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, csv.Error) as error:  # of UTF-8 and JSON, too
        raise ConfigError(
            f"{path}: expected steps and losses, got {type(error).__name__}: {error}. Repair it, or name another; a "
            "run that was killed may have left half a line."
        ) from error
    if not values:
        raise ConfigError(f"{path}: expected numbers in the column {name!r}, got none. Name another by --column.")
    # No loss is larger than float32's numbers, and sums of such would overflow.
    finite = {s: loss if not abs(loss) > _FLOAT32_MAX else math.copysign(math.inf, loss) for s, loss in values.items()}
    return Curve(str(path), dict(sorted(finite.items())))


def _last_attempt(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return losses by step. A step that comes again is a resumed run's: what came from it on before is dropped."""
    found: dict[int, float] = {}
    newest = -1
    for step, loss in pairs:
        if step in found and step < newest:
            found = {before: found[before] for before in found if before < step}
            newest = step
        found[step] = loss
        newest = max(newest, step)
    return found


def _of_folder(folder: Path, column: str | None) -> Curve:
    found, reasons = [], []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        if file.suffix in (".csv", ".jsonl") or file.name == _TRAINER_STATE or "tfevents" in file.name:
            try:
                found.append(read_curve(file, column))
            except ConfigError as error:
                reasons.append(str(error).rstrip("."))
    if found and all(curve.name.endswith(_TRAINER_STATE) for curve in found):
        return max(found, key=lambda curve: len(curve.losses))  # one for each checkpoint: the last has all steps
    if len(found) != 1:
        told = ", ".join(curve.name for curve in found) or "; ".join(reasons[:2])
        num = f"{len(found)} of {len(found) + len(reasons)}"
        raise ConfigError(f"{folder}: expected one file with a loss, got {num} ({told}). Name the file.")
    return found[0]


def _loss_name(path: Path, columns: set[str]) -> str:
    names = sorted(name for name in columns if "loss" in name.lower())
    of_training = [name for name in names if not any(part in name.lower() for part in _NOT_OF_TRAINING)]
    chosen = [name for name in of_training if name.lower() == "loss"] or of_training or names
    if not chosen:
        shown = ", ".join(sorted(columns)[:_NUM_SHOWN]) or "no rows"  # with fp8.monitor there are hundreds
        raise ConfigError(
            f'{path}: expected a column with "loss" in its name, got {shown}. Name one by --column, or another file; '
            "docs/cli.md says how DeepSpeed and Trainer are made to log one."
        )
    if len(chosen) > 1:
        raise ConfigError(f"--column: expected one loss in {path}, got {chosen}. Name the column.")
    return chosen[0]


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    if "tfevents" in path.name:
        return _scalars(path)
    if path.suffix not in (".csv", ".jsonl") and path.name != _TRAINER_STATE:
        raise ConfigError(
            f"run: expected .csv, .jsonl, {_TRAINER_STATE}, an event file or a folder, got {path}. Convert it."
        )
    text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    if path.suffix == ".csv":
        return csv.DictReader(text.splitlines(keepends=True), skipinitialspace=True)
    if path.suffix == ".jsonl":
        lines = ",\n".join(filter(str.strip, text.splitlines()))  # as one list, so that an error names its line
        return list(json_text.parse(f"[{lines}\n]"))
    return list(json_text.parse(text)["log_history"])


def _step_of(row: Mapping[str, Any]) -> int:
    name = next((key for key in row if str(key).lower() in _STEP_NAMES), None)
    if name is None or None in row:  # where csv.DictReader puts values without a name
        raise ValueError(f"{str(row)[:60]} without one of {', '.join(_STEP_NAMES)}, or with values that have no name")
    if not float(row[name]).is_integer():
        raise ValueError(f"{row[name]!r} as a step")
    return int(float(row[name]))


def _scalars(path: Path) -> list[dict[str, Any]]:
    """Read an event file's scalars by TensorBoard's own reader, which leaves out an incomplete record at the end."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise ConfigError(f"{path}: expected tensorboard, to read it, got none. `pip install tensorboard`.") from error
    values = [(event.step, value) for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    arrays = [(step, value.tag, make_ndarray(value.tensor)) for step, value in values if value.HasField("tensor")]
    return [{"step": step, tag: array.item()} for step, tag, array in arrays if array.size == 1]

"""Groups of paired runs against a base: their loss curves, differences and verdicts, as text and as data."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp8_ds.config.explain import parse_json
from fp8_ds.errors import ConfigError

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""0.975 quantiles of Student's t with 1, 2, ... degrees of freedom; above 15 that of 15 is used, a little too wide."""
MEAN_BOUND, UPPER_BOUND = 0.1, 0.3
"""Per cent by which the loss may be higher: its mean difference, and the upper end of the 95 % interval of that.
Tighter than DeepSeek-V3's 0.25 % (arXiv 2412.19437, section 3.3)."""

Verdict = Literal["parity", "worse", "undecided"]

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
        return list(parse_json(f"[{lines}\n]"))
    return list(parse_json(text)["log_history"])


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


@dataclass(frozen=True)
class Paired:
    """Relative differences in per cent, one for each pair of runs; positive is worse than the base."""

    by_pair: tuple[float, ...]

    @property
    def mean(self) -> float:
        return _mean(self.by_pair)

    @property
    def half_width(self) -> float:
        """Half the 95 % interval of the mean, by Student's t; infinite for one pair, NaN if one is not finite."""
        degrees = len(self.by_pair) - 1
        if degrees < 1 or not math.isfinite(self.mean):
            return math.inf if math.isfinite(self.mean) else math.nan
        quantile = T_975[min(degrees, len(T_975)) - 1]
        return quantile * statistics.stdev(self.by_pair) / math.sqrt(len(self.by_pair))

    def verdict(self) -> Verdict:
        """Return "parity" if the mean and the upper end of its interval are within the bounds, "worse" if the lower end
        is above the bound of the mean, else "undecided": more pairs or longer runs would tell."""
        if self.mean <= MEAN_BOUND and self.mean + self.half_width <= UPPER_BOUND:
            return "parity"
        return "worse" if self.mean - self.half_width > MEAN_BOUND else "undecided"


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only; the i-th is paired with the base's i-th."""

    name: str
    curves: tuple[Curve, ...]


def read_groups(texts: Sequence[str], column: str | None) -> list[Group]:
    """Read `[NAME=]PATH[,PATH...]` of each group: one run or several seeds. Without a name it has that of its path.

    Raises:
        ConfigError: a path has no curve, two groups have one name, or one run is named twice.
        OSError: a path cannot be read.
    """
    groups = []
    for text in texts:
        name, equals, rest = text.partition("=")
        is_named = equals and not Path(text.split(",")[0]).exists()  # a path that is there may have an equals sign
        paths = (rest if is_named else text).split(",")
        if "" in paths:
            raise ConfigError(f"RUNS: expected [NAME=]PATH[,PATH...], got {text!r}. Write a path behind = and comma.")
        curves = tuple(read_curve(Path(path), column) for path in paths)
        groups.append(Group(name if is_named and name else paths[0], curves))
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise ConfigError(f"RUNS: expected a name of its own for each run, got {', '.join(names)}. Write NAME=PATH.")
    runs = [(group.name, curve) for group in groups for curve in group.curves]
    for (name, one), (other_name, other) in itertools.combinations(runs, 2):
        is_copy = name == other_name and one.losses == other.losses
        if is_copy or Path(one.name).resolve() == Path(other.name).resolve():
            raise ConfigError(
                f"{other_name}: expected a run of its own for each path, got {one.name} and {other.name}, which are "
                "the same. A run is at parity with itself: name each once."
            )
    return groups


def compare(groups: Sequence[Group], fraction: float, until: int | None = None) -> dict[str, Any]:
    """Compare the mean loss over the last steps.

    Args:
        groups: the base, then the others.
        fraction: share of the common steps, from the end, that is compared, at most 1; at least the last step is.
        until: later steps do not count, nor that a run has them; None: runs that go on after the last common step, for
            more than the interval between such steps, leave the verdict undecided.

    Returns:
        What `--json` prints. Of each other group: mean losses, differences in per cent, half of the 95 % interval of
        their mean, the verdict, whether a run goes on after the last compared step, and where one diverged. Numbers
        that are not finite are None.

    Raises:
        ConfigError: less than two groups, runs without a pair, too few steps in common, or a base that has diverged or
            whose loss is not above 0.
    """
    if len(groups) < 2:
        raise ConfigError(f"runs: expected a base and another, got {len(groups)}. Name both.")
    common = set.intersection(*(set(curve.losses) for group in groups for curve in group.curves))
    steps = sorted(step for step in common if until is None or step <= until)
    if len(steps) < 2:
        raise ConfigError(
            f"runs: expected at least 2 steps that all have{'' if until is None else f' until {until}'}, got "
            f"{len(steps)}. Log the same steps, and more of them (Trainer: a lower --logging_steps)."
        )
    compared = steps[-max(1, round(fraction * len(steps))) :]
    latest = steps[-1] + statistics.median(after - before for before, after in itertools.pairwise(steps))
    base, *others = groups
    theirs = [_loss_of_base(curve, compared, until) for curve in base.curves]
    results = []
    for group in others:
        if len(group.curves) != len(base.curves):
            raise ConfigError(
                f"{group.name}: expected {len(base.curves)} runs, one for each of {base.name}, got "
                f"{len(group.curves)}. Runs are paired in the order they are named."
            )
        ours = [_mean_of(curve, compared) for curve in group.curves]
        paired = Paired(tuple(100 * (mine / other - 1) for mine, other in zip(ours, theirs, strict=True)))
        goes_on = any(max(curve.losses) > latest for curve in (*base.curves, *group.curves))
        ends_early = goes_on and (until is None or until > latest)
        diverged = min((s for curve in group.curves if (s := curve.diverged_at(until)) is not None), default=None)
        results.append(
            {
                "run": group.name,
                "base_loss": _mean(theirs),
                "loss": _finite(_mean(ours)),
                "percent_by_pair": [_finite(value) for value in paired.by_pair],
                "percent": _finite(paired.mean),
                "half_width": _finite(paired.half_width),
                "verdict": "worse" if diverged is not None else "undecided" if ends_early else paired.verdict(),
                "ends_early": ends_early,
                "diverged_at": diverged,
            }
        )
    return {
        "base": base.name,
        "steps": len(steps),
        "compared_steps": len(compared),
        "from_step": compared[0],
        "to_step": compared[-1],
        "ends": {group.name: [max(curve.losses) for curve in group.curves] for group in groups},
        "noise_percent": 100 * statistics.stdev(theirs) / _mean(theirs) if len(theirs) > 1 else None,
        "results": results,
    }


def _mean(values: Sequence[float]) -> float:
    """Return the mean; NaN if a value is not finite."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def _mean_of(curve: Curve, steps: Sequence[int]) -> float:
    return _mean([curve.losses[step] for step in steps])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _loss_of_base(curve: Curve, steps: Sequence[int], until: int | None) -> float:
    if (step := curve.diverged_at(until)) is not None:
        raise ConfigError(
            f"{curve.name}: expected a base with finite losses, got {curve.losses[step]} in step {step}: it has "
            "diverged. Name another base, or compare the steps before by --until."
        )
    if (loss := _mean_of(curve, steps)) <= 0:
        raise ConfigError(
            f"{curve.name}: expected a base whose mean loss is above 0, got {loss:.6g}. Differences are relative to "
            "it: name a --column of losses above 0."
        )
    return loss


def describe(found: Mapping[str, Any]) -> str:
    """Return lines about what was compared, each result, and the noise of the base."""
    ends = (f"{name} ends at " + " and ".join(map(str, sorted(set(steps)))) for name, steps in found["ends"].items())
    told = [
        f"Compared: the mean loss of the last {found['compared_steps']} of {found['steps']} common steps, "
        f"{found['from_step']} to {found['to_step']}; {', '.join(ends)}.",
        *map(_describe, found["results"]),
    ]
    if found["noise_percent"] is not None:
        told.append(f"Deviation of {found['base']}'s runs: {found['noise_percent']:.3f} %.")
    return "\n".join(told)


def _describe(one: Mapping[str, Any]) -> str:
    """Say a result in one sentence."""
    if one["diverged_at"] is not None:
        return f"{one['run']}: diverged at step {one['diverged_at']}: worse. Its loss is not finite there."
    told, num_pairs = f"{one['run']}: {one['percent']:+.3f} %", len(one["percent_by_pair"])
    if one["ends_early"]:
        return (
            f"{told}: undecided. A run goes on where another has ended: let it go on too, or say by --until STEP that "
            "the steps until there are meant."
        )
    if num_pairs == 1:
        return f"{told}, one pair: undecided. The noise between seeds is not known; two pairs or more have an interval."
    low, high = one["percent"] - one["half_width"], one["percent"] + one["half_width"]
    bounds = f"mean at most {MEAN_BOUND} %, upper end at most {UPPER_BOUND} %"
    return f"{told}, 95 % interval {low:+.3f} to {high:+.3f} % of {num_pairs} pairs: {one['verdict']} ({bounds})."

"""Groups of paired runs against a base: their curves, differences and verdicts, as data, as a picture, as a page."""

from __future__ import annotations

import base64
import html
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8_ds.curves import Curve, read_curve, smooth
from fp8_ds.errors import ConfigError
from fp8_ds.statistics import MEAN_BOUND, UPPER_BOUND, Paired, Verdict, finite_or_none, mean, t_quantile

_MIN_STEPS = 2


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only; the i-th is paired with the base's i-th."""

    name: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Result:
    """A group against the base.

    Attributes:
        group: its name.
        base_loss, loss: means over runs and the compared steps; the latter is not finite where a run diverged in these.
        paired: relative differences in per cent.
        verdict: by the bounds of `Paired.verdict`; worse where `diverged_at`, else undecided where `ends_early`.
        ends_early: one of these runs goes on after the last compared step, for more than a logging interval.
        diverged_at: the first step in which a run of the group has no finite loss, up to the one that was asked for.
    """

    group: str
    base_loss: float
    loss: float
    paired: Paired
    verdict: Verdict
    ends_early: bool = False
    diverged_at: int | None = None


@dataclass(frozen=True)
class Comparison:
    """All of it.

    Attributes:
        groups: the base first.
        steps: that all runs have, up to the one that was asked for.
        last: how many of these, from the end, are compared.
        noise_percent: deviation of the base's runs in the compared steps, relative to their mean; None for one run.
        results: of each group but the base.
    """

    groups: tuple[Group, ...]
    steps: tuple[int, ...]
    last: int
    noise_percent: float | None
    results: tuple[Result, ...]

    @property
    def compared(self) -> tuple[int, ...]:
        """The steps whose losses are compared."""
        return self.steps[-self.last :]


def read_groups(texts: Sequence[str], column: str | None) -> list[Group]:
    """Of each text as `read_group`; a group without a name has as much of the end of its path as no other has.

    Raises:
        ConfigError: as `read_group`, or two groups are given one name, or one file.
        OSError: a path cannot be read.
    """
    split = [_split(text) for text in texts]
    if (empty := next((text for text, (_, paths) in zip(texts, split, strict=True) if "" in paths), None)) is not None:
        raise ConfigError(f"RUNS: expected [NAME=]PATH[,PATH...], got {empty!r}. Write a path behind each = and comma.")
    given = [name for name, _ in split if name is not None]
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise ConfigError(f"{twice}: expected a name of its own for each run, got it twice. Write NAME=PATH.")
    names = _distinct([name or Path(paths[0]) for name, paths in split])
    groups = [replace(read_group(text, column), name=name) for text, name in zip(texts, names, strict=True)]
    _refuse_shared(groups)
    return groups


def _refuse_shared(groups: Sequence[Group]) -> None:
    """Raises: ConfigError: two groups have a file in common, by whatever path."""
    owners: dict[Path, str] = {}
    for group in groups:
        for curve in group.curves:
            owner = owners.setdefault(Path(curve.name).resolve(), group.name)
            if owner != group.name:
                raise ConfigError(
                    f"{group.name}: expected files of its own, got {curve.name}, which {owner} has too. A run is at "
                    "parity with itself: name the file of the other one."
                )


def _split(text: str) -> tuple[str | None, list[str]]:
    """Name, if there is one, and paths; a path that is there may have an equals sign in it."""
    name, equals, paths = text.partition("=")
    if not equals or Path(text.split(",")[0]).exists():
        return None, text.split(",")
    return name, paths.split(",")


def _distinct(given: Sequence[str | Path]) -> list[str]:
    """Names as they are; of paths the shortest ends that tell them apart, numbered where it is the same path."""
    lengths = [1] * len(given)
    while True:
        names = [
            one if isinstance(one, str) else Path(*one.parts[-length:]).as_posix()
            for one, length in zip(given, lengths, strict=True)
        ]
        too_short = [
            k
            for k, one in enumerate(given)
            if isinstance(one, Path) and names.count(names[k]) > 1 and lengths[k] < len(one.parts)
        ]
        if not too_short:
            break
        for k in too_short:
            lengths[k] += 1
    seen = [names[: k + 1].count(name) for k, name in enumerate(names)]
    return [name if number == 1 else f"{name} ({number})" for name, number in zip(names, seen, strict=True)]


def read_group(text: str, column: str | None) -> Group:
    """`[NAME=]PATH[,PATH...]`: one run or several seeds.

    Raises:
        ConfigError: a path has no curve, or two have the same.
        OSError: it cannot be read.
    """
    given, paths = _split(text)
    name = given or Path(paths[0]).name
    curves = tuple(read_curve(Path(path), column) for path in paths)
    for one, other in itertools.combinations(curves, 2):
        if one.name == other.name or (one.steps, one.losses) == (other.steps, other.losses):
            raise ConfigError(
                f"{name}: expected a run of its own for each seed, got {one.name} and {other.name} with the same "
                "losses. Their interval would be that of copies: name each run once."
            )
    return Group(name, curves)


def pair(losses: Sequence[float], base: Sequence[float]) -> Paired:
    """Relative differences in per cent of runs to those of a base, paired in order."""
    return Paired(tuple(100 * (mine / other - 1) for mine, other in zip(losses, base, strict=True)))


@dataclass(frozen=True)
class Stepwise:
    """A run's losses to those of another on the same batches, step by step: what a batch adds to both cancels.

    Attributes:
        mean: of the relative differences, in per cent.
        error: standard error of it, from their scatter.
        last_step: the last one that both have.
    """

    mean: float
    error: float
    last_step: int


def stepwise(curve: Curve, base: Curve, num_steps: float) -> Stepwise | None:
    """Over the last steps that both have logged; None where these are fewer than two.

    Args:
        curve: of a run.
        base: of the one it is paired with: the same batches in the same order.
        num_steps: of training, up to the last that both have logged.
    """
    both = sorted(set(curve.steps) & set(base.steps))
    compared = [step for step in both if step > both[-1] - num_steps]
    if len(compared) < _MIN_STEPS:
        return None
    each = pair(curve.at(compared), base.at(compared)).by_pair
    return Stepwise(statistics.fmean(each), statistics.stdev(each) / math.sqrt(len(each)), compared[-1])


def pooled_half_widths(found: Sequence[Paired]) -> list[float]:
    """Half widths of the 95 % intervals of their means, with one deviation for all.

    It is pooled over those with several pairs, each weighted by its degrees of freedom, which add up: fewer pairs tell
    more, if the arms spread alike. Infinite where none has two pairs.
    """
    spreads = [(statistics.variance(one.by_pair), len(one.by_pair) - 1) for one in found if len(one.by_pair) > 1]
    degrees = sum(n for _, n in spreads)
    deviation = math.sqrt(sum(variance * n for variance, n in spreads) / degrees) if degrees else math.inf
    return [t_quantile(degrees) * deviation / math.sqrt(len(one.by_pair)) for one in found]


def compare(groups: Sequence[Group], fraction: float, until: int | None = None) -> Comparison:
    """Differences of the mean loss over the last steps.

    Args:
        groups: the base, then the others.
        fraction: share of the common steps, from the end, that is compared, at most 1; at least the last step is.
        until: later steps do not count, nor that a run has them; None: runs that go on after the last common step, for
            more than the interval between such steps, leave the verdict undecided.

    Raises:
        ConfigError: less than two groups, runs without a pair, too few steps in common, or a base that has diverged or
            whose loss is not above 0.
    """
    _refuse_unpaired(groups)
    base = groups[0]
    steps = _common_steps(groups, until)
    last = max(1, round(fraction * len(steps)))
    compared = steps[-last:]
    latest = steps[-1] + statistics.median(after - before for before, after in itertools.pairwise(steps))
    theirs = [_base_mean(curve, compared, until) for curve in base.curves]
    results = []
    for group in groups[1:]:
        ours = [mean(curve.at(compared)) for curve in group.curves]
        ends = [curve.steps[-1] for curve in (*base.curves, *group.curves)]
        ends_early = any(end > latest for end in ends) and (until is None or until > latest)
        diverged = [step for curve in group.curves if (step := curve.diverged_at(until)) is not None]
        results.append(_result(group.name, ours, theirs, ends_early, min(diverged, default=None)))
    noise = 100 * statistics.stdev(theirs) / statistics.fmean(theirs) if len(theirs) > 1 else None
    return Comparison(tuple(groups), tuple(steps), last, noise, tuple(results))


def _result(
    name: str, ours: Sequence[float], theirs: Sequence[float], ends_early: bool, diverged_at: int | None
) -> Result:
    paired = pair(ours, theirs)
    verdict: Verdict = "undecided" if ends_early else paired.verdict()
    if diverged_at is not None:
        verdict = "worse"
    return Result(name, mean(theirs), mean(ours), paired, verdict, ends_early, diverged_at)


def _refuse_unpaired(groups: Sequence[Group]) -> None:
    if len(groups) < 2:
        raise ConfigError(f"runs: expected a base and another, got {len(groups)}. Name both.")
    base = groups[0]
    unpaired = next((group for group in groups[1:] if len(group.curves) != len(base.curves)), None)
    if unpaired is not None:
        raise ConfigError(
            f"{unpaired.name}: expected {len(base.curves)} runs, one for each of {base.name}, got "
            f"{len(unpaired.curves)}. Runs are paired in the order they are named."
        )


def _common_steps(groups: Sequence[Group], until: int | None) -> list[int]:
    common = set.intersection(*(set(curve.steps) for group in groups for curve in group.curves))
    steps = sorted(step for step in common if until is None or step <= until)
    if len(steps) < _MIN_STEPS:
        limit = "" if until is None else f" until {until}"
        raise ConfigError(
            f"runs: expected at least {_MIN_STEPS} steps that all have{limit}, got {len(steps)}. Log the same steps."
        )
    return steps


def _base_mean(curve: Curve, steps: Sequence[int], until: int | None) -> float:
    if (diverged := curve.diverged_at(until)) is not None:
        raise ConfigError(
            f"{curve.name}: expected a base with finite losses, got {curve.at([diverged])[0]} in step {diverged}: it "
            "has diverged. Name another base, or compare the steps before by --until."
        )
    loss = mean(curve.at(steps))
    if loss <= 0:
        raise ConfigError(
            f"{curve.name}: expected a base whose mean loss is above 0, got {loss:.6g}. Differences are relative to "
            "it: name a --column of losses above 0."
        )
    return loss


def describe_steps(found: Comparison) -> str:
    """What was compared, and where each group ends."""
    ends = [(group.name, sorted({curve.steps[-1] for curve in group.curves})) for group in found.groups]
    texts = [f"{name} ends at {' and '.join(map(str, steps))}" for name, steps in ends]
    return (
        f"Compared: the mean loss of the last {found.last} of {len(found.steps)} common steps, {found.compared[0]} to "
        f"{found.compared[-1]}; {', '.join(texts)}."
    )


def describe_mean(paired: Paired) -> str:
    """The mean, and its interval where there are two pairs."""
    if len(paired.by_pair) == 1:
        return f"{paired.mean:+.3f} %, one pair"
    low, high = paired.mean - paired.half_width, paired.mean + paired.half_width
    return f"{paired.mean:+.3f} %, 95 % interval {low:+.3f} to {high:+.3f} % of {len(paired.by_pair)} pairs"


def describe(result: Result) -> str:
    """One sentence for a person."""
    paired = result.paired
    if result.diverged_at is not None:
        return f"{result.group}: diverged at step {result.diverged_at}: worse. Its loss is not finite there."
    if result.ends_early:
        return (
            f"{result.group}: {paired.mean:+.3f} %: undecided. A run goes on where another has ended: let it go on "
            "too, or say by --until STEP that the steps until there are meant."
        )
    if len(paired.by_pair) == 1:
        return (
            f"{result.group}: {describe_mean(paired)}: undecided. The noise between seeds is not known; two "
            "pairs or more have an interval."
        )
    bounds = f"mean at most {MEAN_BOUND} %, upper end at most {UPPER_BOUND} %"
    return f"{result.group}: {describe_mean(paired)}: {result.verdict} ({bounds})."


def plot(found: Comparison, path: Path, window: int) -> None:
    """A PNG: curves with the noise band of the base, and their relative differences.

    Args:
        found: what is shown.
        path: of the PNG.
        window: steps that curves are smoothed over.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("matplotlib: expected it to be installed, got none. `pip install matplotlib`.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 8), sharex=True, height_ratios=(2, 1))
    base: list[float] = []
    for number, group in enumerate(found.groups):
        curves = [smooth(curve.at(found.steps), window) for curve in group.curves]
        center = [mean(column) for column in zip(*curves, strict=True)]
        above.plot(found.steps, center, label=group.name, color=f"C{number}")
        if number == 0:
            base = center
            band = _noise_band(group, found.steps, curves, center)
            pairs = list(zip(center, band, strict=True))
            above.fill_between(found.steps, [m - b for m, b in pairs], [m + b for m, b in pairs], alpha=0.2)
            relative = [_percent(b, m) for m, b in pairs]
            below.fill_between(found.steps, [-r for r in relative], relative, alpha=0.2)
        else:
            difference = [_percent(mine - other, other) for mine, other in zip(center, base, strict=True)]
            below.plot(found.steps, difference, color=f"C{number}")
    below.axhline(0, color="gray", linewidth=0.8)
    below.axhline(UPPER_BOUND, color="gray", linestyle=":")
    above.axvspan(found.compared[0], found.compared[-1], color="gray", alpha=0.1)
    above.set(ylabel=f"loss, mean over {window} steps")
    below.set(xlabel="step", ylabel=f"difference to {found.groups[0].name}, %")
    above.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _percent(part: float, whole: float) -> float:
    """NaN where it says nothing: early losses may be 0 or less."""
    return 100 * part / whole if whole > 0 else math.nan


def _noise_band(
    group: Group, steps: Sequence[int], smoothed: Sequence[Sequence[float]], center: Sequence[float]
) -> list[float]:
    """Deviation between runs where there are several, else that of the one from its smoothed self."""
    if len(smoothed) > 1:
        return [statistics.stdev(column) for column in zip(*smoothed, strict=True)]
    residuals = [value - m for value, m in zip(group.curves[0].at(steps), center, strict=True)]
    return [statistics.pstdev(residuals)] * len(center)


def page(found: Comparison, picture: Path) -> str:
    """HTML that needs no other file: the picture, a table, the verdicts."""
    rows = "".join(
        f"<tr><td>{html.escape(one.group)}</td><td>{one.base_loss:.4f}</td><td>{one.loss:.4f}</td>"
        f"<td>{', '.join(_signed(value) for value in one.paired.by_pair)}</td><td>{one.verdict}</td></tr>"
        for one in found.results
    )
    lines = "".join(f"<li>{html.escape(describe(one))}</li>" for one in found.results)
    files = "".join(
        f"<li>{html.escape(group.name)}: {html.escape(', '.join(curve.name for curve in group.curves))}</li>"
        for group in found.groups
    )
    noise = "" if found.noise_percent is None else f" Deviation of the base's runs: {found.noise_percent:.3f} %."
    image = base64.b64encode(picture.read_bytes()).decode()
    return (
        "<!doctype html><meta charset='utf-8'><title>fp8-ds compare</title>"
        "<style>body{font-family:sans-serif;max-width:60em;margin:2em auto}"
        "td,th{padding:.2em 1em;text-align:left}</style>"
        f"<h1>{html.escape(' and '.join(group.name for group in found.groups))}</h1><ul>{lines}</ul>"
        f"<img src='data:image/png;base64,{image}' style='max-width:100%' alt='loss curves'>"
        f"<p>{html.escape(describe_steps(found))}{noise}</p>"
        "<table><tr><th>run</th><th>loss of the base</th><th>loss</th><th>differences, %</th><th>verdict</th></tr>"
        f"{rows}</table><h2>Files</h2><ul>{files}</ul>"
    )


def _signed(percent: float) -> str:
    return f"{percent:+.3f}" if math.isfinite(percent) else "diverged"


def as_data(found: Comparison) -> dict[str, Any]:
    """For JSON."""
    return {
        "base": found.groups[0].name,
        "steps": len(found.steps),
        "compared_steps": found.last,
        "from_step": found.compared[0],
        "to_step": found.compared[-1],
        "ends": {group.name: [curve.steps[-1] for curve in group.curves] for group in found.groups},
        "noise_percent": found.noise_percent,
        "results": [result_as_data(one) for one in found.results],
    }


def result_as_data(one: Result) -> dict[str, Any]:
    """For JSON; an interval that is not known is null, and so is what a diverged run makes of a number."""
    return {
        "run": one.group,
        "base_loss": one.base_loss,
        "loss": finite_or_none(one.loss),
        "percent_by_pair": [finite_or_none(value) for value in one.paired.by_pair],
        "percent": finite_or_none(one.paired.mean),
        "half_width": finite_or_none(one.paired.half_width),
        "verdict": one.verdict,
        "ends_early": one.ends_early,
        "diverged_at": one.diverged_at,
    }

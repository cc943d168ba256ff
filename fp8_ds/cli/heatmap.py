"""`fp8-ds heatmap`: what FP8 did in each layer over time, from the JSON lines of the monitor."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fp8_ds.cli.common import JsonOption, argument, failures, show


class Statistic(str, Enum):
    """What can be drawn: monitor/plot.py's list, which takes torch to import."""

    underflow = "underflow"
    saturation = "saturation"
    amax = "amax"
    scale = "scale"
    scale_age = "scale_age"


def heatmap(
    reports: Annotated[Path, typer.Argument(help='JSON lines that "monitor": {"sink": PATH} has written.')],
    out: Annotated[Path, typer.Argument(help="The picture to write, a .png.")],
    statistic: Annotated[Statistic, typer.Option("--statistic", help="What is drawn.")] = Statistic.underflow,
    as_json: JsonOption = False,
) -> None:
    """Heat maps of the FP8 layers over the steps of a run: inputs, weights, output gradients.

    Exit codes: 0 done, 2 wrong usage, no reports in the file or no matplotlib, 3 file error, 4 a defect.
    """
    with failures(as_json):
        from fp8_ds.monitor.plot import plot, read_reports

        with argument("REPORTS"):
            found = read_reports(reports)
        with argument("OUT"):
            plot(found, statistic.value, out)
    layers = {name for report in found for name in report["layers"]}
    steps = [report["step"] for report in found]
    if as_json:
        show({"file": str(out), "statistic": statistic.value, "num_layers": len(layers), "steps": steps})
    else:
        samples = "1 sample" if len(steps) == 1 else f"{len(steps)} samples"
        typer.echo(f"{out}: {statistic.value} of {len(layers)} layers, {samples}, steps {steps[0]} to {steps[-1]}")

"""`fp8-ds compare`: is the loss of one way of training that of another?"""

from __future__ import annotations

from typing import Annotated

import typer

from fp8_ds.cli.common import EXIT_NO, JsonOption, argument, failures, show


def compare(
    runs: Annotated[
        list[str], typer.Argument(help="The base, then others: [NAME=]PATH[,PATH...], a path for each seed.")
    ],
    column: Annotated[str | None, typer.Option("--column", help="Name of the loss, where it is not clear.")] = None,
    last: Annotated[
        float, typer.Option("--last", min=0.0, max=1.0, help="Share of the common steps, from the end, compared.")
    ] = 0.1,
    until: Annotated[int | None, typer.Option("--until", min=0, help="Leave later steps out.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Loss curves, their paired differences with 95 % intervals, and a verdict.

    A path is a CSV, JSON lines, trainer_state.json, a TensorBoard event file, or a folder with one of them. Parity: the
    mean difference is at most 0.1 % and the upper end of its interval at most 0.3 %; that takes two pairs of runs that
    end at the same step, unless --until says what is meant.

    Exit codes: 0 parity of all, 1 worse or undecided, 2 wrong usage, 3 file error, 4 a defect.
    """
    from fp8_ds.tools.compare import comparison

    with failures(as_json):
        with argument("RUNS"):
            groups = comparison.read_groups(runs, column)
        found = comparison.compare(groups, last, until)
    if as_json:
        show(comparison.as_data(found))
    else:
        typer.echo(comparison.describe_all(found))
    if any(result.verdict != "parity" for result in found.results):
        raise typer.Exit(EXIT_NO)

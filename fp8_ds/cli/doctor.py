"""`fp8-ds doctor`: what is there, what is missing, what installs it; is FP8 on with this configuration?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8_ds.cli.common import EXIT_NO, JsonOption, argument, console, failures, read_config, show

if TYPE_CHECKING:
    from fp8_ds.tools.doctor.diagnosis import Check

_MARKS = {"ok": "ok", "warning": "look", "missing": "MISSING", "optional": "-"}
_WORDS = {
    "yes": "FP8 would be ON.",
    "no": "FP8 would be OFF.",
    "if": "FP8 would be OFF, unless the script loads it.",
}


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help="A DeepSpeed configuration: would FP8 be on with it?")
    ] = None,
    script: Annotated[
        Path | None, typer.Option("--script", help="The training script, searched for an import of fp8_ds.")
    ] = None,
    world: Annotated[
        int | None, typer.Option("--world", min=1, help="Ranks of the run: do the batch sizes fit them?")
    ] = None,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Multiply a matrix by each recipe.")] = True,
    as_json: JsonOption = False,
) -> None:
    """GPU, versions, seams, attention, a product per recipe; with --config, whether FP8 is really on in that run.

    Exit codes: 0 all that FP8 training needs is here (--config: FP8 would be on), 1 it is not, 2 wrong usage,
    3 file error, 4 a defect.
    """
    from fp8_ds.errors import ConfigError
    from fp8_ds.tools.doctor import diagnosis
    from fp8_ds.tools.doctor.check_config import check_config

    with failures(as_json):
        for option, value in (("--script", script), ("--world", world)):
            if value is not None and config is None:
                raise ConfigError(f"{option}: expected --config beside it, got {value} alone. Name both.")
        block = None if config is None else read_config(config)
        found = diagnosis.checks()
        found += diagnosis.probes() if probe else []
        with argument("--script"):
            verdict = None if block is None else check_config(block, script, found, world)
    missing = [check for check in found if check.status == "missing"]
    line = _WORDS[verdict.on] if verdict is not None else "All that FP8 training needs is here."
    if verdict is None and missing:
        line = f"FP8 training on this machine lacks: {', '.join(check.name for check in missing)}."
    if as_json:
        show(
            {
                "verdict": line,
                "checks": [asdict(check) for check in found],
                "can_train": not missing,
                "config": verdict and asdict(verdict),
            }
        )
    else:
        _print_table(found)
        remedies = verdict.remedies if verdict else [f"{check.name}: {check.remedy}." for check in missing]
        reasons = [part.strip() for reason in (verdict.reasons if verdict else ()) for part in reason.splitlines()]
        for text in (line, *(f"  {reason}" for reason in reasons), *(f"  to do: {remedy}" for remedy in remedies)):
            typer.echo(text)
    if missing if verdict is None else verdict.on != "yes":
        raise typer.Exit(EXIT_NO)


def _print_table(found: list[Check]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "what", "found", "to do")
    for check in found:
        table.add_row(_MARKS[check.status], check.name, escape(check.found), escape(check.remedy))
    console().print(table)

"""`fp8-ds doctor`: what is there, what is missing, what installs it; is FP8 on with this configuration?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8_ds.cli.common import EXIT_NO, JsonOption, argument, console, failures, read_config, show

if TYPE_CHECKING:
    from fp8_ds.diagnosis import Check, Probe
    from fp8_ds.judgement import Verdict

_MARKS = {"ok": "ok", "warning": "look", "missing": "MISSING", "optional": "-"}


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help="A DeepSpeed configuration: would FP8 be on with it?")
    ] = None,
    script: Annotated[
        Path | None, typer.Option("--script", help="The training script, read for an import of fp8_ds.")
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
    from fp8_ds import diagnosis
    from fp8_ds.errors import ConfigError
    from fp8_ds.judgement import judge

    with failures(as_json):
        for option, value in (("--script", script), ("--world", world)):
            if value is not None and config is None:
                raise ConfigError(f"{option}: expected --config beside it, got {value} alone. Name both.")
        block = None if config is None else read_config(config)
        found = diagnosis.checks()
        products = diagnosis.probes() if probe else []
        with argument("--script"):
            verdict = None if block is None else judge(block, script, found, world)
    good = diagnosis.can_train(found) if verdict is None else verdict.on == "yes"
    if as_json:
        show(
            {
                "checks": [asdict(check) for check in found],
                "probes": [asdict(product) for product in products],
                "can_train": diagnosis.can_train(found),
                "config": verdict and asdict(verdict),
            }
        )
    else:
        _print(found, products, verdict)
    if not good:
        raise typer.Exit(EXIT_NO)


def _print(found: list[Check], products: list[Probe], verdict: Verdict | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = console()
    table = Table("", "what", "found", "to do")
    for check in found:
        table.add_row(_MARKS[check.status], check.name, escape(check.found), escape(check.remedy))
    out.print(table)
    if products:
        table = Table("recipe", "SQNR to the reference, dB", "TFLOP/s", "bf16 TFLOP/s", title="A product per recipe")
        for one in products:
            numbers = [f"{value:.0f}" if value is not None else "-" for value in (one.teraflops, one.bf16_teraflops)]
            table.add_row(one.recipe, _against_reference(one), *numbers)
        out.print(table)
    if verdict is None:
        missing = [check.name for check in found if check.status == "missing"]
        lacks = f"FP8 training on this machine lacks: {', '.join(missing)}."
        out.print(lacks if missing else "All that FP8 training needs is here.")
    else:
        words = {
            "yes": "FP8 would be ON.",
            "no": "FP8 would be OFF.",
            "if": "FP8 would be OFF, unless the script loads it.",
        }
        out.print(" ".join([words[verdict.on], *map(escape, verdict.reasons)]))
        for name, what in verdict.used.items():
            out.print(f"  {name}: {escape(what)}")


def _against_reference(one: Probe) -> str:
    if one.refused:
        return one.refused
    if one.is_exact:
        return "the same bits"
    return f"{one.sqnr_db:.1f}" if one.sqnr_db is not None else "NOT A NUMBER"

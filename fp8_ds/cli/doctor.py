"""`fp8-ds doctor`: what is there, what is missing, what installs it; is FP8 on with this configuration?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8_ds.cli.common import EXIT_NO, JsonOption, argument, console, failures, read_config, show

if TYPE_CHECKING:
    from fp8_ds.diagnosis import Check, Probe
    from fp8_ds.judgement import Verdict

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
    from fp8_ds.judgement import judge, used_by_default

    with failures(as_json):
        for option, value in (("--script", script), ("--world", world)):
            if value is not None and config is None:
                raise ConfigError(f"{option}: expected --config beside it, got {value} alone. Name both.")
        block = None if config is None else read_config(config)
        found = diagnosis.checks()
        products = diagnosis.probes() if probe else []
        with argument("--script"):
            verdict = None if block is None else judge(block, script, found, world)
        default = used_by_default(found) if block is None else None
    good = diagnosis.can_train(found) if verdict is None else verdict.on == "yes"
    if as_json:
        show(
            {
                "verdict": _verdict_line(found, verdict),
                "checks": [asdict(check) for check in found],
                "probes": [asdict(product) for product in products],
                "can_train": diagnosis.can_train(found),
                "config": verdict and asdict(verdict),
                "default": default,
            }
        )
    else:
        _print(found, products, verdict, default or {})
    if not good:
        raise typer.Exit(EXIT_NO)


def _print(found: list[Check], products: list[Probe], verdict: Verdict | None, default: Mapping[str, str]) -> None:
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
    if default:
        out.print('The block "fp8": {"enabled": true} would use here:', highlight=False)
    for line in (*_lines(default), *_end(found, verdict)):
        out.print(escape(line), soft_wrap=True, highlight=False)


def _end(found: Sequence[Check], verdict: Verdict | None) -> Iterator[str]:
    """What the tables are for: what would be used, the verdict, a line for each reason and for each remedy."""
    reasons: Sequence[str] = ()
    remedies: Sequence[str] = [f"{check.name}: {check.remedy}." for check in found if check.status == "missing"]
    if verdict is not None:
        reasons, remedies = verdict.reasons, verdict.remedies
        yield from _lines(verdict.used)
    yield _verdict_line(found, verdict)
    yield from (f"  {line.strip()}" for reason in reasons for line in reason.splitlines())
    yield from (f"  to do: {remedy}" for remedy in remedies)


def _lines(used: Mapping[str, str]) -> Iterator[str]:
    yield from (f"  {name}: {what}" for name, what in used.items())


def _verdict_line(found: Sequence[Check], verdict: Verdict | None) -> str:
    if verdict is not None:
        return _WORDS[verdict.on]
    missing = [check.name for check in found if check.status == "missing"]
    lacks = f"FP8 training on this machine lacks: {', '.join(missing)}."
    return lacks if missing else "All that FP8 training needs is here."


def _against_reference(one: Probe) -> str:
    if one.refused:
        return one.refused
    if one.is_exact:
        return "the same bits"
    return f"{one.sqnr_db:.1f}" if one.sqnr_db is not None else "NOT A NUMBER"

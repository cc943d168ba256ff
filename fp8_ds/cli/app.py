"""The `fp8-ds` command.

Exit codes of all commands: 0 done and well, 1 the answer is no, 2 wrong usage or refused, 3 a file could not be read,
written or removed, 4 an error that nobody foresaw. docs/cli.md says what "no" is for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8_ds import run
from fp8_ds.cli.common import (
    Commands,
    JsonOption,
    answer,
    argument,
    console,
    failures,
    read_config,
)
from fp8_ds.cli.estimate import estimate
from fp8_ds.cli.plan import plan

if TYPE_CHECKING:
    from fp8_ds.tools.doctor.diagnosis import Check

app = typer.Typer(
    name="fp8-ds", cls=Commands, help="FP8 training for DeepSpeed.", no_args_is_help=True, add_completion=False
)
autoload_app = typer.Typer(
    help='Make `"fp8": {"enabled": true}` in the JSON config enough for any script of this environment.\n\n'
    "Exit codes: 0 done (status: on), 1 status: off or outdated, 2 wrong usage, 3 file error, 4 a defect.",
    no_args_is_help=True,
)
app.add_typer(autoload_app, name="autoload")

SiteDirOption = Annotated[
    Path | None, typer.Option("--site-dir", help="Folder of the .pth file. Default: this environment's site-packages.")
]


_MARKS = {"ok": "ok", "warning": "look", "missing": "MISSING", "optional": "-"}
_WORDS = {
    "yes": "FP8 would be ON.",
    "no": "FP8 would be OFF.",
    "if": "FP8 would be OFF, unless the script loads it.",
}


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Of fp8_ds, torch and DeepSpeed, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Beside --version: print one JSON object.")] = False,
) -> None:
    """FP8 training for DeepSpeed."""
    if version:
        from fp8_ds import __version__
        from fp8_ds.tools.doctor.diagnosis import installed

        found = {"fp8_ds": __version__, "torch": installed("torch"), "deepspeed": installed("deepspeed")}
        text = "\n".join(f"{name} {value or 'not installed'}" for name, value in found.items())
        answer(found, as_json, lambda: typer.echo(text))
        raise typer.Exit
    if as_json and context.invoked_subcommand is not None:
        raise typer.BadParameter("expected it behind the command, got it before. Move it.", param_hint="--json")
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


@app.command()
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
    data = {
        "verdict": line,
        "checks": [asdict(check) for check in found],
        "can_train": not missing,
        "config": verdict and asdict(verdict),
    }
    remedies = verdict.remedies if verdict else [f"{check.name}: {check.remedy}." for check in missing]
    reasons = [part.strip() for reason in (verdict.reasons if verdict else ()) for part in reason.splitlines()]
    lines = [line, *(f"  {reason}" for reason in reasons), *(f"  to do: {remedy}" for remedy in remedies)]
    answer(data, as_json, lambda: _print(found, lines), is_yes=verdict.on == "yes" if verdict else not missing)


def _print(found: list[Check], lines: list[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "what", "found", "to do")
    for check in found:
        table.add_row(_MARKS[check.status], check.name, escape(check.found), escape(check.remedy))
    console().print(table)
    typer.echo("\n".join(lines))


app.command()(plan)
app.command()(estimate)


@app.command()
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
    from fp8_ds.tools import compare as comparison

    with failures(as_json):
        with argument("RUNS"):
            groups = comparison.read_groups(runs, column)
        found = comparison.compare(groups, last, until)
    is_parity = all(result["verdict"] == "parity" for result in found["results"])
    answer(found, as_json, lambda: typer.echo(comparison.describe(found)), is_yes=is_parity)


class Target(str, Enum):
    """Forms to convert to: bf16 is what safetensors is; "deepspeed" is refused with what to do instead."""

    safetensors = "safetensors"
    bf16 = "bf16"
    fp8 = "fp8"
    universal = "universal"
    deepspeed = "deepspeed"


class Form(str, Enum):
    """Forms of FP8 folders."""

    block = "fp8-block"
    rows = "compressed-tensors"


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="Folder of save_checkpoint, of a universal checkpoint, or of safetensors, in FP8 too."),
    ],
    out: Annotated[Path, typer.Argument(help="An empty folder, one that is not there, or a universal SOURCE.")],
    to: Annotated[Target, typer.Option("--to", help="The form to write.")],
    tag: Annotated[str | None, typer.Option("--tag", help="One of several saves. Default: the latest.")] = None,
    stage: Annotated[
        int | None, typer.Option("--stage", min=1, max=3, help="ZeRO stage that is to load the universal checkpoint.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder with config.json and tokenizer, copied beside safetensors.")
    ] = None,
    form: Annotated[
        Form | None, typer.Option("--format", help="Form of an FP8 folder. Default: the one that keeps the bytes.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Load the FP8 folder by transformers, on the CPU, and compare all values.")
    ] = False,
    trust_pickle: Annotated[
        bool,
        typer.Option("--trust-pickle", help="Files may hold more than data: code of whoever wrote them is executed."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Converts checkpoints: of training to bf16 or FP8 safetensors, FP8 ones to bf16, and all to a universal one.

    Weights leave as bf16 of the masters, bitwise, or with --to fp8 as the bytes that training computes with, for
    servers; those of FP8 folders are bytes times scales. Of safetensors a universal checkpoint has masters equal to
    them, moments of zero and step 0; it needs --stage, and an engine whose trainable parameters have the names in the
    files, or those that transformers gives them on loading (experts in stacks). Parameter groups, learning rates and
    the scheduler stay the engine's own.

    Exit codes: 0 done, 2 wrong usage or refused, 3 file error, 4 a defect.
    """
    from rich.filesize import decimal

    with failures(as_json):
        from fp8_ds.tools import convert as conversion

        with argument("source"):
            conversion.kind_of(source)
        target: conversion.Kind = "safetensors" if to is Target.bf16 else to.value
        form_name = form and form.value
        found = conversion.convert(source, out, target, tag, stage, model, trust_pickle, form_name, verify)
    dtype = {"universal": " in fp32", "fp8": ""}.get(found["target"], " in bf16")
    what = f"{found['num_tensors']} tensors, {decimal(found['num_bytes'], precision=2)}{dtype}"
    lines = [f"{found['source']} to {found['target']}: {what}; {len(found['files'])} entries in {out}"]
    if found["note"] is not None:
        lines.append(found["note"])
    if found["latest"] is not None:
        reads = f"load_checkpoint({str(Path(found['latest']).parent)!r}) reads it"
        lines.append(f'{found["latest"]} names it now: {reads}, with "checkpoint": {{"load_universal": true}}.')
    answer(found, as_json, lambda: typer.echo("\n".join(lines)))


@autoload_app.command()
def on(as_json: JsonOption = False, site_dir: SiteDirOption = None) -> None:
    """Load fp8_ds whenever Python of this environment imports deepspeed."""
    _answer(run.turn_autoload_on, site_dir, as_json)


@autoload_app.command()
def off(as_json: JsonOption = False, site_dir: SiteDirOption = None) -> None:
    """Undo `autoload on`."""
    _answer(run.turn_autoload_off, site_dir, as_json)


@autoload_app.command()
def status(as_json: JsonOption = False, site_dir: SiteDirOption = None) -> None:
    """Exit with 0 if autoload is on, with 1 if it is not."""
    _answer(None, site_dir, as_json)


def _answer(change: Callable[[Path], bool] | None, site_dir: Path | None, as_json: bool) -> None:
    """Print the state after `change`, which says whether it changed something; without one, "on" is the answer yes."""
    folder = site_dir or run.default_site_dir()
    with failures(as_json), argument(f"--site-dir {folder}", "Use a virtual environment of yours, or another folder."):
        changed = change is not None and change(folder)
        state = run.autoload_state(folder)
    file = str(folder / run.PTH_NAME)
    note = "; run `fp8-ds autoload on` to renew it" if state == "outdated" else ""
    data = {"autoload": state, "changed": changed, "file": file}
    is_yes = change is not None or state == "on"
    answer(data, as_json, lambda: typer.echo(f"autoload is {state}: {file}{note}"), is_yes=is_yes)


def main() -> None:
    app()


if __name__ == "__main__":
    main()

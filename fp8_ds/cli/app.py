"""The `fp8-ds` command.

Exit codes of all commands: 0 done and well, 1 the answer is no, 2 wrong usage or refused, 3 a file could not be read,
written or removed, 4 an error that nobody foresaw. docs/cli.md says what "no" is for each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fp8_ds.cli.common import EXIT_NO, Commands, JsonOption, argument, failures, show
from fp8_ds.cli.compare import compare
from fp8_ds.cli.convert import convert
from fp8_ds.cli.doctor import doctor
from fp8_ds.cli.estimate import estimate
from fp8_ds.cli.plan import plan
from fp8_ds.tools import autoload

app = typer.Typer(
    name="fp8-ds", cls=Commands, help="FP8 training for DeepSpeed.", no_args_is_help=True, add_completion=False
)
autoload_app = typer.Typer(
    help='Make `"fp8": {"enabled": true}` in the JSON config enough for any script of this environment.\n\n'
    "Exit codes: 0 done (status: on), 1 status: off or outdated, 2 wrong usage, 3 file error, 4 a defect.",
    no_args_is_help=True,
)
for command in (doctor, plan, estimate, compare, convert):
    app.command()(command)
app.add_typer(autoload_app, name="autoload")

SiteDirOption = Annotated[
    Path | None, typer.Option("--site-dir", help="Folder of the .pth file. Default: this environment's site-packages.")
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Of fp8_ds, torch and DeepSpeed, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Beside --version: print one JSON object.")] = False,
) -> None:
    """FP8 training for DeepSpeed."""
    if version:
        _show_versions(as_json)
        raise typer.Exit
    if as_json and context.invoked_subcommand is not None:
        raise typer.BadParameter("expected it behind the command, got it before. Move it.", param_hint="--json")
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


def _show_versions(as_json: bool) -> None:
    from fp8_ds import __version__
    from fp8_ds.tools.doctor.diagnosis import installed

    found = {"fp8_ds": __version__, "torch": installed("torch"), "deepspeed": installed("deepspeed")}
    if as_json:
        show(found)
    else:
        typer.echo("\n".join(f"{name} {value or 'not installed'}" for name, value in found.items()))


@autoload_app.command()
def on(as_json: JsonOption = False, site_dir: SiteDirOption = None) -> None:
    """Load fp8_ds whenever Python of this environment imports deepspeed."""
    _answer(autoload.turn_on, site_dir, as_json)


@autoload_app.command()
def off(as_json: JsonOption = False, site_dir: SiteDirOption = None) -> None:
    """Undo `autoload on`."""
    _answer(autoload.turn_off, site_dir, as_json)


@autoload_app.command()
def status(as_json: JsonOption = False, site_dir: SiteDirOption = None) -> None:
    """Exit with 0 if autoload is on, with 1 if it is not."""
    if _answer(lambda _: False, site_dir, as_json) != "on":
        raise typer.Exit(EXIT_NO)


def _answer(change: Callable[[Path], bool], site_dir: Path | None, as_json: bool) -> autoload.State:
    """Print the state after `change`, which says whether it changed something."""
    folder = site_dir or autoload.default_site_dir()
    with failures(as_json), argument(f"--site-dir {folder}", "Use a virtual environment of yours, or another folder."):
        changed = change(folder)
        state = autoload.state(folder)
    file = str(autoload.pth_file(folder))
    if as_json:
        show({"autoload": state, "changed": changed, "file": file})
    else:
        note = "; run `fp8-ds autoload on` to renew it" if state == "outdated" else ""
        typer.echo(f"autoload is {state}: {file}{note}")
    return state


def main() -> None:
    app()


if __name__ == "__main__":
    main()

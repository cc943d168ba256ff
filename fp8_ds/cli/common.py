"""Shared parts of the commands: the `--json` option, exit codes, errors as text or as JSON, the configuration file."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fp8_ds.config.explain import parse_json

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 160
_SHOWN = 60
"""Characters of a line that is no JSON."""

# The answer is no; wrong usage or refused; a file; an error that nobody foresaw; Ctrl-C, which is typer's.
EXIT_NO, EXIT_USAGE, EXIT_FILE, EXIT_DEFECT, _EXIT_INTERRUPTED = 1, 2, 3, 4, 130

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace an entry of the model's configuration.")
]

REMOVED = {
    "heatmap": "Start examples/deepspeed/heatmap.py.",
    "parity": "Start examples/deepspeed/parity.py, or compare runs of your own script: docs/parity.md.",
}
"""Commands of earlier versions, and what to do instead."""
UsageError: Any = typer.BadParameter.__base__
"""typer has a copy of click in some versions, and click in others."""


class Commands(TyperGroup):
    """All commands; with --json wrong usage and Ctrl-C are JSON objects, too; no room for an answer is a file error."""

    def main(self, args: Any = None, *more: Any, **options: Any) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        try:
            if "--json" not in words:
                return super().main(args, *more, **options)
            code = super().main(args, *more, **{**options, "standalone_mode": False})
            if code == _EXIT_INTERRUPTED:
                typer.echo(json.dumps({"error": "interrupted"}))
        except UsageError as error:
            sys.exit(_failed(error.format_message(), EXIT_USAGE, as_json=True).exit_code)
        except OSError as error:  # of the answer itself, as on a full disk: without this the code would be "no"
            typer.echo(f"fp8-ds: standard output: {_file_message(error)}", err=True)
            with suppress(OSError):
                sys.stdout.close()  # what is left in it is not tried again when the process ends
            sys.exit(EXIT_FILE)
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if remedy := REMOVED.get(args[0]):
            ctx.fail(f"{args[0]}: expected a command of this version, got one that is gone. {remedy}")
        return super().resolve_command(ctx, args)


@contextmanager
def failures(as_json: bool) -> Iterator[None]:
    """End the command on an error with its code, and say why; for errors of the user's own model, and those that nobody
    foresaw, with the traceback, too.

    Raises:
        typer.Exit: in place of an error.
    """
    from fp8_ds.errors import Fp8DsError, ModelError

    try:
        with redirect_stdout(sys.stderr):  # DeepSpeed and its converters print on the output that is for the answer
            yield
    except Fp8DsError as error:
        if isinstance(error, ModelError):
            traceback.print_exception(error.__cause__)
        raise _failed(str(error), EXIT_USAGE, as_json) from error
    except (OSError, _FileError) as error:
        raise _failed(_file_message(error), EXIT_FILE, as_json) from error
    except (typer.Exit, typer.Abort, UsageError):
        raise
    except Exception as error:
        traceback.print_exc()
        what = f"expected no error here, got {type(error).__name__}: {str(error).rstrip('.')}"
        remedy = "The traceback is on standard error: look into your model there, or report a defect."
        raise _failed(f"{what}. {remedy}", EXIT_DEFECT, as_json) from error


class _FileError(Exception):
    """A file error whose message is complete."""


@contextmanager
def argument(name: str, remedy: str = "Name another.") -> Iterator[None]:
    """Within `failures`, begin the message of a file error with the argument that named the file."""
    try:
        yield
    except OSError as error:
        raise _FileError(f"{name}: {_file_message(error, remedy)}") from error


def _file_message(error: Exception, remedy: str = "Name another.") -> str:
    if not isinstance(error, OSError):
        return str(error)
    what = f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error)
    return f"expected a file or folder to work with, got {what!r}. {remedy}"


def _failed(message: str, code: int, as_json: bool) -> typer.Exit:
    if as_json:
        typer.echo(json.dumps({"error": message}))
    else:
        typer.echo(f"fp8-ds: {message}", err=True)
    return typer.Exit(code)


def read_parsed_config(path: Path) -> dict[str, Any]:
    """Read the configuration that --config names, filled in as Trainer does, and check it by DeepSpeed's own parser.

    Raises:
        ConfigError: DeepSpeed refuses it, batch sizes apart; or as `read_config` does.
    """
    from fp8_ds.config.ds_config import BATCH_SIZES, filled_in, parsed
    from fp8_ds.errors import ConfigError

    config = dict(filled_in(read_config(path)))
    sizes = (*BATCH_SIZES, "gradient_accumulation_steps")
    with suppress(ImportError):  # no DeepSpeed, which these commands do without
        try:
            parsed({BATCH_SIZES[1]: 1, **{key: value for key, value in config.items() if key not in sizes}})
        except ConfigError as error:
            raise ConfigError(f"--config: DeepSpeed refuses it: {error}") from error
    return config


def read_config(path: Path) -> dict[str, Any]:
    """Read the DeepSpeed configuration that --config names.

    Raises:
        ConfigError: it is no JSON object, or no UTF-8.
    """
    from fp8_ds.errors import ConfigError

    with argument("--config"):
        content = path.read_bytes()
    try:
        config = parse_json(content.decode("utf-8"), object_pairs_hook=_without_duplicates)
        if not isinstance(config, dict):
            raise ValueError(type(config).__name__)
    except ValueError as error:  # of JSON, of UTF-8, or a key twice
        line = ""
        if isinstance(error, json.JSONDecodeError):
            line = f": {''.join(error.doc.splitlines()[error.lineno - 1 : error.lineno]).strip()[:_SHOWN]!r}"
        raise ConfigError(
            "--config: expected a JSON object with each key once (double quotes, no comments, no comma behind the last "
            f"entry), got {error} in {path}{line}. Name a DeepSpeed configuration."
        ) from error
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; raise ValueError, as DeepSpeed does, if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"{json.dumps(twice)} twice in one object")
    return found


def answer(data: Any, as_json: bool, say: Callable[[], None], *, is_yes: bool = True) -> None:
    """Print `data` as one JSON object, or have `say` print text, and end the command with EXIT_NO unless `is_yes`."""
    if as_json:
        typer.echo(json.dumps(data))
    else:
        say()
    if not is_yes:
        raise typer.Exit(EXIT_NO)


def console() -> Console:
    """Return the console for text; as wide as needed where it is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def own_device() -> Any:
    """Return the torch.device that a run on this machine would train on."""
    import torch

    from fp8_ds.host import uses_cuda

    return torch.device("cuda" if uses_cuda() else "cpu")


def num_parameters(number: int) -> str:
    """Return a text such as `8.03 B parameters` or `12.4 M parameters`; in full below 0.1 M."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size / 10:
            return f"{number / size:.3g} {unit} parameters"
    return f"{number:,} parameters"

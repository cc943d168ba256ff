"""`deepspeed --module fp8_ds.run train.py ...` trains an unchanged script with fp8_ds installed."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from itertools import takewhile

_USAGE = "deepspeed --module fp8_ds.run SCRIPT.py [arguments of the script]"


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script's path and the arguments that it is to see.

    The launcher puts its `--local_rank=K` before everything, so before the script's name; it belongs right after.

    Raises:
        SystemExit: no script is named, the first argument is another option, or the file does not exist.
    """
    moved = list(takewhile(lambda word: word.startswith(("--local_rank=", "--local-rank=")), arguments))
    if len(moved) == len(arguments):
        raise SystemExit(f"fp8_ds.run: expected a script to run, got none. Use: {_USAGE}")
    script, *rest = arguments[len(moved) :]
    if script.startswith("-"):
        raise SystemExit(
            f"fp8_ds.run: expected a script before any option, got {script!r}. It has no options of its own: {_USAGE}"
        )
    if not os.path.isfile(script):
        raise SystemExit(
            f"fp8_ds.run: expected the path of a Python file, got {script!r} (no such file in {os.getcwd()}). "
            f"Use: {_USAGE}"
        )
    return script, [*moved, *rest]


def main() -> None:
    script, arguments = split_arguments(sys.argv[1:])
    import fp8_ds  # noqa: F401  (installs)
    from fp8_ds.errors import refusals_without_traceback

    sys.argv = [script, *arguments]
    # As `python SCRIPT.py` has it: the script's folder comes first, in place of the folder that `-m` put there.
    folder = os.path.dirname(os.path.abspath(script))
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)
    with refusals_without_traceback():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

"""Ways to train an unchanged script: `deepspeed --module fp8_ds.run train.py ...`, and the `.pth` file of autoload."""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal

AutoloadState = Literal["on", "off", "outdated"]

PTH_NAME = "fp8_ds_autoload.pth"
# `site` runs this line at every start of Python: it must cost little and must not fail once fp8_ds is uninstalled.
PTH_LINE = 'import importlib.util as u; u.find_spec("fp8_ds") and __import__("fp8_ds")\n'
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


def default_site_dir() -> Path:
    """Return this environment's site-packages."""
    return Path(sysconfig.get_paths()["purelib"])


def autoload_state(site_dir: Path) -> AutoloadState:
    """Return whether a Python started now loads fp8_ds; "outdated": by the file of another version of fp8_ds."""
    path = site_dir / PTH_NAME
    if not path.exists():
        return "off"
    return "on" if path.read_bytes() == PTH_LINE.encode() else "outdated"


def turn_autoload_on(site_dir: Path) -> bool:
    """Write the file; return True if it was not there, or was another version's."""
    if autoload_state(site_dir) == "on":
        return False
    # Renamed into place: a Python that starts meanwhile sees the whole line or no file.
    draft = site_dir / f"{PTH_NAME}.new"
    draft.write_text(PTH_LINE)
    draft.replace(site_dir / PTH_NAME)
    return True


def turn_autoload_off(site_dir: Path) -> bool:
    """Remove the file; return True if it was there."""
    path = site_dir / PTH_NAME
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


if __name__ == "__main__":
    main()

"""The opt-in `.pth` file that installs fp8_ds whenever this environment's Python imports deepspeed."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Literal

State = Literal["on", "off", "outdated"]

PTH_NAME = "fp8_ds_autoload.pth"
# `site` runs this line at every start of Python: it must cost little and must not fail once fp8_ds is uninstalled.
PTH_LINE = 'import importlib.util as u; u.find_spec("fp8_ds") and __import__("fp8_ds.engine.autoload")\n'


def default_site_dir() -> Path:
    """Return this environment's site-packages."""
    return Path(sysconfig.get_paths()["purelib"])


def pth_file(site_dir: Path) -> Path:
    return site_dir / PTH_NAME


def state(site_dir: Path) -> State:
    """Return whether a Python started now loads fp8_ds; "outdated": by the file of another version of fp8_ds."""
    path = pth_file(site_dir)
    if not path.exists():
        return "off"
    return "on" if path.read_bytes() == PTH_LINE.encode() else "outdated"


def turn_on(site_dir: Path) -> bool:
    """Write the file; return True if it was not there, or was another version's.

    Raises:
        OSError: site_dir is missing or cannot be written.
    """
    if state(site_dir) == "on":
        return False
    # Renamed into place: a Python that starts meanwhile sees the whole line or no file.
    draft = site_dir / f"{PTH_NAME}.new"
    draft.write_text(PTH_LINE)
    draft.replace(pth_file(site_dir))
    return True


def turn_off(site_dir: Path) -> bool:
    """Remove the file; return True if it was there.

    Raises:
        OSError: it cannot be removed.
    """
    path = pth_file(site_dir)
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed

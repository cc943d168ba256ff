"""What the benchmark scripts write down about themselves, without a folder of the machine they ran on."""

from __future__ import annotations

import datetime
import platform
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def without_folders(text: str) -> str:
    """`text` with this checkout, the Python installation and other absolute paths cut to their last parts."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)


def command_line() -> str:
    """The command of this process, paths by their last part."""
    return without_folders(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))


def dated_stem(out: Path, name: str) -> Path:
    """`out` made, and the common stem of this run's files in it."""
    out.mkdir(parents=True, exist_ok=True)
    return out / f"{datetime.date.today():%Y-%m-%d}-{name}"


def device_name() -> str:
    from fp8_ds.host import uses_cuda  # importing fp8_ds installs it: not in stock's arms

    return torch.cuda.get_device_name() if uses_cuda() else "cpu"


def heading(title: str) -> str:
    """First lines of a result file: what ran, where, with which versions."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"# {title}\n\n`{command_line()}` on {device_name()}, {versions}\n\n"

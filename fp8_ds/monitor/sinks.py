"""Where reports go: one line of JSON each, or DeepSpeed's monitor (TensorBoard, Weights & Biases, CSV, Comet)."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch.distributed as dist

from fp8_ds.json_text import finite_or_none
from fp8_ds.monitor.statistics import LayerStatistics

STEP_SKIPPED = "step_skipped"
"""Of `Report.numbers`: gradients overflowed, and what was quantised is no sample of the training."""


@dataclass(frozen=True)
class Change:
    """The guard sent a layer to bf16.

    Args:
        step: optimizer steps taken before.
        layer: its name.
    """

    step: int
    layer: str


@dataclass(frozen=True)
class Report:
    """One sampled step.

    Args:
        step: optimizer steps taken when it ended (1 after the first).
        samples: DeepSpeed's count of samples then, the x axis of its monitors.
        layers: what was quantised; layers in bf16 are missing.
        ages: steps since the scale was last seen to change, by layer and kind; seen only in sampled steps. None: it
            has no scale in this one.
        numbers: by name: coverage, layers_in_bf16, skipped_steps, step_skipped (1 or 0), gathered_bytes,
            gathered_fp8_bytes, gather_ms. None: not known.
        changes: by the guard, since the report before.
    """

    step: int
    samples: int
    layers: LayerStatistics
    ages: dict[tuple[str, str], int | None]
    numbers: dict[str, float | None] = field(default_factory=dict)
    changes: Sequence[Change] = ()

    def to_json(self) -> dict[str, Any]:
        """Builtin types; what is infinite or NaN is null. "guard" is there where it changed something."""
        layers = {
            name: {
                kind: {**{k: finite_or_none(v) for k, v in asdict(one).items()}, "scale_age": self.ages[name, kind]}
                for kind, one in kinds.items()
            }
            for name, kinds in self.layers.items()
        }
        numbers = {key: finite_or_none(value) for key, value in self.numbers.items()}
        changes = {"guard": [asdict(change) for change in self.changes]} if self.changes else {}
        return {"step": self.step, "samples": self.samples, **numbers, **changes, "layers": layers}

    def events(self) -> Iterator[tuple[str, float, int]]:
        """(label, value, samples), as DeepSpeed's monitor takes them."""
        for key, value in self.numbers.items():
            if value is not None:
                yield f"fp8/{key}", float(value), self.samples
        for change in self.changes:
            yield f"fp8/{change.layer}/sent_to_bf16", 1.0, self.samples
        for name, kinds in self.layers.items():
            for kind, one in kinds.items():
                prefix = f"fp8/{name}/{kind}"
                for key in ("amax", "scale", "saturation", "underflow"):
                    yield f"{prefix}/{key}", float(getattr(one, key)), self.samples
                age = self.ages[name, kind]
                yield f"{prefix}/scale_age", math.nan if age is None else float(age), self.samples


class JsonLines:
    """Appends to a file, made with the first report.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, report: Report) -> None:
        """The file has one line more.

        Raises:
            OSError: it has not, nor a part of one.
        """
        line = json.dumps(report.to_json()) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:  # unbuffered: what fails fails here
            size = os.fstat(file.fileno()).st_size
            try:
                _write_all(file, (_end_of_line(self.path) + line).encode())
            except OSError:
                with suppress(OSError):
                    file.truncate(size)  # half a line would make the whole file unreadable
                raise

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"


def file_of(sink: str) -> Path:
    """Where a sink that is a path lies: `~` at its beginning is the user's home, as a shell reads it."""
    return Path(os.path.expanduser(sink))


def refuse_unwritable(path: Path) -> None:
    """Nothing happens, and nothing is left, if `JsonLines` can append to `path`, as far as that is known before.

    Raises:
        OSError: it is a folder, or it or the folder that it is to be made in cannot be written.
    """
    if not path.exists():
        with TemporaryFile(dir=next(folder for folder in path.absolute().parents if folder.exists())):
            return
    if path.is_file() or path.is_dir():
        path.open("ab").close()
    elif not os.access(path, os.W_OK):  # a pipe or a device: opening it may wait for somebody
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


class DeepSpeedEvents:
    """Writes to what the configuration has switched on, on global rank 0.

    Args:
        monitor: `engine.monitor`.
    """

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor

    def __call__(self, report: Report) -> None:
        """The events are written, also after `destroy_process_group`, where scripts end and the last report is due."""
        with _group():
            self.monitor.write_events(list(report.events()))

    def __repr__(self) -> str:
        return "DeepSpeed's monitor"


@contextmanager
def _group() -> Iterator[None]:
    """There is a process group: the one that is there, else one of this process alone for as long.

    DeepSpeed 0.19.8's writers ask for their rank before each event and raise where no group answers.
    """
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _end_of_line(path: Path) -> str:
    """What ends half a line, which a run that was killed has left: the report after it would be lost with it."""
    if not path.is_file():  # a pipe or a device
        return ""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return ""
        file.seek(-1, os.SEEK_END)
        return "" if file.read() == b"\n" else "\n"


def _write_all(file: FileIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]

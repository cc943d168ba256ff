"""Sinks of reports: one line of JSON each, or DeepSpeed's monitor (TensorBoard, Weights & Biases, CSV, Comet)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from fp8_ds.monitor.statistics import LayerStatistics

STEP_SKIPPED = "step_skipped"
"""Key of `Report.numbers`: gradients overflowed, and what was quantised is no sample of the training."""


@dataclass(frozen=True)
class Change:
    """A layer that the guard sent to bf16, or back.

    Args:
        step: optimizer steps taken before.
        layer: its name.
        to: "schedule": it is what it would be without the guard.
    """

    step: int
    layer: str
    to: Literal["bf16", "schedule"] = "bf16"


@dataclass(frozen=True)
class Report:
    """One sampled step.

    Args:
        step: optimizer steps taken when it ended (1 after the first).
        samples: DeepSpeed's count of samples then, the x axis of its monitors.
        layers: what was quantised; layers in bf16 are missing.
        numbers: by name: coverage, layers_in_bf16, skipped_steps, step_skipped (1 or 0), gathered_bytes,
            gathered_fp8_bytes. None: not known.
        changes: by the guard, since the report before.
    """

    step: int
    samples: int
    layers: LayerStatistics
    numbers: dict[str, float | None] = field(default_factory=dict)
    changes: Sequence[Change] = ()

    def to_json(self) -> dict[str, Any]:
        """Return builtin types; what is infinite or NaN is null. "guard" is there if it changed something."""
        layers = {
            name: {kind: {k: _finite_or_none(v) for k, v in asdict(one).items()} for kind, one in kinds.items()}
            for name, kinds in self.layers.items()
        }
        numbers = {key: _finite_or_none(value) for key, value in self.numbers.items()}
        changes = {"guard": [asdict(change) for change in self.changes]} if self.changes else {}
        return {"step": self.step, "samples": self.samples, **numbers, **changes, "layers": layers}

    def events(self) -> Iterator[tuple[str, float, int]]:
        """Yield (label, value, samples), as DeepSpeed's monitor takes them."""
        for key, value in self.numbers.items():
            if value is not None:
                yield f"fp8/{key}", float(value), self.samples
        for change in self.changes:
            yield f"fp8/{change.layer}/sent_to_bf16", float(change.to == "bf16"), self.samples
        for name, kinds in self.layers.items():
            for kind, one in kinds.items():
                for key in ("amax", "scale", "saturation", "underflow"):
                    yield f"fp8/{name}/{kind}/{key}", float(getattr(one, key)), self.samples


def _finite_or_none(value: float | None) -> float | None:
    """Return `value`, or None if it is NaN or infinite, for which JSON has no word."""
    return value if value is not None and math.isfinite(value) else None


class JsonLines:
    """Sink that appends to the file `path`; the first report makes it, and its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, report: Report) -> None:
        """Append one line.

        Raises:
            OSError: it cannot be written; no part of it is in the file then.
        """
        line = json.dumps(report.to_json()) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = self.path.stat().st_size if self.path.is_file() else 0  # of a pipe or a device it says nothing
        if size and not self._ends_a_line():  # a run that was killed has left half a one
            line = f"\n{line}"
        try:
            with self.path.open("ab") as file:
                file.write(line.encode())
        except OSError:
            with suppress(OSError):
                os.truncate(self.path, size)  # half a line would make the whole file unreadable
            raise

    def _ends_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"


class DeepSpeedEvents:
    """Sink that writes to `engine.monitor`, as the configuration has switched it on, on global rank 0."""

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor

    def __call__(self, report: Report) -> None:
        """Write the events, also after `destroy_process_group`, where scripts end and the last report is due."""
        with _group():
            self.monitor.write_events(list(report.events()))

    def __repr__(self) -> str:
        return "DeepSpeed's monitor"


@contextmanager
def _group() -> Iterator[None]:
    """Provide a process group: the one that is there, else one of this process alone for as long.

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

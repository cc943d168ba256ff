"""One training run in pieces: its log, its evaluations, and its state between two pieces."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8_ds.errors import NumericsError
from fp8_ds.parity.folder import write_whole

FIELDS = ("step", "tokens", "seconds", "train_loss", "held_out_loss")
_PROGRESS = "progress.json"


class Trainer(Protocol):
    """What takes the steps. All methods are called on all ranks alike."""

    def step(self, number: int) -> Tensor:
        """The loss of step `number`, 0 for the first; detached, on the device."""

    def evaluate(self) -> float:
        """The held-out loss, the same on all ranks."""

    def save(self, folder: Path) -> None:
        """All that `load` needs to go on bit for bit is in the folder."""

    def load(self, folder: Path) -> None:
        """The run is where it was at `save`."""


@dataclass(frozen=True)
class Ranks:
    """How the ranks of a run agree; as it stands, a run of one rank.

    Attributes:
        writes: this rank writes logs.
        mean: of a number over ranks.
        any: true if it is on any rank.
        barrier: returns when all ranks came.
    """

    writes: bool = True
    mean: Callable[[float], float] = float
    any: Callable[[bool], bool] = bool
    barrier: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Length:
    """Of a run, and where it is looked at.

    Attributes:
        steps: of the whole run.
        tokens_per_step: of all ranks.
        num_evaluations: evenly spread, the last after the last step; one more comes before the first.
        log_every: steps between two lines of the log, and between two looks at the clock.
    """

    steps: int
    tokens_per_step: int
    num_evaluations: int = 10
    log_every: int = 10

    @property
    def evaluations(self) -> frozenset[int]:
        return frozenset(round(self.steps * k / self.num_evaluations) for k in range(1, self.num_evaluations + 1))


class State:
    """A run between two pieces: a folder with the trainer's files and the log so far.

    Args:
        folder: of this run alone.
        identity: what must be the same for the run to go on: arm, seed, steps, text. JSON.
        ranks: of the run.
        branches: states of other runs, which have the first steps in common with this one, by the number of these;
            a step that is logged. The run leaves its own state there, and they go on from it.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        ranks: Ranks,
        branches: Mapping[int, Sequence[State]] | None = None,
    ) -> None:
        self.folder = folder
        self.identity = json.loads(json.dumps(identity))
        self.ranks = ranks
        self.branches = branches or {}

    def read(self) -> dict[str, Any] | None:
        """What `write` kept, or None: nothing there, or another run's."""
        path = self.folder / _PROGRESS
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        return found if found["identity"] == self.identity else None

    def write(self, trainer: Trainer, step: int, seconds: float, lines: list[str]) -> None:
        """Whole or as it was: the former state goes when this one is complete."""
        if self.ranks.writes:
            shutil.rmtree(self.files(step), ignore_errors=True)  # of a save that was cut off
        self.ranks.barrier()
        trainer.save(self.files(step))
        self.ranks.barrier()
        if not self.ranks.writes:
            return
        progress = {"identity": self.identity, "step": step, "seconds": seconds, "lines": lines}
        write_whole(self.folder / _PROGRESS, json.dumps(progress))
        for other in self.folder.glob("step*"):
            if other != self.files(step):
                shutil.rmtree(other)

    def files(self, step: int) -> Path:
        """Of the trainer, after this many steps."""
        return self.folder / f"step{step}"

    def clear(self) -> None:
        self.ranks.barrier()
        if self.ranks.writes:
            shutil.rmtree(self.folder, ignore_errors=True)


def train(
    trainer: Trainer,
    length: Length,
    log: Path,
    state: State | None = None,
    deadline: float = math.inf,
    ranks: Ranks | None = None,
    after_step: Callable[[int], bool] = lambda step: False,
) -> float | None:
    """The run is at its end and `log` is there; or the deadline has passed and the state is kept.

    Args:
        trainer: built as at the start of the run.
        length: of the run.
        log: CSV, FIELDS; while the run goes on, beside it with the suffix .part.
        state: of former pieces; None: the run cannot be cut.
        deadline: of time.monotonic(), looked at where lines are logged.
        ranks: of the run; by default one.
        after_step: called with the number of steps taken; true ends the run as if it were whole.

    Returns:
        Seconds in steps, of all pieces, evaluations left out; None if the deadline has cut the run.

    Raises:
        NumericsError: the training loss is not finite.
    """
    ranks = ranks or Ranks()
    known = state.read() if state is not None else None
    first, seconds, lines = 0, 0.0, [",".join(FIELDS)]
    if known is not None and state is not None:
        first, seconds, lines = known["step"], known["seconds"], known["lines"]
        trainer.load(state.files(first))
    else:
        lines.append(f"0,0,0,,{trainer.evaluate():.6f}")
    part = log.with_suffix(".part")
    _write(part, lines, ranks)
    total, since, mark = None, 0, time.perf_counter()
    for step in range(first + 1, length.steps + 1):
        loss = trainer.step(step - 1)
        total = loss if total is None else total + loss
        since += 1
        ends = after_step(step)
        if step % length.log_every and step not in length.evaluations and not ends:
            continue
        mean = ranks.mean(float(total) / since)  # waits for the device
        seconds += time.perf_counter() - mark
        value = f"{trainer.evaluate():.6f}" if step in length.evaluations else ""
        lines.append(f"{step},{step * length.tokens_per_step},{seconds:.2f},{mean:.6f},{value}")
        _append(part, lines[-1], ranks)
        if not math.isfinite(mean):
            raise NumericsError(f"train_loss: expected a finite loss, got {mean} at step {step}. This arm diverged.")
        if ends:
            break
        for branch in state.branches.get(step, ()) if state is not None else ():
            branch.write(trainer, step, seconds, lines)
        if state is not None and step < length.steps and ranks.any(time.monotonic() > deadline):
            state.write(trainer, step, seconds, lines)
            return None
        total, since, mark = None, 0, time.perf_counter()
    ranks.barrier()
    if ranks.writes:
        os.replace(part, log)
    if state is not None:
        state.clear()
    return seconds


def _write(path: Path, lines: list[str], ranks: Ranks) -> None:
    if ranks.writes:
        path.write_text("\n".join(lines) + "\n")


def _append(path: Path, line: str, ranks: Ranks) -> None:
    if ranks.writes:
        with path.open("a") as file:
            file.write(line + "\n")


def device_ranks(device: torch.device) -> Ranks:
    """Of torch.distributed's default group, where there is one."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()

    def mean(value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(tensor)
        return float(tensor) / dist.get_world_size()

    return Ranks(dist.get_rank() == 0, mean, lambda flag: mean(float(flag)) > 0, dist.barrier)

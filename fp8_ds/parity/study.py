"""A parity study of a user's model: paired runs in a folder, each one resumable, and their comparison."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fp8_ds import comparison
from fp8_ds.comparison import Group, Result, Stepwise
from fp8_ds.curves import read_curve
from fp8_ds.errors import ConfigError
from fp8_ds.launcher import free_port, which_gpus
from fp8_ds.parity.arms import BASE, seeded
from fp8_ds.parity.folder import write_whole
from fp8_ds.parity.loop import FIELDS
from fp8_ds.statistics import Paired

HELD_OUT, TRAINING = "held_out_loss", "train_loss"
_LAST_SHARE = 0.1
"""Of the steps, over which training losses are compared."""
_SETTINGS = "study.json"
_TAIL = 2000
_SHORTEST_PIECE = 60.0
"""Seconds; with less left no run is started: it would do little more than build the model."""
_SAVING = 0.1
"""Share of a piece kept for saving, beside building and compiling, which the deadline counts."""


@dataclass(frozen=True)
class Settings:
    """What all runs of a study share.

    Attributes:
        model: as `read_spec` takes it.
        settings: "key=value" pairs for its configuration.
        pretrained: `model` is a folder with weights, which all runs start from; seeds differ in the data's order.
        config: DeepSpeed's, without the "fp8" block.
        steps: of the optimizer.
        seq: tokens of a sequence.
        gpus: ranks.
        compile: `engine.compile()` in all arms.
        digest: of the text.
    """

    model: str
    settings: tuple[str, ...]
    pretrained: bool
    config: dict[str, Any]
    steps: int
    seq: int
    gpus: int
    compile: bool
    digest: str


@dataclass(frozen=True)
class Run:
    """One of a study."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"


@dataclass
class Study:
    """Runs in a folder; what is finished there is not run again.

    Args:
        folder: holds the text (`text/`), finished runs (`runs/`), unfinished ones (`state/`) and the report.
        settings: must be those that the folder was begun with.
        arms: "fp8" blocks by name, None for stock; the first is the base.
        seeds: one pair of runs each.
        inherited: file descriptors that runs keep open, even past the end of this process.
    """

    folder: Path
    settings: Settings
    arms: Mapping[str, dict[str, Any] | None]
    seeds: Sequence[int]
    inherited: Sequence[int] = ()
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            raise ConfigError(
                f"--arms: expected a base and another, got {', '.join(self.arms) or 'none'}. Name both, {BASE} first."
            )
        path = self.folder / _SETTINGS
        mine = json.loads(json.dumps({**asdict(self.settings), "arms": dict(self.arms)}))
        if path.exists():
            known = json.loads(path.read_text())
            arms = known["arms"]
            different = sorted(key for key in mine if key != "arms" and known.get(key) != mine[key])
            different += sorted(
                f"arm {name}" for name in arms.keys() & mine["arms"] if arms[name] != mine["arms"][name]
            )
            if different:
                raise ConfigError(
                    f"--out: expected a study with these settings in {self.folder}, got one with another "
                    f"{', '.join(different)}. Its runs are no pairs of these: name another folder."
                )
            mine["arms"] = {**arms, **mine["arms"]}
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(mine, indent=1))

    def runs(self) -> list[Run]:
        """All, seed by seed: a study cut short has whole pairs."""
        return [Run(arm, seed) for seed in self.seeds for arm in self.arms]

    def log(self, run: Run) -> Path:
        return self.folder / "runs" / f"{run.name}.csv"

    def pending(self) -> list[Run]:
        return [run for run in self.runs() if not self.log(run).exists() and run.name not in self.failures]

    def go_on(self, seconds: float | None, say: Callable[[str], None]) -> None:
        """Runs what is pending, one after the other, until all are done or the time is up.

        Args:
            seconds: of this call; a run that it does not suffice for keeps its state. None: no limit.
            say: is told of each run.
        """
        start = time.monotonic()
        for number, run in enumerate(self.pending()):
            left = None if seconds is None else seconds - (time.monotonic() - start)
            if left is not None and left < _SHORTEST_PIECE and number:
                return
            say(f"{run.name} ...")
            code, output = self._launch(run, None if left is None else left * (1 - _SAVING))
            if self.log(run).exists():
                say(f"{run.name}: held-out loss {read_curve(self.log(run), HELD_OUT).losses[-1]:.4f}")
            elif code:
                self.failures[run.name] = output[-_TAIL:]
                say(f"{run.name}: FAILED, {self.folder / 'runs' / run.name}.log")
            else:
                say(f"{run.name}: paused, its state is kept")
                return

    def _launch(self, run: Run, seconds: float | None) -> tuple[int, str]:
        """Exit status and output of the ranks of one piece of a run."""
        config = {key: value for key, value in self.settings.config.items() if key != "fp8"}
        if (block := self.arms[run.arm]) is not None:
            config["fp8"] = seeded(block, run.seed)
        shared = asdict(self.settings)
        spec = {
            **shared,
            "config": config,
            "seed": run.seed,
            "text": str(self.folder / "text"),
            "log": str(self.log(run)),
            "state": str(self.folder / "state" / run.name),
            "identity": {**shared, "config": config, "seed": run.seed},
            "seconds": seconds,
        }
        spec_file = self.folder / "runs" / f"{run.name}.spec"
        spec_file.write_text(json.dumps(spec))
        command, env = launcher(self.settings.gpus, str(spec_file.resolve()))
        output = self.log(run).with_suffix(".log")
        with output.open("wb") as file:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, pass_fds=self.inherited, check=False
            ).returncode
        spec_file.unlink()
        return code, output.read_text(errors="replace")

    def groups(self, arm: str) -> list[Group]:
        """The base and the arm over the seeds that both have finished."""
        base = next(iter(self.arms))
        seeds = [seed for seed in self.seeds if all(self.log(Run(name, seed)).exists() for name in (base, arm))]
        if not seeds:
            return []
        return [
            Group(name, tuple(read_curve(self.log(Run(name, seed)), HELD_OUT) for seed in seeds))
            for name in (base, arm)
        ]

    def results(self) -> list[Result]:
        """Each arm's held-out loss after the last step against the base's; arms without a finished pair are missing."""
        found: list[Result] = []
        for arm in list(self.arms)[1:]:
            groups = self.groups(arm)
            found += comparison.compare(groups, 0.0).results if groups else ()
        return found

    def about(self, run: Run) -> dict[str, Any]:
        """What a finished run's log has no column for (worker.py)."""
        path = self.log(run).with_suffix(".json")
        if not path.exists() and self.log(run).exists() and (self.arms[run.arm] or {}).get("enabled"):
            return {"not_evaluated_in_bf16": "the run was cut after its last step"}
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def loss_in_bf16(self, run: Run) -> float | None:
        """Of a finished run's last evaluation, or of the one after it that computed in bf16; None: there is none."""
        about = self.about(run)
        if about.get("plan") or "not_evaluated_in_bf16" in about:
            return about.get("held_out_loss_bf16")
        return read_curve(self.log(run), HELD_OUT).losses[-1]

    def differences_in_bf16(self) -> dict[str, Paired]:
        """By arm, of the pairs that both have such a loss."""
        base, *others = self.arms
        found = {}
        for arm in others:
            runs = [(Run(arm, seed), Run(base, seed)) for seed in self.seeds]
            done = [pair for pair in runs if all(self.log(run).exists() for run in pair)]
            losses = [tuple(map(self.loss_in_bf16, pair)) for pair in done]
            both = [(mine, other) for mine, other in losses if mine is not None and other is not None]
            if both and any(self.about(mine).get("plan") for mine, _ in done):
                found[arm] = comparison.pair(*zip(*both, strict=True))
        return found

    def training_differences(self) -> dict[str, dict[int, Stepwise]]:
        """By arm and seed, over the last tenth of the steps: runs of a seed see the same batches."""
        base, *others = self.arms
        found: dict[str, dict[int, Stepwise]] = {}
        for arm in others:
            for seed in self.seeds:
                logs = [self.log(Run(name, seed)) for name in (arm, base)]
                if not all(log.exists() for log in logs):
                    continue
                mine, theirs = (read_curve(log, TRAINING) for log in logs)
                difference = comparison.stepwise(mine, theirs, _LAST_SHARE * self.settings.steps)
                if difference is not None:
                    found.setdefault(arm, {})[seed] = difference
        return found

    def rows(self) -> str:
        """All finished logs as one CSV: arm, seed and the columns of a log."""
        text = io.StringIO()
        writer = csv.DictWriter(text, ("arm", "seed", *FIELDS), lineterminator="\n")
        writer.writeheader()
        for run in self.runs():
            if self.log(run).exists():
                with self.log(run).open(newline="") as file:
                    writer.writerows({"arm": run.arm, "seed": run.seed, **row} for row in csv.DictReader(file))
        return text.getvalue()

    def report(self) -> str:
        """Markdown: final losses, differences with intervals, verdicts, the same evaluated in bf16, failures."""
        seeds = ", ".join(map(str, self.seeds))
        lines = [f"# Parity of {self.settings.model}", "", f"{self.settings.steps} steps, seeds {seeds}.", ""]
        lines += ["| arm | seed | held-out loss | in bf16 | tokens/s | peak GiB | |", "|---|---|---|---|---|---|---|"]
        for run in self.runs():
            path = self.log(run)
            if path.exists():
                about, in_bf16 = self.about(run), self.loss_in_bf16(run)
                loss = read_curve(path, HELD_OUT).losses[-1]
                cells = f"{loss:.4f} | {'' if in_bf16 is None else f'{in_bf16:.4f}'}"
                cells += f" | {about.get('tokens_per_second', '')} | {about.get('peak_gib') or ''}"
                lines.append(f"| {run.arm} | {run.seed} | {cells} | {about.get('plan') or ''} |")
        lines += ["", *(f"- {comparison.describe(result)}" for result in self.results())]
        lines += self._learned()
        if found := self.differences_in_bf16():
            lines += [
                "",
                "The same models, the last evaluation computed in bf16 with weights decoded from the masters:",
            ]
            lines += ["", *(f"- {arm}: {comparison.describe_mean(paired)}" for arm, paired in found.items()), ""]
        if training := self.training_differences():
            lines += [
                "",
                "Training loss over the last tenth of the steps, where both runs of a pair see the same batches:",
                "",
            ]
            for arm, by_seed in training.items():
                each = (f"{d.mean:+.3f} ± {d.error:.3f} % (seed {seed})" for seed, d in by_seed.items())
                lines.append(f"- {arm}: {', '.join(each)}")
            lines += ["", "± is the standard error over the steps; seeds differ by more."]
        reasons = {run.name: self.about(run).get("not_evaluated_in_bf16") for run in self.runs()}
        lines += [f"- NOT EVALUATED in bf16: {name}: {reason}" for name, reason in reasons.items() if reason]
        lines += [f"- NOT FINISHED: {run.name}" for run in self.pending()]
        lines += [f"\nFAILED {name}\n```\n{tail}\n```" for name, tail in self.failures.items()]
        return "\n".join([*lines, ""])

    def _learned(self) -> list[str]:
        """What verdicts are worth: how far the base's loss has come, in the mean over its finished runs."""
        base = next(iter(self.arms))
        logs = [log for seed in self.seeds if (log := self.log(Run(base, seed))).exists()]
        if not logs:
            return []
        curves = [read_curve(log, HELD_OUT) for log in logs]
        first, last = (fmean(curve.losses[k] for curve in curves) for k in (0, -1))
        return [f"- {base} went from {first:.4f} to {last:.4f}: where little is learned, little can differ."]

    def write(self) -> None:
        """`parity.csv`, `parity.md` and, of the arms that have all the base's seeds, `parity.png` and `parity.html`."""
        (self.folder / "parity.csv").write_text(self.rows())
        (self.folder / "parity.md").write_text(self.report())
        pairs = [groups for arm in list(self.arms)[1:] if (groups := self.groups(arm))]
        most = max((len(groups[0].curves) for groups in pairs), default=0)
        full = [groups for groups in pairs if len(groups[0].curves) == most]
        if full:
            found = comparison.compare([full[0][0], *(groups[1] for groups in full)], 0.0)
            picture = self.folder / "parity.png"
            comparison.plot(found, picture, window=1)
            (self.folder / "parity.html").write_text(comparison.page(found, picture))


def launcher(gpus: int, spec: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a run: the deepspeed launcher, or for one rank a process of its own."""
    module, env = "fp8_ds.parity.worker", dict(os.environ)
    # A model named module:function is looked for in the current folder, as the other commands do.
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [env.get("PYTHONPATH")])])
    if gpus == 1:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        return [sys.executable, "-m", module, spec], {**env, **alone, "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *which_gpus(gpus), "--master_port", str(free_port())]
    return [*command, "--module", module, spec], env

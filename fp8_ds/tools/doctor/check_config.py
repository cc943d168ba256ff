"""Check of whether a run with a configuration, and a script, trains in FP8 on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp8_ds.config import Fp8Config
from fp8_ds.config.ds_config import filled_in, parsed
from fp8_ds.errors import ConfigError, Fp8DsError
from fp8_ds.host import uses_cuda
from fp8_ds.tools.doctor import diagnosis
from fp8_ds.tools.doctor.diagnosis import Check

_NEEDED = ("torch", "deepspeed", "seams", "triton")
"""Checks that every run needs. Whether it has the GPU that it needs depends on its recipe."""
_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
"""DeepSpeed's optimizers that its ZeRO takes without a further key."""
_IMPORT = re.compile(r"^[^#'\"\n]*\b(?:from\s+fp8_ds\b|import\s+(?:[\w.]+\s*,\s*)*fp8_ds\b)", re.MULTILINE)
_LOAD = (
    "`import fp8_ds` at the top of the script, start it by `deepspeed --module fp8_ds.run SCRIPT`, or run `fp8-ds "
    "autoload on`."
)


@dataclass(frozen=True)
class Verdict:
    """Answer to whether a run with a configuration trains in FP8.

    Attributes:
        on: yes, no, or "if": only if the script activates fp8_ds.
        reasons: one or two sentences each.
        remedies: what would change it, one sentence each; errors of a start have theirs in the reason.
    """

    on: Literal["yes", "no", "if"]
    reasons: tuple[str, ...]
    remedies: tuple[str, ...] = ()


def check_config(
    config: Mapping[str, Any], script: Path | None = None, found: Sequence[Check] = (), world: int | None = None
) -> Verdict:
    """Judge whether `deepspeed SCRIPT` with this configuration would train in FP8, here.

    Args:
        config: DeepSpeed's, as `json.load` returns it.
        script: the training script, whose text is searched for an import of fp8_ds; None: it is not known.
        found: result of `diagnosis.checks` on this machine.
        world: ranks of the run; None: as many as its batch sizes fit.

    Raises:
        OSError: the script cannot be read.
    """
    from fp8_ds.engine.initialize import other_blocks, refuse_misplaced_block
    from fp8_ds.engine.presets import facts_of

    if missing := [check for check in found if check.status == "missing" and check.name in _NEEDED]:
        reasons = tuple(f"{check.name}: {check.found}." for check in missing)
        return Verdict("no", reasons, tuple(f"{check.name}: {check.remedy}." for check in missing))
    try:
        refuse_misplaced_block(config)
        if config.get("fp8") is None:
            reason = 'The configuration has no "fp8" block: it trains in bf16.'
            return Verdict("no", (*other_blocks(config), reason), ('Add "fp8": {"enabled": true}.',))
        fp8 = Fp8Config.from_block(config["fp8"], facts_of(config))
    except Fp8DsError as error:
        return Verdict("no", (f"It is refused at start: {error}",))
    if not fp8.enabled:
        return Verdict("no", ('"fp8.enabled" is false: it trains in bf16.',), ('Set "fp8.enabled" to true.',))
    if refused := _refused(fp8, filled_in(config), world):
        return refused
    notes = ["fp8_ds and DeepSpeed's own parser accept the configuration."]
    if '"auto"' in json.dumps(config):
        notes.append(
            '"auto" is filled in by Trainer (bf16 by `--bf16 true`) and Accelerate (by mixed precision bf16). DeepSpeed'
            " alone fails, or takes it for a default: bf16.enabled is false then."
        )
    if not uses_cuda():
        notes.append("No GPU here: the numbers would be those of FP8, computed slowly.")
    if diagnosis.autoload_check().status == "ok":
        return Verdict("yes", (*notes, "autoload is on in this environment."))
    if script is not None and _IMPORT.search(script.read_text(encoding="utf-8", errors="replace")):
        why = f"{script} imports fp8_ds, by its text; let it be before deepspeed.initialize()."
        return Verdict("yes", (*notes, why))
    detail = "" if script is None else f", and no import of fp8_ds was found in {script}"
    why = f"Nothing is sure to load fp8_ds: autoload is off{detail}. "
    why += "DeepSpeed alone ignores the block and trains in bf16 without a word."
    return Verdict("if" if script is None else "no", (*notes, why), (_LOAD,))


def _refused(fp8: Fp8Config, config: Mapping[str, Any], world: int | None) -> Verdict | None:
    """Return the verdict on a run that does not start here, or has no step in FP8, as far as that shows without its
    model; None: nothing is wrong."""
    import torch

    from fp8_ds.config.schedule import PrecisionSchedule
    from fp8_ds.engine.compat.config import refusals_of, refuse_start, total_steps
    from fp8_ds.engine.compat.model import capabilities, refuse_device

    rows = refusals_of(config)
    reasons = [f"It is refused at start: {row.key}: {row.reason}." for row in rows]
    try:
        _make_optimizer_and_scheduler(parsed(config, world))
    except ConfigError as error:
        reasons.insert(0, f"DeepSpeed refuses it at start: {error}")
    if reasons:
        return Verdict("no", tuple(reasons), tuple(row.remedy for row in rows))
    device = torch.device("cuda", 0) if uses_cuda() else torch.device("cpu")
    try:
        refuse_start(fp8, config, device, rank=0)
        refuse_device(fp8.linear.recipe, fp8.linear.backend, *capabilities(device))
    except Fp8DsError as error:
        return Verdict("no", (f"It is refused at start: {error}",))
    steps = fp8.schedule.model_copy(update={"layers": {}})
    never = PrecisionSchedule.of(steps, (), total_steps(config)).is_never_fp8
    if never and "fp8" not in fp8.schedule.layers.values():
        reason = "fp8.schedule puts every layer into bf16 in every step: what bf16_until_step leaves is in "
        return Verdict("no", (f"{reason}bf16_last_fraction. Lower one of them, or correct total_steps.",))
    return None


def _make_optimizer_and_scheduler(read: Any) -> None:
    """Raise ConfigError if DeepSpeed cannot make the optimizer or the scheduler that a DeepSpeedConfig names, as far as
    that shows without its own optimizers; torch judges Adam's numbers."""
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    kind = read.optimizer_name
    if kind is not None and kind not in _WITH_ZERO:
        is_known = kind in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, kind)
        if not (is_known and read.zero_allow_untested_optimizer):
            raise ConfigError(
                f'optimizer.type: expected one that DeepSpeed has tested with ZeRO, got "{kind}". Use "AdamW"; for '
                'another of DeepSpeed\'s or of torch.optim set "zero_allow_untested_optimizer": true.'
            )
    adam = {} if kind not in ("adam", "adamw") else read.optimizer_params or {}
    numbers = {key: adam[key] for key in ("lr", "betas", "eps", "weight_decay") if adam.get(key, "auto") != "auto"}
    name, options = read.scheduler_name, read.scheduler_params or {}
    what, value = "optimizer.params", adam
    try:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))], **numbers)
        what, value = f"scheduler {name}", options
        if name is not None and "auto" not in options.values():
            make = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
            make(optimizer, **options)
    except Exception as error:  # whatever torch's and DeepSpeed's constructors raise
        raise ConfigError(
            f"{what}: expected what it can be made with, got {value}. It says: {type(error).__name__}: {error}."
        ) from error

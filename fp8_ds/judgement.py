"""Whether a run with a configuration, and a script, trains in FP8 on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fp8_ds import diagnosis
from fp8_ds.config import Fp8Config
from fp8_ds.device import uses_cuda
from fp8_ds.diagnosis import Check
from fp8_ds.engine.host_config import filled_in, parsed
from fp8_ds.errors import ConfigError, Fp8DsError

if TYPE_CHECKING:
    import torch

_NEEDED = ("torch", "deepspeed", "seams", "triton")
"""Checks that every run needs. Whether it has the GPU that it needs depends on its recipe."""
_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
"""DeepSpeed's optimizers that its ZeRO takes without more."""
_IMPORT = re.compile(r"^[^#'\"\n]*\b(?:from\s+fp8_ds\b|import\s+(?:[\w.]+\s*,\s*)*fp8_ds\b)", re.MULTILINE)
_LOAD = (
    "`import fp8_ds` at the top of the script, start it by `deepspeed --module fp8_ds.run SCRIPT`, or run `fp8-ds "
    "autoload on`."
)


@dataclass(frozen=True)
class Verdict:
    """Whether a run with a configuration trains in FP8.

    Attributes:
        on: yes, no, or "if": only if the script activates fp8_ds.
        reasons: one or two sentences each.
        remedies: what would change it, one sentence each; errors of a start have theirs in the reason.
    """

    on: Literal["yes", "no", "if"]
    reasons: tuple[str, ...]
    remedies: tuple[str, ...] = ()


def judge(
    config: Mapping[str, Any], script: Path | None = None, found: Sequence[Check] = (), world: int | None = None
) -> Verdict:
    """Whether `deepspeed SCRIPT` with this configuration would train in FP8, here.

    Args:
        config: DeepSpeed's, as `json.load` returns it.
        script: the training script, whose text is searched for an import of fp8_ds; None: it is not known.
        found: what `diagnosis.checks` has found on this machine.
        world: ranks of the run; None: as many as its batch sizes fit.

    Raises:
        ConfigError: the script is no Python.
        OSError: it cannot be read.
    """
    from fp8_ds.engine.initialize import other_blocks, refuse_misplaced_block
    from fp8_ds.engine.refusals import refusals_of

    if missing := [check for check in found if check.status == "missing" and check.name in _NEEDED]:
        reasons = tuple(f"{check.name}: {check.found}." for check in missing)
        return Verdict("no", reasons, tuple(f"{check.name}: {check.remedy}." for check in missing))
    try:
        refuse_misplaced_block(config)
        if config.get("fp8") is None:
            reason = 'The configuration has no "fp8" block: it trains in bf16.'
            return Verdict("no", (*other_blocks(config), reason), ('Add "fp8": {"enabled": true}.',))
        fp8 = Fp8Config.from_block(config["fp8"])
    except Fp8DsError as error:
        return Verdict("no", (f"It is refused at start: {error}",))
    if not fp8.enabled:
        return Verdict("no", ('"fp8.enabled" is false: it trains in bf16.',), ('Set "fp8.enabled" to true.',))
    given, config = config, filled_in(config)
    refused = _refused_by_deepspeed(config, world)
    rows = refusals_of(config)
    reasons = (*refused, *(f"It is refused at start: {row.key}: {row.reason}." for row in rows))
    if not reasons:
        try:
            refuse_here(fp8, config)
            reasons = _never_fp8(fp8, config)
        except Fp8DsError as error:
            reasons = (f"It is refused at start: {error}",)
    if reasons:
        return Verdict("no", reasons, tuple(row.remedy for row in rows))
    on, why, remedies = _loaded(script)
    notes = ["fp8_ds and DeepSpeed's own parser accept the configuration."]
    if '"auto"' in str(given).replace("'", '"'):
        notes.append('"auto" is filled in by Trainer and Accelerate; DeepSpeed alone takes it for a default, or fails.')
    if config is not given:
        notes.append('bf16.enabled is "auto": DeepSpeed alone takes it for false.')
        remedies = ("Start Trainer with `--bf16 true`, Accelerate with mixed precision bf16.", *remedies)
    if not uses_cuda():
        notes.append("No GPU here: the numbers would be those of FP8, computed slowly.")
    return Verdict(on, (*notes, why), remedies)


def _refused_by_deepspeed(config: Mapping[str, Any], world: int | None) -> tuple[str, ...]:
    """Why DeepSpeed stops at the configuration; nothing where it does not."""
    try:
        read = parsed(config, world)
        _make_optimizer_and_scheduler(read)
    except ConfigError as error:
        return (f"DeepSpeed refuses it at start: {error}",)
    return ()


def _make_optimizer_and_scheduler(read: Any) -> None:
    """Nothing happens if DeepSpeed can make those that its configuration names, as far as that shows without its own
    optimizers; Adam's numbers are torch's to judge.

    Args:
        read: a DeepSpeedConfig.

    Raises:
        ConfigError: one is not known or not taken with ZeRO, or its parameters are wrong.
    """
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    kind = read.optimizer_name
    if kind is not None:
        if kind not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, kind):
            raise ConfigError(f'optimizer.type: expected one of DeepSpeed\'s or of torch.optim, got "{kind}".')
        if kind not in _WITH_ZERO and not read.zero_allow_untested_optimizer:
            raise ConfigError(
                f'optimizer.type: expected one that DeepSpeed has tested with ZeRO, got "{kind}". Use "AdamW", or set '
                '"zero_allow_untested_optimizer": true.'
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


def _never_fp8(fp8: Fp8Config, config: Mapping[str, Any]) -> tuple[str, ...]:
    from fp8_ds.engine.startup import total_steps
    from fp8_ds.schedule import never_fp8

    if not never_fp8(fp8.schedule, total_steps(config)) or "fp8" in fp8.schedule.layers.values():
        return ()
    return (
        "fp8.schedule puts every layer into bf16 in every step: what bf16_until_step leaves is in bf16_last_fraction. "
        "Lower one of them, or correct total_steps.",
    )


def refuse_here(fp8: Fp8Config, config: Mapping[str, Any]) -> None:
    """Nothing happens if a run can start on this machine, as rank 0 says it, as far as that needs no model.

    Args:
        fp8: the "fp8" block of `config`.
        config: DeepSpeed's.

    Raises:
        ConfigError: a key has nothing to take effect on.
        UnsupportedError: FP8 ZeRO does not support the configuration, or what it names cannot be had here.
    """
    from fp8_ds.engine.refusals_device import capabilities, refuse_device
    from fp8_ds.engine.startup import refuse_start

    device = _this_device()
    refuse_start(fp8, config, device, rank=0)
    refuse_device(fp8.linear.recipe, fp8.linear.backend, *capabilities(device))


def _this_device() -> torch.device:
    """The first GPU, or the CPU where DeepSpeed has none."""
    import torch

    return torch.device("cuda", 0) if uses_cuda() else torch.device("cpu")


def _loaded(script: Path | None) -> tuple[Literal["yes", "no", "if"], str, tuple[str, ...]]:
    """Whether something loads fp8_ds, as far as can be seen from here; what; what would."""
    if diagnosis.autoload_check().status == "ok":
        return "yes", "autoload is on in this environment.", ()
    if script is not None and _imports(script):
        return "yes", f"{script} imports fp8_ds, by its text; let it be before deepspeed.initialize().", ()
    detail = "" if script is None else f", and no import of fp8_ds was found in {script}"
    why = f"Nothing is sure to load fp8_ds: autoload is off{detail}. "
    why += "DeepSpeed alone ignores the block and trains in bf16 without a word."
    return "if" if script is None else "no", why, (_LOAD,)


def _imports(script: Path) -> bool:
    source = script.read_bytes()
    try:
        compile(source, str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"--script: expected Python, got {error} in {script}. Name the training script.") from error
    return _IMPORT.search(source.decode("utf-8", errors="replace")) is not None

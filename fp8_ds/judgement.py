"""Whether a run with a configuration, and a script, trains in FP8 on this machine; and what it then uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fp8_ds import diagnosis
from fp8_ds.config import ActivationsConfig, Fp8Config, LinearConfig
from fp8_ds.device import uses_cuda
from fp8_ds.diagnosis import Check
from fp8_ds.engine.host_config import BATCH_SIZES as BATCH_SIZES
from fp8_ds.engine.host_config import block_of, filled_in
from fp8_ds.engine.known_keys import refused_optimizer, removed_key, unknown_keys, unread_key
from fp8_ds.errors import Fp8DsError
from fp8_ds.script_imports import import_in, parsed

if TYPE_CHECKING:
    import torch

_NEEDED = ("torch", "deepspeed", "seams", "triton")
"""Checks that every run needs. Whether it has the GPU that it needs depends on its recipe."""
_STEPS = "gradient_accumulation_steps"
_NO_SIZE = (
    f"It does not start: DeepSpeed needs {' or '.join(BATCH_SIZES)}, and this configuration has neither. Trainer and "
    'Accelerate add none, they fill in "auto" alone.'
)
_ADD_SIZE = (
    f'Add "{BATCH_SIZES[1]}": a number, or "auto" under Trainer or Accelerate. Where the script adds it, judge the '
    "configuration with it."
)
_ALL_BF16 = (
    "fp8.schedule puts every layer into bf16 in every step: what bf16_until_step leaves is in bf16_last_fraction."
)
_SHORTER = "Lower one of them, or total_steps is not that of your run."
_BLOCKS = {
    "zero_optimization": '{"stage": 2}',
    "bf16": '{"enabled": true}',
    "bfloat16": '{"enabled": true}',
    "fp16": '{"enabled": false}',
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-4}}',
    "scheduler": '{"type": "WarmupLR", "params": {}}',
    "tensor_parallel": '{"autotp_size": 1}',
    "data_types": '{"grad_accum_dtype": "fp32"}',
}
"""DeepSpeed's, which are objects, and one of each."""


@dataclass(frozen=True)
class Verdict:
    """Whether a run with a configuration trains in FP8.

    Attributes:
        on: yes, no, or "if": only if the script activates fp8_ds.
        reasons: one or two sentences each.
        remedies: what would change it, one sentence each; errors of a start have theirs in the reason.
        used: of what is accepted, what it trains with, by name.
    """

    on: Literal["yes", "no", "if"]
    reasons: tuple[str, ...]
    remedies: tuple[str, ...] = ()
    used: Mapping[str, str] = field(default_factory=dict)


def judge(
    config: Mapping[str, Any], script: Path | None = None, found: Sequence[Check] = (), world: int | None = None
) -> Verdict:
    """Whether `deepspeed SCRIPT` with this configuration would train in FP8, here.

    Args:
        config: DeepSpeed's, as `json.load` returns it.
        script: the training script, read for an import of fp8_ds; None: it is not known.
        found: what `diagnosis.checks` has found on this machine.
        world: ranks of the run; None: it is not known.

    Raises:
        ConfigError: the script is no Python.
        OSError: the script cannot be read.
    """
    missing = [check for check in found if check.status == "missing" and check.name in _NEEDED]
    if missing:
        reasons = tuple(f"{check.name}: {check.found}." for check in missing)
        return Verdict("no", reasons, tuple(f"{check.name}: {check.remedy}." for check in missing))
    verdict = _judge(config, script, world)
    return replace(verdict, reasons=(*unknown_keys(config), *verdict.reasons))


def _judge(config: Mapping[str, Any], script: Path | None, world: int | None) -> Verdict:
    from fp8_ds.engine.initialize import refuse_misplaced_block
    from fp8_ds.engine.refusals import refusals_of
    from fp8_ds.engine.startup import total_steps
    from fp8_ds.schedule import never_fp8

    try:
        refuse_misplaced_block(config)
    except Fp8DsError as error:
        return Verdict("no", (str(error),))
    if config.get("fp8") is None:
        reason = 'The configuration has no "fp8" block: it trains in bf16.'
        return Verdict("no", (reason,), ('Add "fp8": {"enabled": true}.',))
    config, given = filled_in(config), config
    device = _this_device()
    try:
        fp8 = Fp8Config.from_block(config["fp8"])
        if not fp8.enabled:
            return Verdict("no", ('"fp8.enabled" is false: it trains in bf16.',), ('Set "fp8.enabled" to true.',))
        if (problem := malformed(config)) is not None:
            return Verdict("no", (problem,))
        if (unread := unread_key(config)) is not None:
            return Verdict("no", (f"DeepSpeed refuses it at start: {unread}",))
        if rows := refusals_of(config):
            reasons = tuple(f"It is refused at start: {row.key}: {row.reason}." for row in rows)
            return Verdict("no", reasons, tuple(row.remedy for row in rows))
        refuse_here(fp8, config)
        if never_fp8(fp8.schedule, total_steps(config)) and "fp8" not in fp8.schedule.layers.values():
            return Verdict("no", (_ALL_BF16,), (_SHORTER,))
    except Fp8DsError as error:
        return Verdict("no", (f"It is refused at start: {error}",))
    if (refused := removed_key(config) or refused_optimizer(config)) is not None:
        return Verdict("no", (f"DeepSpeed refuses it at start: {refused}",))
    if all(config.get(key) is None for key in BATCH_SIZES):
        return Verdict("no", (_NO_SIZE,), (_ADD_SIZE,))
    if world is not None and (mismatch := batch_mismatch(config, world)) is not None:
        return Verdict("no", (mismatch,))
    if world is None and (mismatch := _never_fits(config)) is not None:
        return Verdict("no", (mismatch,))
    notes, remedies = ["fp8_ds accepts the configuration."], []
    if config is not given:
        notes.append('bf16.enabled is "auto": Trainer and Accelerate fill it in, DeepSpeed alone takes it for false.')
        remedies.append("Start Trainer with `--bf16 true`, Accelerate with mixed precision bf16; else write true.")
    if automatic := _automatic(config):
        notes.append(
            f'{", ".join(automatic)}: "auto", which Trainer and Accelerate fill in, and DeepSpeed alone fails on.'
        )
    if device.type == "cpu":
        notes.append("No GPU here: the numbers would be those of FP8, computed slowly.")
    on, why, remedy = _loaded(script)
    remedies += [remedy] if remedy else []
    return Verdict(on, (*notes, why), tuple(remedies), _used(fp8, config, device))


def _automatic(config: Mapping[str, Any]) -> list[str]:
    """Numbers of the optimizer and the scheduler that somebody has to fill in. Of what is not `malformed`."""
    found = [
        (name, *entry) for name in ("optimizer", "scheduler") for entry in block_of(config, name, "params").items()
    ]
    return [f"{name}.params.{key}" for name, key, value in found if value == "auto"]


def malformed(config: Mapping[str, Any]) -> str | None:
    """What DeepSpeed's own start cannot read, of what is counted with here; None: nothing.

    Blocks are objects, except `"zero_optimization": true` and `"bf16": null`; sizes are integers or somebody's "auto".
    """
    for key, example in _BLOCKS.items():
        value = config.get(key, {})
        allowed = isinstance(value, bool) if key == "zero_optimization" else value is None and key == "bf16"
        if not allowed and not isinstance(value, Mapping):
            return f'{key}: expected an object, got {json.dumps(value)}. Write "{key}": {example}, or remove the key.'
    for key in (*BATCH_SIZES, _STEPS):
        size = config.get(key)
        if size not in (None, "auto") and (isinstance(size, str) or not _whole(size)):
            return f'{key}: expected an integer from 1 on, or "auto", got {json.dumps(size)}. Write the number.'
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if stage != "auto" and _whole(stage) not in range(4):
        return f"zero_optimization.stage: expected 1, 2 or 3, got {json.dumps(stage)}. Write the number."
    if _whole(size := config.get("tensor_parallel", {}).get("autotp_size", 0)) is None:
        return f"tensor_parallel.autotp_size: expected an integer, got {json.dumps(size)}. Write the number."
    if (kind := config.get("optimizer", {}).get("type")) is not None and not isinstance(kind, str):
        return f'optimizer.type: expected a name, got {json.dumps(kind)}. Write "AdamW".'
    rate = block_of(config, "optimizer", "params").get("lr", 0)
    for key, number in {"gradient_clipping": config.get("gradient_clipping", 0), "optimizer.params.lr": rate}.items():
        if isinstance(number, str) and number != "auto":
            return f'{key}: expected a number or "auto", got {json.dumps(number)}. Write the number.'
    return None


def _whole(value: Any) -> int | None:
    """As DeepSpeed's pydantic models read an integer, from 0 on; None: they do not, or it is below."""
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found >= 0 and (isinstance(value, str) or found == value) else None


def autotp_size(config: Mapping[str, Any]) -> int:
    """Ranks that DeepSpeed cuts each layer over; 1: none are cut. Of what is not `malformed`."""
    return _whole(config.get("tensor_parallel", {}).get("autotp_size", 1)) or 1


def batch_mismatch(config: Mapping[str, Any], world: int) -> str | None:
    """Why DeepSpeed's own start fails on so many ranks; None: its batch sizes fit, or are somebody's "auto". Of what is
    not `malformed`.

    Source: `DeepSpeedConfig._set_batch_related_parameters` and `_batch_assertion` of deepspeed 0.19.8; ranks of tensor
    parallelism share a batch.
    """
    autotp = autotp_size(config)
    ranks, left = divmod(world, autotp)
    if left:
        return f"tensor_parallel.autotp_size: expected a divisor of {world} ranks, got {autotp}. Use such a one."
    total, micro, steps = (config.get(key) for key in (*BATCH_SIZES, _STEPS))
    if any(isinstance(size, str) for size in (total, micro, steps)) or total is None:
        return None
    if micro is None:
        steps = 1 if steps is None else steps
        micro = total // ranks // steps
    elif steps is None:
        steps = total // micro // ranks
        if total % (micro * ranks):
            return _no_multiple(total, micro, f"ranks of data parallelism, {ranks}", micro * ranks)
    if min(micro, steps) >= 1 and total == micro * steps * ranks:
        return None
    return (
        f"train_batch_size: expected {micro} (train_micro_batch_size_per_gpu) x {steps} (gradient_accumulation_steps) "
        f"x {ranks} (ranks of data parallelism), got {total}. DeepSpeed refuses that: change one, or leave one out."
    )


def _never_fits(config: Mapping[str, Any]) -> str | None:
    """Why DeepSpeed's own start fails on any number of ranks; None: on some it does not. Of what is not `malformed`."""
    total, micro, steps = (config.get(key) for key in (*BATCH_SIZES, _STEPS))
    if total is None or micro is None or any(isinstance(size, str) for size in (total, micro, steps)):
        return None
    own = 1 if steps is None else steps
    return None if total % (micro * own) == 0 else _no_multiple(total, micro, f"{_STEPS}, {own}", micro * own)


def _no_multiple(total: int, micro: int, other: str, product: int) -> str:
    return (
        f"train_batch_size: expected a multiple of {product}, train_micro_batch_size_per_gpu, {micro}, times {other}, "
        f"got {total}. DeepSpeed refuses that: change one, or leave one out."
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


def used_by_default(found: Sequence[Check]) -> dict[str, str]:
    """What `"fp8": {"enabled": true}` trains with on this machine; empty where what every run needs is missing.

    Args:
        found: what `diagnosis.checks` has found.
    """
    if any(check.status == "missing" and check.name in _NEEDED for check in found):
        return {}
    return _used(Fp8Config.from_block({"enabled": True}), None, _this_device())


def _used(fp8: Fp8Config, config: Mapping[str, Any] | None, device: torch.device) -> dict[str, str]:
    """Without a configuration neither ZeRO's stage nor the optimizer is known."""
    from fp8_ds.engine.host_config import zero_stage

    linear, optimizer, attention = fp8.linear, fp8.optimizer, fp8.attention
    states = f"{optimizer.states} moments, {optimizer.master_format} masters"
    if config is not None:
        states += f", ZeRO stage {zero_stage(config)}"
    backend = "the model's own"
    if attention.backend is not None:
        from fp8_ds.attention import describe_backend

        backend = describe_backend(attention.backend) + (", q and k rotated" if attention.hadamard else "")
    return {
        "recipe": f"{linear.recipe}, output gradients in {linear.grad_dtype}",
        "GEMM backend": _gemms(linear, device),
        "optimizer states": states,
        "optimizer": "the configuration's, or the script's" if config is None else _optimizer(fp8, config),
        "activations": _activations(fp8.activations),
        "attention": backend,
    }


def _gemms(linear: LinearConfig, device: torch.device) -> str:
    if linear.backend == "reference":
        return "reference, which is slow"
    if device.type == "cpu":
        return "torch, on this CPU"
    fast = f"fast accumulation of {', '.join(linear.fast_gemms)}" if linear.fast_gemms else "no fast accumulation"
    return f"torch, on tensor cores; {fast}"


def _optimizer(fp8: Fp8Config, config: Mapping[str, Any]) -> str:
    from fp8_ds.engine.host_config import gradient_clipping

    block = config.get("optimizer", {})
    kind = block.get("type")
    if kind is None:
        name = "the one that the script gives to deepspeed.initialize"
    elif str(kind).lower() in ("adam", "adamw") and fp8.optimizer.states == "fp32":
        name = f"{kind}, {'of torch' if (block.get('params') or {}).get('torch_adam') else 'FusedAdam of DeepSpeed'}"
    else:
        name = str(kind)
    if fp8.optimizer.states == "fp8":
        name += ", computed by fp8_ds on FP8 states"
    if not fp8.optimizer.release:
        return name
    if fp8.optimizer.releases(norm := gradient_clipping(config)):
        return f"{name}, in the backward (release)"
    return f'{name}, in the step: "release_clipping": "exact" holds the gradients, for they are clipped at {norm:g}'


def _activations(activations: ActivationsConfig) -> str:
    parts = [f"fused SwiGLUs and norms, kept in {activations.nonlinear}" if activations.fused else "the model's own"]
    if activations.cross_entropy == "liger":
        times = activations.cross_entropy_chunk_mem_const
        parts.append("Liger's cross entropy" + (f" with chunk_mem_const {times}" if times != 1 else ""))
    return ", ".join(parts)


def _loaded(script: Path | None) -> tuple[Literal["yes", "no", "if"], str, str]:
    """Whether something loads fp8_ds before the engine is made, as far as can be seen from here; what; what would."""
    if diagnosis.autoload_check().status == "ok":
        return "yes", "autoload is on in this environment.", ""
    place = "nowhere" if script is None else import_in(parsed(script))
    if place == "first":
        return "yes", f"{script} imports fp8_ds.", ""
    detail = {
        "nowhere": "" if script is None else f", and {script} does not import it",
        "elsewhere": f", and {script} imports it in a function, under a condition, or after what may call "
        "deepspeed.initialize(): that this comes first cannot be seen from here",
    }[place]
    return (
        "no" if place == "nowhere" and script is not None else "if",
        f"Nothing is sure to load fp8_ds: autoload is off{detail}. DeepSpeed alone ignores the block and trains in "
        "bf16 without a word.",
        "`import fp8_ds` at the top of the script, start it by `deepspeed --module fp8_ds.run SCRIPT`, or run `fp8-ds "
        "autoload on`.",
    )

"""Configurations that FP8 ZeRO does not support, refused when they are read: on every rank, before any collective.

One row per combination; docs/refusals.md shows the same table (a test compares them). The functions need no model:
`fp8-ds doctor` calls them, too.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from fp8_ds.config import Fp8Config
from fp8_ds.config.ds_config import (
    FP32_NAMES,
    Config,
    bf16_block,
    block_of,
    gradient_clipping,
    is_on,
    number,
    zero_stage,
    zero_value,
)
from fp8_ds.config.schedule import check_total
from fp8_ds.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch

_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
"""Monitors of DeepSpeed, by their blocks."""


def _offloads(key: str) -> Callable[[Config], bool]:
    def found(config: Config) -> bool:
        device = block_of(config, "zero_optimization", key).get("device")
        return device not in (None, "auto") and str(getattr(device, "value", device)) != "none"

    return found


def _reduces_in_fp8(config: Config) -> bool:
    return bool(block_of(config, "fp8", "zero").get("reduce_scatter") == "fp8")


def _has_fp8_states(config: Config) -> bool:
    return bool(block_of(config, "fp8", "optimizer").get("states") == "fp8")


def _has_unbounded_betas(config: Config) -> bool:
    """Whether betas are two numbers that `numerics.predicted.check_betas` refuses; torch refuses all that are not."""
    betas = block_of(config, "optimizer", "params").get("betas")
    if not isinstance(betas, (list, tuple)) or len(betas) != 2 or not all(isinstance(b, (int, float)) for b in betas):
        return False
    return not (0 <= betas[0] < 1 and 0 <= betas[1] < 1 and betas[0] ** 2 < betas[1])


def _is_off(value: object) -> bool:
    """Whether a key that is on by default is turned off."""
    return value not in (None, "auto") and not is_on(value)


def _fp8_reduction_without(key: str) -> Callable[[Config], bool]:
    """Return a test for FP8 reduction of gradients although `key`, which is on by default, is turned off."""

    return lambda c: _reduces_in_fp8(c) and _is_off(zero_value(c, key))


@dataclass(frozen=True)
class Refusal:
    """A configuration that is refused: its key as the user wrote it, when it applies, why, and what to do instead.

    `instead` is empty where the remedy is to remove the key.
    """

    key: str
    applies: Callable[[Config], bool]
    reason: str
    instead: str = ""

    @property
    def remedy(self) -> str:
        return self.instead or f'Remove "{re.split("[: ]", self.key)[0].rpartition(".")[2]}".'


def _true(key: str, reason: str, instead: str = "") -> Refusal:
    """Return the refusal of configurations in which `key` is true."""
    *blocks, name = key.split(".")

    def applies(config: Config) -> bool:
        return is_on((bf16_block(config) if blocks == ["bf16"] else block_of(config, *blocks)).get(name))

    return Refusal(f"{key}: true", applies, reason, instead)


REFUSALS = (
    Refusal(
        "zero_optimization.stage: 0",
        lambda c: zero_stage(c) == 0,
        "without ZeRO there are no sharded masters to quantise from",
        'Set "zero_optimization": {"stage": 1}; on one GPU it costs nothing.',
    ),
    _true(
        "fp16.enabled",
        "the loss scale of fp16 and FP8 gradient scales contradict each other",
        'Set "bf16": {"enabled": true} and remove "fp16".',
    ),
    Refusal(
        "bf16.enabled: false",
        lambda c: not is_on(bf16_block(c).get("enabled")),
        "the nominal dtype of FP8 weights, activations and gradients is bf16",
        'Set "bf16": {"enabled": true}.',
    ),
    _true("bf16.bf16_master_weights_and_grads", "FP8 weights are quantised from fp32 masters"),
    _true("bf16.bf16_optimizer_states", "bf16 moments rounded to nearest stall, and are not tested with FP8 weights"),
    Refusal(
        "zero_optimization.offload_optimizer.device",
        _offloads("offload_optimizer"),
        "masters on the CPU or on NVMe are quantised where the GPU cannot read them (SuperOffload included)",
        'Remove "offload_optimizer"; a higher ZeRO stage or more ranks save memory too.',
    ),
    _true("zero_optimization.cpu_offload", "masters on the CPU are quantised where the GPU cannot read them"),
    _true("zero_optimization.cpu_offload_param", "FP8 shards live on the device that gathers them"),
    Refusal(
        "zero_optimization.offload_param.device",
        _offloads("offload_param"),
        "FP8 shards live on the device that gathers them",
        'Remove "offload_param"; FP8 shards take half of what bf16 shards take.',
    ),
    _true(
        "zero_optimization.offload_optimizer.super_offload",
        "SuperOffload has an optimizer class of its own",
        'Remove "super_offload" and "offload_optimizer".',
    ),
    Refusal(
        "zero_optimization.zenflow",
        lambda c: zero_value(c, "zenflow") not in (None, "auto"),
        "ZenFlow has optimizer classes of its own that update selected columns",
    ),
    Refusal(
        "zero_optimization.zero_hpz_partition_size",
        lambda c: number(zero_value(c, "zero_hpz_partition_size"), 1) > 1,
        "the secondary bf16 shards of hpZ would be gathered instead of FP8",
        'Remove "zero_hpz_partition_size"; an FP8 gather already moves half the bytes.',
    ),
    _true(
        "zero_optimization.zero_quantized_weights",
        "qwZ and FP8 both decide how weights travel",
        'Remove "zero_quantized_weights": FP8 moves as few bytes, with one scale a weight.',
    ),
    _true("zero_optimization.zero_quantized_gradients", "qgZ is not tested with FP8 weights"),
    _true(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "INT8 shards of frozen weights and FP8 both decide how weights are stored",
        'Remove it; "fp8": {"linear": {"frozen": "fp8"}} stores frozen linears in FP8.',
    ),
    Refusal(
        "zero_optimization.mics_shard_size",
        lambda c: number(zero_value(c, "mics_shard_size"), -1) > 0,
        "MiCS shards within sub-groups with an optimizer class of its own",
    ),
    Refusal(
        "zero_optimization.stage3_use_all_reduce_for_fetch_params: true",
        lambda c: is_on(zero_value(c, "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params")),
        "an all-reduce cannot sum FP8 shards",
    ),
    _true(
        "zero_optimization.elastic_checkpoint",
        "elastic checkpoints are deprecated and not tested with FP8",
        'Remove "elastic_checkpoint"; use universal checkpoints to change the world size.',
    ),
    Refusal(
        "checkpoint.writer",
        lambda c: block_of(c, "checkpoint").get("writer") is not None,
        "in stages 1 and 2 all ranks write one file at once, in stage 3 DeepSpeed cannot load what was written, and a "
        "decoupled write that fails reaches no rank",
    ),
    Refusal(
        "datastates_ckpt",
        lambda c: c.get("datastates_ckpt") not in (None, False),
        "files that are still being written have no checksum, and a failed write would reach no rank",
    ),
    Refusal(
        "data_types.grad_accum_dtype: fp32 with stage 1",
        lambda c: zero_stage(c) == 1 and str(block_of(c, "data_types").get("grad_accum_dtype")) in FP32_NAMES,
        "DeepSpeed then builds BF16_Optimizer, which is not a ZeRO-1 optimizer",
        'Use "stage": 2, or "grad_accum_dtype": "bf16".',
    ),
    Refusal(
        "zero_optimization.reduce_scatter: false with fp8.zero.reduce_scatter: fp8",
        _fp8_reduction_without("reduce_scatter"),
        "DeepSpeed then all-reduces whole gradients",
        'Remove "zero_optimization.reduce_scatter"; true is its default.',
    ),
    Refusal(
        "zero_optimization.contiguous_gradients: false with stage 2 and fp8.zero.reduce_scatter: fp8",
        lambda c: zero_stage(c) == 2 and _fp8_reduction_without("contiguous_gradients")(c),
        "DeepSpeed then all-reduces whole gradients",
        'Remove "contiguous_gradients"; true is its default.',
    ),
    Refusal(
        "zero_optimization.use_multi_rank_bucket_allreduce: false with stage 2 and fp8.zero.reduce_scatter: fp8",
        lambda c: zero_stage(c) == 2 and _fp8_reduction_without("use_multi_rank_bucket_allreduce")(c),
        "one all-to-all serves all ranks of a bucket; DeepSpeed would reduce to one rank at a time",
    ),
    Refusal(
        "communication_data_type with fp8.zero.reduce_scatter: fp8",
        lambda c: (
            _reduces_in_fp8(c)
            and any(
                c.get(key) not in (None, "auto")
                for key in ("communication_data_type", "seq_parallel_communication_data_type")
            )
        ),
        "both decide in which format gradients travel",
        'Remove "communication_data_type" and "seq_parallel_communication_data_type", or set '
        '"fp8": {"zero": {"reduce_scatter": "bf16"}}.',
    ),
    Refusal(
        "gradient_predivide_factor with fp8.zero.reduce_scatter: fp8",
        lambda c: _reduces_in_fp8(c) and c.get("gradient_predivide_factor") not in (None, "auto", 1, 1.0),
        "it keeps 16-bit sums in range, and FP8 gradients are added in float64",
    ),
    Refusal(
        "optimizer.type: Muon with fp8.zero.reduce_scatter: fp8",
        lambda c: _reduces_in_fp8(c) and str(block_of(c, "optimizer").get("type")).lower() == "muon",
        "Muon needs the whole gradient of a weight on every rank that holds a part of it",
        'Set "fp8": {"zero": {"reduce_scatter": "bf16"}}, and in stage 3 "zero_optimization": '
        '{"reduce_scatter": false}.',
    ),
    Refusal(
        "optimizer.type other than Adam and AdamW with fp8.optimizer.states: fp8",
        lambda c: (
            _has_fp8_states(c)
            and str(block_of(c, "optimizer").get("type") or "Adam").lower() not in ("adam", "adamw", "auto")
        ),
        "FP8 states are those of Adam, and their scales follow from the bound of its update",
        'Use "Adam" or "AdamW", or set "fp8": {"optimizer": {"states": "fp32"}}.',
    ),
    Refusal(
        "optimizer.params.amsgrad: true with fp8.optimizer.states: fp8",
        lambda c: _has_fp8_states(c) and is_on(block_of(c, "optimizer", "params").get("amsgrad")),
        "it needs a third moment, which would take another byte and is not tested",
        'Remove "amsgrad", or set "fp8": {"optimizer": {"states": "fp32"}}.',
    ),
    Refusal(
        "optimizer.params.bias_correction: false with fp8.optimizer.states: fp8",
        lambda c: _has_fp8_states(c) and not is_on(block_of(c, "optimizer", "params").get("bias_correction", True)),
        "without it the first updates have no bound that scales could follow from",
        'Remove "bias_correction", or set "fp8": {"optimizer": {"states": "fp32"}}.',
    ),
    Refusal(
        "optimizer.params.betas with fp8.optimizer.states: fp8",
        lambda c: _has_fp8_states(c) and _has_unbounded_betas(c),
        "without beta1**2 < beta2, both from 0 to below 1, Adam's update has no bound that scales could follow from",
        'Lower beta1 or raise beta2, or set "fp8": {"optimizer": {"states": "fp32"}}.',
    ),
    _true(
        "torch_autocast.enabled",
        "torch_autocast keeps fp32 parameters and chooses modules by exact class",
        'Remove "torch_autocast"; use "bf16": {"enabled": true}.',
    ),
    _true(
        "hybrid_engine.enabled",
        "the hybrid engine swaps in inference kernels that read bf16 weights",
        'Remove "hybrid_engine".',
    ),
    _true(
        "compile.deepcompile",
        "DeepCompile gathers bf16 shards from C++",
        'Remove "deepcompile"; engine.compile() with torch.compile works.',
    ),
    Refusal(
        "tensor_parallel.autotp_size with zero_optimization.stage: 3",
        lambda c: zero_stage(c) == 3 and number(block_of(c, "tensor_parallel").get("autotp_size"), 0) > 1,
        "AutoTP's shards of ZeRO-3's shards are not tested in FP8 (DeepSpeed itself refuses them before 0.19.8)",
        'Use "stage": 1 or 2, or shard the model by fp8_ds.tp.parallelize.',
    ),
    _true(
        "expert_parallel.enabled",
        "AutoEP shards experts over groups of their own",
        'Remove "expert_parallel".',
    ),
)


def refusals_of(config: Config) -> list[Refusal]:
    """Return the rows that apply."""
    return [row for row in REFUSALS if row.applies(config)]


def refuse_config(config: Config) -> None:
    """Raise an UnsupportedError with all rows that apply, each with its key and remedy."""
    if found := refusals_of(config):
        rows = "\n".join(f"  {row.key}: {row.reason}. {row.remedy}" for row in found)
        raise UnsupportedError(f'"fp8" is enabled together with what it does not support:\n{rows}')


def refuse_unread_reports(sinks: Sequence[str], config: Config, rank: int) -> None:
    """Refuse `fp8.monitor.sink` on rank 0, which writes, if nobody would see the reports.

    Args:
        sinks: values of fp8.monitor.sink.
        rank: rank of this process; rank 0 alone writes to DeepSpeed's monitor, and to the path itself.

    Raises:
        ConfigError: they go to DeepSpeed's monitor, and none is on, or to a path that cannot be written.
    """
    if rank != 0:
        return
    for sink in sinks:
        if sink != "deepspeed":
            _refuse_unwritable(sink)
    if "deepspeed" in sinks and not any(is_on(block_of(config, name).get("enabled")) for name in _MONITORS):
        raise ConfigError(
            f'fp8.monitor.sink: expected a path, or "deepspeed" with a monitor of its own ({", ".join(_MONITORS)}) '
            'enabled, got "deepspeed" and none of these, on rank 0, which writes. Write a path for JSON lines, or '
            "enable one."
        )


def _refuse_unwritable(sink: str) -> None:
    path = Path(os.path.expanduser(sink))
    try:
        if not path.exists():
            TemporaryFile(dir=next(folder for folder in path.absolute().parents if folder.exists())).close()
        elif path.is_file() or path.is_dir():
            path.open("ab").close()
        elif not os.access(path, os.W_OK):  # a pipe or a device: opening it may wait for somebody
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f'fp8.monitor.sink: expected a path that can be written, or "deepspeed", got "{sink}" '
            f"({error.strerror or error}). Name a file in a folder of yours."
        ) from error


def refuse_settings(fp8: Fp8Config, config: Config) -> None:
    """Refuse a block that contradicts the rest of the configuration, on any machine.

    Raises:
        ConfigError: a key has nothing to take effect on.
        UnsupportedError: FP8 ZeRO does not support the configuration.
    """
    refuse_config({**config, "fp8": fp8.model_dump(mode="json")})
    fp8.validate_with(config)
    check_total(fp8.schedule, total_steps(config))
    refuse_release(fp8, config)


def refuse_release(fp8: Fp8Config, config: Config) -> None:
    """Refuse settings in `config` that rule out updates in the backward; `build_zero` finds the rest."""
    if not fp8.optimizer.release or not fp8.optimizer.releases(gradient_clipping(config)):
        return
    steps = config.get("gradient_accumulation_steps")
    dtype = block_of(config, "data_types").get("grad_accum_dtype")
    problems = {
        f"gradient_accumulation_steps {steps}": isinstance(steps, int) and steps > 1,
        "managed_gradient_accumulation false": _is_off(config.get("managed_gradient_accumulation")),
        "zero_optimization.contiguous_gradients false": zero_stage(config) < 3
        and _is_off(zero_value(config, "contiguous_gradients")),
        "data_types.grad_accum_dtype torch.float32": str(dtype) in FP32_NAMES,
    }
    if found := [name for name, is_there in problems.items() if is_there]:
        raise no_release(found)


def no_release(found: Sequence[str]) -> ConfigError:
    """Return the error that names what rules out updates during the backward."""
    return ConfigError(
        f"fp8.optimizer.release: expected false with {' and '.join(found)}, got true. Gradients are freed as "
        'soon as they are reduced, one backward per step: remove it, or set "release": false; with '
        '"release_clipping": "exact" and gradient_clipping, reduced shards are held and it may stay.'
    )


def refuse_start(fp8: Fp8Config, config: Config, device: torch.device, rank: int) -> None:
    """Refuse a configuration that no run on `device` can start with, whatever its model.

    Raises:
        ConfigError: a key has nothing to take effect on.
        UnsupportedError: FP8 ZeRO does not support the configuration, or this machine lacks what it names.
    """
    refuse_settings(fp8, config)
    if fp8.monitor.every:
        refuse_unread_reports(fp8.monitor.sinks, config, rank)
    if fp8.attention.backend is not None:
        from fp8_ds.attention.huggingface import refuse_backend

        refuse_backend(fp8.attention.backend, device)


def total_steps(config: Config) -> object:
    """Return the number of steps that DeepSpeed's learning-rate scheduler is configured with; None if there is none."""
    found: object = block_of(config, "scheduler", "params").get("total_num_steps")
    return found

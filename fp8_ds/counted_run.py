"""Run: what of a DeepSpeed configuration decides how much memory a step takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8_ds.config import Fp8Config
from fp8_ds.engine.host_config import FP32_NAMES, block_of, gradient_clipping, zero_stage
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.estimate import Setup

_FP32, _BF16 = 4, 2
_DEFAULTS: dict[str, int] = {
    "reduce_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed 0.19.8, runtime/zero/config.py; a value "auto" that nobody fills in is the default too."""
_STAGE3 = "stage3_"
"""How DeepSpeed's names of stage 3 begin, which it takes without, too."""


@dataclass(frozen=True)
class Run:
    """How a model is trained, as far as it decides memory.

    Args:
        fp8: the block; None is stock bf16.
        setup: of the states.
        micro_batch: sequences a rank computes at a time.
        seq_len: tokens of a sequence.
        accumulation: micro-batches a step.
        checkpointing: whether layers are computed again in the backward.
        max_live_parameters: of stage 3, in elements.
        sub_group_size: likewise.
        max_reuse_distance: likewise.
        names_live: the configuration names the first of these, which stays as it is then.
        total_steps: that the learning-rate scheduler knows.
        compiled: whether it is compiled as docs/compile.md has it.
        leaf_module: stage 3's block of that name.
    """

    fp8: Fp8Config | None
    setup: Setup
    micro_batch: int
    seq_len: int
    accumulation: int = 1
    checkpointing: bool = False
    max_live_parameters: int = _DEFAULTS["stage3_max_live_parameters"]
    sub_group_size: int = _DEFAULTS["sub_group_size"]
    total_steps: int | None = None
    compiled: bool = False
    leaf_module: Mapping[str, Any] | None = None
    max_reuse_distance: int = _DEFAULTS["stage3_max_reuse_distance"]
    names_live: bool = False

    @property
    def holds_head(self) -> bool:
        """Whether the loss is Liger's by our key, which reads the head without calling it."""
        return self.fp8 is not None and self.fp8.activations.cross_entropy == "liger"


def read_run(
    config: Mapping[str, Any],
    world_size: int,
    micro_batch: int | None,
    seq_len: int,
    checkpointing: bool = False,
    compiled: bool = False,
) -> Run:
    """What decides memory in a DeepSpeed configuration.

    Args:
        config: as `json.load` returns it.
        world_size: ranks of the run, all of which are data-parallel, for models that are cut are refused.
        micro_batch: instead of the configuration's; needed where it has none, or "auto".
        seq_len: tokens of a sequence.
        checkpointing: of activations.
        compiled: by torch.compile, as docs/compile.md has it; else eager.

    Raises:
        ConfigError: the "fp8" block is wrong, or there is no micro-batch, or it does not divide the batch.
        UnsupportedError: the configuration is refused with FP8, or has what is not estimated.
    """
    from fp8_ds.engine.refusals import refuse_config

    fp8 = Fp8Config.from_block(config["fp8"]) if "fp8" in config else None
    fp8 = fp8 if fp8 is not None and fp8.enabled else None
    stage = zero_stage(config)
    if fp8 is not None:
        refuse_config(config)
        fp8.check_stage(stage)
    if stage not in (1, 2, 3):
        raise ConfigError(f"zero_optimization.stage: expected 1, 2 or 3, got {stage}. Only these are estimated.")
    _refuse_uncounted(config, fp8)
    zero = config["zero_optimization"] if isinstance(config.get("zero_optimization"), Mapping) else {}
    zero = {**zero, **{f"{_STAGE3}{key}": value for key, value in zero.items() if f"{_STAGE3}{key}" in _DEFAULTS}}
    numbers = {key: _number(zero.get(key), default) for key, default in _DEFAULTS.items()}
    micro, accumulation = _batch(config, world_size, micro_batch)
    types = config.get("data_types") or {}
    if not isinstance(types, Mapping):
        raise ConfigError(f"data_types: expected an object, got {json.dumps(types)}. Write grad_accum_dtype in it.")
    dtype = str(types.get("grad_accum_dtype"))
    setup = Setup(
        stage,
        world_size,
        fp8.optimizer if fp8 is not None else Fp8Config(enabled=False).optimizer,
        gradient_clipping=gradient_clipping(config),
        grad_bytes=_FP32 if dtype in FP32_NAMES else _BF16,
        overlap_comm=zero.get("overlap_comm") if isinstance(zero.get("overlap_comm"), bool) else None,
        reduce_bucket_size=numbers["reduce_bucket_size"],
        persistence_threshold=numbers["stage3_param_persistence_threshold"],
    )
    live, sub_group = numbers["stage3_max_live_parameters"], numbers["sub_group_size"]
    return Run(
        *(fp8, setup, micro, seq_len, accumulation, checkpointing, live, sub_group, _total_steps(config)),
        compiled=compiled,
        leaf_module=block_of(zero, "leaf_module"),
        max_reuse_distance=numbers["stage3_max_reuse_distance"],
        names_live="stage3_max_live_parameters" in zero,
    )


def _batch(config: Mapping[str, Any], world_size: int, micro_batch: int | None) -> tuple[int, int]:
    """(sequences of a micro-batch, micro-batches a step); one follows from the other and the batch, as in DeepSpeed."""
    whole = int(_number(config.get("train_batch_size"), 0))  # JSON may write 2.0, which DeepSpeed takes for 2
    steps = int(_number(config.get("gradient_accumulation_steps"), 0))
    micro = micro_batch or int(_number(config.get("train_micro_batch_size_per_gpu"), 0))
    if whole and not micro:
        steps = steps or 1
        micro = whole // (steps * world_size)
    elif whole and not steps:
        steps = whole // (micro * world_size)
        if steps * micro * world_size != whole:
            raise ConfigError(
                f"train_batch_size: expected a multiple of {micro * world_size}, micro-batches of {micro} on "
                f"{world_size} ranks, got {whole}. Name another --micro-batch or --world."
            )
    if micro < 1:
        raise ConfigError(
            f"micro-batch: expected an integer, got {config.get('train_micro_batch_size_per_gpu')!r} in the "
            "configuration. Name one with --micro-batch."
        )
    if whole and not micro_batch and whole != micro * (steps or 1) * world_size:
        raise ConfigError(
            f"train_batch_size: expected {micro} (train_micro_batch_size_per_gpu) x {steps or 1} "
            f"(gradient_accumulation_steps) x {world_size} (ranks), got {whole}, which DeepSpeed refuses. Name another "
            "--world, or change one."
        )
    return micro, steps or 1


def _refuse_uncounted(config: Mapping[str, Any], fp8: Fp8Config | None) -> None:
    """Raises UnsupportedError where bytes would be others than the estimate's."""
    from fp8_ds.engine.refusals import REFUSALS
    from fp8_ds.judgement import autotp_size

    stock = {key: value for key, value in config.items() if key != "fp8"}
    found = [row.key for row in REFUSALS if row.applies(stock)]
    optimizer = block_of(config, "optimizer")
    kind = optimizer.get("type")
    if kind is not None and str(kind).lower() not in ("adam", "adamw", "auto"):
        found.append(f"optimizer.type: {kind}")
    if block_of(optimizer, "params").get("amsgrad"):
        found.append("optimizer.params.amsgrad: true")
    if (autotp := autotp_size(config)) > 1:
        found.append(f"tensor_parallel.autotp_size: {autotp}")
    if found:
        raise UnsupportedError(
            f"estimate: expected Adam or AdamW on bf16, all on the GPU, got {', '.join(found)}, which is not counted. "
            "Leave it out of the configuration that is estimated."
        )


def _total_steps(config: Mapping[str, Any]) -> int | None:
    from fp8_ds.engine.startup import total_steps

    total = total_steps(config)
    if total == "auto":
        return 1  # of a number that is filled in later: any step may be in the last fraction
    return total if isinstance(total, int) else None


def _number(value: Any, default: int) -> Any:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default

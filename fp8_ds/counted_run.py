"""Run: what of a DeepSpeed configuration decides how much memory a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8_ds.config import Fp8Config, OptimizerConfig
from fp8_ds.engine.host_config import BATCH_SIZES, FP32_NAMES, block_of, gradient_clipping, number, parsed, zero_stage
from fp8_ds.engine.refusals import REFUSALS, refuse_config
from fp8_ds.engine.startup import total_steps
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.estimate import BF16, FP32, Setup

_STEPS = "gradient_accumulation_steps"
_LIVE = ("stage3_max_live_parameters", "max_live_parameters")
"""DeepSpeed takes both."""


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
        zero: DeepSpeed's model of its "zero_optimization" block.
        names_live: the configuration names stage 3's bound on live weights, which stays as it is then.
        total_steps: that the learning-rate scheduler knows; None: it does not.
    """

    fp8: Fp8Config | None
    setup: Setup
    micro_batch: int
    seq_len: int
    accumulation: int
    checkpointing: bool
    zero: Any
    names_live: bool
    total_steps: int | None

    @property
    def holds_head(self) -> bool:
        """Whether the loss is Liger's by our key, which reads the head without calling it."""
        return self.fp8 is not None and self.fp8.activations.cross_entropy == "liger"


def read_run(
    config: Mapping[str, Any], world_size: int, micro_batch: int | None, seq_len: int, checkpointing: bool = False
) -> Run:
    """What decides memory in a DeepSpeed configuration.

    Args:
        config: as `json.load` returns it.
        world_size: ranks of the run, all of which are data-parallel: models that are cut are refused.
        micro_batch: instead of the configuration's; needed where it has none, or "auto".
        seq_len: tokens of a sequence.
        checkpointing: of activations.

    Raises:
        ConfigError: the "fp8" block is wrong, DeepSpeed refuses the configuration, or there is no micro-batch.
        UnsupportedError: the configuration is refused with FP8, or has what is not estimated.
    """
    fp8 = Fp8Config.from_block(config["fp8"]) if "fp8" in config else None
    fp8 = fp8 if fp8 is not None and fp8.enabled else None
    stage = zero_stage(config)
    if fp8 is not None:
        refuse_config(config)
        fp8.check_stage(stage)
    if stage not in (1, 2, 3):
        raise ConfigError(f"zero_optimization.stage: expected 1, 2 or 3, got {stage}. Only these are estimated.")
    _refuse_uncounted(config)
    given = {key: value for key, value in config.items() if value != "auto"}
    if micro_batch is not None:
        given[BATCH_SIZES[1]] = micro_batch
        if _STEPS in given:
            given.pop(BATCH_SIZES[0], None)  # the micro-batch that is asked about wins
    if not any(given.get(key) for key in BATCH_SIZES):
        found = config.get(BATCH_SIZES[1])
        raise ConfigError(
            f"micro-batch: expected an integer, got {found!r} in the configuration. Name one with --micro-batch."
        )
    read = parsed(given, world_size)
    dtype = block_of(config, "data_types").get("grad_accum_dtype")
    setup = Setup(
        stage,
        world_size,
        fp8.optimizer if fp8 is not None else OptimizerConfig(),
        gradient_clipping=gradient_clipping(config),
        grad_bytes=FP32 if str(dtype) in FP32_NAMES else BF16,
        overlap_comm=read.zero_config.overlap_comm,
        reduce_bucket_size=read.zero_config.reduce_bucket_size,
        persistence_threshold=read.zero_config.param_persistence_threshold,
    )
    total = total_steps(config)
    return Run(
        fp8,
        setup,
        int(read.train_micro_batch_size_per_gpu),  # JSON may write 2.0, which DeepSpeed takes for 2
        seq_len,
        int(read.gradient_accumulation_steps),
        checkpointing,
        read.zero_config,
        names_live=any(key in block_of(config, "zero_optimization") for key in _LIVE),
        # "auto" is a number that is filled in later: any step may be in the last fraction
        total_steps=1 if total == "auto" else total if isinstance(total, int) else None,
    )


def _refuse_uncounted(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where bytes would be others than the estimate's."""
    found = [row.key for row in REFUSALS if row.applies({key: value for key, value in config.items() if key != "fp8"})]
    optimizer = block_of(config, "optimizer")
    if str(optimizer.get("type", "auto")).lower() not in ("adam", "adamw", "auto", "none"):
        found.append(f"optimizer.type: {optimizer['type']}")
    if block_of(optimizer, "params").get("amsgrad"):
        found.append("optimizer.params.amsgrad: true")
    if (autotp := number(block_of(config, "tensor_parallel").get("autotp_size"), 0)) > 1:
        found.append(f"tensor_parallel.autotp_size: {autotp}")
    if found:
        raise UnsupportedError(
            f"estimate: expected Adam or AdamW on bf16, all on the GPU, got {', '.join(found)}, which is not counted. "
            "Leave it out of the configuration that is estimated."
        )

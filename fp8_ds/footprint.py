"""estimate: what a GPU holds at most in training, by part; and the most layers that fit.

The parts that stay (weights, masters, moments) come from estimate.py by arithmetic, those of a forward and a backward
from rehearsal.py by running the model without memory. Peaks measured on an H200 are in tests/unit/test_footprint.py.

Not counted: fragmentation, and what CUDA, cuBLAS and NCCL take for themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8_ds.config import Fp8Config, OptimizerConfig
from fp8_ds.errors import ConfigError
from fp8_ds.estimate import Setup, Weight, estimate_states, weights_of
from fp8_ds.model_spec import ModelSpec, loss_of
from fp8_ds.nn.convert import apply_plan, make_plan
from fp8_ds.nn.producers import fuse_producers
from fp8_ds.rehearsal import Rehearsal, rehearse

_FP32, _BF16 = 4, 2
_DEFAULTS: dict[str, int] = {
    "reduce_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed 0.19.8, runtime/zero/config.py; a value "auto" that nobody fills in is the default too."""


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
        max_live_parameters, sub_group_size: of stage 3, in elements.
    """

    fp8: Fp8Config | None
    setup: Setup
    micro_batch: int
    seq_len: int
    accumulation: int = 1
    checkpointing: bool = False
    max_live_parameters: int = _DEFAULTS["stage3_max_live_parameters"]
    sub_group_size: int = _DEFAULTS["sub_group_size"]

    @property
    def fp32_states_from_step(self) -> int | None:
        """The step since which FP8 states are fp32; None: states do not change."""
        return None if self.fp8 is None else self.fp8.schedule.fp32_states_from_step

    def with_fp32_states(self) -> Run:
        """This run from that step on: what one is that has fp32 states from its start."""
        setup = replace(self.setup, optimizer=OptimizerConfig())
        fp8 = None if self.fp8 is None else self.fp8.model_copy(update={"optimizer": setup.optimizer})
        return replace(self, fp8=fp8, setup=setup)


@dataclass(frozen=True)
class Footprint:
    """Bytes on the GPU that holds most.

    Attributes:
        weights, masters, moments: all the time.
        gathered: weights of other ranks that stage 3 holds at once.
        gradients: that wait for the step.
        activations: what the backward finds of a micro-batch.
        temporaries: beside these at the largest moment of forward and backward.
        buffers: that gradients are reduced in.
        in_backward: the peak of forward and backward.
        in_step: the peak of the optimizer's step.
        num_parameters: of the model.
        later: after `schedule.fp32_states_from_step`, to which all of the above does not apply; None: without it.
    """

    weights: int
    masters: int
    moments: int
    gathered: int
    gradients: int
    activations: int
    temporaries: int
    buffers: int
    in_backward: int
    in_step: int
    num_parameters: int
    later: Footprint | None = None

    @property
    def peak(self) -> int:
        """What must fit: the largest moment of the whole run."""
        return max(self.in_backward, self.in_step, 0 if self.later is None else self.later.peak)


def read_run(
    config: Mapping[str, Any], world_size: int, micro_batch: int | None, seq_len: int, checkpointing: bool = False
) -> Run:
    """What decides memory in a DeepSpeed configuration.

    Args:
        config: as `json.load` returns it.
        world_size: ranks of data parallelism.
        micro_batch: instead of the configuration's; needed where it has none, or "auto".
        seq_len: tokens of a sequence.
        checkpointing: of activations.

    Raises:
        ConfigError: the "fp8" block is wrong, or there is no micro-batch.
        UnsupportedError: the configuration is refused with FP8.
    """
    from fp8_ds.engine.refusals import refuse_config, zero_stage

    fp8 = Fp8Config.from_block(config["fp8"]) if "fp8" in config else None
    fp8 = fp8 if fp8 is not None and fp8.enabled else None
    stage = zero_stage(config)
    if fp8 is not None:
        refuse_config(config)
        fp8.check_stage(stage)
    if stage not in (1, 2, 3):
        raise ConfigError(f"zero_optimization.stage: expected 1, 2 or 3, got {stage}. Only these are estimated.")
    zero = config["zero_optimization"] if isinstance(config.get("zero_optimization"), Mapping) else {}
    numbers = {key: _number(zero.get(key), default) for key, default in _DEFAULTS.items()}
    micro = micro_batch or _number(config.get("train_micro_batch_size_per_gpu"), 0)
    if micro < 1:
        raise ConfigError(
            f"micro-batch: expected an integer, got {config.get('train_micro_batch_size_per_gpu')!r} in the "
            "configuration. Name one with --micro-batch."
        )
    types = config.get("data_types") or {}
    if not isinstance(types, Mapping):
        raise ConfigError(f"data_types: expected an object, got {json.dumps(types)}. Write grad_accum_dtype in it.")
    dtype = str(types.get("grad_accum_dtype"))
    setup = Setup(
        stage,
        world_size,
        fp8.optimizer if fp8 is not None else Fp8Config(enabled=False).optimizer,
        gradient_clipping=float(_number(config.get("gradient_clipping"), 0)),
        grad_bytes=_FP32 if dtype in ("fp32", "float32") else _BF16,
        overlap_comm=zero.get("overlap_comm") if isinstance(zero.get("overlap_comm"), bool) else None,
        reduce_bucket_size=numbers["reduce_bucket_size"],
        persistence_threshold=numbers["stage3_param_persistence_threshold"],
    )
    accumulation = _number(config.get("gradient_accumulation_steps"), 1)
    live, sub_group = numbers["stage3_max_live_parameters"], numbers["sub_group_size"]
    return Run(fp8, setup, micro, seq_len, accumulation, checkpointing, live, sub_group)


def _number(value: Any, default: int) -> Any:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def estimate(spec: ModelSpec, run: Run) -> Footprint:
    """What training `spec` so takes on a GPU; with `schedule.fp32_states_from_step` before that step and after it.

    Raises:
        ConfigError: no linear can be in FP8, or gradient checkpointing is not what the model knows.
    """
    model: Any = spec.build()
    linear = run.fp8.linear if run.fp8 is not None else None
    if run.fp8 is None:
        weights = [Weight(p.numel(), False, p.requires_grad) for p in model.parameters()]
    else:
        weights = weights_of(model, linear)
        _convert(model, run.fp8)
    if run.checkpointing:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise ConfigError(f"checkpointing: expected a model of transformers, got {spec.name}. Leave it out.")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rehearsal = rehearse(model, lambda model: loss_of(model, run.micro_batch, run.seq_len))
    found = _sum(weights, rehearsal, run)
    if run.fp32_states_from_step is None:
        return found
    return replace(found, later=_sum(weights, rehearsal, run.with_fp32_states()))


def _convert(model: Any, fp8: Fp8Config) -> None:
    plan = make_plan(model, fp8.linear, may_be_empty=fp8.optimizer.states == "fp8")
    if plan.num_converted:
        apply_plan(model, plan, fp8.linear, "cpu")
    if fp8.activations.fused:
        fuse_producers(model, fp8.activations)


def _sum(weights: Sequence[Weight], rehearsal: Rehearsal, run: Run) -> Footprint:
    """With the states that `run.setup` names."""
    setup = run.setup
    states = estimate_states(weights, setup)
    parts = states.parts
    gathered = parts.gathered + _live(weights, run)
    trainable = sum(weight.numel for weight in weights if weight.is_trainable)
    is_direct = _is_direct(run)
    buffers = 0 if is_direct else states.buckets
    resident = parts.weights + parts.master + parts.moments + parts.moment_scales + gathered
    if setup.stage == 3:
        resident += parts.gradients + buffers
    elif run.accumulation > 1 and not setup.releases:
        resident += parts.gradients

    def gradients(num_elements: int) -> float:
        """Of complete gradients in stages 1 and 2; stage 3 has room for them all the time."""
        if setup.stage == 3 or setup.releases or run.accumulation > 1:
            return 0.0
        if is_direct or states.unreduced:
            return setup.grad_bytes * num_elements
        return parts.gradients * num_elements / max(trainable, 1)

    in_pass = rehearsal.peak(gradients)
    step_extra = 0 if setup.optimizer.states == "fp8" else _dense_step(trainable, run)
    held = 0 if setup.stage == 3 or run.accumulation > 1 else parts.gradients
    late = 0 if setup.stage == 3 else buffers
    return Footprint(
        weights=parts.weights,
        masters=parts.master,
        moments=parts.moments + parts.moment_scales,
        gathered=gathered,
        gradients=parts.gradients,
        activations=rehearsal.kept,
        temporaries=in_pass - rehearsal.kept,
        buffers=buffers,
        in_backward=resident + late + in_pass,
        in_step=resident - (gathered - parts.gathered) + held + step_extra,
        num_parameters=sum(weight.numel for weight in weights),
    )


def _is_direct(run: Run) -> bool:
    """Whether gradients stay in the parameters, without buckets: FP8 states of stages 1 and 2 on one rank."""
    setup = run.setup
    one_rank = setup.num_ranks == 1 and setup.stage < 3 and setup.grad_bytes == _BF16
    return one_rank and run.fp8 is not None and setup.optimizer.states == "fp8" and not setup.releases


def _live(weights: Sequence[Weight], run: Run) -> int:
    """Bytes of weights that stage 3 has gathered at once, beside its shards and persistent ones."""
    if run.setup.stage < 3 or run.setup.num_ranks == 1:
        return 0
    threshold = run.setup.persistence_threshold
    numel = sum(weight.numel for weight in weights if weight.numel >= threshold)
    num_bytes = sum(weight.numel * (1 if weight.is_fp8 else _BF16) for weight in weights if weight.numel >= threshold)
    return round(num_bytes * min(1.0, run.max_live_parameters / max(numel, 1)))


def _dense_step(trainable: int, run: Run) -> int:
    """Bytes that DeepSpeed's own step adds: in stages 1 and 2 the flat gradients of the partition in bf16, and again in
    float32; in stage 3 those of a sub-group in float32.

    Source: deepspeed/runtime/zero/stage_1_and_2.py `step`, stage3.py `_prepare_sub_group` (0.19.8).
    """
    share = -(-trainable // run.setup.num_ranks)
    if run.setup.stage < 3:
        return (_FP32 + (_BF16 if run.setup.grad_bytes == _BF16 else 0)) * share
    return _FP32 * min(share, run.sub_group_size)


def largest(spec: ModelSpec, run: Run, num_bytes: int) -> tuple[int, Footprint] | None:
    """The most layers of this model that fit.

    Args:
        spec: a configuration that says how many layers it has.
        run: how it is trained.
        num_bytes: of a GPU that training may use.

    Returns:
        (number of layers, what they take); None if not even one fits.

    Raises:
        ConfigError: the number of layers cannot be changed.
    """
    first, second = (estimate(spec.with_layers(n), run) for n in (1, 2))
    if first.peak > num_bytes:
        return None
    layers, found = 1, first
    per_layer = max(second.peak - first.peak, 1)
    # The peak is linear in the layers, or bends upwards where another moment becomes the largest.
    while (more := (num_bytes - found.peak) // per_layer) > 0:
        tried = estimate(spec.with_layers(layers + more), run)
        slope = (tried.peak - found.peak) // more
        if tried.peak > num_bytes:
            per_layer = max(per_layer, slope) + 1
        else:
            layers, found, per_layer = layers + more, tried, max(slope, 1)
    return layers, found

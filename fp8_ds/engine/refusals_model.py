"""Kinds of models that FP8 ZeRO refuses; docs/refusals.md shows the table."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8_ds.errors import UnsupportedError

if TYPE_CHECKING:
    from fp8_ds.config import LinearConfig


@dataclass(frozen=True)
class ModelRefusal:
    """A kind of model that is refused: its name, why, and what to do instead."""

    what: str
    reason: str
    remedy: str

    def error(self, found: str) -> UnsupportedError:
        return UnsupportedError(f'"fp8" is enabled for {self.what}, got {found}: {self.reason}. {self.remedy}')


EXPERTS = ModelRefusal(
    "a model with expert-parallel parameters (`deepspeed.moe`)",
    "DeepSpeed reduces them over expert groups, with an optimizer group each",
    'Turn "fp8.enabled" off for this model.',
)
DUAL_PIPE = ModelRefusal(
    "a DualPipeVModule",
    "its engine class is not one that FP8 ZeRO extends",
    "Use deepspeed.pipe.PipelineModule with ZeRO stage 1.",
)
AUTOTP_STAGE_3 = ModelRefusal(
    "a model that `deepspeed.tp_model_init` splits, in ZeRO stage 3",
    "AutoTP's shards of ZeRO-3's shards are not tested in FP8 (DeepSpeed itself refuses them before 0.19.8)",
    'Use "stage": 1 or 2, or cut the model by fp8_ds.tp.parallelize.',
)
AUTOTP_PIPELINE = ModelRefusal(
    "a PipelineModule that AutoTP splits",
    "its stages have groups of their own, and DeepSpeed does not test the two together",
    'Remove "tensor_parallel" and `deepspeed.tp_model_init`.',
)
PIPELINE_ENDS = ModelRefusal(
    "a PipelineModule with `linear.num_layers_at_start_in_bf16` or `linear.num_layers_at_end_in_bf16`",
    "a stage does not know which entries of the others are layers",
    'Set these keys to 0, and name linears in "linear.filter_fqns": `"23."` is all of entry 23, `"0."` that of 10 and '
    "20, too.",
)
PIPELINE_FROM_THE_END = ModelRefusal(
    "a PipelineModule with negative numbers in `linear.filter_fqns`",
    "a stage has entries of its own, which do not tell where the model ends",
    'Name linears by the number of their entry: `"23.mlp"`.',
)
COMPILED_WRAPPER = ModelRefusal(
    "a model with modules that `torch.compile(module)` has wrapped, in ZeRO stage 3",
    "DeepSpeed puts the inner module's parameters out of its reach and fails in the first forward, in bf16 as well",
    "Compile in place by `module.compile()`, or all of it by `engine.compile()`.",
)
PARALLEL_SCHEDULE = ModelRefusal(
    "tensor-parallel layers with `schedule`, or `engine.set_layer_precision`",
    "their gathers move FP8 only",
    'Remove "schedule"; layers that shall not be in FP8 go into "linear.filter_fqns".',
)
MODEL_REFUSALS = (
    EXPERTS,
    DUAL_PIPE,
    AUTOTP_STAGE_3,
    AUTOTP_PIPELINE,
    PIPELINE_ENDS,
    PIPELINE_FROM_THE_END,
    COMPILED_WRAPPER,
    PARALLEL_SCHEDULE,
)


def refuse_model(model: Any, linear: LinearConfig) -> None:
    """Raise an UnsupportedError for a kind of model that FP8 ZeRO does not support, by its classes and names."""
    import deepspeed
    from deepspeed.runtime.pipe.module import PipelineModule

    from fp8_ds.nn.stacks import counts_from_the_end

    if isinstance(model, getattr(deepspeed, "DualPipeVModule", ())):
        raise DUAL_PIPE.error(type(model).__name__)
    if isinstance(model, PipelineModule):
        num_first, num_last = linear.num_layers_at_start_in_bf16, linear.num_layers_at_end_in_bf16
        if num_first or num_last:
            raise PIPELINE_ENDS.error(f"{num_first} and {num_last}")
        if from_the_end := list(filter(counts_from_the_end, linear.filter_fqns)):
            raise PIPELINE_FROM_THE_END.error(", ".join(map(repr, from_the_end)))
    experts = [name for name, p in model.named_parameters() if getattr(p, "allreduce", True) is False]
    if experts:
        raise EXPERTS.error(", ".join(experts[:3]))


def refuse_wrapped(model: Any, stage: int) -> None:
    """Refuse modules that `torch.compile` has wrapped: ZeRO-3 does not find their parameters.

    ZeRO-3 takes a wrapper's empty `_parameters`, and the wrapper then sets them in the module inside it.
    Source: deepspeed/runtime/zero/parameter_offload.py `_inject_parameters` (0.19.8), torch/_dynamo/eval_frame.py
    `OptimizedModule.__setattr__`.
    """
    wrapper = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    if stage < 3 or wrapper is None:
        return
    wrapped = [name or "the model itself" for name, module in model.named_modules() if isinstance(module, wrapper)]
    if wrapped:
        raise COMPILED_WRAPPER.error(", ".join(wrapped[:3]))

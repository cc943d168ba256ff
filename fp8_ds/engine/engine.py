"""Engine mix-in: our code where DeepSpeed's engine builds, steps, saves and loads."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection
from typing import Any

import torch
from deepspeed.profiling.flops_profiler import profiler as flops_profiler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp8_ds.engine import attention_masks, compiling, conversion, deepspeed_fixes, leaf_modules, zero_optimizer
from fp8_ds.engine.checkpoints import BeforeStateDict, Fp8Checkpoints
from fp8_ds.engine.folder_model import as_bytes, drop_scales
from fp8_ds.engine.precision import Request
from fp8_ds.engine.rank_agreement import refuse_other_order
from fp8_ds.engine.ranks import say
from fp8_ds.engine.step_callbacks import StepCallbacks
from fp8_ds.errors import ConfigError
from fp8_ds.monitor.health import Listener
from fp8_ds.nn.linear.fp8_linear import Fp8Linear, full_shape
from fp8_ds.nn.linear.parameter import keep_values_in_hooks
from fp8_ds.nn.moe.experts import WEIGHTS, Fp8Experts
from fp8_ds.zero.param_hooks import share_readers


class Fp8Engine(Fp8Checkpoints):
    """Mix-in before DeepSpeedEngine or PipelineEngine. Seams: fp8_ds/engine/seams.py.

    Attributes:
        fp8: context of the engine; None where FP8 is off, and the engine is DeepSpeed's own.
    """

    def _configure_distributed_model(self: Any, model: Any) -> None:
        """Convert the model's linears in place, after DeepSpeed has cast, moved and broadcast it."""
        conversion.refuse_autotp(self, model)
        with as_bytes(model):
            super()._configure_distributed_model(model)  # type: ignore[misc]
        self.fp8 = conversion.convert(self)
        if self.fp8 is not None:
            self._fp8_state_dict_hook = self.module.register_state_dict_pre_hook(BeforeStateDict(self))

    def _configure_basic_optimizer(self: Any, model_parameters: Any) -> Any:
        """Return torch's Adam or AdamW if there are FP8 states, which take it over."""
        if self.fp8 is None or self.fp8.config.optimizer.states == "fp32":
            return super()._configure_basic_optimizer(model_parameters)  # type: ignore[misc]
        return zero_optimizer.adam_to_take_over(self, model_parameters)

    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        """Let DeepSpeed build its optimizer, then retype it."""
        build = super()._configure_zero_optimizer  # type: ignore[misc]
        if self.fp8 is None:
            return build(optimizer)
        drop_scales(optimizer, self.fp8.stored.values())
        refuse_other_order(optimizer.param_groups, self.param_names, self.seq_data_parallel_group)
        conversion.leave_unoptimized(self.module, self.fp8, optimizer)
        if zero_optimizer.has_no_purpose(self):
            say("fp8: off for this engine: none of its linears is in FP8; it trains as stock bf16")
            self.fp8, self._fp8_unused = None, self.fp8
            return build(optimizer)
        lines = deepspeed_fixes.prepare(self)
        zero, host = zero_optimizer.build_zero(self, optimizer, build)
        zero_optimizer.retype(zero, host, self.fp8, self.gradient_clipping())
        deepspeed_fixes.finish(self, zero)
        for line in lines:
            say(line)
        return zero

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self._fp8_hooks: list[Any] = []  # things with `remove()`
        self._fp8_checkpointed: list[compiling.CheckpointedForward] = []
        self._fp8_drops_full_masks = False
        super().__init__(*args, **kwargs)
        if self.fp8 is not None:
            self._fp8_step_callbacks = StepCallbacks(self)
            if self.flops_profiler_enabled():
                self.flops_profiler.__class__ = Fp8FlopsProfiler
            for line in (leaf_modules.hint_on_building(self), leaf_modules.hint_on_live(self)):
                if line:
                    say(line)
        else:
            share_readers(self.module)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's own forward. If a backward can follow, layers keep their precision until the next step."""
        callbacks = self._fp8_step_callbacks if torch.is_grad_enabled() else None
        if callbacks is not None:
            callbacks.before_forward(self.module.training, (inputs, kwargs))
        keep_values_in_hooks()
        for layer in self._fp8_checkpointed:
            layer.take_over()
        if self._fp8_drops_full_masks and self.module._compiled_call_impl is not None:
            kwargs = attention_masks.without_full_mask(inputs, kwargs)  # a graph cannot read a mask
        output = super().forward(*inputs, **kwargs)  # type: ignore[misc]
        if callbacks is not None and self.module.training:
            callbacks.has_graph = True
        return output

    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> None:
        """Run DeepSpeed's own step, then the callbacks of an engine with FP8."""
        if self._fp8_step_callbacks is not None:
            self._fp8_step_callbacks.before_step()
        super()._take_model_step(*args, **kwargs)  # type: ignore[misc]
        if self._fp8_step_callbacks is not None:
            self._fp8_step_callbacks.after_step()

    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        """Compile as DeepSpeed does, with rotary tables made once, no guards on fixed objects, and logits beside a loss
        without a gradient; in ZeRO-3 with decoder layers as leaf modules, checkpointed without its hooks, which are
        called and not traced."""
        given = inspect.signature(super().compile).bind(*args, **kwargs)  # type: ignore[misc]
        if self.fp8 is not None:
            compiling.allow_more_graphs()
            compiling.compute_functions_again()
            self._fp8_hooks += compiling.keep_tables(self.module)
            if leaves := leaf_modules.make_leaves(self):
                self._fp8_hooks.append(leaves)
            lines = [leaf_modules.describe(leaves) if leaves else None, leaf_modules.set_prefetch(self)]
            lines += [deepspeed_fixes.before_compiling(self, leaves is not None)]
            lines += [leaf_modules.hint_on_live(self) if leaves else None]
            if self.zero_optimization_partition_weights():
                new = compiling.checkpoint_without_hooks(leaf_modules.leaves_in(self.module))
                self._fp8_checkpointed += new
                self._fp8_hooks += new
            for line in filter(None, lines):
                say(line)
            given.arguments["compile_kwargs"] = compiling.without_fixed(given.arguments.get("compile_kwargs", {}))
        super().compile(*given.args, **given.kwargs)  # type: ignore[misc]
        if self._fp8_step_callbacks is not None:
            self._fp8_step_callbacks.sizes.reopen()
        if self.fp8 is not None:
            deepspeed_fixes.after_compiling(self)

    def set_layer_precision(self: Any, names: str | Collection[str], precision: Request) -> list[str]:
        """Set the precision of layers from the next step on, whatever the schedule; "schedule" follows it again.

        Collective: call it on all ranks alike, between optimizer steps or in a step callback. Checkpoints keep the
        setting.

        Args:
            names: names of layers, or parts of names, in any order.
            precision: "bf16", "fp8" or "schedule".

        Returns:
            The names of these layers.

        Raises:
            ConfigError: FP8 is off, no layer in FP8 has a name, or ranks disagree; on all ranks, and nothing changes.
            UnsupportedError: layers are tensor-parallel, or a rank is between a forward and the step that follows; on
                all ranks, and nothing changes.
        """
        if self._fp8_step_callbacks is None:
            raise ConfigError(
                "set_layer_precision: expected an engine with layers in FP8, got none. Turn fp8.enabled on."
            )
        layers: list[str] = self._fp8_step_callbacks.set_layer_precision(names, precision)
        return layers

    def add_fp8_listener(self: Any, listener: Listener) -> RemovableHandle:
        """Call `listener` with a `Report` of each sampled step, one step later, until the handle's `remove()`.

        It is called on each rank that adds it, in the same step, and with the same numbers on data-parallel ranks, but
        not with the report of a run's last step. Its errors are raised. Checkpoints do not keep it.

        Args:
            listener: takes a report; it must not keep or change what is in it.

        Raises:
            ConfigError: nothing samples steps, or the listener has been added already.
        """
        monitor = None if self._fp8_step_callbacks is None else self._fp8_step_callbacks.monitor
        if monitor is None:
            raise ConfigError(
                "add_fp8_listener: expected an engine with layers in FP8 that samples steps, got none. Set "
                '"monitor": {"every": 100} and its "sink", which may be "/dev/null".'
            )
        handle: RemovableHandle = monitor.listen(listener)
        return handle

    def fp8_report(self: Any) -> dict[str, Any]:
        """Report the state and traffic of FP8 in this engine, on this rank.

        Returns:
            `enabled` (false, and the only key, where FP8 is off for this engine); `gathered_bytes` (of weights, in the
            last finished step, own share included), `gathered_fp8_bytes` of these, `reduced_bytes` (handed to FP8
            reduce-scatters in that step, 0 if gradients are reduced in bf16), `num_amax_reduces` in that step,
            `resident_weight_bytes` and its parts, `num_fp8_weights` (elements), `plan` (one line),
            `num_layers_in_bf16` (of the plan's, by size, schedule or request).
        """
        if self.fp8 is None:
            return {"enabled": False}
        context, optimizer = self.fp8, self.optimizer
        last = context.counter.last or context.counter
        resident = optimizer.fp8.resident_bytes()
        num_weights = resident.pop("num_fp8_weights")
        return {
            "enabled": True,
            "gathered_bytes": last.total,
            "gathered_fp8_bytes": last.fp8,
            "reduced_bytes": last.reduced,
            "num_amax_reduces": last.num_amax_reduces,
            "resident_weight_bytes": sum(resident.values()),
            **{f"resident_{kind}_bytes": value for kind, value in resident.items()},
            "num_fp8_weights": num_weights,
            "plan": context.plan.describe(),
            "num_layers_in_bf16": len(context.precision.in_bf16),
        }

    def destroy(self: Any) -> None:
        """Write the last report and remove our hooks, then destroy the engine as DeepSpeed does.

        All of it is done, whatever raises; then the first error is raised.
        """
        callbacks, self._fp8_drops_full_masks = self._fp8_step_callbacks, False
        last_report = () if callbacks is None else (callbacks.close,)
        errors = []
        for undo in (*last_report, *(hook.remove for hook in self._fp8_hooks), super().destroy):  # type: ignore[misc]
            try:
                undo()
            except BaseException as error:  # an interrupt is raised as late as the others
                errors.append(error)
        if errors:
            raise errors[0]


class Fp8FlopsProfiler(flops_profiler.FlopsProfiler):
    """DeepSpeed's flops profiler, which by itself counts calls of torch's functions only, with products of FP8 layers.

    Modules in its own table of those that count themselves (`MODULE_HOOK_MAPPING`) would have no latency. Seams:
    fp8_ds/engine/seams.py.
    """

    def start_profile(self, ignore_list: Any = None) -> None:
        super().start_profile(ignore_list)
        handles: list[RemovableHandle] = [
            # Before DeepSpeed's own hook, which adds up what was counted within the module.
            module.register_forward_hook(_count, with_kwargs=True, prepend=True)
            for module in self.model.modules()
            if isinstance(module, (Fp8Linear, Fp8Experts))
        ]

        def remove(*args: Any) -> None:
            for handle in handles:
                handle.remove()

        handles.append(self.model.register_forward_hook(remove, always_call=True))


def _count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
    """Count a plain linear's products for `module`, in place of those that its parts have counted."""
    given = (*args, *kwargs.values())
    if isinstance(module, Fp8Experts):
        weights = [full_shape(getattr(module, name)) for name in WEIGHTS]
        num_macs = given[1].numel() * sum(shape.numel() // shape[0] for shape in weights)  # given[1]: top_k_index
    else:
        # With sequence parallelism one of the two is a rank's part of the tokens that are multiplied.
        num_tokens = max(math.prod(tensor.shape[:-1]) for tensor in (given[0], output))
        num_macs = num_tokens * full_shape(module.weight).numel()
    for counts, num in ((flops_profiler.module_flop_count, 2 * num_macs), (flops_profiler.module_mac_count, num_macs)):
        if counts:
            counts[-1][:] = [(type(module).__name__, num)]


class Fp8DeepSpeedEngine(Fp8Engine, DeepSpeedEngine):
    """DeepSpeedEngine with FP8 ZeRO."""


class Fp8PipelineEngine(Fp8Engine, PipelineEngine):
    """PipelineEngine with FP8 ZeRO (stage 1, the only one that DeepSpeed allows with pipelines)."""

"""Repairs of DeepSpeed, one of transformers and one of torch.compile, each with a switch; none has to do with FP8.

An FP8 run shall differ from a bf16 run by FP8 alone: a name in `fp8.without_deepspeed_fixes` leaves a repair out, and
DeepSpeed's own code runs. Each is a function that is called once, or a mix-in between our class and DeepSpeed's that is
left out of the optimizer's class. Files and quotes are of deepspeed 0.19.8, below deepspeed/.

These repairs stay where they are, without a switch:
- FP8 would compute wrongly without them: fragments with `round_robin_gradients` (zero/masters12.py), trainable float32
  weights under zero.Init (`conversion._cast_trainable`), readers of several engines' weights (zero/param_hooks.py).
- They are a promise of docs/reliability.md: whole checkpoints (saving.py, checking.py), ranks that start alike
  (rank_agreement.py), refusals (compat/).
- They mend our own code only: handles that are waited for together (zero/param_hooks.py), a last report after
  `destroy_process_group` (monitor/sinks.py). With one rank our own step reads gradients without a bucket
  (zero/gradients.py); of fp32 states `adam_step` leaves both out.
- They are others of torch.compile (compiling.py) or of Liger's loss (liger_loss.py).
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage3 as ds_stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

from fp8_ds.comm.reduce_scatter import reduce_scatter_shares
from fp8_ds.config import DeepSpeedFix, Fp8Config
from fp8_ds.engine import attention_masks, compiling, leaf_modules
from fp8_ds.tp.group import device_of

FETCHES_AHEAD = 4
"""Fetches of leaves that the host may run ahead; in FP8 these are the bytes of two leaves in bf16."""


def prepare(engine: Any) -> list[str]:
    """Apply the repairs that DeepSpeed's optimizer is built with; return lines for the log."""
    config = engine.fp8.config
    lines = [
        leave_out_bucket(engine) if config.has_fix("gradient_bucket") else None,
        raise_max_live_parameters(engine) if config.has_fix("max_live_parameters") else None,
    ]
    return [line for line in lines if line]


def mixins(host: type, config: Fp8Config, gradient_clipping: float) -> list[type]:
    """Return the mix-ins before `host`, DeepSpeed's class, of an optimizer with this configuration."""
    has_fp8_states = config.optimizer.states == "fp8"
    keeps_gradients = not (has_fp8_states and config.optimizer.releases(gradient_clipping))
    found: list[tuple[DeepSpeedFix, type]] = []
    if issubclass(host, DeepSpeedZeroOptimizer_Stage3):
        found += [("universal_step", OwnUniversalSteps), ("reduce_scatter", FewerLaunches)]
        found += [("gradient_bucket", WaitingGradients)]
        found += [("stale_gradients", FreshGradients)] if keeps_gradients else []
        found += [("epilogue_sync", EpilogueOnDevice)] if has_fp8_states else []
    else:
        found += [("graph_gradients", GradientsOutOfGraphs)]
        found += [] if has_fp8_states else [("overflow_check", OverflowFromNorms)]
    return [mixin for name, mixin in found if config.has_fix(name)]


def finish(engine: Any, zero: Any) -> None:
    """Apply the repairs of an engine whose optimizer `zero` is in FP8."""
    config: Fp8Config = engine.fp8.config
    if config.has_fix("timer_sync"):
        disable_timer_sync(engine._config)
    if config.has_fix("attention_masks"):
        make_fewer_masks(engine)
    if config.has_fix("group_timeout"):
        use_default_timeout(zero.dp_process_group)
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        compiling.add_biases_out_of_place()
        if config.has_fix("fetches_ahead"):
            fetch_further_ahead(zero)
        if config.has_fix("hook_signatures"):
            store_signatures(zero.module)


def before_compiling(engine: Any, has_new_leaves: bool = False) -> str | None:
    """Apply the repairs of an engine in FP8 that is about to compile its model; return a line for the log, or None."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:
        return None
    config, line = engine.fp8.config, None
    if config.has_fix("hook_tracing"):
        leave_out_of_graphs(offload)
    if has_new_leaves and config.has_fix("fetches_ahead"):
        fetch_further_ahead(engine.optimizer)
    if has_new_leaves and config.has_fix("max_live_parameters") and (line := raise_max_live_parameters(engine)):
        bound = engine.zero_max_live_parameters()
        offload.get_param_coordinator()._PartitionedParameterCoordinator__max_n_available_params = bound
    return line


def after_compiling(engine: Any) -> None:
    """Apply the repairs of an engine in FP8 that has compiled its model."""
    if engine.fp8.config.has_fix("logits_gradient"):
        detach_logits(engine)


def disable_timer_sync(config: Any) -> None:
    """`timer_sync`: keep the throughput timer from emptying the device's queue twice a step, unless its key is set.

    utils/timer.py, ThroughputTimer: `if self.config.synchronized: get_accelerator().synchronize()`; the default of
    `timers.throughput.synchronized` is true.

    Args:
        config: DeepSpeed's, of an engine.
    """
    if "synchronized" not in config._param_dict.get("timers", {}).get("throughput", {}):
        config.timers_config.synchronized = False


def make_fewer_masks(engine: Any) -> None:
    """`attention_masks`: let transformers' causal models have no attention mask where none is needed, until the engine
    is destroyed (attention_masks.py, which names transformers' functions)."""
    handles = attention_masks.make_fewer_masks(engine.module)
    engine._fp8_hooks += handles
    engine._fp8_drops_full_masks = bool(handles) and attention_masks.is_causal_model(engine.module)


def detach_logits(engine: Any) -> None:
    """`logits_gradient`: let logits beside a loss leave the graph of a compiled model without a gradient, or, in
    ZeRO-3, leave it before the loss, until the engine is destroyed (compiling.py)."""
    if engine.zero_optimization_partition_weights():
        engine._fp8_hooks += compiling.separate_losses(engine.module)
    elif not any(isinstance(hook, compiling.DetachedLogits) for hook in engine._fp8_hooks):
        engine._fp8_hooks.append(compiling.DetachedLogits(engine.module))


def use_default_timeout(group: Any) -> None:
    """`group_timeout`: give ZeRO's group the default group's time-out, by which a run ends that has lost a rank.

    utils/groups.py makes groups by `dist.new_group(ranks)`, with torch's own time-out (gloo: 30 minutes), whatever
    DEEPSPEED_TIMEOUT or `init_distributed(timeout=...)` says.
    """
    options = getattr(dist.group.WORLD._get_backend(device_of(None)), "options", None)  # type: ignore[union-attr]
    if options is not None:
        c10d: Any = dist.distributed_c10d  # torch 2.14 renames it
        (getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout)(options._timeout, group)


def leave_out_bucket(engine: Any) -> str | None:
    """`gradient_bucket`: let ZeRO-3 reduce gradients from where they are, unless `contiguous_gradients` is set.

    Not with gradient release, whose bucket is small and bounds what waits. Return a hint if the key says true.

    runtime/zero/stage3.py, `__add_grad_to_ipg_bucket`, copies each one to a buffer of `reduce_bucket_size` elements, a
    GB by default, which is there all the time. A reduce-scatter copies them once more; only an all-reduce, with
    `"reduce_scatter": false`, takes the buffer as it is.
    """
    zero = engine._config.zero_config
    if zero.stage < 3 or not zero.reduce_scatter or not zero.contiguous_gradients:
        return None
    if engine.fp8.config.optimizer.releases(engine.gradient_clipping()):
        return None
    if needs_no_bucket(engine._config._param_dict, zero):
        zero.contiguous_gradients = False
        return None
    return (
        f"fp8: zero_optimization.contiguous_gradients is true: every gradient is copied to a buffer of "
        f"{zero.reduce_bucket_size:,} elements, which is there all the time. Leave the key out to save both"
    )


def needs_no_bucket(config: Mapping[str, Any], zero: Any) -> bool:
    """Whether gradients may stay where they are until they are reduced: in stage 3, if nobody has asked for copies.

    Args:
        config: DeepSpeed's configuration, as it was given.
        zero: its "zero_optimization" block, as DeepSpeed has read it.
    """
    given = config.get("zero_optimization", {}).get("contiguous_gradients", "auto")
    return zero.stage == 3 and zero.reduce_scatter and given == "auto"


def raise_max_live_parameters(engine: Any) -> str | None:
    """`max_live_parameters`: raise this bound, if none is set, so that DeepSpeed can prefetch every leaf module.

    runtime/zero/partitioned_param_coordinator.py prefetches no more than `self.__max_n_available_params -
    self.__n_available_params`. The default of a thousand million leaves some out in silence; Llama-3-8B's head and
    embedding, which Liger's loss holds, are more.

    Returns:
        A line that says so, or None if DeepSpeed's bound stays.
    """
    if not engine.zero_optimization_partition_weights() or leaf_modules.names_bound(engine):
        return None
    needed, before = leaf_modules.needed_bound(engine), engine.zero_max_live_parameters()
    if needed <= before:
        return None
    engine._config.zero_config.max_live_parameters = needed
    return (
        f"fp8: {leaf_modules.BOUND} is {needed:,}, and not {before:,}, for the leaf modules to be prefetched: it is "
        "not set"
    )


def fetch_further_ahead(zero: Any) -> None:
    """`fetches_ahead`: with leaf modules, let the host run 4 fetches ahead. Otherwise ranks that are late in turns wait
    for each other in every gather.

    runtime/zero/partitioned_param_coordinator.py: `# TODO. make this configurable via JSON`,
    `self.__max_ongoing_fetch_events: int = 2`. It counts parameters there, and whole leaves here (zero/param_hooks.py).
    """
    if zero.fp8.shards.in_flight.has_leaves:
        coordinator = zero.parameter_offload.get_param_coordinator()
        coordinator._PartitionedParameterCoordinator__max_ongoing_fetch_events = FETCHES_AHEAD


def store_signatures(module: nn.Module) -> None:
    """`hook_signatures`: store the signatures of the functions that mark where a module's backward begins and ends.

    runtime/zero/parameter_offload.py makes these functions for each module. `torch.autograd.Function.apply` asks
    `inspect.signature` for a function with `setup_context` at every call (torch 2.11 to 2.14), three times a decoder
    layer; a stored signature is returned as it is.
    """
    for child in module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            if (function := child.__dict__.get(name)) is not None:
                function.forward.__signature__ = inspect.signature(function.forward)


def leave_out_of_graphs(offload: Any) -> None:
    """`hook_tracing`: keep torch.compile from tracing ZeRO-3's hooks; it calls them instead.

    runtime/zero/parameter_offload.py has `@torch.compiler.disable` on half of its hooks. A graph ends at a module with
    hooks either way. Traced hooks become graphs without an operator, with half a thousand guards a module that are
    checked in each call, some of them on DeepSpeed's trace of the model. Hooks that are registered later, as TRL does,
    are traced.

    Args:
        offload: DeepSpeed's `parameter_offload` of a ZeRO-3 optimizer.
    """
    for handle in (offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = torch.compiler.disable(hooks[handle.id])


def correct_tp_degree(engine: Any, state: dict[str, Any]) -> None:
    """`tp_degree`: say in a model file how many tensor-parallel ranks there are, with Ulysses' `mpu` one.

    runtime/engine.py: `CHECKPOINT_TP_DEGREE: bwc_tensor_model_parallel_world_size(mpu)`, which takes ranks that share a
    sequence for tensor-parallel ones, and so does ds_to_universal (from 0.19.8 on).
    """
    dims = state.get("checkpoint_parallel_dimensions")
    if engine.sequence_parallel_size > 1 and dims is not None:
        state["checkpoint_parallel_dimensions"] = {**dims, "tp_degree": engine.mp_world_size}


class OwnUniversalSteps:
    """`universal_step`: mix-in that gives each sub-group of ZeRO-3 a `step` of its own after a universal load.

    runtime/zero/stage3.py, `load_hp_checkpoint_state_from_checkpoint_dir_stage3`, puts one tensor into the state of all
    sub-groups, and torch's Adam adds to it once for each.
    """

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        for state in self.optimizer.state.values():
            if isinstance(step := state.get("step"), Tensor):
                state["step"] = step.clone()


class WaitingGradients:
    """`gradient_bucket`: mix-in that keeps gradients of ZeRO-3 that wait in no bucket until the reduction has read
    them.

    runtime/zero/stage3.py, `partition_grads`, frees them on the stream of the reduction: where a rank has no part of a
    small parameter it says `param.grad = None; continue`, before the line that tells the allocator of this stream.
    """

    def partition_grads(self: Any, params_to_release: list[Any], grad_partitions: list[Tensor]) -> list[Tensor]:
        if not get_accelerator().is_synchronized_device():
            stream = get_accelerator().current_stream()
            for p in params_to_release:
                p.grad.record_stream(stream)
        return super().partition_grads(params_to_release, grad_partitions)  # type: ignore[misc]


class FewerLaunches:
    """`reduce_scatter`: mix-in that averages ZeRO-3's gradients in few launches, whatever the number of ranks.

    runtime/comm/coalesced_collectives.py, `reduce_scatter_coalesced`, makes a tensor for each rank's share of each
    gradient. A step's first gradients are written to where DeepSpeed copies them afterwards. That copy is then free: on
    CUDA torch copies nothing onto itself (ATen/native/cuda/Copy.cu).
    """

    # The name under which DeepSpeed's private `__avg_scatter_grads` is looked up.
    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(self: Any, params: list[Any], *args: Any) -> list[Tensor]:
        own = ds_stage3.reduce_scatter_coalesced
        is_first = self.fp8.step.release is None and self.micro_step_id == 0
        places = [gradient_buffer(self, p) for p in params] if is_first else ()
        # A larger gradient is in no bucket, but autograd's own.
        owned = self.contiguous_gradients and sum(p.grad.numel() for p in params) <= self.reduce_bucket_size
        ds_stage3.reduce_scatter_coalesced = partial(reduce_scatter_shares, places=places, owned=owned)
        try:
            return super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(params, *args)  # type: ignore[misc]
        finally:
            ds_stage3.reduce_scatter_coalesced = own


class FreshGradients:
    """`stale_gradients`: mix-in that gives parameters of ZeRO-3 that a step has not used gradients of zeros, as in
    stages 1 and 2.

    runtime/zero/stage3.py, `partition_grads`, writes to `self.__param_id_to_grad_partition[param.ds_id]` where the
    first micro-batch has used a parameter, else it adds to what is there: the gradient of the last step that used it.
    Nothing else clears it, and `step` updates by it for as long as none does.
    """

    def partition_grads(self: Any, params_to_release: list[Any], grad_partitions: list[Tensor]) -> list[Tensor]:
        """Run DeepSpeed's method, from zero for parameters that earlier micro-batches did not use."""
        used = _used(self)
        for p in params_to_release:
            if p.ds_id not in used:
                used.add(p.ds_id)
                if self.micro_step_id > 0:
                    gradient_buffer(self, p).zero_()
        return super().partition_grads(params_to_release, grad_partitions)  # type: ignore[misc]

    def _pre_step(self: Any) -> None:
        used = _used(self)
        for p in (p for group in self.fp16_groups for p in group):
            if p.ds_id not in used:
                gradient_buffer(self, p).zero_()
        used.clear()
        super()._pre_step()  # type: ignore[misc]

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients, and forget which parameters the micro-batches so far have used."""
        _used(self).clear()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


def _used(zero: Any) -> set[int]:
    """Return the parameters used since the last step, by ds_id."""
    return zero.fp8.remembered.setdefault("stale_gradients", set())


def gradient_buffer(zero: Any, p: Any) -> Tensor:
    """Return the buffer in which ZeRO-3 adds up this rank's gradients of `p`."""
    return zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[p.ds_id]


class EpilogueOnDevice:
    """`epilogue_sync`: mix-in with which the device waits for ZeRO-3's last reductions, and not the host, which would
    let the device run dry. Of FP8 states, whose step does not wait either.

    runtime/zero/stage3.py: `self.reduce_and_partition_stream.synchronize()`.
    """

    def independent_gradient_partition_epilogue(self: Any) -> None:
        stream = self.reduce_and_partition_stream
        if stream is not None:  # else the device has no streams
            stream.synchronize = lambda: get_accelerator().current_stream().wait_stream(stream)
        try:
            super().independent_gradient_partition_epilogue()  # type: ignore[misc]
        finally:
            if stream is not None:
                del stream.synchronize


class OverflowFromNorms:
    """`overflow_check`: mix-in that finds an overflow by the norms of ZeRO-1 and 2, which clipping needs anyway.

    runtime/zero/stage_1_and_2.py, `has_overflow`, reads every gradient (some ten operators each), waits, and launches
    all norms to an idle device. Finite gradients whose norm is beyond float32 (1.8e19) are an overflow, too, as from
    0.19.8 on. If a norm may leave gradients out (replicas of model parallelism, experts), DeepSpeed's check runs.
    """

    def step(self: Any, closure: Any = None) -> None:
        try:
            super().step(closure)  # type: ignore[misc]
        finally:
            _measured(self).clear()

    def check_overflow(self: Any, partition_gradients: bool = True) -> None:
        """Set `overflow` in a step: whether the norm of a group is infinite or NaN."""
        if not (self.fp8.step.in_deepspeed and _norm_has_all(self)):
            super().check_overflow(partition_gradients)  # type: ignore[misc]
            return
        for i in range(len(self.bit16_groups)):
            gradients = self.averaged_gradients[i]
            norm = super().get_grad_norm_direct(gradients, self.params_in_partition[i])  # type: ignore[misc]
            _measured(self).append((gradients, norm))
        norms = torch.stack([norm for _, norm in _measured(self)])
        self.overflow = not bool(((norms >= 0) & torch.isfinite(norms)).all())  # DeepSpeed's is -1 for infinite or NaN

    def get_grad_norm_direct(self: Any, gradients: Any, params: Any, norm_type: float = 2) -> Tensor:
        """Return DeepSpeed's norm; one that `check_overflow` has measured in this step is not measured again."""
        for k, (measured, norm) in enumerate(_measured(self)):
            if measured is gradients and norm_type == 2:
                del _measured(self)[k]  # with the gradients, which DeepSpeed is about to free
                return norm
        return super().get_grad_norm_direct(gradients, params, norm_type)  # type: ignore[misc]


def _measured(zero: Any) -> list[tuple[Any, Tensor]]:
    """Return gradients of groups, each with its norm, that were measured in this step."""
    return zero.fp8.remembered.setdefault("overflow_check", [])


def _norm_has_all(zero: Any) -> bool:
    """Whether the norm counts every gradient there is; the same answer on all ranks."""
    group = zero.model_parallel_group
    return (
        not zero.cpu_offload
        and not zero.has_moe_layers
        and getattr(zero, "compute_grad_norm", True)
        and (group is None or dist.get_world_size(group) == 1)
    )


class GradientsOutOfGraphs:
    """`graph_gradients`: mix-in that moves gradients of ZeRO-1 and 2 that wait for the step, or for more micro-batches,
    out of the memory of CUDA graphs.

    runtime/zero/stage_1_and_2.py, `backward_epilogue`, keeps the very tensors that autograd left (`all_grad_tensors`),
    and the next replay would write over them.
    """

    def backward_epilogue(self: Any, *args: Any, **kwargs: Any) -> None:
        super().backward_epilogue(*args, **kwargs)  # type: ignore[misc]
        if not are_replayed():
            return
        copied: dict[int, weakref.ref[Tensor]] = {}  # by id: each is copied once
        known = self.fp8.remembered.get("graph_gradients", {})

        def own(grad: Tensor) -> Tensor:
            if (before := known.get(id(grad))) is None or before() is not grad:
                grad = grad.clone()
            copied[id(grad)] = weakref.ref(grad)
            return grad

        for gradients in self.all_grad_tensors.values():
            for number, grad in enumerate(gradients or ()):
                gradients[number] = own(grad)  # one at a time: each frees the one before
        for p in itertools.chain.from_iterable(self.bit16_groups):
            if p.grad is not None:
                p.grad = own(p.grad)
        self.fp8.remembered["graph_gradients"] = copied


def are_replayed() -> bool:
    """Whether this thread has CUDA graphs of torch.compile on its device, whose replays overwrite outputs.

    Source: torch 2.11 and 2.13, `torch/_inductor/cudagraph_trees.py`, `get_manager`; not imported for the question.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized():
        return False
    return trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None

"""The engine mix-in: converts linears, retypes the ZeRO optimizer, and keeps checkpoints in DeepSpeed's formats."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger

from fp8_ds.attention.huggingface import use_backend
from fp8_ds.checkpoint.state import CHECKPOINT_KEY, restore_state, save_state, split_master_scales
from fp8_ds.config import Fp8Config, LinearConfig, OptimizerConfig
from fp8_ds.engine.attention import describe_attention
from fp8_ds.engine.cross_entropy import fuse_loss
from fp8_ds.engine.health import add_guard, health_monitor
from fp8_ds.engine.layer_choice import choose_layers
from fp8_ds.engine.precision import LayerPrecision, Request
from fp8_ds.engine.refusals import AUTOTP_PIPELINE, AUTOTP_STAGE_3, capabilities, refuse_device
from fp8_ds.engine.saving import Recorder, check_whole, save_whole
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.monitor.guard import EVERY as GUARD_EVERY
from fp8_ds.monitor.health import HealthMonitor
from fp8_ds.nn.convert import ForeignLinears, Plan, apply_plan, make_plan, revert
from fp8_ds.nn.producers import fuse_producers
from fp8_ds.nn.recipe_smooth import smooth_swiglus
from fp8_ds.optim.adamw import Fp8AdamW
from fp8_ds.tp.autotp import as_plain_weights, autotp_linears, configure_autotp, set_gathers
from fp8_ds.tp.group import device_of
from fp8_ds.tp.linears import ParallelLinear
from fp8_ds.tp.plan import configure as configure_tensor_parallel
from fp8_ds.zero.building import BuildingHost, building
from fp8_ds.zero.context import Fp8Context
from fp8_ds.zero.reduce3 import Fp8ReduceStage3
from fp8_ds.zero.reduce12 import Fp8ReduceStage12
from fp8_ds.zero.release3 import Fp8ReleaseStage3
from fp8_ds.zero.release12 import Fp8ReleaseStage12
from fp8_ds.zero.stage3 import Fp8ZeroStage3
from fp8_ds.zero.stage12 import Fp8ZeroStage12
from fp8_ds.zero.states3 import Fp8StatesStage3
from fp8_ds.zero.states12 import Fp8StatesStage12

_MIXINS: dict[type, type] = {
    DeepSpeedZeroOptimizer: Fp8ZeroStage12,
    DeepSpeedZeroOptimizer_Stage3: Fp8ZeroStage3,
}
_STATES_MIXINS: dict[type, type] = {
    DeepSpeedZeroOptimizer: Fp8StatesStage12,
    DeepSpeedZeroOptimizer_Stage3: Fp8StatesStage3,
}
_RELEASE_MIXINS: dict[type, type] = {
    DeepSpeedZeroOptimizer: Fp8ReleaseStage12,
    DeepSpeedZeroOptimizer_Stage3: Fp8ReleaseStage3,
}
_REDUCE_MIXINS: dict[type, type] = {
    DeepSpeedZeroOptimizer: Fp8ReduceStage12,
    DeepSpeedZeroOptimizer_Stage3: Fp8ReduceStage3,
}


class Fp8Engine:
    """Mix-in before DeepSpeedEngine or PipelineEngine. Seams: fp8_ds/engine/seams.py."""

    fp8: Fp8Context | None = None
    _fp8_unused: Fp8Context | None = None
    _fp8_said_state_dict = False
    _fp8_after_step: tuple[Callable[[], None], ...] = ()
    _fp8_is_after_step = False
    _fp8_health: HealthMonitor | None = None

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.fp8 is None:
            return
        self.fp8.precision = LayerPrecision(
            self.module,
            self.optimizer.fp8_set_bf16,
            self.fp8.config.schedule,
            _total_steps(self._config),
            self.device,
            _say,
        )
        self._fp8_update_precision()
        if not self.fp8.precision.schedule.is_constant:
            self._fp8_after_step += (self._fp8_update_precision,)
        if self.fp8.config.monitor.every or self.fp8.config.guard.action is not None:
            self._fp8_start_monitor()

    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> None:
        """Stock step; then what follows it, each a function of its own, none by default."""
        super()._take_model_step(*args, **kwargs)  # type: ignore[misc]
        self._fp8_is_after_step = True
        for follow in self._fp8_after_step:
            follow()
        self._fp8_is_after_step = False

    def _fp8_start_monitor(self: Any) -> None:
        settings, guards = self.fp8.config.monitor, self.fp8.config.guard.action is not None
        every, sink = (settings.every, settings.sink) if settings.every else (GUARD_EVERY, None)
        health = self._fp8_health = health_monitor(self, every, sink)
        if guards:
            add_guard(self, health, _say)
        health.start(self.global_steps)
        self._fp8_after_step += (lambda: health.after_step(self.global_steps, self.global_samples),)
        flush = weakref.WeakMethod(health.flush)  # of an engine that lives until the process ends, and is not destroyed
        atexit.register(lambda: None if (last := flush()) is None else last())

    def destroy(self: Any) -> None:
        """Stock, after the last report."""
        if self._fp8_health is not None:
            self._fp8_health.flush()
        super().destroy()  # type: ignore[misc]

    def _fp8_update_precision(self: Any) -> None:
        self.fp8.precision.update(self.global_steps, max(float(lr) for lr in self.get_lr()))

    def set_layer_precision(self: Any, names: str | Sequence[str], precision: Request) -> list[str]:
        """Layers compute in bf16 or FP8 from the next step on, whatever the schedule; "schedule": as it says again.

        Collective: called on all ranks alike, between optimizer steps (or from what follows a step, as the guard is).
        Checkpoints keep it.

        Args:
            names: of layers, or parts of names.
            precision: "bf16", "fp8" or "schedule".

        Returns:
            The layers meant.

        Raises:
            ConfigError: FP8 is off; a name is of no layer in FP8, or ranks disagree: on all ranks, nothing has changed.
            UnsupportedError: layers are tensor-parallel, or gradients are being accumulated.
        """
        if self.fp8 is None:
            raise ConfigError(
                "set_layer_precision: expected an engine with layers in FP8, got none. Turn fp8.enabled on."
            )
        if self.micro_steps % self.gradient_accumulation_steps() and not self._fp8_is_after_step:
            raise UnsupportedError(
                f"set_layer_precision: expected a call between optimizer steps, got one after micro-batch "
                f"{self.micro_steps % self.gradient_accumulation_steps()} of {self.gradient_accumulation_steps()}. "
                "Call it after engine.step() at the boundary."
            )
        layers = self.fp8.precision.request([names] if isinstance(names, str) else list(names), precision)
        self._fp8_update_precision()
        return list(layers)

    def _configure_distributed_model(self: Any, model: Any) -> None:
        """After DeepSpeed has cast, moved and broadcast the model, retype its linears in place."""
        is_autotp = self.autotp_size() > 1
        if is_autotp and self.zero_optimization_stage() > 2:
            raise AUTOTP_STAGE_3.error(f"{self.autotp_size()} ranks and stage {self.zero_optimization_stage()}")
        if is_autotp and isinstance(model, PipelineModule):
            raise AUTOTP_PIPELINE.error(f"{self.autotp_size()} ranks")
        super()._configure_distributed_model(model)  # type: ignore[misc]
        config = Fp8Config.from_block(self._config._param_dict["fp8"])
        if self.client_optimizer is None and not self.optimizer_name():
            _say("fp8: off for this engine: it has no optimizer (a reference or inference model); it stays bf16")
            return
        refuse_device(config.linear.recipe, config.linear.backend, *capabilities(self.device))
        _let_the_host_run_ahead(self._config)
        foreign = autotp_linears(self.module) if is_autotp else {}
        plan = _agree_on_plan(self.module, config.linear, config.optimizer.states == "fp8", foreign)
        if config.linear.layer_choice == "measured":
            plan = choose_layers(self.module, plan, config.linear, self.device, _say)
        if is_autotp:
            configure_autotp(config.tensor_parallel)
        else:
            configure_tensor_parallel(self.module, config.tensor_parallel, config.linear.recipe)
        history = apply_plan(self.module, plan, config.linear, self.device, foreign) if plan.num_converted else None
        modules = dict(self.module.named_modules())
        weights = {f"{row.fqn}.weight": modules[row.fqn].weight for row in plan.layers if row.converted}
        check_overflow = bool(getattr(self._config.bfloat16_config, "check_grad_overflow", True))
        self.fp8 = Fp8Context(config, plan, weights, history, check_overflow=check_overflow)
        self._fp8_state_dict_hook = self.module.register_state_dict_pre_hook(self._fp8_before_state_dict)
        _say(plan.describe())
        if is_autotp:
            _say(set_gathers(self.module, config.tensor_parallel))
        if config.attention.backend is not None:
            use_backend(self.module, config.attention.backend, hadamard=config.attention.hadamard)
        _say(describe_attention(self.module, self.device))
        if config.activations.smooth_swiglu:
            _say(smooth_swiglus(self.module, config.linear))
        if config.activations.fused:
            _say(fuse_producers(self.module, config.activations).describe())
        if config.activations.cross_entropy == "liger":
            _say(fuse_loss(self.module, self.zero_optimization_stage()))

    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        """Let DeepSpeed build its optimizer, then retype it."""
        if self.fp8 is None:
            return super()._configure_zero_optimizer(optimizer)  # type: ignore[misc]
        self._fp8_leave_unoptimized(optimizer)
        settings = self.fp8.config.optimizer
        if settings.states == "fp8":
            self.basic_optimizer = optimizer = Fp8AdamW.take_over(optimizer)
            releases = settings.releases(self.gradient_clipping())
            if releases:
                self._fp8_check_release()
            with building(settings.master_format, settings.outstanding_update_bytes if releases else None):
                zero = super()._configure_zero_optimizer(optimizer)  # type: ignore[misc]
        else:
            zero = super()._configure_zero_optimizer(optimizer)  # type: ignore[misc]
        host = next((host for host in _MIXINS if isinstance(zero, BuildingHost) and isinstance(zero, host)), type(zero))
        if host not in _MIXINS:
            raise UnsupportedError(
                f"ZeRO optimizer: expected one of {[h.__name__ for h in _MIXINS]}, got {host.__name__}. Remove the "
                'option that selects it, or turn "fp8.enabled" off.'
            )
        if settings.states == "fp32" and self.fp8.config.zero.reduce_scatter == "bf16" and self._fp8_has_no_weights():
            _say("fp8: off for this engine: none of its linears is in FP8; it trains as stock bf16")
            self.fp8, self._fp8_unused = None, self.fp8
            _let_the_timer_wait(self._config)
            return zero
        mixins = [_mixins_for(settings, self.gradient_clipping())[host]]
        if self.fp8.config.zero.reduce_scatter == "fp8":
            mixins.insert(0, _REDUCE_MIXINS[host])
        zero.__class__ = type(f"Fp8{host.__name__}", (*mixins, host), {})
        zero.fp8_init(self.fp8)
        _wait_no_longer_than_the_default_group(zero.dp_process_group)
        _start_count_anew(self.fp8)
        return zero

    def _fp8_has_no_weights(self: Any) -> bool:
        """Whether this rank has no FP8 weight, nor has any other pipeline stage or tensor-parallel rank."""
        found = torch.tensor([len(self.fp8.weights)], device=self.device)
        if isinstance(self, PipelineEngine) or self.autotp_size() > 1:
            ds_comm.all_reduce(found)
        return int(found) == 0

    def _fp8_check_release(self: Any) -> None:
        """Updates during the backward are possible here.

        Raises:
            ConfigError: naming the setting that contradicts them.
        """
        stage, steps = self.zero_optimization_stage(), self.gradient_accumulation_steps()
        accumulation_dtype = self.get_data_types()[1]
        problems = {
            f"gradient_accumulation_steps {steps}": steps > 1,
            "a PipelineModule": isinstance(self, PipelineEngine),
            "zero_optimization.contiguous_gradients false": stage < 3 and not self.zero_contiguous_gradients(),
            f"data_types.grad_accum_dtype {accumulation_dtype}": accumulation_dtype != torch.bfloat16,
        }
        found = [name for name, is_there in problems.items() if is_there]
        if found:
            raise ConfigError(
                f"fp8.optimizer.release: expected false with {' and '.join(found)}, got true. Gradients are freed as "
                'soon as they are reduced, one backward per step: remove it, or set "release": false; with '
                '"release_clipping": "exact" and gradient_clipping, reduced shards are held and it may stay.'
            )

    def _configure_basic_optimizer(self: Any, model_parameters: Any) -> Any:
        """With FP8 states torch's Adam or AdamW, to be taken over: no kernel of DeepSpeed's is built for it."""
        if self.fp8 is None or self.fp8.config.optimizer.states == "fp32":
            return super()._configure_basic_optimizer(model_parameters)  # type: ignore[misc]
        name = (self.optimizer_name() or "").lower()
        if name not in ("adam", "adamw"):
            raise UnsupportedError(
                f'optimizer.type: expected Adam or AdamW with fp8.optimizer.states "fp8", got {name}. '
                'Use one of these, or "states": "fp32".'
            )
        options = dict(self.optimizer_params() or {})
        decoupled = options.pop("adam_w_mode", True) or name == "adamw"
        for kernel_choice in ("torch_adam", "fp32_optimizer_states", "foreach", "fused", "set_grad_none"):
            options.pop(kernel_choice, None)
        if not options.pop("bias_correction", True):
            raise UnsupportedError("optimizer.params.bias_correction: expected true with FP8 states, got false.")
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(model_parameters, **options)

    def _fp8_leave_unoptimized(self: Any, optimizer: Any) -> None:
        """An FP8 weight is quantised from a master; trainable weights in no parameter group have none and stay bf16."""
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [name for name, p in self.fp8.trainable.items() if id(p) not in optimized]
        if not left:
            return
        fqns = [name.removesuffix(".weight") for name in left]
        self.fp8.plan = revert(self.module, self.fp8.plan, fqns, "in no parameter group")
        for name in left:
            del self.fp8.weights[name]
        _say(self.fp8.plan.describe())

    def fp8_report(self: Any) -> dict[str, Any]:
        """What FP8 does in this engine, on this rank.

        Returns:
            `gathered_bytes` (of weights, in the last finished step, own share included), `gathered_fp8_bytes` of
            these, `reduced_bytes` (handed to FP8 reduce-scatters in that step, 0 if gradients are reduced in bf16),
            `num_amax_reduces` in that step, `resident_weight_bytes` and its parts, `num_fp8_weights`
            (elements), `plan` (one line), `num_layers_in_bf16` (of the plan's, by schedule or request).
        """
        if self.fp8 is None:
            return {"enabled": False}
        last = self.fp8.counter.last or self.fp8.counter
        resident = self.optimizer.fp8_resident_bytes()
        num_weights = resident.pop("num_fp8_weights")
        if isinstance(self.optimizer, Fp8ZeroStage12):  # of frozen weights, which are in no partition
            num_frozen = sum(p.numel() for p in self.fp8.frozen.values())
            resident["fp8"] += num_frozen
            num_weights += num_frozen
        return {
            "enabled": True,
            "gathered_bytes": last.total,
            "gathered_fp8_bytes": last.fp8,
            "reduced_bytes": last.reduced,
            "num_amax_reduces": last.num_amax_reduces,
            "resident_weight_bytes": sum(resident.values()),
            **{f"resident_{kind}_bytes": value for kind, value in resident.items()},
            "num_fp8_weights": num_weights,
            "plan": self.fp8.plan.describe(),
            "num_layers_in_bf16": len(self.fp8.precision.in_bf16),
        }

    # --- checkpoints ---

    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Stock save, with bf16 of the masters as `module` and our state under one key of the model file; complete and
        checksummed before it has its name, and `latest` after that.

        Raises:
            CheckpointError: a rank could not write, on all ranks; checkpoints before are untouched.
        """
        if not save_dir:
            raise ValueError(f"save_dir: expected a path, got {save_dir!r}.")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        client_state = dict(client_state or {})
        if (context := self.fp8 or self._fp8_unused) is not None:
            client_state[CHECKPOINT_KEY] = save_state(context)

        def write(tag: str) -> Any:
            return super(Fp8Engine, self).save_checkpoint(  # type: ignore[misc]
                save_dir, tag, client_state, save_latest=False, exclude_frozen_parameters=exclude_frozen_parameters
            )

        if self.fp8 is None:
            return save_whole(self, save_dir, tag, save_latest, write, _say)
        writes = self.save_non_zero_checkpoint or isinstance(self, PipelineEngine)
        with self.optimizer.fp8_export(writes):
            return save_whole(self, save_dir, tag, save_latest, write, _say)

    def _copy_recovery_script(self: Any, save_path: str) -> None:
        """Stock copy; rank 0's failure waits until all ranks can hear of it."""
        copy = super()._copy_recovery_script  # type: ignore[misc]
        if isinstance(self.checkpoint_engine, Recorder):
            self.checkpoint_engine.attempt(copy, save_path)
        else:
            copy(save_path)

    def save_16bit_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock save of bf16 of the masters. Collective in every stage.

        Raises:
            UnsupportedError: `fp8_ds.tp.parallelize` has cut the model: stock code would write one rank's part.
        """
        if self.fp8 is None:
            return super().save_16bit_model(*args, **kwargs)  # type: ignore[misc]
        if any(isinstance(module, ParallelLinear) for module in self.module.modules()):
            raise UnsupportedError(
                "save_16bit_model: expected a whole model, got one that fp8_ds.tp.parallelize has cut; a file would "
                "hold one rank's part. Use engine.save_checkpoint, which keeps every rank's."
            )
        with self.optimizer.fp8_export(ds_comm.get_rank() == 0):
            return super().save_16bit_model(*args, **kwargs)  # type: ignore[misc]

    def _replace_module_consolidated_state_dict(self: Any) -> Any:
        """Stock gather of AutoTP's shards, as bf16 of the masters."""
        if self.fp8 is None:
            return super()._replace_module_consolidated_state_dict()  # type: ignore[misc]
        with self.optimizer.fp8_export(True, on_device=True), as_plain_weights(self.module.parameters()):
            return super()._replace_module_consolidated_state_dict()  # type: ignore[misc]

    def load_checkpoint(
        self: Any,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Stock load of a checkpoint that has been checked; then our state, if the checkpoint has it, and what it says
        about other settings.

        Raises:
            CheckpointError: the checkpoint is torn, damaged, of another model or layout, or holds more than data: on
                all ranks, before anything is loaded.
        """
        tag = check_whole(
            self,
            load_dir,
            tag,
            module_only=load_module_only and load_optimizer_states,
            with_optimizer=load_optimizer_states and not load_module_only and self.zero_optimization(),
            reads_latest=self.zero_optimization_partition_weights() and not load_optimizer_states,
            say=_say,
        )
        load = partial(
            super().load_checkpoint,  # type: ignore[misc]
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        if self.fp8 is None:
            path, client_state = load()
            if self._fp8_unused is not None and client_state is not None:
                restore_state(self._fp8_unused, client_state.pop(CHECKPOINT_KEY, None), _say)
            return path, client_state
        with self.optimizer.fp8_dense() as scales:  # masters are stored with the scales they were saved with
            path, client_state = load()
            state = None if client_state is None else client_state.pop(CHECKPOINT_KEY, None)
            scales.update(split_master_scales(state))
        if client_state is not None:
            _start_count_anew(self.fp8)
            restore_state(self.fp8, state, _say)
            self._fp8_update_precision()
        return path, client_state

    def load_module_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock load; FP8 weights also hand the loaded values to their masters, without an FP8 rounding between."""
        optimizer = getattr(self, "optimizer", None)
        if not isinstance(optimizer, Fp8ZeroStage12):
            return super().load_module_state_dict(*args, **kwargs)  # type: ignore[misc]
        with optimizer.fp8_load():
            return super().load_module_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _fp8_before_state_dict(self: Any, module: Any, prefix: str, keep_vars: bool) -> None:
        """Say once that a plain state_dict() is no collective, and what it therefore holds in ZeRO-1/2."""
        optimizer = getattr(self, "optimizer", None)
        if self._fp8_said_state_dict or not isinstance(optimizer, Fp8ZeroStage12) or optimizer.fp8_is_exporting:
            return
        self._fp8_said_state_dict = True
        _say(
            "fp8: module.state_dict() gives de-quantised FP8 weights; engine.save_checkpoint and "
            "engine.save_16bit_model give bf16 of the masters"
        )


class Fp8DeepSpeedEngine(Fp8Engine, DeepSpeedEngine):
    """DeepSpeedEngine with FP8 ZeRO."""


class Fp8PipelineEngine(Fp8Engine, PipelineEngine):
    """PipelineEngine with FP8 ZeRO (stage 1, what DeepSpeed allows with pipelines)."""


def _mixins_for(settings: OptimizerConfig, gradient_clipping: float) -> dict[type, type]:
    if settings.states == "fp32":
        return _MIXINS
    return _RELEASE_MIXINS if settings.releases(gradient_clipping) else _STATES_MIXINS


def _total_steps(config: Any) -> int | None:
    """Optimizer steps of the run, where DeepSpeed's scheduler is told them."""
    total = (config.scheduler_params or {}).get("total_num_steps")
    return total if isinstance(total, int) else None


def _let_the_host_run_ahead(config: Any) -> None:
    """DeepSpeed's throughput timer empties the device's queue twice a step; here only if the configuration says so."""
    if not _says_how_to_time(config):
        config.timers_config.synchronized = False


def _let_the_timer_wait(config: Any) -> None:
    """As in stock code again."""
    if not _says_how_to_time(config):
        config.timers_config.synchronized = True


def _says_how_to_time(config: Any) -> bool:
    return "synchronized" in config._param_dict.get("timers", {}).get("throughput", {})


def _say(line: str) -> None:
    if ds_comm.get_rank() == 0:
        logger.warning(line)


def _wait_no_longer_than_the_default_group(group: Any) -> None:
    """DeepSpeed makes ZeRO's group with torch's own time-out (gloo: 30 minutes), not with `init_distributed`'s."""
    options = getattr(dist.group.WORLD._get_backend(device_of(None)), "options", None)  # type: ignore[union-attr]
    if options is not None:
        dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def _start_count_anew(context: Fp8Context) -> None:
    """What `initialize` or a load gathered belongs to no step."""
    context.counter.end_step()
    context.counter.last = None


def _agree_on_plan(module: Any, config: LinearConfig, may_be_empty: bool, foreign: ForeignLinears) -> Plan:
    """The plan of this rank's module. A pipeline stage without linears is fine if another stage has some, and so is a
    rank that AutoTP has left with none (fewer heads than ranks).

    FP8 states need no FP8 linear (`may_be_empty`). Weights that pipeline stages share (`tied_modules`) are never
    converted.
    """
    if isinstance(module, PipelineModule):
        config = config.model_copy(update={"filter_fqns": (*config.filter_fqns, "tied_modules")})
    elif not foreign:
        return make_plan(module, config, may_be_empty)
    try:
        plan, error = make_plan(module, config, foreign=foreign), None
    except ConfigError as caught:
        plan, error = Plan(()), caught
    found = torch.tensor([plan.num_converted], device=device_of(None))
    ds_comm.all_reduce(found)
    if error is not None and int(found) == 0 and not may_be_empty:
        raise error
    return plan

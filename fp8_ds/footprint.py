"""estimate: what a GPU holds at most in training, by part; and the most layers that fit.

The parts that stay (weights, masters, moments) come from estimate.py by arithmetic, those of a forward and a backward
from rehearsal.py by running the model without memory, in eager or as compiled_parts.py compiles it. Peaks that were
measured are in tests/unit/test_footprint.py and test_footprint_compiled.py.

Not counted: fragmentation, and what CUDA, cuBLAS and NCCL take for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.compiled_parts import compile_as_trained, mark_leaves
from fp8_ds.config import Fp8Config
from fp8_ds.counted_run import Run
from fp8_ds.counting_backend import CountingBackend
from fp8_ds.engine.leaves import live_weights
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.estimate import Weight, estimate_states, weights_of
from fp8_ds.liger_stand_in import LossOfLiger
from fp8_ds.model_spec import ModelSpec, loss_on, zeros_for
from fp8_ds.nn.convert import apply_plan, make_plan
from fp8_ds.nn.layers import fp8_layers
from fp8_ds.nn.producers import fuse_producers
from fp8_ds.nn.recipe_bf16 import bf16_recipe
from fp8_ds.rehearsal import Rehearsal, rehearse
from fp8_ds.schedule import PrecisionSchedule

_FP32, _BF16 = 4, 2


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
        in_bf16: with every layer in bf16 that schedule or guard may send there, to which all of the above does not
            apply; None: none is sent.
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
    in_bf16: Footprint | None = None

    @property
    def peak(self) -> int:
        """What must fit: the largest moment of the whole run."""
        return max(self.in_backward, self.in_step, 0 if self.in_bf16 is None else self.in_bf16.peak)


def estimate(spec: ModelSpec, run: Run) -> Footprint:
    """What training `spec` so takes on a GPU; where layers go to bf16 for a while, also with all of these there.

    Raises:
        ConfigError: no linear can be in FP8, the schedule names what is not there, or gradient checkpointing is not
            what the model knows.
    """
    model, weights = _prepare(spec, run)
    layers = _sent_to_bf16(model, run)
    found = _sum(weights, _rehearse(model, run), _live(model, weights, run), run)
    if not layers:
        return found
    model, weights = _prepare(spec, run)
    weights = _send_to_bf16(layers, model, weights)
    return replace(found, in_bf16=_sum(weights, _rehearse(model, run), _live(model, weights, run), run))


def _prepare(spec: ModelSpec, run: Run) -> tuple[Any, list[Weight]]:
    """The model as it is trained, on the meta device, and its weights in order."""
    model: Any = spec.build()
    if run.fp8 is None:
        weights = [Weight(p.numel(), False, p.requires_grad) for p in model.parameters()]
    else:
        weights = weights_of(model, run.fp8.linear)
        _convert(model, run.fp8, run.compiled)
    if run.checkpointing:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise ConfigError(f"checkpointing: expected a model of transformers, got {spec.name}. Leave it out.")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if run.setup.stage == 3:
        mark_leaves(model, run.leaf_module or {})
    return model, weights


def _rehearse(model: Any, run: Run) -> Rehearsal:
    training: nn.Module = _LossAlone(model)
    if run.fp8 is not None and run.holds_head:
        training = LossOfLiger(model, run.fp8.activations.cross_entropy_chunk_mem_const)

    def loss(training: nn.Module) -> Tensor:
        found: Tensor = training(zeros_for(model, run.micro_batch, run.seq_len))
        return found

    if not run.compiled:
        return rehearse(training, loss)
    backend = CountingBackend()
    compile_model = partial(
        compile_as_trained,
        backend=backend,
        stage=run.setup.stage,
        releases=run.setup.releases,
        is_fp8=run.fp8 is not None,
    )
    try:
        found = rehearse(training, loss, compile_model)
    except Exception:
        if backend.failure is None:
            raise
    if (failure := backend.failure) is not None:
        raise UnsupportedError(
            f"compile: expected torch's inductor to be as in 2.11 to 2.13 and to take {type(model).__name__}, got "
            f"{type(failure).__name__}: {str(failure).rstrip('.')} (torch {torch.__version__}). Leave --compile out."
        ) from failure
    if not backend.num_graphs:
        raise UnsupportedError(
            f"compile: expected code that torch.compile takes, got none in {type(model).__name__}. Leave --compile out."
        )
    return found


class _LossAlone(nn.Module):
    """Tokens in, the loss out: docs/compile.md, "Return the loss alone"."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_on(self.model, tokens)


def _sent_to_bf16(model: Any, run: Run) -> tuple[str, ...]:
    """The layers that schedule or guard may send to bf16, all of which may be there at once.

    Raises:
        ConfigError: as a start does, the schedule names what is not there.
    """
    if run.fp8 is None:
        return ()
    names = [name for name, layer in fp8_layers(model).items() if layer.weight.requires_grad]
    schedule = PrecisionSchedule.of(run.fp8.schedule, names, run.total_steps)
    if run.fp8.guard.action == "bf16":
        return tuple(names)
    usual = "fp8" if schedule.is_constant else "bf16"
    return tuple(name for name in names if schedule.fixed.get(name, usual) == "bf16")


def _send_to_bf16(names: Sequence[str], model: Any, weights: Sequence[Weight]) -> list[Weight]:
    """The layers `names` of `model` compute in bf16; its weights as they are then."""
    found = fp8_layers(model)
    layers = [found[name] for name in names]
    for layer in layers:
        layer.fp8_recipe = bf16_recipe(layer.fp8_recipe)
    ids = {id(layer.weight) for layer in layers}
    return [replace(w, in_bf16=id(p) in ids) for p, w in zip(model.parameters(), weights, strict=True)]


def _convert(model: Any, fp8: Fp8Config, is_warm: bool) -> None:
    """Its linears are in FP8. `is_warm`: delayed scales are there, as after the first step."""
    plan = make_plan(model, fp8.linear, may_be_empty=fp8.optimizer.states == "fp8")
    if plan.num_converted:
        history = apply_plan(model, plan, fp8.linear, "cpu")
        if history is not None:
            history.ready = is_warm
    if fp8.activations.fused:
        fuse_producers(model, fp8.activations)


def _sum(weights: Sequence[Weight], rehearsal: Rehearsal, live: int, run: Run) -> Footprint:
    """With the states that `run.setup` names, and `live` bytes of weights that stage 3 has gathered.

    Stages 1 and 2 allocate the buckets when the backward gives its first gradient, and the room for a rank's gradients,
    all of it, when the first bucket is reduced: the loss's own peak meets neither.
    Source: deepspeed/runtime/zero/stage_1_and_2.py `setup_buckets`, `copy_grads_in_partition` (0.19.8).
    """
    setup = run.setup
    states = estimate_states(weights, setup)
    parts = states.parts
    gathered = parts.gathered + live
    trainable = sum(weight.numel for weight in weights if weight.is_trainable)
    is_direct = _is_direct(run)
    buffers = 0 if is_direct else states.buckets
    resident = parts.weights + parts.master + parts.moments + parts.moment_scales + gathered
    if setup.stage == 3:
        resident += parts.gradients + buffers
    elif run.accumulation > 1 and not setup.releases:
        resident += parts.gradients

    late = 0 if setup.stage == 3 else buffers

    def gradients(num_elements: int) -> float:
        """Of complete gradients in stages 1 and 2, with the buckets; stage 3 has room for them all the time."""
        if setup.stage == 3 or num_elements == 0:
            return 0.0
        if setup.releases or run.accumulation > 1:
            return late
        if is_direct or states.unreduced:
            return late + setup.grad_bytes * num_elements
        is_reduced = num_elements > setup.reduce_bucket_size or num_elements == trainable
        return late + parts.gradients * is_reduced

    in_pass = rehearsal.peak(gradients)
    step_extra = 0 if setup.optimizer.states == "fp8" else _dense_step(trainable, run)
    held = 0 if setup.stage == 3 or run.accumulation > 1 else parts.gradients
    return Footprint(
        weights=parts.weights,
        masters=parts.master,
        moments=parts.moments + parts.moment_scales,
        gathered=gathered,
        gradients=parts.gradients,
        activations=rehearsal.kept,
        temporaries=rehearsal.peak(lambda _: 0) - rehearsal.kept,
        buffers=buffers,
        in_backward=resident + in_pass,
        in_step=resident - (gathered - parts.gathered) + held + step_extra,
        num_parameters=sum(weight.numel for weight in weights),
    )


def _is_direct(run: Run) -> bool:
    """Whether gradients stay in the parameters, without buckets: FP8 states of stages 1 and 2 on one rank."""
    setup = run.setup
    one_rank = setup.num_ranks == 1 and setup.stage < 3 and setup.grad_bytes == _BF16
    return one_rank and run.fp8 is not None and setup.optimizer.states == "fp8" and not setup.releases


def _live(model: nn.Module, weights: Sequence[Weight], run: Run) -> int:
    """Bytes of weights that stage 3 has gathered at once, beside its shards and persistent ones.

    As many elements as the bound on live weights lets it prefetch and keep, and what is held whatever the bound.
    """
    if run.setup.stage < 3 or run.setup.num_ranks == 1:
        return 0
    threshold = run.setup.persistence_threshold
    cut = [weight for weight in weights if weight.numel >= threshold]
    numel = sum(weight.numel for weight in cut)
    num_bytes = sum(w.numel * (1 if w.is_fp8 and not w.in_bf16 else _BF16) for w in cut)
    needed = live_weights(model, run.max_reuse_distance, run.holds_head, threshold)
    bound = run.max_live_parameters
    if needed.leaves and run.fp8 is not None and not run.names_live:
        bound = max(bound, needed.total)
    held = needed.held if run.holds_head else 0
    others = max(min(bound, numel) - held, needed.largest)
    if held and needed.leaves:
        others = min(others, needed.leaves)
    return _BF16 * held + round((num_bytes - _BF16 * held) * others / max(numel - held, 1))


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

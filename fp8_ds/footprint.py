"""estimate: what a GPU holds at most in training, by part.

The parts that stay (weights, masters, moments) come from estimate.py by arithmetic, those of a forward and a backward
from rehearsal.py, which runs the model in eager without memory. tests/unit/test_footprint.py has the peaks that were
measured. Not counted: fragmentation, and what CUDA, cuBLAS and NCCL take for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config, z3_leaf_module
from torch import Tensor, nn

from fp8_ds.config import Fp8Config
from fp8_ds.counted_run import Run
from fp8_ds.engine.cross_entropy import chunk_mem_const_of, most_chunks
from fp8_ds.engine.leaves import Live, live_weights
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.estimate import BF16, FP32, Weight, estimate_states, weights_of
from fp8_ds.model_spec import ModelSpec, loss_on, zeros_for
from fp8_ds.nn.convert import apply_plan, make_plan
from fp8_ds.nn.layers import fp8_layers
from fp8_ds.nn.producers import fuse_producers
from fp8_ds.nn.recipe_bf16 import bf16_recipe
from fp8_ds.rehearsal import Rehearsal, rehearse
from fp8_ds.schedule import PrecisionSchedule

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


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
        in_backward: the peak of forward and backward, in eager.
        in_step: the peak of the optimizer's step.
        compiled: an upper bound of both peaks under torch.compile; never below that of eager.
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
    compiled: int
    num_parameters: int
    in_bf16: Footprint | None = None

    @property
    def peak(self) -> int:
        """What must fit in eager: the largest moment of the whole run."""
        return max(self.in_backward, self.in_step, 0 if self.in_bf16 is None else self.in_bf16.peak)

    @property
    def peak_compiled(self) -> int:
        """What is enough under torch.compile."""
        return max(self.compiled, 0 if self.in_bf16 is None else self.in_bf16.compiled)


def estimate(spec: ModelSpec, run: Run) -> Footprint:
    """What training `spec` so takes on a GPU; where layers go to bf16 for a while, also with all of these there.

    Raises:
        ConfigError: no linear can be in FP8, the schedule names what is not there, or gradient checkpointing is not
            what the model knows.
        UnsupportedError: the model is not one for Liger's loss.
    """
    counted = _Counted.of(spec, run)
    found = counted.footprint(run)
    if not counted.detour:
        return found
    return replace(found, in_bf16=_Counted.of(spec, run, in_bf16=counted.detour).footprint(run))


def _prepare(spec: ModelSpec, run: Run) -> tuple[Any, list[Weight]]:
    """The model as it is trained, on the meta device, and its weights in order."""
    model: Any = spec.build()
    if run.fp8 is None:
        weights = [Weight(p.numel(), False, p.requires_grad) for p in model.parameters()]
    else:
        weights = weights_of(model, run.fp8.linear)
        _convert(model, run.fp8)
    if run.checkpointing:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise ConfigError(f"checkpointing: expected a model of transformers, got {spec.name}. Leave it out.")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if run.setup.stage == 3:
        apply_zero_leaf_module_config(model, run.zero.leaf_module)  # DeepSpeed's log says which names there are none of
    return model, weights


def _convert(model: Any, fp8: Fp8Config) -> None:
    """Put its linears into FP8."""
    plan = make_plan(model, fp8.linear, may_be_empty=fp8.optimizer.states == "fp8")
    if plan.num_converted:
        apply_plan(model, plan, fp8.linear, "cpu")
    if fp8.activations.fused:
        fuse_producers(model, fp8.activations)


def _detour(model: Any, run: Run) -> tuple[str, ...]:
    """Layers that schedule or guard may send to bf16, all of which may be there at once.

    Raises: ConfigError: as a start does, the schedule names what is not there.
    """
    if run.fp8 is None:
        return ()
    names = [name for name, layer in fp8_layers(model).items() if layer.weight.requires_grad]
    schedule = PrecisionSchedule.of(run.fp8.schedule, names, run.total_steps)
    if run.fp8.guard.action == "bf16":
        return tuple(names)
    usual = "fp8" if schedule.is_constant else "bf16"
    return tuple(name for name in names if schedule.fixed.get(name, usual) == "bf16")


@dataclass(frozen=True)
class _Counted:
    """A model whose forward and backward have been counted.

    Attributes:
        weights: its parameters, in order.
        rehearsal: of a micro-batch.
        live: weights that stage 3 has gathered at once.
        num_embedding: elements of the trainable embeddings, and of the gradients of what they give.
        num_graph: elements of the most weights whose gradients one compiled graph gives.
        detour: as `_detour` has it.
    """

    weights: list[Weight]
    rehearsal: Rehearsal
    live: Live
    num_embedding: int
    num_graph: int
    detour: tuple[str, ...]

    @classmethod
    def of(cls, spec: ModelSpec, run: Run, in_bf16: Sequence[str] = ()) -> _Counted:
        """Args: in_bf16: names of layers that compute in bf16."""
        model, weights = _prepare(spec, run)
        detour = _detour(model, run)
        found = fp8_layers(model)
        for name in in_bf16:
            found[name].fp8_recipe = bf16_recipe(found[name].fp8_recipe)
        ids = {id(found[name].weight) for name in in_bf16}
        weights = [replace(w, in_bf16=id(p) in ids) for p, w in zip(model.parameters(), weights, strict=True)]
        live = live_weights(model, run.zero.max_reuse_distance, run.holds_head, run.setup.persistence_threshold)
        tokens = run.micro_batch * run.seq_len
        embeddings = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        return cls(
            weights,
            rehearse(model, lambda model: _loss(model, run)),
            live,
            sum(p.numel() + tokens * p.shape[1] for p in embeddings.values() if p.requires_grad),
            _num_graph(model, run),
            detour,
        )

    def footprint(self, run: Run) -> Footprint:
        """With the states that `run.setup` names.

        Stages 1 and 2 allocate the buckets when the backward gives its first gradient, and the room for a rank's
        gradients, all of it, when the first bucket is reduced: the loss's own peak meets neither.
        Source: deepspeed/runtime/zero/stage_1_and_2.py `setup_buckets`, `copy_grads_in_partition` (0.19.8).
        """
        setup = run.setup
        states = estimate_states(self.weights, setup)
        parts = states.parts
        gathered = parts.gathered + self._live_bytes(run)
        trainable = sum(weight.numel for weight in self.weights if weight.is_trainable)
        is_direct = _is_direct(run)
        buffers = 0 if is_direct else states.buckets
        resident = parts.weights + parts.master + parts.moments + parts.moment_scales + gathered
        if setup.stage == 3:
            resident += parts.gradients + buffers
        elif run.accumulation > 1 and not setup.releases:
            resident += parts.gradients
        stays = is_direct or states.unreduced > 0  # gradients do, in the parameters
        late = 0 if setup.stage == 3 else buffers

        def gradients(num_elements: int) -> float:
            """Of complete gradients in stages 1 and 2, with the buckets; stage 3 has room for them all the time."""
            if setup.stage == 3 or num_elements == 0:
                return 0.0
            if setup.releases or run.accumulation > 1:
                return late
            if stays:
                return late + setup.grad_bytes * num_elements
            is_reduced = num_elements > setup.reduce_bucket_size or num_elements == trainable
            return late + parts.gradients * is_reduced

        in_backward = resident + self.rehearsal.peak(gradients)
        held = 0 if setup.stage == 3 or run.accumulation > 1 else parts.gradients
        step_extra = 0 if setup.optimizer.states == "fp8" else _dense_step(trainable, run)
        in_step = resident - (gathered - parts.gathered) + held + step_extra
        after_graph = gradients(trainable) + (0 if stays else BF16 * trainable)
        return Footprint(
            weights=parts.weights,
            masters=parts.master,
            moments=parts.moments + parts.moment_scales,
            gathered=gathered,
            gradients=parts.gradients,
            activations=self.rehearsal.kept,
            temporaries=self.rehearsal.peak(lambda _: 0) - self.rehearsal.kept,
            buffers=buffers,
            in_backward=in_backward,
            in_step=in_step,
            compiled=max(in_backward, in_step, resident + self._in_graphs(run, trainable, late, round(after_graph))),
            num_parameters=sum(weight.numel for weight in self.weights),
        )

    def _in_graphs(self, run: Run, trainable: int, late: int, after_graph: int) -> int:
        """Most bytes in a compiled backward whose activations are eager's, beside what is resident.

        The gradients that one graph gives, in bf16, are all there at its end: those of the whole model in stages 1 and
        2, of a layer with gradient release, of a leaf in stage 3. Inductor adds an embedding's up in float32.
        """
        is_whole = run.setup.stage < 3 and not run.setup.releases
        in_float = 0 if run.setup.releases else FP32 * self.num_embedding

        def gradients(num_elements: int) -> int:
            of_graph = BF16 * num_elements if is_whole else late + BF16 * self.num_graph
            return of_graph + (in_float if num_elements >= trainable - self.num_embedding else 0)

        return max(self.rehearsal.peak(gradients), after_graph if is_whole else 0)

    def _live_bytes(self, run: Run) -> int:
        """Bytes of weights that stage 3 has gathered at once, beside its shards and persistent ones.

        As many elements as the bound on live weights lets it prefetch and keep, and what is held whatever the bound.
        """
        if run.setup.stage < 3 or run.setup.num_ranks == 1:
            return 0
        cut = [weight for weight in self.weights if weight.numel >= run.setup.persistence_threshold]
        numel = sum(weight.numel for weight in cut)
        num_bytes = sum(w.numel * (1 if w.is_fp8 and not w.in_bf16 else BF16) for w in cut)
        needed, bound = self.live, run.zero.max_live_parameters
        if needed.leaves and run.fp8 is not None and not run.names_live:
            bound = max(bound, needed.total)
        held = needed.held if run.holds_head else 0
        others = max(min(bound, numel) - held, needed.largest)
        if held and needed.leaves:
            others = min(others, needed.leaves)
        return BF16 * held + round((num_bytes - BF16 * held) * others / max(numel - held, 1))


def _num_graph(model: nn.Module, run: Run) -> int:
    """Elements of the most weights whose gradients one graph gives, where a graph is a part of the model."""
    if run.setup.stage == 3:
        parts = [module for module in model.modules() if z3_leaf_module(module)]
    else:
        containers = (module for module in model.modules() if isinstance(module, _CONTAINERS))
        parts = [child for module in containers for child in module.children()] or [model]
    return max((sum(p.numel() for p in part.parameters() if p.requires_grad) for part in parts), default=0)


def _is_direct(run: Run) -> bool:
    """Whether gradients stay in the parameters, without buckets: FP8 states of stages 1 and 2 on one rank."""
    setup = run.setup
    one_rank = setup.num_ranks == 1 and setup.stage < 3 and setup.grad_bytes == BF16
    return one_rank and run.fp8 is not None and setup.optimizer.states == "fp8" and not setup.releases


def _dense_step(trainable: int, run: Run) -> int:
    """Bytes that DeepSpeed's own step adds: in stages 1 and 2 the flat gradients of the partition in bf16, and again in
    float32; in stage 3 those of a sub-group in float32.

    Source: deepspeed/runtime/zero/stage_1_and_2.py `step`, stage3.py `_prepare_sub_group` (0.19.8).
    """
    share = -(-trainable // run.setup.num_ranks)
    if run.setup.stage < 3:
        return (FP32 + (BF16 if run.setup.grad_bytes == BF16 else 0)) * share
    return FP32 * min(share, run.zero.sub_group_size)


# --- the loss ---


def _loss(model: Any, run: Run) -> Tensor:
    """The loss of a micro-batch of zeros; Liger's where the run has that."""
    tokens = zeros_for(model, run.micro_batch, run.seq_len)
    if run.fp8 is None or not run.holds_head:
        return loss_on(model, tokens)
    body = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
    head: Any = getattr(model, "lm_head", None)
    if not isinstance(body, nn.Module) or type(head) is not nn.Linear or head.bias is not None:
        raise UnsupportedError(
            'fp8.activations.cross_entropy: expected "stock" with a model that is no causal LM of transformers with an '
            f'`lm_head` in bf16 without bias, got "liger" and {type(model).__name__}. Set it to "stock", or put '
            '"lm_head" into fp8.linear.filter_fqns, where it is by default.'
        )
    x_TK = body(input_ids=tokens)[0].flatten(0, -2)
    times = chunk_mem_const_of(model, run.fp8.activations.cross_entropy_chunk_mem_const)
    rows = -(-len(x_TK) // most_chunks(head.in_features, head.out_features, times))
    loss: Tensor = _LigerLoss.apply(x_TK, head.weight, min(1 << (rows - 1).bit_length(), len(x_TK)))
    return loss


class _LigerLoss(torch.autograd.Function):
    """What liger-kernel's fused loss allocates: both gradients in the forward, logits of `rows` tokens at a time.

    Source: linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py
    `fused_linear_cross_entropy_forward` (0.8.5, compute capability 8 or more, reduction "mean", accum_dtype None).
    """

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_VK: Tensor, rows: int) -> Tensor:
        grad_weight = torch.zeros_like(weight_VK) if weight_VK.requires_grad else None
        ctx.save_for_backward(torch.zeros_like(x_TK), grad_weight)
        losses = x_TK.new_zeros(len(x_TK), dtype=torch.float32)
        x_TK.new_empty(rows, len(weight_VK))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        del grad
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x, grad_weight, None

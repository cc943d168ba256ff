"""estimate: bytes that a GPU holds at most in training, by part.

The parts that stay (weights, masters, moments) come from `estimate_states` by arithmetic, those of a forward and a
backward from `count_activations`, which runs the model in eager without memory. tests/unit/tools/test_footprint.py has
the measured peaks. Not counted: fragmentation, and what CUDA, cuBLAS and NCCL take for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config, z3_leaf_module
from torch import Tensor, nn

from fp8_ds.config import Fp8Config, OptimizerConfig
from fp8_ds.config.ds_config import BATCH_SIZES, FP32_NAMES, block_of, gradient_clipping, number, parsed, zero_stage
from fp8_ds.config.presets import Facts, is_written
from fp8_ds.config.schedule import PrecisionSchedule
from fp8_ds.engine.compat.config import refusals_of, refuse_settings, total_steps
from fp8_ds.engine.deepspeed_fixes import needs_no_bucket
from fp8_ds.engine.leaf_modules import LIVE_NAMES, live_weights
from fp8_ds.engine.liger_loss import most_chunks
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.nn.linear.recipes import Bf16Recipe
from fp8_ds.nn.plan.convert import apply_plan, fp8_layers
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.tools.estimate import BF16, FP32, Setup, Weight, estimate_states
from fp8_ds.tools.estimate.activations import count_activations
from fp8_ds.tools.estimate.model_spec import ModelSpec, loss_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Run:
    """Settings of a training run that decide memory.

    Args:
        fp8: the block; None is DeepSpeed's own bf16.
        micro_batch: sequences a rank computes at a time, of `seq_len` tokens.
        accumulation: micro-batches a step.
        checkpointing: whether layers are computed again in the backward.
        zero: DeepSpeed's model of its "zero_optimization" block.
        names_live: whether the configuration names stage 3's bound on live weights, which stays as it is then.
        total_steps: steps that the learning-rate scheduler knows.
        may_miss: whether the schedule may name layers that are not in FP8, as that of a preset may.
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
    may_miss: bool = False

    @property
    def holds_head(self) -> bool:
        """Whether the loss is Liger's, which reads the head without calling it: a key says how large its chunks are."""
        return self.fp8 is not None and self.fp8.activations.cross_entropy_chunk_mem_const is not None


def read_run(
    config: Mapping[str, Any],
    world_size: int,
    micro_batch: int | None,
    seq_len: int,
    checkpointing: bool = False,
    facts: Facts | None = None,
) -> Run:
    """Read the settings that decide memory from a DeepSpeed configuration.

    Args:
        config: as `json.load` returns it.
        world_size: ranks of the run, all of which are data-parallel: TP-sharded models are refused.
        micro_batch: instead of the configuration's; needed where it has none, or "auto".
        facts: facts of the run that a preset chooses by; None: nothing is known.

    Raises:
        ConfigError: the "fp8" block is wrong, DeepSpeed refuses the configuration, or there is no micro-batch.
        UnsupportedError: the configuration is refused with FP8, or has what is not estimated.
    """
    block = config.get("fp8")
    fp8 = None if block is None else Fp8Config.from_block(block, facts)
    if fp8 is not None and fp8.enabled:
        refuse_settings(fp8, config)
    else:
        fp8 = None
    _refuse_uncounted(config)
    given = {key: value for key, value in config.items() if value != "auto"}
    if micro_batch is not None:
        given[BATCH_SIZES[1]] = micro_batch
        if "gradient_accumulation_steps" in given:
            given.pop(BATCH_SIZES[0], None)  # the micro-batch that is asked about wins
    if not any(given.get(key) for key in BATCH_SIZES):
        raise ConfigError(
            f"micro-batch: expected an integer, got {config.get(BATCH_SIZES[1])!r} in the configuration. "
            "Name one with --micro-batch."
        )
    read = parsed(given, world_size)
    is_in_place = fp8 is not None and fp8.has_fix("gradient_bucket") and needs_no_bucket(config, read.zero_config)
    dtype, total = block_of(config, "data_types").get("grad_accum_dtype"), total_steps(config)
    setup = Setup(
        zero_stage(config),
        world_size,
        fp8.optimizer if fp8 is not None else OptimizerConfig(),
        gradient_clipping=gradient_clipping(config),
        grad_bytes=FP32 if str(dtype) in FP32_NAMES else BF16,
        overlap_comm=read.zero_config.overlap_comm,
        reduce_bucket_size=read.zero_config.reduce_bucket_size,
        copies_gradients=read.zero_config.contiguous_gradients and not is_in_place,
        persistence_threshold=read.zero_config.param_persistence_threshold,
    )
    return Run(
        fp8,
        setup,
        int(read.train_micro_batch_size_per_gpu),  # JSON may write 2.0, which DeepSpeed takes for 2
        seq_len,
        int(read.gradient_accumulation_steps),
        checkpointing,
        read.zero_config,
        names_live=not block_of(config, "zero_optimization").keys().isdisjoint(LIVE_NAMES),
        # "auto" is a number that is filled in later: any step may be in the last fraction
        total_steps=1 if total == "auto" else total if isinstance(total, int) else None,
        may_miss=not is_written(block or {}, "schedule", "layers"),
    )


def _refuse_uncounted(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if bytes would be others than the estimate's."""
    found = [row.key for row in refusals_of({key: value for key, value in config.items() if key != "fp8"})]
    optimizer = block_of(config, "optimizer")
    if str(optimizer.get("type", "auto")).lower() not in ("adam", "adamw", "auto", "none"):
        found.append(f"optimizer.type: {optimizer['type']}")
    if block_of(optimizer, "params").get("amsgrad"):
        found.append("optimizer.params.amsgrad: true")
    if (autotp := number(block_of(config, "tensor_parallel").get("autotp_size"), 0)) > 1:
        found.append(f"tensor_parallel.autotp_size: {autotp}")
    if found:
        raise UnsupportedError(
            f"estimate: expected ZeRO and Adam or AdamW on bf16, all on the GPU, got {', '.join(found)}, which is not "
            "counted. Leave it out of the configuration that is estimated."
        )


PARTS = {
    "weights": "weights",
    "masters": "masters",
    "moments": "moments and their scales",
    "gathered": "weights of other ranks, gathered",
    "gradients": "gradients that wait for the step",
    "activations": "activations kept for the backward",
    "temporaries": "temporaries at the largest moment",
    "buffers": "buffers that gradients are reduced in",
}
PEAKS = {
    "in_backward": "peak of forward and backward, eager",
    "in_step": "peak of the step",
    "compiled": "under torch.compile, at most",
}
"""Texts for the numbers of a Footprint."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on the GPU that holds most: PARTS and PEAKS.

    Attributes:
        in_bf16: with every layer in bf16 that schedule or guard may send there, to which all of the others do not
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
        """Bytes that must fit in eager: the largest moment of the whole run."""
        return max(self.in_backward, self.in_step, 0 if self.in_bf16 is None else self.in_bf16.peak)

    @property
    def peak_compiled(self) -> int:
        """Bytes that are enough under torch.compile."""
        return max(self.compiled, 0 if self.in_bf16 is None else self.in_bf16.compiled)


def estimate(spec: ModelSpec, run: Run) -> Footprint:
    """Estimate training of `spec` on a GPU; if layers go to bf16 for a while, also with all of these there.

    Raises:
        ConfigError: no linear can be in FP8, the schedule names what is not there, or gradient checkpointing is not
            what the model knows.
        UnsupportedError: the model is not one for Liger's loss.
    """
    model = _prepare(spec, run)
    sent = _layers_sent_to_bf16(model, run)
    found = _footprint(model, run)
    if not sent:
        return found
    model = _prepare(spec, run)
    for name, layer in fp8_layers(model).items():
        if name in sent:
            layer.fp8_recipe = Bf16Recipe(layer.fp8_recipe)
    return replace(found, in_bf16=_footprint(model, run))


def _prepare(spec: ModelSpec, run: Run) -> Any:
    """Return the model as it is trained, on the meta device."""
    model: Any = spec.build()
    if run.fp8 is not None:
        plan = make_plan(model, run.fp8.linear, may_be_empty=run.fp8.optimizer.states == "fp8")
        apply_plan(model, plan, run.fp8.linear, "cpu")
        if run.fp8.activations.fused:
            fuse_producers(model, run.fp8.activations)
    if run.checkpointing:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise ConfigError(f"checkpointing: expected a model of transformers, got {spec.name}. Leave it out.")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if run.setup.stage == 3:
        apply_zero_leaf_module_config(model, run.zero.leaf_module)  # DeepSpeed's log says which names there are none of
    return model


def _layers_sent_to_bf16(model: Any, run: Run) -> tuple[str, ...]:
    """Return layers that schedule or guard may send to bf16, all of which may be there at once.

    Raises: ConfigError: as a start does, the schedule names what is not there.
    """
    if run.fp8 is None:
        return ()
    names = [name for name, layer in fp8_layers(model).items() if layer.weight.requires_grad]
    schedule = PrecisionSchedule.of(run.fp8.schedule, names, run.total_steps, run.may_miss)
    if run.fp8.guard.action == "bf16":
        return tuple(names)
    usual = "fp8" if schedule.is_constant else "bf16"
    return tuple(name for name in names if schedule.fixed.get(name, usual) == "bf16")


def _footprint(model: nn.Module, run: Run) -> Footprint:
    """Estimate bytes with the states that `run.setup` names. `model` is used up.

    Stages 1 and 2 allocate the buckets when the backward gives its first gradient, and the room for a rank's gradients,
    all of it, when the first bucket is reduced: the loss's own peak meets neither. Stage 3 has both all the time.
    Source: deepspeed/runtime/zero/stage_1_and_2.py `setup_buckets`, `copy_grads_in_partition` (0.19.8).

    A compiled backward is bounded by eager's activations, and the gradients that one graph gives: in bf16 they are all
    there at its end, those of the whole model in stages 1 and 2, of a layer with gradient release, of a leaf in stage
    3. Inductor adds an embedding's gradients up in float32.
    """
    setup = run.setup
    is_stage3 = setup.stage == 3
    recipes = {layer.weight: layer.fp8_recipe for layer in fp8_layers(model).values()}
    weights = [
        Weight(p.numel(), p in recipes, p.requires_grad, in_bf16=p in recipes and not recipes[p].is_fp8)
        for p in model.parameters()
    ]
    states = estimate_states(weights, setup)
    parts, live = states.parts, _live_bytes(model, weights, run)
    trainable = sum(weight.numel for weight in weights if weight.is_trainable)
    largest = max((weight.numel for weight in weights if weight.is_trainable), default=0)
    tokens = run.micro_batch * run.seq_len
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad}
    num_embedding = sum(p.numel() + tokens * p.shape[1] for p in embeddings)
    num_graph = _num_graph(model, run)
    one_rank = setup.num_ranks == 1 and not is_stage3 and setup.grad_bytes == BF16
    is_one_pass = run.fp8 is not None and (setup.optimizer.states == "fp8" or run.fp8.has_fix("adam_step"))
    is_direct = one_rank and is_one_pass and not setup.releases
    buffers = 0 if is_direct else states.buckets
    late = 0 if is_stage3 else buffers
    stays = is_direct or states.unreduced > 0  # gradients do, in the parameters
    holds = is_stage3 or run.accumulation > 1  # the gradients that wait for the step, during the forward
    resident = live + (states.at_step if holds else states.between_steps)

    def gradients(num_elements: int) -> int:
        """Return bytes of so many complete gradients, and the buckets, beside what is resident."""
        if num_elements == 0:
            return 0
        if is_stage3:  # those of a bucket wait for each other, in the buffer or where they are
            return 0 if setup.num_buffers else BF16 * min(num_elements, max(setup.bucket_numel, largest))
        if setup.releases or holds:
            return late
        if stays:
            return late + setup.grad_bytes * num_elements
        is_reduced = num_elements > setup.reduce_bucket_size or num_elements == trainable
        return late + parts.gradients * is_reduced

    is_whole = not is_stage3 and not setup.releases

    def in_graphs(num_elements: int) -> int:
        """Return the same for compiled graphs."""
        waiting = gradients(num_elements) if is_stage3 else late
        of_graph = BF16 * num_elements if is_whole else waiting + BF16 * num_graph
        in_float = 0 if setup.releases or num_elements < trainable - num_embedding else FP32 * num_embedding
        return of_graph + in_float

    activations = count_activations(model, lambda model: _loss(model, run))
    in_backward = resident + activations.peak(gradients)
    in_step = states.at_step + (0 if is_one_pass else _dense_step(trainable, run))
    after_graph = gradients(trainable) + (0 if stays else BF16 * trainable) if is_whole else 0
    return Footprint(
        weights=parts.weights,
        masters=parts.master,
        moments=parts.moments + parts.moment_scales,
        gathered=parts.gathered + live,
        gradients=parts.gradients,
        activations=activations.kept,
        temporaries=activations.peak(lambda _: 0) - activations.kept,
        buffers=buffers,
        in_backward=in_backward,
        in_step=in_step,
        compiled=max(in_backward, in_step, resident + activations.peak(in_graphs), resident + after_graph),
        num_parameters=sum(weight.numel for weight in weights),
    )


def _live_bytes(model: nn.Module, weights: list[Weight], run: Run) -> int:
    """Return bytes of weights that stage 3 has gathered at once, beside its shards and persistent ones.

    They are as many elements as the bound on live weights lets it prefetch and keep, and those held whatever the bound.
    """
    setup, bound = run.setup, run.zero.max_live_parameters
    if setup.stage < 3 or setup.num_ranks == 1:
        return 0
    sharded = [weight for weight in weights if weight.numel >= setup.persistence_threshold]
    numel = sum(weight.numel for weight in sharded)
    num_bytes = sum(w.numel * (1 if w.is_fp8 and not w.in_bf16 else BF16) for w in sharded)
    needed = live_weights(model, run.zero.max_reuse_distance, run.holds_head, setup.persistence_threshold)
    if needed.leaves and run.fp8 is not None and not run.names_live:
        bound = max(bound, needed.total)
    held = needed.held if run.holds_head else 0
    others = max(min(bound, numel) - held, needed.largest)
    if held and needed.leaves:
        others = min(others, needed.leaves)
    return BF16 * held + round((num_bytes - BF16 * held) * others / max(numel - held, 1))


def _num_graph(model: nn.Module, run: Run) -> int:
    """Return the most elements of weights whose gradients one graph gives, where a graph is a part of the model."""
    if run.setup.stage == 3:
        parts = [module for module in model.modules() if z3_leaf_module(module)]
    else:
        containers = (module for module in model.modules() if isinstance(module, _CONTAINERS))
        parts = [child for module in containers for child in module.children()] or [model]
    return max((sum(p.numel() for p in part.parameters() if p.requires_grad) for part in parts), default=0)


def _dense_step(trainable: int, run: Run) -> int:
    """Return bytes that DeepSpeed's own step adds: in stages 1 and 2 the partition's flat gradients in bf16, and again
    in float32; in stage 3 those of a sub-group in float32.

    Source: deepspeed/runtime/zero/stage_1_and_2.py `step`, stage3.py `_prepare_sub_group` (0.19.8).
    """
    share = -(-trainable // run.setup.num_ranks)
    if run.setup.stage < 3:
        return (FP32 + (BF16 if run.setup.grad_bytes == BF16 else 0)) * share
    return FP32 * min(share, run.zero.sub_group_size)


def _loss(model: Any, run: Run) -> Tensor:
    """Compute the loss of a micro-batch of zeros; Liger's where the run has that."""
    times = run.fp8 and run.fp8.activations.cross_entropy_chunk_mem_const
    if times is None:
        return loss_of(model, run.micro_batch, run.seq_len)
    body = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
    head: Any = getattr(model, "lm_head", None)
    if not isinstance(body, nn.Module) or type(head) is not nn.Linear or head.bias is not None:
        raise UnsupportedError(
            "fp8.activations.cross_entropy_chunk_mem_const: expected null with a model that has no lm_head in bf16 "
            f"without bias, got {times} and {type(model).__name__} with {head}. Remove the key."
        )
    x_TK = body(input_ids=torch.zeros(run.micro_batch, run.seq_len, dtype=torch.long))[0].flatten(0, -2)
    rows = -(-len(x_TK) // most_chunks(head.in_features, head.out_features, times))
    loss: Tensor = _LigerLoss.apply(x_TK, head.weight, min(1 << (rows - 1).bit_length(), len(x_TK)))
    return loss


class _LigerLoss(torch.autograd.Function):
    """Allocations of liger-kernel's fused loss: both gradients in the forward, logits of `rows` tokens at a time.

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

"""estimate_states: bytes that weights, masters, moments and gradients take on a rank, from sizes alone.

Arithmetic by the layout rules of DeepSpeed 0.19.8 and of this package (older versions hold gradients in other buffers
where they accumulate in fp32); neither torch nor deepspeed is imported unless a module is passed.

Not counted: activations, what a step needs for a moment (nothing of a weight's size on a GPU), fragmentation, what CUDA
and NCCL take, and about 60 bytes of scales for each FP8 weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from fp8_ds.comm.layout import OUTSTANDING_UPDATE_BYTES, compact_layout
from fp8_ds.config import LinearConfig, OptimizerConfig

if TYPE_CHECKING:
    from torch import nn

_GROUP = 128  # elements of a moment scale: numerics/moments.py
_ALIGNMENT = {True: 16, False: 8}  # elements, of FP8 weights and others: zero/flat_weights.py, zero/sharded.py
_RANK_ALIGNMENT = 2  # DeepSpeed pads a flat group to this many elements a rank (nccl_start_alignment_factor)
_LOW_BYTES = {"e4m19": 2, "e4m11": 1}
_HP_LOW_BYTES = 1
FP32, BF16 = 4, 2


@dataclass(frozen=True)
class Weight:
    """A parameter, in the order of `module.parameters()`.

    Args:
        numel: elements.
        is_fp8: whether it is the weight of an FP8 linear.
        is_trainable: whether it has a master and moments.
        in_bf16: whether the FP8 linear computes in bf16 for now: bf16 of the masters beside the FP8 bytes.
    """

    numel: int
    is_fp8: bool
    is_trainable: bool = True
    in_bf16: bool = False


@dataclass(frozen=True)
class Setup:
    """Settings that decide the bytes, beside the weights.

    Args:
        stage: ZeRO stage, 1 to 3.
        num_ranks: ranks that share the states.
        optimizer: the "fp8.optimizer" block.
        gradient_clipping: DeepSpeed's; with "exact" clipping it decides whether release holds the gradients.
        grad_bytes: bytes of an accumulated gradient: 2, or 4 with "grad_accum_dtype": "fp32".
        overlap_comm: None is DeepSpeed's default, true in stage 3.
        reduce_bucket_size: DeepSpeed's, in elements.
        copies_gradients: whether stage 3 has a buffer for a bucket all the time, as it has with "contiguous_gradients".
            With release one is counted in any case.
        persistence_threshold: DeepSpeed's, in elements: smaller weights stay gathered in stage 3.
    """

    stage: int
    num_ranks: int
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    gradient_clipping: float = 0.0
    grad_bytes: int = BF16
    overlap_comm: bool | None = None
    reduce_bucket_size: int = 500_000_000
    copies_gradients: bool = False
    persistence_threshold: int = 100_000

    @property
    def releases(self) -> bool:
        return self.optimizer.releases(self.gradient_clipping)

    @property
    def num_buffers(self) -> int:
        """Buffers that buckets of gradients are copied to."""
        if self.stage == 3:
            return int(self.copies_gradients or self.releases)
        return 2 if self.overlap_comm else 1

    @property
    def bucket_numel(self) -> int:
        """Elements of a bucket; with release, buffers and the copy that a reduction makes share the threshold."""
        most = OUTSTANDING_UPDATE_BYTES // (self.num_buffers + 1) // BF16
        return min(self.reduce_bucket_size, most) if self.releases else self.reduce_bucket_size


@dataclass
class Parts:
    """Bytes on a rank of one kind of parameters, FP8 weights or others.

    Attributes:
        weights: in the form of compute, FP8 or bf16.
        master: low parts of split masters, or float32 masters.
        moments: both of Adam's.
        moment_scales: scales of FP8 moments.
        gradients: reduced ones that wait for the step; none with release.
        gathered: copies of persistent weights in stage 3.
    """

    weights: int = 0
    master: int = 0
    moments: int = 0
    moment_scales: int = 0
    gradients: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(frozen=True)
class StateBytes:
    """Bytes on the rank that holds most.

    Attributes:
        fp8, other: parts of FP8 weights, and of all other parameters with the padding.
        buckets: buffers that gradients are copied to; there all the time in stage 3, else during the backward.
        unreduced: gradients of all parameters that stage 1 without overlap_comm holds until the backward ends.
        num_parameters: elements, over all ranks.
        stage: ZeRO stage.
    """

    fp8: Parts
    other: Parts
    buckets: int
    unreduced: int
    num_parameters: int
    stage: int

    @property
    def parts(self) -> Parts:
        return self.fp8 + self.other

    @property
    def at_step(self) -> int:
        """Bytes when a step begins: states, weights, and the gradients that it will use."""
        return self.parts.total + (self.buckets if self.stage == 3 else 0)

    @property
    def between_steps(self) -> int:
        """Bytes after a step: DeepSpeed frees gradients of stages 1 and 2, and keeps the memory of those of stage 3."""
        return self.at_step - (self.parts.gradients if self.stage < 3 else 0)

    @property
    def per_parameter(self) -> float:
        """Bytes per parameter of the whole model when a step begins, without buckets."""
        return self.parts.total / max(self.num_parameters, 1)


def estimate_states(weights: Sequence[Weight], setup: Setup) -> StateBytes:
    """Estimate the bytes of `weights`.

    Args:
        weights: all parameters, in order (`weights_of` reads them from a module).
        setup: how they are trained.

    Raises:
        ValueError: a stage that is none of 1, 2, 3, or no ranks.
    """
    most = max(parts_by_rank(weights, setup), key=lambda kinds: kinds[True].total + kinds[False].total)
    late = setup.stage == 1 and setup.num_buffers == 1 and not setup.releases
    return StateBytes(
        fp8=most[True],
        other=most[False],
        buckets=setup.num_buffers * setup.bucket_numel * (setup.grad_bytes if setup.stage == 1 else BF16),
        unreduced=setup.grad_bytes * sum(weight.numel for weight in weights if weight.is_trainable) if late else 0,
        num_parameters=sum(weight.numel for weight in weights),
        stage=setup.stage,
    )


_Kinds = dict[bool, Parts]
"""Parts of FP8 weights (True) and of others."""


def parts_by_rank(weights: Sequence[Weight], setup: Setup) -> Iterator[_Kinds]:
    """Yield the parts of each rank of the ZeRO group. It raises as `estimate_states` does."""
    if setup.stage not in (1, 2, 3) or setup.num_ranks < 1:
        raise ValueError(
            f"setup: expected stage 1, 2 or 3 and at least one rank, got stage {setup.stage} and {setup.num_ranks}."
        )
    yield from (_stage3 if setup.stage == 3 else _stage12)(weights, setup)


def weights_of(module: nn.Module, linear: LinearConfig | None = None) -> list[Weight]:
    """Return `module`'s parameters as `fp8_ds` would treat them: real, on the meta device, or under `zero.Init`."""
    from fp8_ds.nn.plan.plan import make_plan

    plan = make_plan(module, linear or LinearConfig(), may_be_empty=True)
    fp8 = {id(module.get_parameter(layer.weight_name)) for layer in plan.layers if layer.converted}
    return [
        Weight(int(getattr(p, "ds_numel", p.numel())), id(p) in fp8, bool(p.requires_grad)) for p in module.parameters()
    ]


def _stage12(weights: Sequence[Weight], setup: Setup) -> Iterator[_Kinds]:
    """Yield each rank's parts: one flat parameter group in equal partitions, all weights on every rank."""
    common: _Kinds = {True: Parts(), False: Parts()}
    trainable = [weight for weight in weights if weight.is_trainable]
    starts = [0, *accumulate(weight.numel for weight in trainable)]
    alignment = _RANK_ALIGNMENT * setup.num_ranks
    partition = -(-starts[-1] // alignment) * alignment // setup.num_ranks
    laid_out = []
    for is_fp8 in (True, False):
        chosen = [(w, start) for w, start in zip(trainable, starts, strict=False) if w.is_fp8 == is_fp8]
        sizes = [w.numel for w, _ in chosen]
        layout = compact_layout([start for _, start in chosen], sizes, partition, setup.num_ranks, _ALIGNMENT[is_fp8])
        common[is_fp8].weights += layout.numel * (1 if is_fp8 else BF16)
        laid_out.append(([w for w, _ in chosen], layout.fragments))
    for weight in weights:
        if not weight.is_trainable:
            common[weight.is_fp8].weights += weight.numel * (1 if weight.is_fp8 else BF16)
        elif weight.in_bf16:
            common[True].weights += BF16 * weight.numel
    for rank in range(setup.num_ranks):
        kinds = {is_fp8: replace(parts) for is_fp8, parts in common.items()}
        padding = partition
        for chosen_weights, fragments in laid_out:
            for fragment in fragments[rank]:
                weight, numel = chosen_weights[fragment.index], fragment.in_tensor.numel
                padding -= numel
                _add_states(kinds[weight.is_fp8], weight, fragment.in_tensor.start, numel, numel, setup)
                # DeepSpeed keeps bf16 gradients of whole parameters that a partition touches, fp32 ones of it alone
                kept = numel if setup.grad_bytes == FP32 else weight.numel
                kinds[weight.is_fp8].gradients += 0 if setup.releases else setup.grad_bytes * kept
        other = kinds[False]
        _add_states(other, Weight(0, False), 0, 0, padding, setup)  # where they are float32
        other.gradients += FP32 * padding if setup.grad_bytes == FP32 and not setup.releases else 0
        yield kinds


def _stage3(weights: Sequence[Weight], setup: Setup) -> Iterator[_Kinds]:
    """Yield each rank's parts: every weight in equal shards."""
    for rank in range(setup.num_ranks):
        kinds: _Kinds = {True: Parts(), False: Parts()}
        for weight in weights:
            parts = kinds[weight.is_fp8]
            shard = -(-weight.numel // setup.num_ranks)
            aligned = -(-shard // _ALIGNMENT[True]) * _ALIGNMENT[True]
            parts.weights += aligned if weight.is_fp8 else BF16 * shard
            if weight.numel < setup.persistence_threshold and setup.num_ranks > 1:
                parts.gathered += weight.numel * (1 if weight.is_fp8 and not weight.in_bf16 else BF16)
            if weight.in_bf16 or (weight.is_fp8 and not weight.is_trainable):  # a frozen one keeps its bf16 shard
                parts.weights += BF16 * shard
            if not weight.is_trainable:
                continue
            real = max(0, min(shard, weight.numel - rank * shard))
            _add_states(parts, weight, rank * shard, real, shard, setup)
            parts.gradients += 0 if setup.releases else setup.grad_bytes * shard
        yield kinds


def _add_states(parts: Parts, weight: Weight, start: int, numel: int, padded: int, setup: Setup) -> None:
    """Add master and moments of elements `[start, start + numel)` of a weight; flat float32 tensors have `padded`."""
    groups = -(-(start % _GROUP + numel) // _GROUP) if numel else 0
    if setup.optimizer.states == "fp32":
        parts.master += FP32 * padded
        parts.moments += 2 * FP32 * padded
        return
    low_bytes = _LOW_BYTES[setup.optimizer.master_format] if weight.is_fp8 else _HP_LOW_BYTES
    parts.master += low_bytes * groups * _GROUP
    parts.moments += 2 * groups * _GROUP
    parts.moment_scales += 2 * FP32 * groups

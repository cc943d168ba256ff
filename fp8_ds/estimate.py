"""estimate_states: bytes that weights, masters, moments and gradients take on a rank, from sizes alone.

Pure arithmetic by the layout rules of DeepSpeed 0.19.8 and of this package (older versions hold gradients in other
buffers where they accumulate in fp32); neither torch nor deepspeed is imported unless a module is passed.
tests/distributed/test_state_bytes.py compares with what training really holds.
`python -m fp8_ds.estimate` prints the tables of docs/memory.md.

Not counted: activations, what a step needs for a moment (nothing of a weight's size on a GPU), fragmentation, and what
CUDA and NCCL take; for each FP8 weight about 60 bytes of scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from fp8_ds.config import LinearConfig, OptimizerConfig
from fp8_ds.zero.layout import CompactLayout, compact_layout

if TYPE_CHECKING:
    from torch import nn

_GROUP = 128  # elements of a moment scale: optim/moments.py
_FP8_ALIGNMENT, _HP_ALIGNMENT = 16, 8  # elements: zero/kind_buffer.py, zero/stage3.py
_RANK_ALIGNMENT = 2  # DeepSpeed pads a flat group to this many elements a rank (nccl_start_alignment_factor)
_LOW_BYTES = {"e4m19": 2, "e4m11": 1}
_HP_LOW_BYTES = 1
_FP32 = 4


@dataclass(frozen=True)
class Weight:
    """A parameter, in the order of `module.parameters()`.

    Args:
        numel: elements.
        is_fp8: whether it is the weight of an FP8 linear.
        is_trainable: whether it has a master and moments.
        group: its parameter group.
        in_bf16: whether the FP8 linear computes in bf16 for now: bf16 of the masters beside the FP8 bytes.
    """

    numel: int
    is_fp8: bool
    is_trainable: bool = True
    group: int = 0
    in_bf16: bool = False


@dataclass(frozen=True)
class Setup:
    """What decides the bytes, beside the weights.

    Args:
        stage: of ZeRO, 1 to 3.
        num_ranks: ranks that share the states.
        optimizer: the "fp8.optimizer" block.
        gradient_clipping: DeepSpeed's; with "exact" clipping it decides whether release holds the gradients.
        grad_bytes: of an accumulated gradient: 2, or 4 with "grad_accum_dtype": "fp32".
        overlap_comm: None is DeepSpeed's default, true in stage 3.
        reduce_bucket_size: DeepSpeed's, in elements.
        persistence_threshold: DeepSpeed's, in elements: smaller weights stay gathered in stage 3.
    """

    stage: int
    num_ranks: int
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    gradient_clipping: float = 0.0
    grad_bytes: int = 2
    overlap_comm: bool | None = None
    reduce_bucket_size: int = 500_000_000
    persistence_threshold: int = 100_000

    @property
    def releases(self) -> bool:
        return self.optimizer.releases(self.gradient_clipping)

    @property
    def num_buffers(self) -> int:
        """Bucket buffers: two where stages 1 and 2 overlap."""
        overlaps = self.stage == 3 if self.overlap_comm is None else self.overlap_comm
        return 2 if overlaps and self.stage < 3 else 1

    @property
    def bucket_bytes(self) -> int:
        """Of one buffer. With release, buffers and the copy that a reduction makes share the threshold."""
        elements = self.reduce_bucket_size
        if self.releases:
            elements = min(elements, self.optimizer.outstanding_update_bytes // (self.num_buffers + 1) // 2)
        return elements * (self.grad_bytes if self.stage == 1 else 2)


@dataclass
class Parts:
    """Bytes on a rank of one kind of parameters, FP8 weights or others.

    Attributes:
        weights: as computed with: FP8, bf16.
        master: low parts of split masters, or float32 masters.
        moments: both.
        moment_scales: of FP8 moments.
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
    """Bytes on one rank.

    Attributes:
        fp8, other: parts of FP8 weights, and of all other parameters with the padding.
        fp8_mean: total of `fp8`, mean over the ranks: in stages 1 and 2 a rank's partition may hold few FP8 weights.
        buckets: buffers that gradients are reduced in; there all the time in stage 3, else during the backward.
        unreduced: gradients of all parameters that stage 1 without overlap_comm holds until the backward ends.
        num_fp8, num_other: parameters, over all ranks.
        stage: of ZeRO.
    """

    fp8: Parts
    other: Parts
    fp8_mean: float
    buckets: int
    unreduced: int
    num_fp8: int
    num_other: int
    stage: int

    @property
    def parts(self) -> Parts:
        return self.fp8 + self.other

    @property
    def at_step(self) -> int:
        """When a step begins: states, weights, and the gradients that it will use."""
        return self.parts.total + (self.buckets if self.stage == 3 else 0)

    @property
    def between_steps(self) -> int:
        """After a step. DeepSpeed frees the gradients of stages 1 and 2, and keeps the memory of those of stage 3."""
        return self.at_step - (self.parts.gradients if self.stage < 3 else 0)

    @property
    def per_fp8_weight(self) -> float:
        """Bytes per FP8 weight when a step begins, mean over the ranks."""
        return self.fp8_mean / max(self.num_fp8, 1)

    @property
    def per_parameter(self) -> float:
        """Bytes per parameter of the whole model when a step begins, without buckets."""
        return self.parts.total / max(self.num_fp8 + self.num_other, 1)


def estimate_states(weights: Sequence[Weight], setup: Setup, rank: int | None = None) -> StateBytes:
    """Bytes of `weights` on a rank.

    Args:
        weights: all parameters, in order (`weights_of` reads them from a module).
        setup: how they are trained.
        rank: within the ZeRO group; None: the rank that holds most.

    Raises:
        ValueError: a stage that is none of 1, 2, 3, or no ranks.
    """
    if setup.stage not in (1, 2, 3) or setup.num_ranks < 1:
        raise ValueError(
            f"setup: expected stage 1, 2 or 3 and at least one rank, got stage {setup.stage} and {setup.num_ranks}."
        )
    by_rank = list(_ranks_of_stage3(weights, setup) if setup.stage == 3 else _ranks_of_stage12(weights, setup))
    if rank is None:
        fp8, other = max(by_rank, key=lambda found: found[0].total + found[1].total)
    else:
        fp8, other = by_rank[rank]
    trainable = [weight for weight in weights if weight.is_trainable]
    late = setup.stage == 1 and setup.num_buffers == 1 and not setup.releases
    return StateBytes(
        fp8=fp8,
        other=other,
        fp8_mean=sum(found.total for found, _ in by_rank) / setup.num_ranks,
        buckets=setup.num_buffers * setup.bucket_bytes,
        unreduced=setup.grad_bytes * sum(weight.numel for weight in trainable) if late else 0,
        num_fp8=sum(weight.numel for weight in weights if weight.is_fp8),
        num_other=sum(weight.numel for weight in weights if not weight.is_fp8),
        stage=setup.stage,
    )


def weights_of(module: nn.Module, linear: LinearConfig | None = None) -> list[Weight]:
    """The parameters of `module` as `fp8_ds` would treat them: real, on the meta device, or under `zero.Init`.

    All trainable ones in one parameter group.
    """
    from fp8_ds.nn.convert import make_plan

    plan = make_plan(module, linear or LinearConfig(), may_be_empty=True)
    fp8 = {id(module.get_parameter(layer.weight_name)) for layer in plan.layers if layer.converted}
    return [
        Weight(int(getattr(p, "ds_numel", p.numel())), id(p) in fp8, bool(p.requires_grad)) for p in module.parameters()
    ]


# --- stages 1 and 2: flat groups cut into equal partitions, all weights on every rank ---


def _ranks_of_stage12(weights: Sequence[Weight], setup: Setup) -> Iterator[tuple[Parts, Parts]]:
    common = _Kinds()
    for weight in weights:
        if not weight.is_trainable:
            common.of(weight).weights += weight.numel * (1 if weight.is_fp8 else 2)
    groups = []
    for number in sorted({weight.group for weight in weights if weight.is_trainable}):
        group = _FlatGroup([w for w in weights if w.is_trainable and w.group == number], setup.num_ranks)
        common.fp8.weights += group.layouts[True].numel + 2 * sum(w.numel for w in group.weights[True] if w.in_bf16)
        common.other.weights += 2 * group.layouts[False].numel
        groups.append(group)
    for rank in range(setup.num_ranks):
        kinds = _Kinds(common.fp8 + Parts(), common.other + Parts())
        for group in groups:
            group.add_states(kinds, rank, setup)
        yield kinds.fp8, kinds.other


class _Kinds:
    def __init__(self, fp8: Parts | None = None, other: Parts | None = None) -> None:
        self.fp8, self.other = fp8 or Parts(), other or Parts()

    def of(self, weight: Weight) -> Parts:
        return self.fp8 if weight.is_fp8 else self.other


class _FlatGroup:
    """One parameter group as DeepSpeed flattens it."""

    def __init__(self, weights: list[Weight], num_ranks: int) -> None:
        self.weights: dict[bool, list[Weight]] = {True: [], False: []}
        starts: dict[bool, list[int]] = {True: [], False: []}
        end = 0
        for weight in weights:
            self.weights[weight.is_fp8].append(weight)
            starts[weight.is_fp8].append(end)
            end += weight.numel
        alignment = _RANK_ALIGNMENT * num_ranks
        self.partition = -(-end // alignment) * alignment // num_ranks
        self.layouts: dict[bool, CompactLayout] = {
            is_fp8: compact_layout(
                starts[is_fp8],
                [weight.numel for weight in chosen],
                self.partition,
                num_ranks,
                _FP8_ALIGNMENT if is_fp8 else _HP_ALIGNMENT,
            )
            for is_fp8, chosen in self.weights.items()
        }

    def add_states(self, kinds: _Kinds, rank: int, setup: Setup) -> None:
        owned = 0
        for is_fp8, layout in self.layouts.items():
            for fragment in layout.fragments[rank]:
                weight = self.weights[is_fp8][fragment.index]
                parts = kinds.of(weight)
                owned += fragment.numel
                _add_states(parts, weight, fragment.tensor_start, fragment.numel, fragment.numel, setup)
                if not setup.releases:
                    # DeepSpeed keeps bf16 gradients of whole parameters that a partition touches, fp32 ones of it alone
                    kept = fragment.numel if setup.grad_bytes == _FP32 else weight.numel
                    parts.gradients += setup.grad_bytes * kept
        padding = self.partition - owned
        if setup.optimizer.states == "fp32":
            kinds.other.master += _FP32 * padding
            kinds.other.moments += 2 * _FP32 * padding
        if setup.grad_bytes == _FP32 and not setup.releases:
            kinds.other.gradients += _FP32 * padding


# --- stage 3: every weight cut into equal shards ---


def _ranks_of_stage3(weights: Sequence[Weight], setup: Setup) -> Iterator[tuple[Parts, Parts]]:
    for rank in range(setup.num_ranks):
        kinds = _Kinds()
        for weight in weights:
            parts = kinds.of(weight)
            shard = -(-weight.numel // setup.num_ranks)
            aligned = -(-shard // _FP8_ALIGNMENT) * _FP8_ALIGNMENT
            parts.weights += aligned if weight.is_fp8 else 2 * shard
            if weight.numel < setup.persistence_threshold and setup.num_ranks > 1:
                parts.gathered += weight.numel if weight.is_fp8 and not weight.in_bf16 else 2 * weight.numel
            if not weight.is_trainable:
                parts.weights += 2 * shard if weight.is_fp8 else 0  # frozen FP8 weights keep their bf16 shard
                continue
            if weight.in_bf16:
                parts.weights += 2 * shard
            real = max(0, min(shard, weight.numel - rank * shard))
            _add_states(parts, weight, rank * shard, real, shard, setup)
            if not setup.releases:
                parts.gradients += setup.grad_bytes * shard
        yield kinds.fp8, kinds.other


def _add_states(parts: Parts, weight: Weight, start: int, numel: int, padded: int, setup: Setup) -> None:
    """Master and moments of elements `[start, start + numel)` of a weight; flat float32 tensors have `padded`."""
    groups = -(-(start % _GROUP + numel) // _GROUP) if numel else 0
    if setup.optimizer.states == "fp32":
        parts.master += _FP32 * padded
        parts.moments += 2 * _FP32 * padded
        return
    low_bytes = _LOW_BYTES[setup.optimizer.master_format] if weight.is_fp8 else _HP_LOW_BYTES
    parts.master += low_bytes * groups * _GROUP
    parts.moments += 2 * groups * _GROUP
    parts.moment_scales += 2 * _FP32 * groups


# --- the tables of docs/memory.md ---


def llama_weights(hidden: int, mlp: int, num_layers: int, key_value: int, vocabulary: int) -> list[Weight]:
    """Parameters of a Llama: FP8 all linears but the head.

    Args:
        hidden, mlp, key_value: widths of the residual stream, of the MLP, of keys and values.
    """
    matrices = (hidden * hidden, hidden * key_value, hidden * key_value, hidden * hidden, *[hidden * mlp] * 3)
    layer = [*(Weight(numel, True) for numel in matrices), *(Weight(hidden, False) for _ in range(2))]
    embedding, head = Weight(vocabulary * hidden, False), Weight(vocabulary * hidden, False)
    return [embedding, *layer * num_layers, Weight(hidden, False), head]


LLAMA_8B = llama_weights(4096, 14336, 32, 1024, 128256)
LLAMA_70B = llama_weights(8192, 28672, 80, 1024, 128256)
_PLACES = (
    ("8B", LLAMA_8B, 2, 1),
    ("8B", LLAMA_8B, 2, 8),
    ("8B", LLAMA_8B, 3, 8),
    ("70B", LLAMA_70B, 2, 8),
    ("70B", LLAMA_70B, 3, 8),
    ("70B", LLAMA_70B, 3, 64),
)
_CHOICES: tuple[OptimizerConfig, ...] = (
    OptimizerConfig(),
    *(OptimizerConfig(states="fp8", master=m, release=r) for m in ("e4m19", "e4m11") for r in (False, True)),
)


def _shown(choice: OptimizerConfig) -> list[str]:
    return [choice.states, choice.master_format, "yes" if choice.release else "no"]


def markdown_tables() -> tuple[str, str]:
    """Bytes per parameter by part of Llama-3-8B on 1, 8 and 64 ranks, and GiB on a rank of it and of the 70B model."""
    parts = []
    for stage, stages in ((2, "1, 2"), (3, "3")):
        for num_ranks in (1, 8, 64):
            for choice in _CHOICES:
                found = estimate_states(LLAMA_8B, Setup(stage, num_ranks, choice))
                whole, num = found.parts, found.num_fp8 + found.num_other
                columns = (whole.weights + whole.gathered, whole.master, whole.moments + whole.moment_scales)
                numbers = [f"{value / num:.2f}" for value in (*columns, whole.gradients)]
                numbers += [f"{found.per_parameter:.2f}", f"{found.per_fp8_weight:.2f}"]
                parts.append([stages, str(num_ranks), *_shown(choice), *numbers])
    head = ["Stage", "Ranks", "States", "Master", "Release", "Weights", "Master beside", "Moments", "Gradients"]
    sizes = []
    for choice in _CHOICES:
        row = _shown(choice)
        for _, weights, stage, num_ranks in _PLACES:
            found = estimate_states(weights, Setup(stage, num_ranks, choice))
            row.append(f"{found.parts.total / 2**30:.1f}")
        sizes.append(row)
    names = [f"{model}, stage {stage}, N = {num_ranks}" for model, _, stage, num_ranks in _PLACES]
    return (
        _markdown([*head, "Whole model", "FP8 weights"], parts),
        _markdown(["States", "Master", "Release", *names], sizes),
    )


def _markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print("\n\n".join(markdown_tables()))

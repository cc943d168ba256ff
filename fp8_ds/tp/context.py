"""TensorParallel: the group of a model's tensor-parallel layers, how they communicate, and what has been gathered."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_ds.config import TensorParallelConfig
from fp8_ds.errors import ConfigError
from fp8_ds.tp.gather import Gathered
from fp8_ds.tp.group import SAME_BATCHES, BatchCheck, check_same, fingerprint, shape_text

_R = TypeVar("_R")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

is_tracing = torch.compiler.is_compiling
"""Whether torch.compile is making a graph. It is a constant there: the graph follows the branch that holds."""


class TensorParallel:
    """Context that all tensor-parallel layers of a model share.

    Args:
        group: this rank's; see `check_group`.
        sequence_parallel: whether activations between the layers are sharded by tokens.
        config: the "tensor_parallel" block.

    Attributes:
        inputs: gathered inputs that are being read.
        full_shape: (batch, sequence) of the last forward, where `parallelize` shards tokens.
        sharded_weight: one of the sharded weights.
        num_bytes_gathered: bytes that linears have gathered in FP8 so far, this rank's own share included. Gathers
            inside graphs of torch.compile are not counted.
    """

    def __init__(
        self, group: dist.ProcessGroup, sequence_parallel: bool = True, config: TensorParallelConfig | None = None
    ) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.group_name = group.group_name
        if self.rank < 0:
            raise ConfigError("group: expected one that this rank is in, got another. Pass each rank its own.")
        self.sequence_parallel = sequence_parallel
        self.set_config(TensorParallelConfig() if config is None else config)
        self.inputs = GatheredInputs()
        self.full_shape: tuple[int, int] | None = None
        self._full_shapes: dict[int, set[tuple[int, int]]] = {}
        self.sharded_weight: weakref.ref[Tensor] | None = None
        self.num_bytes_gathered = 0
        self._compare_batches = BatchCheck(group)

    def set_config(self, config: TensorParallelConfig) -> None:
        """Make the layers communicate as `config` says; call it before they are converted to FP8.

        Raises:
            ConfigError: `config` is no TensorParallelConfig.
        """
        if not isinstance(config, TensorParallelConfig):
            raise ConfigError(
                f"config: expected a TensorParallelConfig, got {config!r}. Of the keys of a block write "
                'fp8_ds.config.TensorParallelConfig(gather="bf16"), or leave it out: deepspeed.initialize brings the '
                "block."
            )
        self.config = config
        self._is_checked = False

    @property
    def is_traceable(self) -> bool:
        """Whether torch.compile can take the layers into its graphs; else graphs end at the borders of a block.

        ZeRO-3 does not allow that: its hooks end graphs at every module and hand modules aliases of their inputs.
        """
        weight = None if self.sharded_weight is None else self.sharded_weight()
        return not hasattr(weight, "ds_id")

    def check_first(self, x: Tensor, *, is_full: bool, is_replicated: bool = False) -> None:
        """Check that ranks bring the same shape, dtype and settings. Collective the first time only.

        Args:
            x: [..., tokens, C]: a shard, or all tokens.
            is_full: whether x is to be sharded by tokens, which must divide.
            is_replicated: whether x is the same on all ranks.

        Raises:
            ValueError: on all ranks of the group, if one of them brings another, or tokens do not divide.
        """
        if not self._is_checked:
            self._compare(x, is_replicated)
        num_tokens = math.prod(x.shape[:-1])
        if is_full and num_tokens % self.size:
            raise ValueError(
                f"input: expected tokens (batch x sequence) divisible by tensor-parallel size {self.size}, got "
                f"{num_tokens} of shape {tuple(x.shape)}. Pad the sequences."
            )
        if x.dtype not in _DTYPES:
            raise ValueError(f"input: expected bfloat16, float16 or float32, got {x.dtype}. Cast it before.")

    def check_batch(self, x: Tensor, *, is_full: bool) -> None:
        """Run `check_first`; check that ranks bring the same x to every forward but those inside graphs. Collective.

        Args:
            x: the same on all ranks; the layers after it are TP-sharded.
            is_full: as in `check_first`.
        """
        self.check_first(x, is_full=is_full, is_replicated=True)
        if not is_tracing():
            self._compare_batches(x)

    # A graph that was made before the first batch is made anew after it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compare(self, x: Tensor, is_replicated: bool) -> None:
        kind = f"sequence_parallel={self.sequence_parallel} {self.config.model_dump()}"
        values = f"values {fingerprint(x)}" if is_replicated else ""
        check_same(
            "first batch of the tensor-parallel layers",
            [shape_text(x), kind, values],
            self.group,
            on_all_ranks=False,
            remedy=f"Build the same model from the same configuration everywhere. {SAME_BATCHES}",
        )
        self._is_checked = True

    def set_full_shape(self, batch: int, length: int) -> None:
        """Set (batch, sequence) of the forward that begins."""
        self.full_shape = batch, length
        self._full_shapes.setdefault(batch * length, set()).add(self.full_shape)

    def shape_of(self, num_tokens: int) -> tuple[int, int]:
        """Return (batch, sequence) of the forward that a block with `num_tokens` tokens belongs to; one sequence if
        only blocks have been called.

        Raises:
            ValueError: the block is computed again in a backward, and there have been forwards of several such shapes;
                or no forward has had as many tokens.
        """
        if self.full_shape is None:
            return 1, num_tokens
        is_in_backward = not is_tracing() and torch._C._current_graph_task_id() != -1
        if math.prod(self.full_shape) == num_tokens and not is_in_backward:
            return self.full_shape
        shapes = self._full_shapes.get(num_tokens, set())
        if len(shapes) != 1:
            raise ValueError(
                f"input: expected tokens of one shape (batch, sequence) that is known, got {num_tokens} tokens of "
                f"{sorted(shapes) or 'none'}. Give the blocks `position_embeddings`, or keep to one shape of batches."
            )
        return next(iter(shapes))

    def __deepcopy__(self, memo: Any) -> TensorParallel:
        raise ConfigError(
            "model: expected no copy of a model that fp8_ds.tp.parallelize has sharded, got one. It would lose the "
            "hooks that sum gradients, and what says that a weight is sharded. Copy the model before that."
        )


def traced_where_possible(function: Callable[..., _R]) -> Callable[..., _R]:
    """Decorate a function (x, tp, ...): it is part of a graph of torch.compile if `tp` says that this is possible; else
    the graph ends before it."""
    left_alone: Callable[..., _R] = torch.compiler.disable(function)

    @functools.wraps(function)
    def chosen(x: Tensor, tp: TensorParallel, *args: Any, **kwargs: Any) -> _R:
        if is_tracing() and not tp.is_traceable:
            return left_alone(x, tp, *args, **kwargs)
        return function(x, tp, *args, **kwargs)

    return chosen


class GatheredInputs:
    """Gathered FP8 matrices and the nominal tensors that stand for them, for as long as these tensors live.

    A nominal tensor has the shape and dtype of what was gathered, and the storage of one NaN: what reads it past the
    layers that know it reads NaN. Aliases (ZeRO-3's hooks hand modules one each) have the same storage.

    Attributes:
        traced: the one of the block that torch.compile is following, where storages are unknown.
    """

    def __init__(self) -> None:
        self.traced: tuple[Tensor, Gathered] | None = None
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.Size, Gathered]] = {}

    def put(self, nominal: Tensor, gathered: Gathered) -> None:
        storage = nominal.untyped_storage()
        key = storage.data_ptr()

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            if key in self._known and self._known[key][0] is reference:
                del self._known[key]

        self._known[key] = (weakref.ref(storage, forget), nominal.shape, gathered)

    def find(self, x: Tensor) -> Gathered | None:
        """Return what `x` stands for; None for any other tensor.

        Raises:
            ValueError: `x` is a view of it with tokens in other places, or of some of them.
        """
        if self.traced is not None and x is self.traced[0]:
            return self.traced[1]
        if not self._known:
            return None
        storage = x.untyped_storage()
        known = self._known.get(storage.data_ptr())
        if known is None or known[0]() is not storage:
            return None
        _, shape, gathered = known
        if x.shape != shape and x.shape not in (gathered.shape, (1, *gathered.shape)):
            raise ValueError(
                f"input: expected what its block was called with, {tuple(shape)}, got a view {tuple(x.shape)}. A "
                "block's column-parallel linears read its first argument as it is, and nothing else does."
            )
        return gathered

    def __len__(self) -> int:
        return len(self._known)

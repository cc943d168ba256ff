"""AdamCore: one Adam step over all shards, for whoever owns the gradients (a torch optimizer, or ZeRO)."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fp8_ds.numerics.moments import GROUP
from fp8_ds.numerics.predicted import BoundSums, PredictedScales, bound_of_powers, check_betas
from fp8_ds.ops.adamw import AdamShard, AdamStep, Hyper, StepInputs, prepare
from fp8_ds.optim.states import FlatBuffer, has_moments

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_BETAS = slice(1, 3)
_CYCLES_BETAS = "max_momentum"
"""Key of a group whose beta1 is changed by one of torch's schedulers (CyclicLR, OneCycleLR)."""
_DIGEST_BITS = 24
_KEPT_STEPS = 4


class _Constants(NamedTuple):
    """Numbers of a step that the host computes to save operators on the device: float64, by group or by row."""

    beta1: Tensor
    beta2: Tensor
    ratio: Tensor
    """`beta1**2 / beta2`; powers of these first three are computed as one."""
    one_minus_beta1: Tensor
    one_minus_beta2: Tensor
    one_minus_ratio: Tensor
    bound_factor: Tensor
    """`(1 - beta1) / sqrt(1 - beta2)`"""
    lr: Tensor
    eps: Tensor
    weight_decay: Tensor
    decay: Tensor
    """As `Hyper.DECAY`."""
    zero: Tensor


class StepCache(Generic[K, V]):
    """Values by key, for sets of shards: buckets are mostly the same in every step.

    A value that was not requested for four steps is dropped, or memory would grow where layers are dropped at random. A
    value that a CUDA graph was captured with stays: the graph reads its tensors.
    """

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._last_step: dict[K, float] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`, made if there is none."""
        if key not in self._values:
            self._values[key] = make()
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        self._last_step[key] = max(self._last_step.get(key, 0), math.inf if is_captured else self._step)
        return self._values[key]

    def next_step(self) -> None:
        """Begin a step, and drop old values."""
        self._step += 1
        for key in [key for key, step in self._last_step.items() if step < self._step - _KEPT_STEPS]:
            del self._values[key], self._last_step[key]

    def clear(self) -> None:
        self._values.clear()
        self._last_step.clear()


class AdamCore:
    """Step counts, hyperparameters, scales and shards of Adam.

    Args:
        flats: tensors that the optimizer sees as parameters, in rows 0, 1, ...
        row_groups: for each row the index of its parameter group.
        scales: those of the FP8 masters; None if there are none.
        decoupled: true for AdamW, false for Adam (L2).
        seed: seed of the rounding noise.

    Attributes:
        weight_moves: bool [num_weights], by entry in the scale vectors: whether it is trained.
    """

    def __init__(
        self,
        flats: Sequence[FlatBuffer],
        row_groups: Sequence[int],
        scales: PredictedScales | None,
        device: torch.device,
        decoupled: bool,
        seed: int,
    ) -> None:
        self.flats = list(flats)
        self.shards: list[AdamShard] = [shard for flat in flats for shard in flat.shards]
        self.scales = scales or PredictedScales(0, device)
        self.device = device
        self.decoupled = decoupled
        self.seed = seed
        self.step_count = torch.zeros(len(flats), dtype=torch.int64, device=device)
        self._row_groups = torch.tensor(list(row_groups), dtype=torch.long, device=device)
        self.sums = BoundSums(row_groups, device)
        self._host_numbers: list[tuple[float, ...]] = []
        self._constants = self._digest = torch.zeros(0, dtype=torch.float32)
        self._no_skip = torch.zeros((), dtype=torch.int32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._prepared: StepCache[tuple[int, ...], AdamStep] = StepCache()
        rows = {shard.scale_index: shard.group for shard in self.shards if shard.fmt.is_fp8}
        self.set_weight_rows([rows.get(index, 0) for index in range(self.scales.num)])

    def set_weight_rows(self, rows: Sequence[int | None]) -> None:
        """Set the row of every FP8 weight, also of those without a shard on this rank; None for a frozen weight."""
        self._weight_rows = torch.tensor([row or 0 for row in rows], dtype=torch.long, device=self.device)
        self.weight_moves = torch.tensor([row is not None for row in rows], dtype=torch.bool, device=self.device)

    @property
    def has_moments(self) -> bool:
        return all(map(has_moments, self.shards))

    def allocate(self) -> None:
        """Allocate moments of zeros where there are none yet."""
        for shard in self.shards:
            if not has_moments(shard):
                shard.m = torch.zeros(shard.num_groups * GROUP, dtype=torch.uint8, device=self.device)
                shard.v = torch.zeros(shard.num_groups * GROUP, dtype=torch.uint8, device=self.device)
                shard.m_scale_inv = torch.zeros(shard.num_groups, dtype=torch.float32, device=self.device)
                shard.v_scale_inv = torch.zeros(shard.num_groups, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def forget(self, row: int) -> None:
        """Reset row `row` to before its first step: moments of zeros, in place, and a count of 0."""
        self.step_count[row] = 0
        self.sums.set(row, None)
        for shard in self.flats[row].shards:
            for moment in (shard.m, shard.v, shard.m_scale_inv, shard.v_scale_inv):
                moment.zero_()

    def moved(self) -> None:
        """Drop the tables of addresses, because tensors of shards have moved."""
        self._prepared.clear()

    @torch.no_grad()
    def begin(
        self,
        param_groups: Sequence[dict[str, Any]],
        *,
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
        moves: Tensor | None = None,
    ) -> StepInputs:
        """Count the step, and compute its numbers and the next scales, all on the device.

        Args:
            grad_scale: float32, 0-dim, factor of the gradients; None: 1.
            skip: int32, 0-dim; nothing happens unless it is 0; None: 0.
            moves: bool [num_rows], rows that take part; None: all.
        """
        self._update_constants(param_groups)  # first: it may raise, and nothing has changed then
        self.allocate()
        self._prepared.next_step()
        skip = self._no_skip if skip is None else skip
        taken = skip == 0
        steps = taken if moves is None else (taken & moves)
        self.step_count += steps
        hyper = self._hyper(steps)
        scales = self.scales
        if scales.num:
            rows = hyper.index_select(0, self._weight_rows)
            decay = rows[:, Hyper.DECAY] if self.decoupled else torch.ones_like(rows[:, 0])
            weight_moves = self.weight_moves & taken
            if moves is not None:
                weight_moves = weight_moves & moves.index_select(0, self._weight_rows)
            scales.predict(rows[:, Hyper.LR], decay, rows[:, Hyper.BOUND], weight_moves)
        return StepInputs(
            hyper=hyper,
            step=self.step_count,
            grad_scale=self._one if grad_scale is None else grad_scale,
            skip=skip,
            scale_inv=scales.previous_scale_inv,
            next_scale_inv=scales.next_scale_inv,
            amax=scales.measured,
            seed=self.seed,
            decoupled=self.decoupled,
        )

    @torch.no_grad()
    def run(self, grads: Sequence[Tensor | None], inputs: StepInputs, chosen: Sequence[int] | None = None) -> None:
        """Update shards.

        Args:
            grads: 1-D, one per shard (None: leave it), or per chosen shard.
            inputs: from `begin`.
            chosen: indices of the shards; None: all.
        """
        key = tuple(chosen) if chosen is not None else (-1,)
        shards = self.shards if chosen is None else [self.shards[i] for i in chosen]
        self._prepared.get(key, lambda: prepare(shards))(grads, inputs)

    def end(self) -> None:
        """Put the new scales into force, after all shards are updated, and start reducing amaxes."""
        if self.scales.num:
            self.scales.commit()
        self.scales.start_reduce()

    @torch.no_grad()
    def follow(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Take the betas of `param_groups` for the steps to come; the steps so far had those before.

        The sum that bounds an update exists from the first step on where a scheduler moves betas:
        torch.distributed.checkpoint loads only entries that a new run has, too.
        """
        self._update_constants(param_groups)
        self._end_constant_betas([_CYCLES_BETAS in group for group in param_groups])

    def _hyper(self, steps: Tensor) -> Tensor:
        """Return float32 [num_rows, 16], columns as `Hyper`.

        Args:
            steps: bool [num_rows] or 0-dim: the rows that count the step.
        """
        by_row = self._constants.index_select(1, self._row_groups)
        c = _Constants(*by_row)
        t = self.step_count.clamp(min=1).double()
        # Each operator on these few numbers is one that the device waits for: one power of three bases.
        corrections = 1 - by_row[:3] ** t
        root_factor = corrections[0] * corrections[1].rsqrt()
        constant = None if self.sums.all_moved else bound_of_powers(c.bound_factor, c.one_minus_ratio, *corrections)
        bound = self.sums.bound(constant, c.ratio, c.bound_factor, root_factor, steps)
        betas = (c.beta1, c.beta2, c.one_minus_beta1, c.one_minus_beta2)
        columns = [c.lr, *betas, c.eps * corrections[0], c.decay, root_factor, bound]
        return torch.stack([*columns, *[c.zero] * (Hyper.WIDTH - len(columns))], dim=1).float()

    def _end_constant_betas(self, groups: Sequence[bool]) -> None:
        """Compute the bound sum of these groups, whose steps so far all had the betas of `_constants`."""
        if self.sums.are_constant(groups) and self.has_moments:  # else there was no step
            c = _Constants(*self._constants.index_select(1, self._row_groups))
            ratio_correction = 1 - c.ratio ** self.step_count.double()
            self.sums.end_constant(groups, c.bound_factor * c.bound_factor * (ratio_correction / c.one_minus_ratio))

    @torch.no_grad()
    def digest(self, param_groups: Sequence[dict[str, Any]]) -> Tensor:
        """Return float32 [24] of zeros and ones, on the device, from the groups' numbers except tensors."""
        self._update_constants(param_groups)
        return self._digest

    def _update_constants(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Copy constants to the device when a number has changed; a learning rate that is a tensor is read there."""
        host = [_numbers_of(group) for group in param_groups]
        if host != self._host_numbers:
            for group in param_groups:
                check_betas(*group["betas"])
            if self._host_numbers:
                pairs = zip(self._host_numbers, host, strict=True)
                self._end_constant_betas([old[_BETAS] != new[_BETAS] for old, new in pairs])
            # In float32, as the step has them: libraries of two hosts may differ in the last bit of a cosine.
            checksum = zlib.crc32(torch.tensor(host, dtype=torch.float32).numpy().tobytes())
            bits = [float(checksum >> place & 1) for place in range(_DIGEST_BITS)]
            rows = zip(*(_constants_of(numbers, decoupled=self.decoupled) for numbers in host), strict=True)
            packed = torch.tensor([*bits, *itertools.chain.from_iterable(rows)], dtype=torch.float64)
            if self.device.type == "cuda":
                packed = packed.pin_memory()
            packed = packed.to(self.device, non_blocking=True)
            self._digest = packed[:_DIGEST_BITS].float()
            self._constants = packed[_DIGEST_BITS:].view(-1, len(host))
            self._host_numbers = host
        rates = {index: group["lr"] for index, group in enumerate(param_groups) if isinstance(group["lr"], Tensor)}
        if rates:
            c = _Constants(*self._constants)
            for index, lr in rates.items():
                c.lr[index].copy_(lr.reshape(()), non_blocking=True)
            if self.decoupled:
                c.decay.copy_(1 - c.lr * c.weight_decay)


def _numbers_of(group: dict[str, Any]) -> tuple[float, ...]:
    lr = 0.0 if isinstance(group["lr"], Tensor) else float(group["lr"])
    return lr, *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"])


def _constants_of(numbers: tuple[float, ...], *, decoupled: bool) -> list[float]:
    """Return the constants in the order of `_Constants`, each operation in float64, as on the device."""
    lr, beta1, beta2, eps, weight_decay = numbers
    ratio = beta1 * beta1 / beta2
    bound_factor = (1 - beta1) / math.sqrt(1 - beta2)
    decay = 1 - lr * weight_decay if decoupled else weight_decay
    of_betas = [beta1, beta2, ratio, 1 - beta1, 1 - beta2, 1 - ratio, bound_factor]
    return [*of_betas, lr, eps, weight_decay, decay, 0.0]

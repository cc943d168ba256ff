"""AdamCore: one Adam step over all shards, for whoever owns the gradients (a torch optimizer, or ZeRO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics.moments import GROUP
from fp8_ds.numerics.predicted import BoundSums, PredictedScales
from fp8_ds.ops.adamw import AdamShard, AdamStep, Hyper, StepInputs, prepare
from fp8_ds.ops.adamw.dense import has_moments, read_dense, write_dense
from fp8_ds.ops.adamw.hyper import HyperRows
from fp8_ds.ops.step_cache import StepCache

_CYCLES_BETAS = "max_momentum"
"""Key of a group whose beta1 is changed by one of torch's schedulers (CyclicLR, OneCycleLR)."""


@dataclass
class FlatBuffer:
    """A tensor that the optimizer sees as one parameter, and the shards it is made of; gaps are padding.

    Args:
        row: index of its hyperparameters and of its step count.
        numel: elements, padding included.
        pieces: the shards, and which of its elements they are.
    """

    row: int
    numel: int
    pieces: list[tuple[ShardRange, AdamShard]]

    @property
    def shards(self) -> list[AdamShard]:
        return [shard for _, shard in self.pieces]

    def split(self, x: Tensor) -> list[tuple[AdamShard, Tensor]]:
        """Return the shards that are not empty, each with a view of its elements of `x` ([numel])."""
        return [(shard, elements.narrow(x)) for elements, shard in self.pieces if shard.numel]


def dense_flat(flat: FlatBuffer, key: str | None, scale_inv: Tensor | None, device: torch.device | str) -> Tensor:
    """Return float32 [flat.numel] on `device`, with zeros in the padding."""
    out = torch.zeros(flat.numel, dtype=torch.float32, device=device)
    for shard, own in flat.split(out):
        read_dense(shard, key, own, scale_inv)
    return out


def absorb_flat(flat: FlatBuffer, key: str | None, value: Tensor, scale_inv: Tensor | None) -> None:
    """Quantise a dense float32 [flat.numel] into the shards of `flat`."""
    for shard, own in flat.split(value):
        write_dense(shard, key, own, scale_inv)


def virtual_flat(numel: int, device: torch.device | str) -> Tensor:
    """Make a float32 leaf of `numel` elements in the memory of one, in the place of DeepSpeed's flat masters.

    Reading it gives NaN; writing it raises, as into any expanded tensor.
    """
    return torch.full((1,), float("nan"), dtype=torch.float32, device=device).expand(numel).requires_grad_()


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
        self.hyper = HyperRows(row_groups, device, decoupled)
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
    def sums(self) -> BoundSums:
        """The sums that bound updates of rows whose betas have changed."""
        return self.hyper.sums

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
        self._set_hyper(param_groups)  # first: it may raise, and nothing has changed then
        self.allocate()
        self._prepared.next_step()
        skip = self._no_skip if skip is None else skip
        taken = skip == 0
        steps = taken if moves is None else (taken & moves)
        self.step_count += steps
        hyper = self.hyper.rows(self.step_count, steps)
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
        self._set_hyper(param_groups)
        cycles = [_CYCLES_BETAS in group for group in param_groups]
        self.hyper.end_constant_betas(cycles, self.step_count, lambda: self.has_moments)

    @torch.no_grad()
    def digest(self, param_groups: Sequence[dict[str, Any]]) -> Tensor:
        """Return float32 [24] of zeros and ones, on the device, from the groups' numbers except tensors."""
        self._set_hyper(param_groups)
        return self.hyper.digest

    def _set_hyper(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.hyper.set(param_groups, self.step_count, lambda: self.has_moments)

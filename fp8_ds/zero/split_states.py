"""Masters of a ZeRO optimizer, as far as they are the same in all stages.

`Masters` is the interface: what masters in float32 do, which are DeepSpeed's. `SplitStates` are FP8 masters and
moments: scales, update, dense form. DeepSpeed's flat masters are tensors of no size then (`virtual_flat`), except
inside `dense`, for loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

from fp8_ds.comm.collectives import max_reduce, reduced_amaxes
from fp8_ds.comm.host_copy import OverflowFlag
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.weight_quantizer import WeightQuantizer
from fp8_ds.numerics.masters import BY_NAME, MasterFormat
from fp8_ds.numerics.new_masters import SplitQuantizer
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import is_exact, write_first
from fp8_ds.ops.squares import SumOfSquares
from fp8_ds.optim.core import AdamCore, FlatBuffer, absorb_flat, dense_flat, virtual_flat
from fp8_ds.zero.norm import HyperparameterCheck, clip_factor, global_norm, overflow_flag
from fp8_ds.zero.stage import Fp8Context, ZeroHost

_MOVED = {OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params}


class Masters:
    """Interface of a stage's masters; what is here is done by masters in float32, of which most is DeepSpeed's.

    Attributes:
        scales: those of the FP8 weights.
        is_dense: whether DeepSpeed's flat masters hold the values.
        states: FP8 states, or None.
    """

    scales: WeightQuantizer | SplitQuantizer
    states: SplitStates | None = None

    @property
    def is_dense(self) -> bool:
        return self.states is None or self.states.is_dense

    def point(self) -> None:
        """Tell who quantises where masters and bytes lie (again, after they were moved)."""
        raise NotImplementedError

    def update_bytes(self, is_step: bool) -> None:
        """Bring this rank's FP8 bytes up to date. Collective. Those of split masters, their high parts, always are."""

    def end_refresh(self, is_step: bool) -> None:
        """End what `update_bytes` began, once the weights are in place."""

    @contextmanager
    def dense(self) -> Iterator[dict[str, Tensor]]:
        """Make masters dense float32 inside the block, and quantise them on leaving. Collective.

        Yields:
            a dict to be filled with scale_inv by weight name, to store the masters with.
        """
        yield {}

    def saved(self, state: Any) -> Any:
        """Return `state`, DeepSpeed's, as a checkpoint has it."""
        return state

    def offload(self, include: Any, device: Any) -> Any:
        """Move what is not DeepSpeed's to `device`; return the states to be offloaded by DeepSpeed."""
        return include if self.states is None else self.states.offload(include, device)

    def reload(self) -> None:
        if self.states is not None:
            self.states.reload()


class SplitStates:
    """States of the optimizer `host`, whose inner optimizer is a `ZeroAdamW`.

    Args:
        names: those of the FP8 weights, in the order of the scale vectors.
        values: this rank's parts of them, in the same order. Collective.
        first: scale_inv, by index, of weights that came in FP8.

    Attributes:
        flats: the shards by flat master of DeepSpeed; filled by the stage, which then calls `manage`.
        flag: whether a step was skipped.
    """

    def __init__(
        self,
        host: ZeroHost,
        context: Fp8Context,
        names: list[str],
        values: Sequence[Tensor],
        device: torch.device,
        first: Mapping[int, Tensor],
    ) -> None:
        self._host = host
        self._context = context
        self.format: MasterFormat = BY_NAME[context.config.optimizer.master_format]
        self.flats: list[FlatBuffer] = []
        self.flag = OverflowFlag()
        self.is_dense = False
        self.names = names
        self._squares = SumOfSquares()
        self._inexact: list[str] = []
        num_extra = 0 if context.history is None else context.history.amax_local.numel()
        self.predicted = PredictedScales(len(names), device, host.dp_process_group, num_extra)
        scale_inv = torch.zeros(self.predicted.num, dtype=torch.float32, device=device)  # 0: no scale
        for index, stored in first.items():
            scale_inv[index] = stored
        amaxes = reduced_amaxes(self.predicted.num, list(enumerate(values)), host.dp_process_group, device)
        self.predicted.set(amaxes, scale_inv)
        self.scales = SplitQuantizer(self.predicted, self.format)

    @property
    def core(self) -> AdamCore:
        core: AdamCore = self._host.optimizer.core
        return core

    def manage(self, row_groups: Sequence[int], weight_rows: Sequence[int | None], device: torch.device) -> None:
        """Hand the shards of `flats` to the inner optimizer.

        Args:
            row_groups: the parameter group of each flat tensor.
            weight_rows: the flat tensor of each FP8 weight, wherever its shards are; None for a frozen one.
        """
        optimizer = self._host.optimizer
        core = AdamCore(self.flats, row_groups, self.predicted, device, optimizer.decoupled, optimizer.seed)
        core.set_weight_rows(weight_rows)
        optimizer.manage(core)
        self.alike = HyperparameterCheck(core, self._host.dp_process_group)

    def write_first(self, p: Any, shard: AdamShard, value: Tensor) -> None:
        """Encode the first master of an FP8 shard of `p` from `value`, bf16 [shard.numel]; without noise if `p` came
        in FP8."""
        is_stored = id(p) in self._context.stored
        write_first(shard, value, self.predicted, None if is_stored else self._host.optimizer.seed)
        if is_stored and not is_exact(shard, value, self.predicted):
            self._inexact.append(shard.name)

    def check_stored(self) -> None:
        """Refuse masters of weights that came in FP8 and have been rounded. Collective if there are such weights.

        Raises:
            UnsupportedError: on all ranks, if one has such a master.
        """
        if not self._context.stored:
            return
        found = torch.tensor([float(len(self._inexact))], dtype=torch.float32, device=self.predicted.amax.device)
        max_reduce(self._host.dp_process_group, found)
        if bool(found):
            names = ", ".join(self._inexact[:3]) or "those of other ranks"
            raise UnsupportedError(
                f"fp8.optimizer.master: expected a format for values of such different sizes as in {names}, which came "
                f'in FP8, got "{self.format.name}", which rounds the smallest. Set "optimizer": {{"states": "fp32"}}.'
            )

    def update(self, grads: list[Tensor], params: list[Any]) -> Tensor:
        """Launch a step of all shards, and return the norm of the gradients, float32, 0-dim. Collective.

        Args:
            grads: this rank's reduced gradients, 1-D, one per shard.
            params: the parameter of each.
        """
        host, core, history = self._host, self.core, self._context.history
        norm = global_norm(host, grads, params, self._squares, self.alike)
        skip = overflow_flag(norm)
        self.flag.send(skip)
        inputs = core.begin(host.param_groups, grad_scale=clip_factor(norm, host.clip_grad, host.loss_scale), skip=skip)
        core.run(grads, inputs)
        if history is not None:
            history.amax_local.masked_fill_(skip != 0, float("nan"))  # on all ranks: no scale follows this step
            self.predicted.extra.copy_(history.amax_local)
        core.end()
        return norm

    def end_step(self, norm: Tensor, waits: bool) -> None:
        """Update the host's numbers after a step whose flag was sent: overflow, norm, loss scale.

        Args:
            waits: whether the host waits for the step's flag; else `overflow` is that of the step before.

        Raises:
            ConfigError: the step was skipped because ranks would have stepped with different numbers.
        """
        host = self._host
        host.overflow = self.flag.resolve(waits)
        self.alike.end_step(host.param_groups, host.overflow)
        host._global_grad_norm = norm / host.loss_scale if getattr(host, "compute_grad_norm", True) else None
        host._update_scale(host.overflow)

    def is_skipped(self) -> bool:
        """Whether the host knows already that this step has changed nothing; amax histories forget it then."""
        skipped = self._host.overflow and self.flag.is_current
        if skipped and self._context.history is not None:
            self._context.history.amax_local.zero_()
        return skipped

    def end_scales(self) -> None:
        """Update the histories of activations and gradients from the step's reduced amaxes."""
        self._context.counter.num_amax_reduces += 1
        if self._context.history is not None:
            self.predicted.wait()
            self._context.history.update(self.predicted.extra)

    def bound_sums(self) -> dict[int, float]:
        """Return the sums that bound the update, by parameter group whose betas have changed; equal on all ranks."""
        self.core.follow(self._host.param_groups)
        return self.core.sums.by_group()

    def load_bound_sums(self, sums: dict[int, float]) -> None:
        """Load `bound_sums` after the moments. Steps of other groups all had the betas that were loaded."""
        self.core.follow(self._host.param_groups)
        self.core.sums.set_by_group(sums)

    @contextmanager
    def dense(self, masters: Sequence[Any], enter: Callable[[], object]) -> Iterator[dict[str, Tensor]]:
        """Make `masters`, DeepSpeed's flat ones, dense float32 on the CPU inside the block; what is put into
        `optimizer.state` stays there. On leaving, both are quantised. Collective.

        Args:
            enter: called once they are dense.

        Yields:
            a dict to be filled with scale_inv by weight name, to store the masters with.
        """
        saved: dict[str, Tensor] = {}
        self.is_dense = self._host.optimizer.is_dense = True
        try:
            for master, dense in zip(masters, self.dense_masters(), strict=True):
                master.data = dense
            enter()
            yield saved
        finally:
            self.is_dense = self._host.optimizer.is_dense = False
            self._absorb(masters, saved)

    def dense_masters(self) -> Iterator[Tensor]:
        """Yield each flat master, float32 on the CPU."""
        return (dense_flat(flat, None, self.predicted.scale_inv, "cpu") for flat in self.flats)

    def _absorb(self, masters: Sequence[Any], saved_scales: dict[str, Tensor]) -> None:
        """Quantise dense moments and masters, and free the memory of the masters. Collective.

        Frozen weights, which have no master, have no scale until the refresh that follows.
        """
        self._host.optimizer.absorb_dense(masters)
        scales = self.predicted
        sources = [
            (shard.scale_index, values)
            for flat, master in zip(self.flats, masters, strict=True)
            for shard, values in flat.split(master.detach())
            if shard.fmt.is_fp8
        ]
        device = scales.amax.device
        amaxes = reduced_amaxes(scales.num, sources, self._host.dp_process_group, device)
        values = [float(saved_scales.get(name, 0.0)) for name in self.names]
        scales.set(amaxes, torch.tensor(values, dtype=torch.float32).to(device))
        for flat, master in zip(self.flats, masters, strict=True):
            absorb_flat(flat, None, master.detach(), scales.scale_inv)
            master.data = virtual_flat(flat.numel, device).detach()

    def offload(self, include: Any, device: Any) -> set[OffloadStateTypeEnum]:
        """Move low parts and moments to `device` (pageable, one copy each); return the states left for DeepSpeed."""
        wanted = set(OffloadStateTypeEnum) if include is None else set(include)
        chosen = (wanted & _MOVED) - self._host.offloaded_states
        self._move(chosen, torch.device("cpu" if device is None else device.value))
        self._host.offloaded_states.update(chosen)
        return wanted - _MOVED

    def reload(self) -> None:
        chosen = self._host.offloaded_states & _MOVED
        self._move(chosen, torch.device(get_accelerator().current_device_name()))
        self._host.offloaded_states.difference_update(chosen)

    def _move(self, chosen: set[OffloadStateTypeEnum], device: torch.device) -> None:
        for shard in self.core.shards:
            if OffloadStateTypeEnum.optim_states in chosen:
                shard.m, shard.v = shard.m.to(device), shard.v.to(device)
                shard.m_scale_inv, shard.v_scale_inv = shard.m_scale_inv.to(device), shard.v_scale_inv.to(device)
            if OffloadStateTypeEnum.hp_params in chosen and shard.lo is not None:
                shard.lo = shard.lo.to(device)
        self.core.moved()

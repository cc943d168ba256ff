"""Common part of FP8 optimizer states in ZeRO 1, 2 and 3: construction, the update, the host's numbers, dense states.

DeepSpeed makes no dense masters, moments or gradients (`building`): it looks its optimizer classes up by name, and
finds a subclass without the state initialisation, which `Fp8StatesStage12` and `Fp8StatesStage3` replace. Seams:
fp8_ds/engine/seams.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.engine as engine_module
import deepspeed.runtime.zero.stage3 as stage3_module
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from fp8_ds.comm.collectives import max_reduce
from fp8_ds.comm.layout import OUTSTANDING_UPDATE_BYTES
from fp8_ds.errors import UnsupportedError
from fp8_ds.numerics.masters import BY_NAME, MasterFormat
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.squares import SumOfSquares
from fp8_ds.optim.states import FlatBuffer, absorb_flat, dense_flat, is_exact, write_first
from fp8_ds.optim.zero_adamw import ZeroAdamW
from fp8_ds.zero.norm import HyperparameterCheck, OverflowFlag
from fp8_ds.zero.stage import Fp8Context, offload_adam, reload_adam
from fp8_ds.zero.weights import SplitQuantizer, reduced_amaxes, virtual_flat


class Fp8States:
    """Mix-in before `Fp8ZeroStage12` or `Fp8ZeroStage3`; the class with both says where shards and masters lie.

    Attributes:
        _fp8_waits: whether the host waits for a step's flag; else `overflow` is that of the step before.
        _fp8_deepspeed_masters: DeepSpeed's flat masters, one for each of `_fp8_flats`.
    """

    optimizer: ZeroAdamW
    _fp8_flats: list[FlatBuffer]
    _fp8_is_dense = False

    def fp8_init(self: Any, context: Fp8Context) -> None:
        self._fp8_format: MasterFormat = BY_NAME[context.config.optimizer.master_format]
        self.fp8_flag = OverflowFlag()
        self._fp8_squares = SumOfSquares()
        self._fp8_inexact: list[str] = []
        super().fp8_init(context)  # type: ignore[misc]

    def _fp8_make_scales(
        self: Any, names: list[str], values: list[Tensor], device: torch.device, first: Mapping[int, Tensor]
    ) -> SplitQuantizer:
        """Make the scales of FP8 weights from this rank's parts of their `values`, in the same order.

        `first`: scale_inv, by index, of weights that came in FP8.
        """
        self._fp8_scale_names = names
        num_extra = 0 if self._fp8.history is None else self._fp8.history.amax_local.numel()
        scales = PredictedScales(len(names), device, self.dp_process_group, num_extra)
        scale_inv = torch.zeros(scales.num, dtype=torch.float32, device=device)  # 0: no scale
        for index, stored in first.items():
            scale_inv[index] = stored
        scales.set(reduced_amaxes(scales.num, list(enumerate(values)), self.dp_process_group, device), scale_inv)
        self._fp8_scales: PredictedScales = scales
        return SplitQuantizer(scales, self._fp8_format)

    def _fp8_restore_stored(self: Any) -> None:
        """Do nothing: masters of weights that came in FP8 are encoded without noise, by `_fp8_write_first`."""

    def _fp8_write_first(self: Any, p: Any, shard: AdamShard, value: Tensor) -> None:
        """Encode the master of an FP8 shard of `p` from `value`, bf16 [shard.numel]."""
        is_stored, scales = id(p) in self._fp8.stored, self._fp8_scales
        write_first(shard, value, scales, None if is_stored else self.optimizer.seed)
        if is_stored and not is_exact(shard, value, scales):
            self._fp8_inexact.append(shard.name)

    def _fp8_check_stored(self: Any) -> None:
        """Refuse masters of weights that came in FP8 and have been rounded. Collective if there are such weights.

        Raises:
            UnsupportedError: on all ranks, if one has such a master.
        """
        if not self._fp8.stored:
            return
        found = torch.tensor([float(len(self._fp8_inexact))], dtype=torch.float32, device=self._fp8_scales.amax.device)
        max_reduce(self.dp_process_group, found)
        if bool(found):
            names = ", ".join(self._fp8_inexact[:3]) or "those of other ranks"
            raise UnsupportedError(
                f"fp8.optimizer.master: expected a format for values of such different sizes as in {names}, which came "
                f'in FP8, got "{self._fp8_format.name}", which rounds the smallest. Set "optimizer": {{"states": '
                '"fp32"}.'
            )

    @functools.cached_property
    def _fp8_alike(self: Any) -> HyperparameterCheck:
        return HyperparameterCheck(self.optimizer.core, self.dp_process_group)

    def _fp8_update(self: Any, grads: list[Tensor], grad_scale: Tensor, skip: Tensor) -> None:
        core = self.optimizer.core
        inputs = core.begin(self.optimizer.param_groups, grad_scale=grad_scale, skip=skip)
        core.run(grads, inputs)
        history = self._fp8.history
        if history is not None:
            history.amax_local.masked_fill_(skip != 0, float("nan"))  # on all ranks: no scale follows this step
            core.scales.extra.copy_(history.amax_local)
        core.end()

    def _fp8_end_scales(self: Any) -> None:
        """Update the histories of activations and gradients from the step's reduced amaxes."""
        self._fp8.counter.num_amax_reduces += 1
        if self._fp8.history is not None:
            scales = self.optimizer.core.scales
            scales.wait()
            self._fp8.history.update(scales.extra)

    def _fp8_is_skipped(self: Any) -> bool:
        """Whether the host knows already that this step has changed nothing; amax histories forget it then."""
        skipped = self.overflow and self.fp8_flag.is_current
        if skipped and self._fp8.history is not None:
            self._fp8.history.amax_local.zero_()
        return skipped

    def _fp8_end_step(self: Any, norm: Tensor) -> None:
        """Update the host's numbers after a step whose flag was sent: overflow, norm, loss scale.

        Raises:
            ConfigError: the step was skipped because ranks would have stepped with different numbers.
        """
        self.overflow = self.fp8_flag.resolve(self._fp8_waits)
        self._fp8_alike.end_step(self.optimizer.param_groups, self.overflow)
        self._global_grad_norm = norm / self.loss_scale if getattr(self, "compute_grad_norm", True) else None
        self._update_scale(self.overflow)

    def fp8_bound_sums(self: Any) -> dict[int, float]:
        """Return the sums that bound the update, by parameter group whose betas have changed; equal on all ranks."""
        core = self.optimizer.core
        core.follow(self.optimizer.param_groups)
        return core.sums.by_group()

    def fp8_load_bound_sums(self: Any, sums: dict[int, float]) -> None:
        """Load `fp8_bound_sums` after the moments. Steps of other groups all had the betas that were loaded."""
        core = self.optimizer.core
        core.follow(self.optimizer.param_groups)
        core.sums.set_by_group(sums)

    @contextmanager
    def fp8_dense(self: Any) -> Iterator[dict[str, Tensor]]:
        """Make masters dense float32 on the CPU inside the block; moments put into `optimizer.state` stay there.

        On leaving, both are quantised, and in stages 1 and 2 the weights gathered. Collective. The dict may be filled
        with scale_inv by weight name, to store the masters with.
        """
        scales: dict[str, Tensor] = {}
        if self._fp8_is_dense:
            yield scales
            return
        self._fp8_is_dense = self.optimizer.is_dense = True
        try:
            for master, dense in zip(self._fp8_deepspeed_masters, self._fp8_dense_masters(), strict=True):
                master.data = dense
            self._fp8_enter_dense()
            yield scales
        finally:
            self._fp8_is_dense = self.optimizer.is_dense = False
            self._fp8_absorb(scales)

    def _fp8_enter_dense(self: Any) -> None:
        """Do nothing. Overridden where DeepSpeed holds views of masters."""

    def _fp8_dense_masters(self: Any) -> Iterator[Tensor]:
        scale_inv = self.optimizer.core.scales.scale_inv
        return (dense_flat(flat, None, scale_inv, "cpu") for flat in self._fp8_flats)

    def _fp8_absorb(self: Any, saved_scales: dict[str, Tensor]) -> None:
        """Quantise dense moments and masters, and free the memory of the masters. Collective."""
        masters = self._fp8_deepspeed_masters
        self.optimizer.absorb_dense(masters)
        core = self.optimizer.core
        scales: PredictedScales = core.scales
        sources = [
            (shard.scale_index, values)
            for flat, master in zip(self._fp8_flats, masters, strict=True)
            for shard, values in flat.split(master.detach())
            if shard.fmt.is_fp8
        ]
        device = scales.amax.device
        amaxes = reduced_amaxes(scales.num, sources, self.dp_process_group, device)
        values = [float(saved_scales.get(name, 0.0)) for name in self._fp8_scale_names]
        saved = torch.tensor(values, dtype=torch.float32).to(device)
        amaxes = torch.where(core.weight_moves, amaxes, scales.amax)  # a frozen weight has no master
        scales.set(amaxes, torch.where(core.weight_moves, saved, scales.scale_inv))
        for flat, master in zip(self._fp8_flats, masters, strict=True):
            absorb_flat(flat, None, master.detach(), scales.scale_inv)
            master.data = virtual_flat(flat.numel, device).detach()

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        with self.fp8_dense():
            super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def offload_states(self: Any, include: Any = None, device: Any = None, **kwargs: Any) -> None:
        super().offload_states(include=offload_adam(self, include, device), device=device, **kwargs)  # type: ignore[misc]

    def reload_states(self: Any, non_blocking: bool = False) -> None:
        reload_adam(self)
        super().reload_states(non_blocking=non_blocking)  # type: ignore[misc]


class BuildingHost:
    fp8_releases = False


class Building12(BuildingHost):
    """Mix-in before DeepSpeedZeroOptimizer."""

    @property
    def device(self) -> Any:
        """Device on which DeepSpeed makes its masters: meta, without memory."""
        return "meta"

    @device.setter
    def device(self, value: Any) -> None:
        self.__dict__["_fp8_device"] = value


class Building3(BuildingHost):
    """Mix-in before DeepSpeedZeroOptimizer_Stage3."""

    def initialize_optimizer_states(self) -> None:
        """Do nothing: moments come with the first step, and gradients are not copied to fp32."""

    def _setup_for_real_optimizer(self: Any) -> None:
        """Set up; with gradient release, without a buffer for all gradients and with small buckets."""
        if not self.fp8_releases:
            super()._setup_for_real_optimizer()  # type: ignore[misc]
            return
        copies = 2  # the bucket, and what the reduction concatenates
        bucket_bytes = OUTSTANDING_UPDATE_BYTES // copies
        self.reduce_bucket_size = min(self.reduce_bucket_size, bucket_bytes // self.dtype.itemsize)
        device, self.device = self.device, "meta"
        try:
            super()._setup_for_real_optimizer()  # type: ignore[misc]
        finally:
            self.device = device

    def _create_fp32_partitions(self: Any) -> None:
        device = get_accelerator().current_device_name()
        for numel, ids in zip(
            self.fp16_partitioned_groups_flat_numel, self.fp16_partitioned_groups_flat_id, strict=True
        ):
            flat: Any = virtual_flat(int(numel), device)
            flat.ds_id = f"{ids[0]}_{ids[-1]}"
            self.fp32_partitioned_groups_flat.append(flat)
        for group in self.optimizer.param_groups:
            group["params"] = []


@contextmanager
def building(releases: bool) -> Iterator[None]:
    """Let DeepSpeed build these classes instead of its own inside the block. `releases`: with gradient release."""
    places = (
        (engine_module, "DeepSpeedZeroOptimizer", Building12),
        (stage3_module, "DeepSpeedZeroOptimizer_Stage3", Building3),
    )
    original = [getattr(module, name) for module, name, _ in places]
    attributes = {"fp8_releases": releases}
    for (module, name, mixin), host in zip(places, original, strict=True):
        setattr(module, name, type(f"Building{host.__name__}", (mixin, host), attributes))
    try:
        yield
    finally:
        for (module, name, _), host in zip(places, original, strict=True):
            setattr(module, name, host)

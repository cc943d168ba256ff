"""Zero3: FP8 of one ZeRO-3 optimizer: its shards, masters, gradients and step, and who reads and writes weights.

Shards are resident in one byte, gathered in one byte, and released after use. Parameters that are not FP8 keep bf16
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.parameter import Fp8Parameter
from fp8_ds.zero.gradients import ReleasedGradientShards, ShardedGradients
from fp8_ds.zero.masters3 import FlatMasters3, Fp32Masters3, SplitMasters3
from fp8_ds.zero.param_hooks import InFlight, ZeroParamHooks
from fp8_ds.zero.release import make_release
from fp8_ds.zero.sharded import Fp8Shards, Gathered, ShardedWeight, StoredWeight
from fp8_ds.zero.stage import Fp8Context, Host3
from fp8_ds.zero.step import Step3
from fp8_ds.zero.zero import Zero


class Zero3(Zero):
    """FP8 of the optimizer `host` of stage 3. Collective, here and in all methods that gather.

    Attributes:
        flat: DeepSpeed's flat masters.
        hooks: of all parameters of the module.
        masters, shards: this rank's part of parameters, in high precision and in FP8.
        step: updates the masters.
        gradients: what happens to a gradient until then.
    """

    host: Host3

    def __init__(self, host: Host3, context: Fp8Context) -> None:
        super().__init__(host, context)
        self.flat = FlatMasters3(host)
        for p in context.weights.values():
            if p.ds_status == ZeroParamStatus.AVAILABLE:  # type: ignore[attr-defined]
                p.partition()  # type: ignore[attr-defined]
        self.masters: Fp32Masters3 | SplitMasters3 = (SplitMasters3 if self.has_states else Fp32Masters3)(
            host, context, self.flat
        )
        self.shards = self._make_shards()
        self.masters.start(self.shards)
        self.masters.point()
        self._flat_masters = host.fp32_partitioned_groups_flat
        self.hooks = [ZeroParamHooks(p, self.shards) for p in host.module.parameters() if hasattr(p, "ds_id")]
        self.refresh(is_step=False)
        states, num_parameters = self.masters.states, sum(map(len, host.fp16_groups))
        if states is not None:
            states.check_stored()
        release = None if states is None else make_release(host, context, states, num_parameters)
        self.step = Step3(host, context, states, release)
        self.gradients = ShardedGradients() if release is None else ReleasedGradientShards(host, release)

    def _make_shards(self) -> Fp8Shards:
        host, context, masters = self.host, self.context, self.masters
        in_flight = InFlight(host.module)
        shards = Fp8Shards(masters.scales, context.counter, in_flight, host.persistent_parameters, masters.write)
        index_of = {name: index for index, name in enumerate(context.quantized)}
        for name, p in context.weights.items():
            if name in index_of:
                shards.add(masters.make_weight(name, p, index_of[name]))
            else:
                shards.add(StoredWeight(name, p, context.stored[id(p)]))
        self.flat.shards = shards
        return shards

    @torch.no_grad()
    def refresh(self, is_step: bool) -> None:
        """Update the shards from the masters, unless it `is_held`: quantise, copy bf16. Later gathers wait for them."""
        if self.is_held:
            return
        self.masters.update_bytes(is_step)
        self.shards.refresh_bf16()
        self.masters.end_refresh(is_step)

    @torch.no_grad()
    def set_bf16(self, names: Collection[str]) -> None:
        """Give the weights `names`, and no others, bf16 shards that DeepSpeed gathers; release gathered ones."""
        for weight in self.shards.weights:
            wanted = weight.payload.name in names
            if wanted == weight.in_bf16:
                continue
            if weight.gathered in (Gathered.UNSHARDED_FP8, Gathered.UNSHARDED_BF16):
                weight.param.partition()
            # Gathered in bf16 it is as DeepSpeed has it: no look at it is to go through our class.
            weight.param.__class__ = nn.Parameter if wanted else Fp8Parameter
            weight.set_bf16(wanted)
        self.shards.mark_ready()

    def post_step(self, original: Callable[[Any], None], timer_names: Any) -> None:
        """End a step that was not skipped: new FP8 shards, then DeepSpeed gathers persistent parameters.

        Raises:
            UnsupportedError: the optimizer has other masters than those of the FP8 weights; on all ranks.
        """
        if self.host.fp32_partitioned_groups_flat is not self._flat_masters:
            raise UnsupportedError(
                f"{type(self.host.optimizer).__name__}: expected to find the masters of the start, got others, which "
                "it has made for other weights (BAdam does when it goes on to the next block): FP8 weights would not "
                'follow them. Train with LoRA, or all weights with "fp8": {"optimizer": {"states": "fp8"}}.'
            )
        self.refresh(is_step=True)
        original(timer_names)
        self.context.counter.end_step()

    def copy_masters(self, original: Callable[[int], None], sub_group: int) -> None:
        """Copy the masters of an updated sub-group to its bf16 shards, for parameters that have one."""
        if self.flat.is_live:
            original(sub_group)
        elif self.masters.is_dense:
            self.flat.copy_masters(sub_group)

    def end_dense(self) -> None:
        """Gather persistent parameters again from the shards: a load has them from dense masters. Collective."""
        stale = [p for p in self.host.persistent_parameters if p.ds_status == ZeroParamStatus.AVAILABLE]
        for p in stale:
            p.partition()
        if stale:
            stale[0].all_gather_coalesced(stale).wait()

    def load_state_dict(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Load as DeepSpeed does, then quantise."""
        with self.dense():
            with self.flat.restored():
                original(*args, **kwargs)
            self.refresh(is_step=False)
        if self.step.adam is not None:
            self.step.adam.forget_counts()

    def restore_masters(self) -> None:
        """Set masters from the model's weights, where these are the newer (a module-only load)."""
        with self.dense():
            self.flat.take_weights()
            if not self.flat.is_live:  # else who loads refreshes
                self.refresh(is_step=False)

    def offload(self, original: Callable[..., None], include: Any, device: Any, **kwargs: Any) -> None:
        super().offload(original, self.gradients.offload(include), device, **kwargs)

    def move(self, device: torch.device) -> None:
        """Move FP8 and bf16 shards to `device`."""
        self.shards.move(device)
        for p in self.shards.fetched_in_bf16(self.flat.params):
            p.ds_tensor.data = p.ds_tensor.data.to(device)

    @contextmanager
    def export(self, wanted: bool, with_frozen: bool | None = None) -> Iterator[None]:
        """Give frozen weights that have none bf16 shards inside the block, unless `with_frozen` is false: DeepSpeed's
        checkpoints hold them in the place of masters. Its exports of ZeRO-3 gather bf16 of the masters by themselves.
        """
        with self.shards.bf16_shards([] if with_frozen is False else self._frozen_without_bf16()):
            yield

    @contextmanager
    def load(self) -> Iterator[None]:
        """Let DeepSpeed write bf16 shards of frozen weights that have none, inside the block. Collective."""
        frozen = self._frozen_without_bf16()
        with self.shards.bf16_shards(frozen):
            yield
            if frozen:
                self.shards.absorb(frozen)

    def _frozen_without_bf16(self) -> list[ShardedWeight]:
        """Return the frozen FP8 weights without a bf16 shard: those with masters, which a user has frozen in the middle
        of the run, and those that came in FP8. Equal on all ranks."""
        frozen = (weight for weight in self.shards.weights if not weight.param.requires_grad)
        return [weight for weight in frozen if weight.is_trainable or weight.is_stored]

    def resident_bytes(self) -> dict[str, int]:
        """Return this rank's bytes outside a forward or backward: FP8 shards, bf16 shards, persistent weights."""
        parameters: list[Any] = [p for p in self.host.module.parameters() if hasattr(p, "ds_id")]
        bf16 = {p.ds_tensor.untyped_storage().data_ptr(): p.ds_tensor.untyped_storage().nbytes() for p in parameters}
        persistent = sum(
            p.ds_numel * (p.element_size() if self.shards.get(p) is None else 1)
            for p in parameters
            if p.ds_persist and p.ds_status == ZeroParamStatus.AVAILABLE
        )
        return {
            "fp8": self.shards.buffer.numel(),
            "hp": sum(bf16.values()),
            "persistent": persistent,
            "num_fp8_weights": sum(weight.param.ds_numel for weight in self.shards.weights),
        }

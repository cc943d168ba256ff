"""Masters of ZeRO-3: `Fp32Masters3`, DeepSpeed's own, and `SplitMasters3`, whose high parts are the FP8 shards.

Both have the same methods, so that nobody else asks which one it is. The masters are the only high-precision copy: the
bf16 shard of an FP8 weight is made from its master when DeepSpeed reads it, and dropped again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp8_ds.comm.collectives import reduced_amaxes
from fp8_ds.comm.layout import ShardRange
from fp8_ds.errors import UnsupportedError
from fp8_ds.numerics.masters import BF16_8
from fp8_ds.numerics.new_masters import SplitQuantizer, weight_id
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import MOMENTS, allocate_lo, read_dense, write_dense
from fp8_ds.optim.core import FlatBuffer
from fp8_ds.zero.flat_masters import FlatMasters3
from fp8_ds.zero.host import Host3
from fp8_ds.zero.sharded import Fp8Shards, ShardedWeight, own_elements
from fp8_ds.zero.split_states import Masters, SplitStates
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.weights import Part, WeightQuantizer

Original = Callable[..., Any]


class Fp32Masters3(Masters):
    """Masters of which the shards are quantised in each step. Collective.

    Attributes:
        write: makes values that users write the masters; None: they hold until the next step.
    """

    write = None
    scales: WeightQuantizer

    def __init__(self, host: Host3, context: Fp8Context, flat: FlatMasters3) -> None:
        self._context = context
        self._flat = flat
        weights = list(context.quantized.values())
        self.scales = WeightQuantizer(
            host.dp_process_group,
            [p.ds_shape for p in weights],  # type: ignore[attr-defined]
            context.granularity,
            flat.device,
            context.history,
            context.counter,
            context.first_scales(weights),
        )

    def make_weight(self, name: str, p: Any, index: int) -> ShardedWeight:
        return ShardedWeight(name, p, index, self.scales)

    def start(self, shards: Fp8Shards) -> None:
        """Restore masters of weights that came in FP8, and make the buffer of FP8 shards."""
        self._shards = shards
        self._flat.restore_stored(self._context.stored)
        self._flat.drop(remake=True)  # before the FP8 bytes exist: initialize holds no more than DeepSpeed's own
        shards.allocate(self._flat.device)

    def point(self) -> None:
        parts = []
        for weight in self._shards.weights:
            if not weight.is_stored:
                weight.point(self._flat.master(weight.param) if weight.is_trainable else weight.bf16)
                parts.append(Part(weight.source, weight.own_bytes, weight.elements.start))
        self.scales.set_parts(parts)

    def write_weights(self, is_step: bool) -> bool:
        self.scales.refresh(is_step)
        return True

    def read_partition(self, original: Original, param: Any, release: bool, key: str | None) -> tuple[Tensor, int]:
        """Return this rank's part of the master (key None) or a moment, padded, and its sub-group."""
        found: tuple[Tensor, int] = original(param, release, key)
        return found

    def set_full(self, original: Original, value: Tensor, param: Any, key: str | None) -> None:
        """Set the master (key None) or a moment to `value`, whole on every rank."""
        original(value, param, key)

    def set_local(self, original: Original, value: Tensor, param: Any, key: str | None) -> None:
        """Set this rank's part of the master (key None) or a moment to `value`, padded."""
        original(value, param, key)


class SplitWeight(ShardedWeight):
    """An FP8 weight whose shard is the high part of its masters.

    Attributes:
        state: masters and moments; None for a frozen weight, and where this rank has no element.
    """

    state: AdamShard | None = None

    def __init__(self, name: str, param: Any, index: int, states: SplitStates) -> None:
        super().__init__(name, param, index, states.scales)
        self._scale_inv = states.predicted.scale_inv

    @property
    def source(self) -> Tensor:
        """Decoded masters, float32 [elements.numel], in a new tensor; the bf16 shard of a frozen weight."""
        if self.state is None:
            return self.bf16
        out = torch.empty(self.state.numel, dtype=torch.float32, device=self.state.hi.device)
        self.read_source(out)
        return out

    def read_source(self, out: Tensor) -> None:
        if self.state is None:
            out.copy_(self.bf16)
        else:
            read_dense(self.state, None, out, self._scale_inv)


class SplitMasters3(Masters):
    """Masters in FP8 states. Arguments and methods: see `Fp32Masters3`.

    The FP8 shard of a weight is the high part of this rank's masters, the low part lies beside the moments, and
    DeepSpeed's flat masters are tensors of no size (`virtual_flat`).
    """

    states: SplitStates
    scales: SplitQuantizer

    def __init__(self, host: Host3, context: Fp8Context, flat: FlatMasters3) -> None:
        self._host = host
        self._flat = flat
        weights: dict[str, Any] = context.quantized
        values = [p.ds_tensor.data[: own_elements(p).numel] for p in weights.values()]
        first = context.first_scales(weights.values())
        self.states = SplitStates(host, context, list(weights), values, flat.device, first)
        self.scales = self.states.scales
        self._shard_of: dict[int, AdamShard] = {}  # by id of a Parameter

    def make_weight(self, name: str, p: Any, index: int) -> ShardedWeight:
        return SplitWeight(name, p, index, self.states)

    def start(self, shards: Fp8Shards) -> None:
        """Encode masters from the bf16 shards, then drop these. Weights that came in FP8 are encoded without noise."""
        self._shards = shards
        shards.allocate(self._flat.device)
        self._manage()
        for p in self._flat.params:
            shard = self._shard_of.get(id(p))
            if shard is not None:
                allocate_lo(shard, self._flat.device)
                if shard.fmt.is_fp8:
                    self.states.write_first(p, shard, p.ds_tensor.data[: shard.numel])
        self._flat.drop()

    def _manage(self) -> None:
        """Make the shards of masters and moments, and hand them to the inner optimizer."""
        host, rows = self._host, []
        for i, group in enumerate(host.fp16_groups):
            flat = FlatBuffer(i, int(host.fp16_partitioned_groups_flat_numel[i]), [])
            for p in group:
                elements = own_elements(p)
                if elements.numel:
                    _, start = self._flat.place(p)
                    place = ShardRange(start, start + elements.numel)
                    flat.pieces.append((place, self._make_shard(p, i, elements)))
            self.states.flats.append(flat)
            rows.append(host.sub_group_to_group_id[i])
        row_of = {id(p): i for i, group in enumerate(host.fp16_groups) for p in group}
        weight_rows = [row_of.get(id(w.param)) for w in self._shards.weights if not w.is_stored]
        self.states.manage(rows, weight_rows, self._shards.buffer.device)

    def _make_shard(self, p: Any, row: int, elements: ShardRange) -> AdamShard:
        name, weight = self._host.param_names[p], self._shards.get(p)
        fmt, index = (BF16_8, 0) if weight is None else (self.states.format, weight.index)
        hi = self._high(p, elements.numel)
        shard = AdamShard(name, elements.numel, elements.start, weight_id(name), row, index, fmt, hi)
        self._shard_of[id(p)] = shard
        if isinstance(weight, SplitWeight):
            weight.state = shard
        return shard

    def _high(self, p: Any, numel: int) -> Tensor:
        """Return where the high parts of this rank's masters of `p` lie: FP8 bytes, or bf16."""
        weight = self._shards.get(p)
        high: Tensor = p.ds_tensor.data if weight is None else weight.shard.view(torch.uint8)
        return high[:numel]

    def point(self) -> None:
        for p in self._flat.params:
            if (shard := self._shard_of.get(id(p))) is not None:
                shard.hi = self._high(p, shard.numel)
        self.states.core.moved()

    def write_weights(self, is_step: bool) -> bool:
        """Return whether there is anything new: the shards are the masters already, but dense ones."""
        return not self.is_dense

    def end_refresh(self, is_step: bool) -> None:
        """Update amax histories after a step; else quantise frozen weights. Collective."""
        if is_step:
            self.states.end_scales()
            return
        frozen = [weight for weight in self._shards.weights if not (weight.is_trainable or weight.is_stored)]
        if frozen:
            self._shards.absorb(frozen)

    @torch.no_grad()
    def write(self, weights: list[ShardedWeight], values: list[Tensor]) -> None:
        """Set the masters of FP8 weights to `values` (1-D, this rank's), with scales to fit. Collective."""
        scales = self.states.predicted
        sources = [(weight.index, value) for weight, value in zip(weights, values, strict=True)]
        amaxes = reduced_amaxes(scales.num, sources, self._host.dp_process_group, scales.amax.device)
        for weight, value in zip(weights, values, strict=True):
            self.scales.rescale(weight.index, amaxes[weight.index])
            shard = self._shard_of.get(id(weight.param))
            if shard is None:
                continue
            write_dense(shard, None, value, scales.scale_inv)
            if self.is_dense:  # the dense masters will be quantised in the end
                self._flat.master(weight.param).copy_(value)

    @contextmanager
    def dense(self) -> Iterator[dict[str, Tensor]]:
        """Make masters dense on the CPU."""
        with self.states.dense(self._host.fp32_partitioned_groups_flat, lambda: None) as saved:
            try:
                yield saved
            finally:
                self.point()

    def saved(self, state: Any) -> Any:
        """Return `state` with dense float32 masters on the CPU; the inner optimizer has put dense moments there."""
        return {**state, "fp32_flat_groups": list(self.states.dense_masters())}

    def read_partition(self, original: Original, param: Any, release: bool, key: str | None) -> tuple[Tensor, int]:
        """Return a de-quantised copy; writing into it changes nothing."""
        core, shard = self.states.core, self._shard_of.get(id(param))
        if key is not None and (key not in MOMENTS or not core.has_moments):
            raise KeyError(key)
        out = torch.zeros(param.ds_tensor.ds_numel, dtype=torch.float32, device=core.device)
        if shard is not None:
            read_dense(shard, key, out[: shard.numel], core.scales.scale_inv)
        return out, self._flat.place(param)[0]

    @torch.no_grad()
    def set_full(self, original: Original, value: Tensor, param: Any, key: str | None) -> None:
        if not param.requires_grad:
            return
        assert value.numel() == param.ds_numel, f"expected {param.ds_numel} elements, got {value.numel()}"
        weight, shard = self._shards.get(param), self._shard_of.get(id(param))
        if key is None and weight is not None:
            self.scales.rescale(weight.index, self.scales.amax_of(weight.index, value.reshape(-1)))
            if weight.payload.data is not None:
                param.partition()  # it was gathered by the scale before
        if shard is not None:
            self._write_state(shard, key, value.detach().reshape(-1).narrow(0, shard.start, shard.numel))

    @torch.no_grad()
    def set_local(self, original: Original, value: Tensor, param: Any, key: str | None) -> None:
        if not param.requires_grad:
            return
        expected = param.ds_tensor.ds_numel
        assert value.numel() == expected, f"expected {expected} elements, got {value.numel()}"
        shard = self._shard_of.get(id(param))
        if shard is None:
            return
        piece = value.detach().reshape(-1)[: shard.numel]
        if key is None and shard.fmt.is_fp8:
            self.states.predicted.wait()
            limit, largest = float(self.states.predicted.amax[shard.scale_index]), float(piece.abs().max())
            if not largest <= limit:
                raise UnsupportedError(
                    f"safe_set_local_fp32_param: expected magnitudes up to {limit:.8g} for {shard.name}, those that "
                    f"its ranks have chosen one FP8 scale for, got {largest:.8g}. Use safe_set_full_fp32_param on all "
                    "ranks."
                )
        self._write_state(shard, key, piece)

    def _write_state(self, shard: AdamShard, key: str | None, value: Tensor) -> None:
        if key is not None:
            if key not in MOMENTS:
                raise KeyError(key)
            self.states.core.allocate()
        write_dense(shard, key, value, self.states.predicted.scale_inv)
        self._shards.mark_ready()

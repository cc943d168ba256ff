"""Masters of ZeRO-3: `Fp32Masters3`, DeepSpeed's own, and `SplitMasters3`, whose high parts are the FP8 shards.

Both have the same methods, so that nobody else asks which one it is. The masters are the only high-precision copy: the
bf16 shard of an FP8 weight is made from its master when DeepSpeed reads it, and dropped again. A user's write into one
with a float32 master holds until the next step, in a bf16 shard that stays until then.

`FlatMasters3`: DeepSpeed's flat tensors of masters and bf16 shards, by parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fp8_ds.comm.collectives import reduced_amaxes
from fp8_ds.comm.layout import ShardRange
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.weight_quantizer import Part, WeightQuantizer
from fp8_ds.numerics.masters import BF16_8
from fp8_ds.numerics.new_masters import SplitQuantizer, newer, weight_id
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import MOMENTS, allocate_lo, read_dense, write_dense
from fp8_ds.optim.core import FlatBuffer
from fp8_ds.zero.sharded import Bf16Shard, Fp8Shards, ShardedWeight, own_elements
from fp8_ds.zero.split_states import Masters, SplitStates
from fp8_ds.zero.stage import Fp8Context, Host3

Original = Callable[..., Any]


class FlatMasters3:
    """Flat masters and bf16 shards of the optimizer `host`, by parameter.

    Attributes:
        device: of the masters, at the start.
        is_live: whether DeepSpeed's flat bf16 buffer exists. Without it, parameters that are not FP8 have bf16 shards
            of their own.
        shards: the FP8 weights; set once they are made.
    """

    shards: Fp8Shards

    def __init__(self, host: Host3) -> None:
        self._host = host
        self.device: torch.device = host.fp32_partitioned_groups_flat[0].device
        self.is_live = True
        self._places: dict[int, tuple[int, int]] = {}  # by id
        for i, group in enumerate(host.fp16_groups):
            starts = accumulate((p.ds_tensor.ds_numel for p in group), initial=0)
            self._places.update((id(p), (i, start)) for p, start in zip(group, starts, strict=False))

    @property
    def params(self) -> Iterator[Any]:
        return (p for group in self._host.fp16_groups for p in group)

    def place(self, p: Any) -> tuple[int, int]:
        """Return the sub-group of a trainable parameter, and where its shard starts in the flat master."""
        return self._places[id(p)]

    def master(self, p: Any, padded: bool = False) -> Tensor:
        """Return this rank's masters of `p` in the flat tensor, a view, 1-D; without padding unless it is asked for."""
        group, start = self._places[id(p)]
        numel = p.ds_tensor.ds_numel if padded else own_elements(p).numel
        flat: Tensor = self._host.fp32_partitioned_groups_flat[group].detach()
        return flat.narrow(0, start, numel)

    @torch.no_grad()
    def restore_stored(self, stored: Any) -> None:
        """Make masters of weights that came in FP8, `stored` by id, their codes times scales: bf16 has rounded them."""
        for p in self.params:
            if id(p) in stored:
                stored[id(p)].restore_(self.master(p), own_elements(p).start)

    def copy_masters(self, group: int) -> None:
        """Copy the masters of a sub-group to its bf16 shards, for parameters that are not FP8."""
        params = self._host.fp16_groups[group]
        flat = self._host.fp32_partitioned_groups_flat[group].detach()
        pairs = zip(params, flat.split([p.ds_tensor.ds_numel for p in params]), strict=False)
        found = [(p.ds_tensor.data, master) for p, master in pairs if self.shards.get(p) is None]
        if found:
            torch._foreach_copy_([bf16 for bf16, _ in found], [master for _, master in found])

    def drop(self, remake: bool = False) -> None:
        """Put a meta tensor in place of the flat bf16 buffer; parameters that are not FP8 get their own bf16 shards.

        Args:
            remake: whether to make these from the masters after the flat buffer is freed; else they are copied.
        """
        host = self._host
        others = [p for p in self.params if self.shards.get(p) is None]
        for p in others:
            p.ds_tensor.data = p.ds_tensor.data.new_empty(0) if remake else p.ds_tensor.data.clone()
        for i, flat in enumerate(host.fp16_partitioned_groups_flat):
            host.fp16_partitioned_groups_flat[i] = torch.empty(flat.numel(), dtype=flat.dtype, device="meta")
        for weight in self.shards.weights:
            if not weight.keeps_bf16:
                weight.drop_bf16()
            elif weight.in_bf16:
                weight.param.ds_tensor.data = weight.param.ds_tensor.data.clone()
        # On its own device: masters are on the CPU in a load of FP8 states.
        host.lp_param_buffer = host.lp_param_buffer.new_empty(0)
        self.is_live = False
        for p in others if remake else ():
            p.ds_tensor.data = self.master(p, padded=True).to(p.dtype)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore DeepSpeed's flat bf16 buffer inside the block, filled from the masters."""
        host = self._host
        numels = [flat.numel() for flat in host.fp16_partitioned_groups_flat]
        host.lp_param_buffer = host.lp_param_buffer.new_empty(sum(numels))
        for i, flat in enumerate(host.lp_param_buffer.split(numels)):
            flat.copy_(host.fp32_partitioned_groups_flat[i].detach())
            host.fp16_partitioned_groups_flat[i] = flat
            pieces = flat.split([p.ds_tensor.ds_numel for p in host.fp16_groups[i]])
            for p, piece in zip(host.fp16_groups[i], pieces, strict=True):
                p.ds_tensor.data = piece
        self.is_live = True
        try:
            yield
        finally:
            self.drop()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Set masters from bf16 shards where these are the newer; a weight that nobody wrote keeps its precision."""
        for p in self.params:
            weight = self.shards.get(p)
            if weight is None:
                master, written = self.master(p, padded=True), p.ds_tensor.data
            elif self.is_live or weight.bf16_shard is Bf16Shard.WRITTEN:
                master, written = self.master(p), weight.bf16
            else:
                continue
            master.copy_(newer(master, written.to(master.device)))


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

    def update_bytes(self, is_step: bool) -> None:
        self.scales.requantize(is_step)

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

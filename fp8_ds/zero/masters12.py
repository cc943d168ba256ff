"""Masters of ZeRO-1 and 2: `Fp32Masters12`, DeepSpeed's own, and `SplitMasters12`, whose high parts are the weights.

Both have the same methods, so that nobody else asks which one it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from torch import Tensor

from fp8_ds.comm.gather import CompactBuffer
from fp8_ds.comm.layout import ShardRange
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.nn.linear.weight_quantizer import Part, WeightQuantizer
from fp8_ds.numerics.masters import BF16_8
from fp8_ds.numerics.new_masters import SplitQuantizer, overwrite, weight_id, write_first_codes
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import MOMENTS, allocate_lo, read_dense, write_dense, write_low
from fp8_ds.optim.core import FlatBuffer, virtual_flat
from fp8_ds.zero.flat_weights import FlatMasters12, GroupWeights, Place
from fp8_ds.zero.split_states import Masters, SplitStates
from fp8_ds.zero.stage import Fp8Context, Host12


class Fp32Masters12(Masters):
    """Masters of which the bytes are quantised in each step.

    Args:
        flat: DeepSpeed's, and what users write.
        params: the FP8 weights, in the order of the scale vectors, before their buffers are made.

    Attributes:
        needs_bf16: whether `encode` reads the bf16 weights; else these are freed before FP8 bytes are made.
    """

    needs_bf16 = False
    scales: WeightQuantizer

    def __init__(self, host: Host12, context: Fp8Context, flat: FlatMasters12, params: Sequence[Any]) -> None:
        self._context = context
        self._flat, self._weights = flat, flat.weights
        self._is_loading = False
        self.scales = WeightQuantizer(
            host.dp_process_group,
            [p.shape for p in params],
            context.granularity,
            host.bit16_groups_flat[0].device,
            context.history,
            context.counter,
            context.first_scales(params),
        )

    def encode(self, i: int, flat: Tensor | None, group: GroupWeights) -> None:
        """Do nothing: the first refresh makes the FP8 bytes."""

    def start(self) -> None:
        """Restore masters of weights that came in FP8, and tell the quantiser where all lie."""
        self._flat.restore_stored(self._context.stored)
        self.point()

    def link(self) -> None:
        """Do nothing: DeepSpeed's fragments link parameters to masters and moments."""

    def point(self) -> None:
        parts: list[Part | None] = []
        for place in self._weights.places:
            f = self._weights.own(place)
            if f is None:
                parts.append(None)
                continue
            master, bytes_ = self._flat.partition(place.group), self._weights.groups[place.group].fp8.buffer
            parts.append(Part(f.in_partition.narrow(master), f.in_buffer.narrow(bytes_), f.in_tensor.start))
        self.scales.set_parts(parts)

    def update_bytes(self, is_step: bool) -> None:
        """Quantise this rank's masters, and copy those of bf16 parameters, before a gather. Collective."""
        self.scales.requantize(is_step)
        for i, group in enumerate(self._weights.groups):
            group.hp.copy_own(self._flat.partition(i))

    def fill_bf16(self, i: int, bf16: CompactBuffer) -> None:
        """Fill this rank's elements of the weights of group `i` that compute in bf16."""
        bf16.copy_own(self._flat.partition(i))

    def read(self, place: Place, full: Tensor) -> None:
        """Fill this rank's elements of `full`, 1-D, with the master of an FP8 weight."""
        self._flat.read(place, full)

    def write(self, place: Place, flat: Tensor) -> None:
        """Write `flat` (1-D, whole, on all ranks) into an FP8 weight; inside `load` it is its master, too."""
        if not self._is_loading:
            self._flat.keep_written(place, flat)
        write_bytes(self.scales, self._weights.payload(place), place.slot, flat)
        if self._is_loading:
            self._flat.set(place, flat)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Make values written into FP8 weights inside the block their masters, bit for bit. At the end the other
        parameters' values become their masters: a model is loaded as a whole."""
        self._is_loading = True
        try:
            yield
            self._weights.point_params(keep_values=True)
            self._flat.take_hp()
        finally:
            self._is_loading = False


def write_bytes(scales: WeightQuantizer | SplitQuantizer, payload: Fp8Payload, slot: int, flat: Tensor) -> None:
    """Quantise `flat` (1-D) to the bytes of a weight, by a scale of its own at `slot`, and to its bf16, if any."""
    assert payload.data is not None
    scales.rescale(slot, scales.amax_of(slot, flat))
    scales.quantize_into(payload.data.view(-1), flat, slot)
    if payload.hp is not None:
        payload.hp.view(-1).copy_(flat)


class SplitMasters12(Masters):
    """Masters in FP8 states. Arguments, attributes and methods: see `Fp32Masters12`."""

    needs_bf16 = True
    states: SplitStates
    scales: SplitQuantizer

    def __init__(self, host: Host12, context: Fp8Context, flat: FlatMasters12, params: Sequence[Any]) -> None:
        self._host = host
        self._context = context
        self._flat, self._weights = flat, flat.weights
        self._is_loading = False
        self._names = {id(p): name for p, name in host.param_names.items()}
        names, values = [self._names[id(p)] for p in params], [p.data for p in params]
        device, first = host.bit16_groups_flat[0].device, context.first_scales(params)
        self.states = SplitStates(host, context, names, values, device, first)
        self.scales = self.states.scales

    def encode(self, i: int, flat: Tensor | None, group: GroupWeights) -> None:
        """Encode this rank's fragments of group `i` from `flat` (bf16), and all bytes of its FP8 weights."""
        assert flat is not None
        fp8, first = group.fp8, sum(len(other.fp8.params) for other in self._weights.groups)
        predicted, seed = self.states.predicted, self._host.optimizer.seed
        for index, (p, place) in enumerate(zip(fp8.params, fp8.layout.in_flat, strict=True)):
            codes = fp8.view(index).view(torch.uint8).view(-1)
            own_seed, number = None if id(p) in self._context.stored else seed, weight_id(self._names[id(p)])
            write_first_codes(codes, place.narrow(flat), self.states.format, predicted, first + index, own_seed, number)
        size = int(self._host.partition_size[i])
        own = FlatBuffer(i, size, self._pieces(i, group, first))
        partition = flat.narrow(0, dist.get_rank(self._host.real_dp_process_group[i]) * size, size)
        for shard, values in own.split(partition):
            allocate_lo(shard, shard.hi.device)
            if shard.fmt.is_fp8:
                self.states.write_first(fp8.params[shard.scale_index - first], shard, values)
        self.states.flats.append(own)
        virtual = virtual_flat(size, flat.device)
        self._host.single_partition_of_fp32_groups[i] = virtual
        self._host.optimizer.param_groups[i]["params"] = [virtual]

    def _pieces(self, i: int, group: GroupWeights, first: int) -> list[tuple[ShardRange, AdamShard]]:
        """Return the shards of group `i` without low parts and moments, in the order of the partition."""
        pieces = []
        for kind in (group.fp8, group.hp):
            is_fp8 = kind is group.fp8
            fmt, buffer = (self.states.format, kind.buffer.view(torch.uint8)) if is_fp8 else (BF16_8, kind.buffer)
            for f in kind.own:
                name = self._names[id(kind.params[f.index])]
                hi, scale_index = f.in_buffer.narrow(buffer), first + f.index if is_fp8 else 0
                shard = AdamShard(name, hi.numel(), f.in_tensor.start, weight_id(name), i, scale_index, fmt, hi)
                pieces.append((f.in_partition, shard))
        return sorted(pieces, key=lambda piece: piece[0].start)

    def start(self) -> None:
        """Hand the shards to the inner optimizer. Collective if there are weights that came in FP8."""
        rows = [i for i, group in enumerate(self._weights.groups) for _ in group.fp8.params]
        self.states.manage(range(len(self.states.flats)), rows, self._weights.groups[0].fp8.buffer.device)
        self.link()
        self.states.check_stored()

    def point(self) -> None:
        if not self._host.optimizer.has_core:
            return
        for flat, group in zip(self.states.flats, self._weights.groups, strict=True):
            for before, (_, now) in zip(flat.shards, self._pieces(flat.row, group, 0), strict=True):
                before.hi = now.hi
        self.states.core.moved()

    def end_refresh(self, is_step: bool) -> None:
        if is_step:
            self.states.end_scales()

    def fill_bf16(self, i: int, bf16: CompactBuffer) -> None:
        own = {self._names[id(bf16.params[f.index])]: f for f in bf16.own}
        for shard in self.states.flats[i].shards:
            f = own.get(shard.name)
            if f is not None:
                read_dense(shard, None, f.in_buffer.narrow(bf16.buffer), self.scales.scale_inv)

    def read(self, place: Place, full: Tensor) -> None:
        if self.is_dense:
            self._flat.read(place, full)
        for shard in [] if self.is_dense else self._shards(place):
            read_dense(shard, None, full.narrow(0, shard.start, shard.numel), self.scales.scale_inv)

    def write(self, place: Place, flat: Tensor) -> None:
        """Write as float32 masters do; outside a load elements that equal what was read keep their masters."""
        payload, scale_inv = self._weights.payload(place), self.scales.scale_inv
        if not (self.is_dense or self._is_loading):
            assert payload.data is not None
            hp = None if payload.hp is None else payload.hp.view(-1)
            codes = payload.data.view(torch.uint8).view(-1)
            kept = overwrite(codes, flat, self.states.predicted, place.slot, self.states.format, hp)
            if hp is not None:
                hp.copy_(flat)
            for shard in self._shards(place):
                part = slice(shard.start, shard.start + shard.numel)
                write_low(shard, flat[part], kept[part], scale_inv)
            return
        if not self._is_loading:
            self._flat.keep_written(place, flat)
        write_bytes(self.scales, payload, place.slot, flat)
        if not self.is_dense:
            for shard in self._shards(place):
                write_dense(shard, None, flat.narrow(0, shard.start, shard.numel), scale_inv)
        elif self._is_loading:
            self._flat.set(place, flat)

    def _shards(self, place: Place) -> list[AdamShard]:
        """Return this rank's shards of an FP8 weight: at most one."""
        name = self._names[id(self._weights.groups[place.group].fp8.params[place.number])]
        return [shard for shard in self.states.flats[place.group].shards if shard.name == name]

    @contextmanager
    def load(self) -> Iterator[None]:
        """Load as float32 masters do. bf16 parameters are the high parts of their masters, whoever writes them."""
        self._is_loading = True
        try:
            yield
            self._weights.point_params(keep_values=True)
        finally:
            self._is_loading = False

    @contextmanager
    def dense(self) -> Iterator[dict[str, Tensor]]:
        """Make masters dense on the CPU."""
        host = self._host
        try:
            with self.states.dense(host.single_partition_of_fp32_groups, host._link_all_hp_params) as saved:
                yield saved
        finally:
            self.link()

    def saved(self, state: Any) -> Any:
        return self.states.dense_masters()

    def link(self) -> None:
        """Make fragments of this rank's parameters read and write quantised states."""
        if self.is_dense or not self._host.optimizer.has_core:
            return
        pieces = {shard.name: (elements, shard) for flat in self.states.flats for elements, shard in flat.pieces}
        for i, group in enumerate(self._host.bit16_groups):
            for p in group:
                piece = pieces.get(self._names[id(p)])
                p._hp_mapping = None if piece is None else _fragment(self._host, i, p, *piece, self.states)
                p.set_full_hp_param = functools.partial(_set_full, self, p)
        self._host._hp_optimizer_states_linked = True  # nothing is left for DeepSpeed to link in its first step


def _fragment(host: Host12, i: int, p: Any, elements: ShardRange, shard: AdamShard, states: SplitStates) -> Any:
    """Make the fragment of `p`, in group `i`. DeepSpeed is wrong about who has one with `round_robin_gradients`."""
    if host.round_robin_gradients:
        p._index_in_param_group = next(k for k, q in enumerate(host.params_in_partition[i]) if q is p)
    of_bf16 = fragment_address(numel=shard.numel, start=shard.start)
    of_flat = fragment_address(numel=shard.numel, start=elements.start)
    return StateFragment(
        states,
        shard,
        lp_fragment=None,
        lp_fragment_address=of_bf16,
        hp_fragment=None,
        hp_fragment_address=of_flat,
        gradient_dict=host.averaged_gradients,
        offload_gradient_dict=host.offload_gradient_dict,
        use_offload=False,
        param_group_index=i,
    )


@torch.no_grad()
def _set_full(masters: SplitMasters12, p: Any, value: Tensor, optim_state_key: str | None = None) -> None:
    """Set a master or moment to `value`, whole on every rank, for `safe_set_full_fp32_param` and its like."""
    if optim_state_key is None:
        if hasattr(p, "_fp8"):
            with masters.load():
                p.copy_(value)  # all bytes on every rank, and this rank's low part
            return
        p.data.copy_(value)
    if p._hp_mapping is None:
        return
    shard = p._hp_mapping.shard
    if optim_state_key is not None:
        if optim_state_key not in MOMENTS:
            raise ValueError(f"{optim_state_key} not found in optimizer state fragment")
        masters.states.core.allocate()
    values = value.detach().reshape(-1).narrow(0, shard.start, shard.numel)
    write_dense(shard, optim_state_key, values, masters.scales.scale_inv)


class StateFragment(tensor_fragment):
    """DeepSpeed's link from a parameter to this rank's master and moments, which are de-quantised when they are read.

    Args:
        fragment: as in DeepSpeed; there is no tensor of high or low precision.
    """

    def __init__(self, states: SplitStates, shard: AdamShard, **fragment: Any) -> None:
        super().__init__(**fragment)
        self.states = states
        self.shard = shard

    def get_hp_fragment(self, optim_state_key: str | None = None) -> Tensor:
        core, shard = self.states.core, self.shard
        if optim_state_key is not None and (optim_state_key not in MOMENTS or not core.has_moments):
            raise ValueError(f"{optim_state_key} not found in optimizer state fragment")
        out = torch.empty(shard.numel, dtype=torch.float32, device=core.device)
        read_dense(shard, optim_state_key, out, core.scales.scale_inv)
        return out

    def get_optim_state_keys(self) -> list[str]:
        return list(MOMENTS)

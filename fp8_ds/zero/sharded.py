"""FP8 shards of ZeRO-3 weights: the weights, their states, and `Fp8Shards`, all of one optimizer with their gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from fp8_ds.comm import collectives
from fp8_ds.comm.collectives import ByteCounter, max_reduce
from fp8_ds.comm.gather import adjacent, join_shards
from fp8_ds.comm.layout import ShardRange, aligned_starts
from fp8_ds.nn.linear.parameter import Fp8Parameter
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.nn.linear.stored import StoredScales
from fp8_ds.nn.linear.weight_quantizer import WeightQuantizer
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.new_masters import SplitQuantizer, newer
from fp8_ds.ops.quantize import quantize_part

if TYPE_CHECKING:
    from fp8_ds.zero.param_hooks import InFlight

_ALIGNMENT = 16
"""Alignment in bytes: FP8 GEMMs read 16 at a time."""


class Gathered(Enum):
    """Place of a weight's full values on this rank. It follows from `ds_status`, which DeepSpeed sets, too.

    | from | to | by |
    |---|---|---|
    | SHARDED | IN_FLIGHT, UNSHARDED_FP8 | `Fp8Shards.gather`, and the handle's `wait`: fetches, persistent weights |
    | UNSHARDED_FP8 | SHARDED | `leave`; `release` and DeepSpeed's `partition` |
    | SHARDED | UNSHARDED_BF16 | DeepSpeed's closures: readers, layers in bf16 |
    | UNSHARDED_BF16 | SHARDED | DeepSpeed's `partition`; what a reader has written is absorbed |
    """

    SHARDED = auto()
    IN_FLIGHT = auto()
    UNSHARDED_FP8 = auto()
    UNSHARDED_BF16 = auto()


class Bf16Shard(Enum):
    """State of a weight's bf16 shard (`ds_tensor`), which DeepSpeed gathers for readers and layers in bf16.

    | from | to | by |
    |---|---|---|
    | ABSENT | MADE | `make_bf16`, while somebody reads (`Fp8Shards.bf16_shards`) |
    | MADE | ABSENT | the end of that |
    | any | WRITTEN | `Fp8Shards.absorb`, of values that are not the master's |
    | WRITTEN | ABSENT, KEPT | the next step |
    | ABSENT, KEPT | KEPT, ABSENT | `set_bf16`: the layer computes in bf16 from now on, or no longer |
    """

    ABSENT = auto()
    """An expanded placeholder: code that reads it past the hooks reads NaN."""
    MADE = auto()
    WRITTEN = auto()
    KEPT = auto()


class ShardedWeight:
    """One FP8 weight of ZeRO-3 on this rank, with a float32 master, or frozen.

    Attributes:
        param: the ZeRO-3 Parameter; `param.ds_tensor` is its bf16 shard, padded to `ds_numel` elements.
        elements: those of the flattened weight in this rank's shard, without padding.
        shard: its FP8 shard, 1-D, padded likewise with zeros.
        is_trainable: whether it has a master. A user may have frozen it since.
        index: entry in the scale vectors.
        in_bf16: whether the layer computes in bf16: DeepSpeed then gathers the weight from `ds_tensor`, and frees it.
        bf16_shard: what `ds_tensor` is.
        is_stored: whether it is a StoredWeight.
    """

    is_stored = False

    def __init__(self, name: str, param: Any, index: int, scales: WeightQuantizer | SplitQuantizer) -> None:
        self.index = index
        self._source = torch.empty(0, dtype=torch.float32)
        self._attach(name, param, scales.scale[index], scales.scale_inv[index])

    def _attach(self, name: str, param: Any, scale: Tensor, scale_inv: Tensor) -> None:
        """Make `param` an Fp8Parameter with these scales."""
        self.param = param
        self.elements = own_elements(param)
        self.shard = torch.empty(0, dtype=E4M3.torch_dtype)
        self.is_trainable: bool = param.requires_grad
        self.in_bf16 = False
        self.bf16_shard = Bf16Shard.KEPT  # DeepSpeed's own, until it is dropped
        device = param.ds_tensor.device
        self.payload = Fp8Payload(name, scale, scale_inv, param.dtype, device)
        self._nominal = self.payload.nominal(param.ds_shape)
        self._nothing = torch.empty(0, dtype=param.dtype, device=device)
        param._fp8 = self.payload
        param.__class__ = Fp8Parameter

    @property
    def source(self) -> Tensor:
        """The real (unpadded) elements that are quantised: the float32 master, or the bf16 shard without one. 1-D."""
        return self._source

    def point(self, source: Tensor) -> None:
        """Set `source`, a view of where the values lie."""
        self._source = source

    def read_source(self, out: Tensor) -> None:
        """Fill `out`, bf16 [elements.numel], with `source`."""
        out.copy_(self.source)

    @property
    def bf16(self) -> Tensor:
        """The bf16 shard without padding, a view."""
        shard: Tensor = self.param.ds_tensor.data
        return shard[: self.elements.numel]

    @property
    def own_bytes(self) -> Tensor:
        """The FP8 shard without padding, a view."""
        return self.shard[: self.elements.numel]

    @property
    def gathered(self) -> Gathered:
        if self.payload.data is not None:
            return Gathered.UNSHARDED_FP8
        return _OF_STATUS[self.param.ds_status]

    def drop_bf16(self) -> None:
        """Release the bf16 shard."""
        self.bf16_shard = Bf16Shard.ABSENT
        self.param.ds_tensor.data = self.payload.placeholder.expand(self.param.ds_tensor.ds_numel)

    def make_bf16(self) -> None:
        """Make the bf16 shard from the master."""
        self.bf16_shard = Bf16Shard.KEPT if self.keeps_bf16 else Bf16Shard.MADE
        source = self.source
        bf16 = torch.zeros(self.param.ds_tensor.ds_numel, dtype=self.param.dtype, device=source.device)
        bf16[: source.numel()].copy_(source)
        self.param.ds_tensor.data = bf16

    def set_bf16(self, wanted: bool) -> None:
        """Give a layer in bf16 a bf16 shard that stays, or drop it; what a user wrote stays until the next step."""
        self.in_bf16 = wanted
        if self.bf16_shard is Bf16Shard.WRITTEN:
            return
        if wanted:
            self.make_bf16()
        else:
            self.drop_bf16()

    def forget_written(self) -> None:
        """Begin a step: the masters count again."""
        if self.bf16_shard is Bf16Shard.WRITTEN:
            if self.keeps_bf16:
                self.bf16_shard = Bf16Shard.KEPT
            else:
                self.drop_bf16()

    @property
    def keeps_bf16(self) -> bool:
        """Whether `ds_tensor` stays resident; else it expands the placeholder and is made on demand."""
        return self.in_bf16 or not self.is_trainable

    def arrive(self, data: Tensor) -> None:
        """Make the weight available from its bytes `data`, float8_e4m3fn of its full shape."""
        with torch._C.DisableTorchFunctionSubclass():
            self.param.data = self._nominal
        self.payload.data = data
        self.param.ds_status = ZeroParamStatus.AVAILABLE

    def release(self) -> None:
        """Drop the gathered bytes, once the stream that computes with them is done."""
        if self.payload.data is not None and not get_accelerator().is_synchronized_device():
            self.payload.data.record_stream(get_accelerator().current_stream())
        self.payload.data = None

    def leave(self) -> None:
        """Release an unused weight that is gathered in FP8, with the result of `free_param` (which takes 80 us)."""
        self.release()
        with torch._C.DisableTorchFunctionSubclass():
            self.param.data = self._nothing
        self.param.ds_status = ZeroParamStatus.NOT_AVAILABLE


class StoredWeight(ShardedWeight):
    """A frozen weight that came in FP8: bytes and scales are its folder's, and there is no bf16 shard.

    Args:
        param: the ZeRO-3 Parameter, whose shard is of bytes.
        stored: its scales.
    """

    is_stored = True

    def __init__(self, name: str, param: Any, stored: StoredScales) -> None:
        self.stored = stored
        self._codes: Tensor | None = param.ds_tensor.data
        param.data = torch.empty(0, dtype=torch.bfloat16, device=param.ds_tensor.device)
        self._attach(name, param, stored.scale, stored.scale_inv)
        self.drop_bf16()

    def fill(self) -> None:
        """Move the bytes from DeepSpeed's shard to `shard`."""
        assert self._codes is not None
        self.own_bytes.view(torch.uint8).copy_(self._codes[: self.elements.numel])
        self._codes = None

    @property
    def source(self) -> Tensor:
        """Codes times scales, float32 [elements.numel], in a new tensor."""
        values = self.own_bytes.float()
        self.stored.multiply_(values, self.elements.start)
        return values

    @property
    def keeps_bf16(self) -> bool:
        return False

    def absorb(self, group: dist.ProcessGroup) -> None:
        """Quantise the bf16 shards that users have written, unless all are what was read. Collective.

        Values that were read keep their bytes: the rule for new scales is another than that of the folder's.
        """
        written, stored, start = self.bf16, self.stored, self.elements.start
        is_other = torch.tensor([not torch.equal(written, self.source.to(written.dtype))], dtype=torch.float32)
        is_other = is_other.to(self.shard.device)
        max_reduce(group, is_other)
        if not bool(is_other):
            return
        shape = self.param.ds_shape
        amax = stored.granularity.amax(written, shape, start)
        max_reduce(group, amax)
        scale, scale_inv = stored.granularity.scales(amax)
        self.payload.scale.copy_(scale)
        self.payload.scale_inv.copy_(scale_inv)
        block = stored.granularity.block[0] or 1, stored.granularity.block[1] or shape[-1]
        codes = quantize_part(written, self.payload.scale, start, shape[-1], block, E4M3)
        self.own_bytes.copy_(codes)


def own_elements(param: Any) -> ShardRange:
    """Return the elements of the flattened ZeRO-3 parameter in this rank's shard, without padding."""
    numel = int(param.ds_tensor.ds_numel)
    start = int(ds_comm.get_rank(group=param.ds_process_group)) * numel
    return ShardRange(start, max(start, min(start + numel, int(param.ds_numel))))


_OF_STATUS = {
    ZeroParamStatus.NOT_AVAILABLE: Gathered.SHARDED,
    ZeroParamStatus.INFLIGHT: Gathered.IN_FLIGHT,
    ZeroParamStatus.AVAILABLE: Gathered.UNSHARDED_BF16,
}


class Fp8GatherHandle:
    """An FP8 gather under way; `wait` makes its weights available. It has the coordinator's handle protocol.

    Args:
        buffers: received bytes, 1-D: each weight with padding, or all of them, rank by rank; none on a single rank.
        work: the collective.
    """

    def __init__(self, weights: list[ShardedWeight], buffers: list[Tensor], work: Any, num_ranks: int) -> None:
        self.weights = weights
        self.buffers = buffers
        self.work = work
        self.num_ranks = num_ranks
        self.complete = False

    def wait(self, handle_dependency: bool = True) -> None:
        if self.complete:
            return
        if self.work is not None:
            self.work.wait()
        for weight, whole in zip(self.weights, self._whole(), strict=True):
            data = whole.view(E4M3.torch_dtype)
            if data.numel() != weight.param.ds_numel:
                data = data[: weight.param.ds_numel]
            weight.arrive(data.view(weight.param.ds_shape))
        if not get_accelerator().is_synchronized_device():
            for buffer in self.buffers:
                buffer.record_stream(get_accelerator().current_stream())
        self.buffers, self.work = [], None  # a released weight's bytes are free, whoever keeps the handle
        self.complete = True

    def _whole(self) -> list[Tensor]:
        """Return each weight's bytes with padding, 1-D; weights that share a buffer are copied, in one launch."""
        if not self.buffers:
            return [weight.shard.view(torch.uint8) for weight in self.weights]
        if len(self.buffers) == len(self.weights):
            return self.buffers
        return join_shards(self.buffers[0], [weight.shard.numel() for weight in self.weights], self.num_ranks)


class Fp8Shards:
    """All FP8 weights of one ZeRO-3 optimizer.

    Args:
        scales: those of the weights.
        persistent: the parameters that stay gathered, in the very list that DeepSpeed passes on.
        write_masters: makes values (1-D, this rank's) the masters of trainable weights. Collective. None: values that
            users write hold until the next step, as in DeepSpeed.

    Attributes:
        buffer: memory of the FP8 shards.
    """

    def __init__(
        self,
        scales: WeightQuantizer | SplitQuantizer,
        counter: ByteCounter,
        in_flight: InFlight,
        persistent: Sequence[Any] = (),
        write_masters: Callable[[list[Any], list[Tensor]], None] | None = None,
    ) -> None:
        self.scales = scales
        self.counter = counter
        self.in_flight = in_flight
        self.persistent = persistent
        self._write_masters = write_masters
        self.buffer = torch.empty(0, dtype=E4M3.torch_dtype)
        self.weights: list[ShardedWeight] = []
        self._by_param: dict[int, ShardedWeight] = {}
        self._ready: Any = None

    def add(self, weight: ShardedWeight) -> None:
        self.weights.append(weight)
        self._by_param[id(weight.param)] = weight

    def get(self, p: Any) -> ShardedWeight | None:
        """Return the FP8 weight of a Parameter, if it is one."""
        return self._by_param.get(id(p))

    def of(self, params: Iterable[Any]) -> list[ShardedWeight]:
        """Return the FP8 weights among `params`."""
        return [self._by_param[id(p)] for p in params if id(p) in self._by_param]

    def fetched_in_fp8(self, params: Iterable[Any]) -> list[ShardedWeight]:
        """Return the FP8 weights among `params` whose layers compute in FP8."""
        return [weight for weight in self.of(params) if not weight.in_bf16]

    def fetched_in_bf16(self, params: Iterable[Any]) -> list[Any]:
        """Return the parameters that arrive in bf16."""
        return [p for p in params if id(p) not in self._by_param or self._by_param[id(p)].in_bf16]

    def allocate(self, device: torch.device) -> None:
        """Make one FP8 buffer for all weights, with each shard at a multiple of 16 bytes."""
        sizes = [weight.param.ds_tensor.ds_numel for weight in self.weights]
        starts = aligned_starts(sizes, _ALIGNMENT)
        self.buffer = torch.zeros(starts[-1], dtype=E4M3.dtype, device=device)
        for weight, start, size in zip(self.weights, starts, sizes, strict=False):
            weight.shard = self.buffer.narrow(0, start, size)
            if isinstance(weight, StoredWeight):
                weight.fill()

    def move(self, device: torch.device) -> None:
        """Move the FP8 shards."""
        self.buffer = self.buffer.to(device)
        for weight in self.weights:
            weight.shard = self.buffer.narrow(0, weight.shard.storage_offset(), weight.shard.numel())

    @torch.no_grad()
    def refresh_bf16(self) -> None:
        """Copy the masters to the bf16 shards of layers in bf16, and forget what users wrote into bf16."""
        for weight in self.weights:
            weight.forget_written()
            if weight.in_bf16:
                weight.read_source(weight.bf16)
        self.mark_ready()

    def mark_ready(self) -> None:
        """Make later gathers, on whatever stream, wait for everything that has been written so far."""
        if not get_accelerator().is_synchronized_device():
            self._ready = get_accelerator().Event()
            self._ready.record()

    def wait_until_ready(self) -> None:
        if self._ready is not None:
            get_accelerator().current_stream().wait_event(self._ready)

    def gather(self, weights: list[ShardedWeight]) -> Fp8GatherHandle:
        """Start the gather of `weights`, one byte an element; they are INFLIGHT until the handle's `wait`."""
        for weight in weights:
            if weight.gathered is not Gathered.SHARDED:
                raise RuntimeError(weight.param.ds_summary())
            weight.param.ds_status = ZeroParamStatus.INFLIGHT
        weights = sorted(weights, key=lambda weight: weight.param.ds_id)
        self.wait_until_ready()
        group = weights[0].param.ds_process_group
        num_ranks = ds_comm.get_world_size(group=group)
        if num_ranks == 1:
            return Fp8GatherHandle(weights, [], None, 1)
        shards = [weight.shard.view(torch.uint8) for weight in weights]
        size = sum(shard.numel() for shard in shards)
        self.counter.fp8 += num_ranks * size
        if collectives.is_worth_it(len(shards), size):
            wholes = [shard.new_empty(num_ranks * shard.numel()) for shard in shards]
            return Fp8GatherHandle(weights, wholes, collectives.all_gather_each(wholes, shards, group), num_ranks)
        local = adjacent(shards)
        buffer = shards[0].new_empty(num_ranks * size)
        if local is None:
            # Where it arrives: a tensor of its own would be free for this stream once the handle is waited for, which
            # may be on another one (prefetches that nobody used), while it is still being sent.
            local = buffer.narrow(0, ds_comm.get_rank(group=group) * size, size)
            torch.cat(shards, out=local)
        work = ds_comm.allgather_fn(buffer, local, group=group, async_op=True)
        return Fp8GatherHandle(weights, [buffer], work, num_ranks)

    @contextmanager
    def bf16_shards(self, weights: list[ShardedWeight]) -> Iterator[None]:
        """Keep bf16 in `ds_tensor` of `weights` inside the block: of the masters, or what a user wrote since."""
        made = [weight for weight in weights if weight.bf16_shard is Bf16Shard.ABSENT]
        for weight in made:
            weight.make_bf16()
        try:
            yield
        finally:
            for weight in made:
                if weight.bf16_shard is Bf16Shard.MADE:
                    weight.drop_bf16()

    @torch.no_grad()
    def absorb(self, weights: list[ShardedWeight]) -> None:
        """Bring the FP8 shards up to date with bf16 shards that a user wrote (collective over the ZeRO group).

        Elements that were not changed are those of the master, so that gathering for reading alone changes no bit.
        """
        for weight in weights:
            if isinstance(weight, StoredWeight):
                weight.absorb(self.scales.group)
        weights = [weight for weight in weights if not weight.is_stored]
        if self._write_masters is not None and (trainable := [weight for weight in weights if weight.is_trainable]):
            self._write_masters(trainable, [newer(weight.source, weight.bf16) for weight in trainable])
            weights = [weight for weight in weights if not weight.is_trainable]
        if weights:
            self._quantize_written(weights)
        self.mark_ready()

    def _quantize_written(self, weights: list[ShardedWeight]) -> None:
        """Quantise what users wrote into bf16 shards, by new scales; masters stay. Collective."""
        values = [newer(weight.source, weight.bf16) for weight in weights]
        starts = [weight.elements.start for weight in weights]
        local = [self.scales.amax_of(w.index, v, start) for w, v, start in zip(weights, values, starts, strict=True)]
        amaxes = torch.cat([amax.reshape(-1) for amax in local])
        max_reduce(self.scales.group, amaxes)
        reduced = amaxes.split([amax.numel() for amax in local])
        for weight, value, start, here, amax in zip(weights, values, starts, local, reduced, strict=True):
            self.scales.rescale(weight.index, amax.view(here.shape))
            self.scales.quantize_into(weight.own_bytes, value, weight.index, start)
            if weight.is_trainable and bool((value != weight.source.float()).any()):
                weight.bf16_shard = Bf16Shard.WRITTEN

"""FP8 shards of ZeRO-3 weights, their gathers, and fetches of DeepSpeed's coordinator as one handle each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn

from fp8_ds.comm import collectives
from fp8_ds.comm.collectives import ByteCounter, max_reduce
from fp8_ds.nn.linear.parameter import Fp8Parameter
from fp8_ds.nn.linear.payload import Fp8Payload
from fp8_ds.numerics.formats import E4M3
from fp8_ds.zero.weights import WeightQuantizer


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
    """One FP8 weight of ZeRO-3 on this rank.

    Attributes:
        param: the ZeRO-3 Parameter; `param.ds_tensor` is its bf16 shard, padded to `ds_numel` elements.
        shard: its FP8 shard, 1-D, padded likewise with zeros.
        source: the real (unpadded) elements that are quantised into it: the fp32 master, or the bf16 shard without one.
        is_trainable: whether it has a master. A user may have frozen it since.
        index: entry in the scale vectors.
        in_bf16: whether the layer computes in bf16: DeepSpeed then gathers the weight from `ds_tensor`, and frees it.
        bf16_shard: what `ds_tensor` is.
        is_stored: whether it is a StoredWeight (zero/stored_weight.py).
    """

    is_stored = False

    def __init__(self, name: str, param: Any, index: int, quantizer: WeightQuantizer) -> None:
        self.index = index
        self._attach(name, param, quantizer.scale[index], quantizer.scale_inv[index])

    def _attach(self, name: str, param: Any, scale: Tensor, scale_inv: Tensor) -> None:
        """Make `param` an Fp8Parameter with these scales."""
        self.param = param
        self.shard = self.source = torch.empty(0, dtype=torch.float32)
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
    def start(self) -> int:
        return start_of(self.param)

    @property
    def num_real(self) -> int:
        return num_real(self.param)

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

    def read_source(self, out: Tensor) -> None:
        """Fill `out`, bf16 [num_real], with the master."""
        out.copy_(self.source)

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


def start_of(param: Any) -> int:
    """Return the first element of this rank's shard in the flattened parameter."""
    return int(ds_comm.get_rank(group=param.ds_process_group) * param.ds_tensor.ds_numel)


def num_real(param: Any) -> int:
    """Return the number of elements of this rank's shard without padding; 0 beyond the parameter's end."""
    return int(max(0, min(param.ds_tensor.ds_numel, param.ds_numel - start_of(param))))


_BITS = {2: torch.int16, 4: torch.int32}
_OF_STATUS = {
    ZeroParamStatus.NOT_AVAILABLE: Gathered.SHARDED,
    ZeroParamStatus.INFLIGHT: Gathered.IN_FLIGHT,
    ZeroParamStatus.AVAILABLE: Gathered.UNSHARDED_BF16,
}


def newer(source: Tensor, read: Tensor) -> Tensor:
    """Return `source` (hp) where it rounds to `read`, else `read`: unchanged elements keep full precision. 1-D.

    Args:
        read: bf16; float32 where DeepSpeed has left that, as in a LoRA whose base zero.Init has sharded.
    """
    return torch.where(same_bits(source.to(read.dtype), read), source.float(), read.float())


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Return which elements are the same, bit for bit; both tensors are bf16, or float32."""
    bits = _BITS[left.element_size()]
    return left.view(bits) == right.view(bits)


def adjacent(shards: list[Tensor]) -> Tensor | None:
    """Return a view of the bytes of 1-D float8 tensors if they lie one behind the other in one storage, else None."""
    first = shards[0]
    start = end = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for shard in shards:
        if shard.storage_offset() != end or shard.untyped_storage().data_ptr() != storage:
            return None
        end += shard.numel()
    return first.view(torch.uint8).as_strided((end - start,), (1,), start)


def join_shards(buffer: Tensor, sizes: Sequence[int], num_ranks: int) -> list[Tensor]:
    """Copy shards of these sizes, which lie rank by rank in `buffer` (1-D), into one tensor each, in one launch."""
    whole = [buffer.new_empty(num_ranks * size) for size in sizes]
    by_rank = [one.view(num_ranks, -1) for one in whole]
    torch.split_with_sizes_copy(buffer.view(num_ranks, -1), sizes, dim=1, out=by_rank)
    return whole


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
    """All FP8 weights of one ZeRO-3 optimizer, whose scales `quantizer` holds.

    Attributes:
        persistent: the parameters that stay gathered, in the very list that DeepSpeed passes on.
    """

    persistent: Sequence[Any] = ()

    def __init__(self, quantizer: WeightQuantizer, counter: ByteCounter, in_flight: InFlight) -> None:
        self.quantizer = quantizer
        self.counter = counter
        self.in_flight = in_flight
        self.weights: list[ShardedWeight] = []
        self._by_param: dict[int, ShardedWeight] = {}
        self._ready: Any = None

    def add(self, weight: ShardedWeight) -> None:
        self.weights.append(weight)
        self._by_param[id(weight.param)] = weight

    def of(self, params: Iterable[Any]) -> list[ShardedWeight]:
        """Return the FP8 weights among `params`."""
        return [self._by_param[id(p)] for p in params if id(p) in self._by_param]

    def fetched_in_fp8(self, params: Iterable[Any]) -> list[ShardedWeight]:
        """Return the FP8 weights among `params` whose layers compute in FP8."""
        return [weight for weight in self.of(params) if not weight.in_bf16]

    def fetched_in_bf16(self, params: Iterable[Any]) -> list[Any]:
        """Return the parameters that arrive in bf16."""
        return [p for p in params if id(p) not in self._by_param or self._by_param[id(p)].in_bf16]

    @torch.no_grad()
    def refresh_bf16(self) -> None:
        """Copy the masters to the bf16 shards of layers in bf16."""
        for weight in self.weights:
            if weight.in_bf16:
                weight.read_source(weight.param.ds_tensor.data[: weight.num_real])
        self.mark_ready()

    def refresh(self, is_step: bool) -> None:
        """Quantise all shards from their sources (collective); forget what users wrote into bf16."""
        self.quantizer.refresh(is_step)
        for weight in self.weights:
            weight.forget_written()
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

        As in DeepSpeed, masters stay: the written value holds until the next optimizer step. Elements that were not
        changed are quantised from the master, so that gathering for reading alone changes no bit.
        """
        stored: list[Any] = [weight for weight in weights if weight.is_stored]
        for weight in stored:
            weight.absorb(self.quantizer.group)
        weights = [weight for weight in weights if not weight.is_stored]
        if not weights:
            self.mark_ready()
            return
        values = []
        for weight in weights:
            bf16 = weight.param.ds_tensor.data[: weight.num_real]
            values.append(newer(weight.source, bf16))
        local = [self.quantizer.amax_of(w.index, v, w.start) for w, v in zip(weights, values, strict=True)]
        amaxes = torch.cat([amax.reshape(-1) for amax in local])
        max_reduce(self.quantizer.group, amaxes)
        reduced = amaxes.split([amax.numel() for amax in local])
        for weight, value, here, amax in zip(weights, values, local, reduced, strict=True):
            self.quantizer.rescale(weight.index, amax.view(here.shape))
            self.quantizer.quantize_into(weight.shard[: weight.num_real], value, weight.index, weight.start)
            if weight.is_trainable and bool((value != weight.source.float()).any()):
                weight.bf16_shard = Bf16Shard.WRITTEN
        self.mark_ready()


class InFlight:
    """Parameters that the coordinator has requested and not waited for yet, and the leaves that they belong to.

    Attributes:
        registry: the coordinator's own, parameter -> handle.
    """

    def __init__(self, module: nn.Module) -> None:
        self.registry: MutableMapping[Any, Any] = module.ds_inflight_param_registry  # type: ignore[assignment]
        self._leaf_of: dict[int, int] = {}
        for leaf in filter(z3_leaf_module, module.modules()):
            for p in leaf.parameters():
                self._leaf_of.setdefault(id(p), getattr(leaf, "ds_id", -1))  # an inner leaf is gathered with the outer

    @property
    def has_leaves(self) -> bool:
        return bool(self._leaf_of)

    def arrived(self, fetch: Fetch) -> None:
        """Drop a leaf's other parameters from the registry, once the coordinator has waited for one in `fetch`.

        They stay if a later call has requested them, after the leaf was released, or if another module that shares the
        one waited for it: the leaf may never be used, and then entries of the registry are released.
        """
        if not self.has_leaves:
            return
        is_left = [self.registry.get(p) is fetch for p in fetch.params]
        leaves = [self._leaf_of.get(id(p)) for p in fetch.params]
        fetched = {
            leaf
            for p, leaf, left in zip(fetch.params, leaves, is_left, strict=True)
            if not left and leaf in p.ds_active_sub_modules
        }
        for p, leaf, left in zip(fetch.params, leaves, is_left, strict=True):
            if left and leaf in fetched:
                del self.registry[p]


class Fetch:
    """One request of the coordinator, as one handle: weights in FP8, and parameters that DeepSpeed gathers.

    The coordinator waits for parameters one by one, and records and polls an event for each to bound how far the host
    runs ahead: a quarter of a millisecond for a decoder layer. With leaves, waiting for the first parameter covers the
    leaf's others, and the bound counts them as one.
    """

    def __init__(self, handles: list[Any], params: list[Any], in_flight: InFlight) -> None:
        self.handles = handles
        self.params = params
        self.in_flight = in_flight
        self.complete = False

    def wait(self, handle_dependency: bool = True) -> None:
        if not self.complete:
            for handle in self.handles:  # once: in DeepSpeed 0.18.9 some make a weight available again, long released
                handle.wait(handle_dependency=handle_dependency)
            self.complete = True
        self.in_flight.arrived(self)

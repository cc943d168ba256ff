"""Adam on FP8 moments and split masters in one Triton launch per kind of shard; the same bits as `reference`.

A program takes `num_tiles` tiles of `rows` groups of 128 elements of one shard, found through a map from blocks to
pieces of shards and a table of addresses. Everything that changes from step to step is read on the device, so a step
can be captured in a CUDA graph. The gradients' addresses are the exception: they are copied when they change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
from fp8_ds.numerics import moments, rounding
from fp8_ds.numerics.masters import MasterFormat
from fp8_ds.ops._device import runs_ptx
from fp8_ds.ops._launch import ceil_div
from fp8_ds.ops.adamw.kernel import COLUMNS, TABLE_WIDTH, adamw_kernel, decode_kernel
from fp8_ds.ops.adamw.shards import AdamShard, StepInputs


@dataclass(frozen=True)
class Launch:
    """Launch of a kind of shard: programs of `num_tiles` tiles of `rows` groups, each by `num_warps` warps.

    Args:
        max_registers: per thread, or None for the compiler's choice.
    """

    rows: int
    num_tiles: int
    num_warps: int
    max_registers: int | None = None


LAUNCHES = {
    "e4m11": Launch(4, 8, 1, 80),
    "e4m19": Launch(4, 8, 1, 96),
    "bf16_8": Launch(4, 8, 1, 96),
    "fp32": Launch(4, 8, 1, 96),
}
"""Launches by master format; measured by a sweep on an H200 (git history, commit 32d3882). 16 one-byte elements a
thread are one vector. With one warp a program, reductions over a group stay in it, and many programs hide each other's
waiting: so many registers a thread that 20 programs share a processor, of e4m11 25."""

_EDGE = Launch(4, 1, 4)

DECODE_BLOCK, DECODE_WARPS = 2048, 4
"""Elements and warps of a program of `decode_master`, 16 elements a thread: words of 16 bytes where aligned."""

_GRAD_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_ALIGNMENT = 16


class Addresses:
    """Addresses of gradients (or pieces of them) on the device, one slot each; those that take no part are 0.

    They are copied when they change, from a pinned buffer that no pending copy reads. Where a CUDA graph was captured
    with them, they stay as they are for as long as the step lives.
    """

    def __init__(self, num_pieces: int, device: torch.device) -> None:
        self.device = device
        self.current: list[int] = [0] * num_pieces
        self.on_device = torch.zeros(num_pieces, dtype=torch.int64, device=device)
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        self._captured: list[Tensor] = []

    def update(self, addresses: list[int]) -> Tensor:
        """Return `addresses` on the device: int64 [num_pieces].

        Raises:
            RuntimeError: the addresses changed, and a CUDA graph is being captured.
        """
        if self.device.type != "cuda":
            self.on_device = torch.tensor(addresses, dtype=torch.int64)
            return self.on_device
        capturing = torch.cuda.is_current_stream_capturing()
        if addresses != self.current:
            if capturing:
                raise RuntimeError(
                    "grads: expected those of the last step while a CUDA graph is captured, got tensors at other "
                    "addresses. Make one step with the same gradient tensors before the capture."
                )
            if self._is_captured():
                self.on_device = torch.empty_like(self.on_device)
            buffer, event = self._free_buffer()
            buffer.copy_(torch.tensor(addresses, dtype=torch.int64))
            self.on_device.copy_(buffer, non_blocking=True)
            event.record()
            self.current = addresses
        if capturing and not self._is_captured():
            self._captured.append(self.on_device)
        return self.on_device

    def _is_captured(self) -> bool:
        return any(captured is self.on_device for captured in self._captured)

    def _free_buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        for buffer, event in self._pinned:
            if event.query():
                return buffer, event
        self._pinned.append((torch.empty(len(self.current), dtype=torch.int64, pin_memory=True), torch.cuda.Event()))
        return self._pinned[-1]


def _tile(shard: AdamShard) -> int:
    return LAUNCHES[shard.fmt.name].rows * moments.GROUP


def _pieces(shard: AdamShard) -> Iterator[AdamShard]:
    """Split a shard where its first whole group begins and where its last whole tile from there on ends."""
    stop = shard.start + shard.numel
    head = min(-(-shard.start // moments.GROUP) * moments.GROUP, stop)
    whole = stop - (stop - head) % _tile(shard)
    for elements in (ShardRange(shard.start, head), ShardRange(head, whole), ShardRange(whole, stop)):
        if elements.numel:
            yield shard.part(elements)


def _is_edge(piece: AdamShard) -> bool:
    return piece.head != 0 or piece.numel % _tile(piece) != 0


def _vectors(piece: AdamShard) -> int:
    """Return 2 if all tensors of a piece lie at multiples of 16 bytes, 1 if lo and the moments do, else 0."""
    tensors = (piece.m, piece.v) if piece.lo is None else (piece.lo, piece.m, piece.v)
    if _is_edge(piece) or any(x.data_ptr() % _ALIGNMENT for x in tensors):
        return 0
    return 1 if piece.hi.data_ptr() % _ALIGNMENT else 2


def _table_row(piece: AdamShard, first_block: int) -> list[int]:
    values = {
        "hi": piece.hi.data_ptr(),
        "lo": 0 if piece.lo is None else piece.lo.data_ptr(),
        "m": piece.m.data_ptr(),
        "v": piece.v.data_ptr(),
        "m_scale": piece.m_scale_inv.data_ptr(),
        "v_scale": piece.v_scale_inv.data_ptr(),
        "numel": piece.numel,
        "start": piece.start,
        "param_id": piece.param_id,
        "group": piece.group,
        "scale": piece.scale_index,
        "first_block": first_block,
    }
    row = [values[column] for column in COLUMNS]
    return row + [0] * (TABLE_WIDTH.value - len(row))


class _Kind:
    """Pieces of one master format that one variant of the kernel takes, in the order of the optimizer.

    Args:
        pieces: each with the position of its shard: whole tiles of it, or the rest beside them at an end.

    Attributes:
        places: position of each piece's shard, and where the piece begins in it.
        table: int64 [num_pieces, 16] on the device, columns as `COLUMNS`.
        block_pieces: int32 [num_blocks] on the device: the piece that a block works on.
        first_blocks: first block of each piece, and num_blocks at the end.
        addresses: addresses of the gradients, for each gradient dtype and alignment.
    """

    def __init__(self, shards: Sequence[AdamShard], pieces: list[tuple[int, AdamShard]], device: torch.device) -> None:
        first = pieces[0][1]
        self.places = [(position, piece.start - shards[position].start) for position, piece in pieces]
        self.fmt, self.is_edge, self.vectors = first.fmt, _is_edge(first), _vectors(first)
        self.launch = _EDGE if self.is_edge else LAUNCHES[self.fmt.name]
        num_blocks = [-(-piece.num_groups // (self.launch.rows * self.launch.num_tiles)) for _, piece in pieces]
        self.first_blocks = [0, *itertools.accumulate(num_blocks)]
        rows = [_table_row(piece, block) for (_, piece), block in zip(pieces, self.first_blocks, strict=False)]
        of_blocks = torch.repeat_interleave(torch.arange(len(pieces), dtype=torch.int32), torch.tensor(num_blocks))
        self.table = torch.tensor(rows, dtype=torch.int64).to(device)
        self.block_pieces = of_blocks.to(device)
        self.addresses: dict[tuple[torch.dtype, int], Addresses] = {}


class TritonStep:
    """`AdamStep` by `adamw_kernel`: one launch per master format, gradient dtype and alignment.

    Args:
        shards: on one CUDA device, or on CPU under Triton's interpreter; their tensors stay where they are.
    """

    def __init__(self, shards: Sequence[AdamShard]) -> None:
        self.shards = tuple(shards)
        self.device = shards[0].hi.device if shards else torch.device("cpu")
        kinds: dict[tuple[str, bool, int], list[tuple[int, AdamShard]]] = {}
        for position, shard in enumerate(self.shards):
            for piece in _pieces(shard):
                kinds.setdefault((shard.fmt.name, _is_edge(piece), _vectors(piece)), []).append((position, piece))
        self._kinds = [_Kind(self.shards, pieces, self.device) for pieces in kinds.values()]

    def __call__(self, grads: Sequence[Tensor | None], inputs: StepInputs) -> None:
        for shard, grad in zip(self.shards, grads, strict=True):
            _check_grad(shard, grad, self.device)
        for kind in self._kinds:
            variants: dict[tuple[torch.dtype, int], list[int]] = {}
            for slot, (position, first) in enumerate(kind.places):
                grad = grads[position]
                if grad is not None:
                    address = grad.data_ptr() + first * grad.element_size()
                    vectors = min(kind.vectors, 1) if address % _ALIGNMENT else kind.vectors
                    variants.setdefault((grad.dtype, vectors), [0] * len(kind.places))[slot] = address
            for variant, addresses in variants.items():
                self._launch(kind, variant, addresses, inputs)

    def _launch(self, kind: _Kind, variant: tuple[torch.dtype, int], addresses: list[int], inputs: StepInputs) -> None:
        grad_dtype, vectors = variant
        if variant not in kind.addresses:
            kind.addresses[variant] = Addresses(len(kind.places), self.device)
        grads = kind.addresses[variant].update(addresses)
        active = [slot for slot, address in enumerate(addresses) if address]
        first_block = kind.first_blocks[active[0]]
        num_blocks = kind.first_blocks[active[-1] + 1] - first_block
        fmt, launch = kind.fmt, kind.launch
        options = {} if launch.max_registers is None else {"maxnreg": launch.max_registers}
        adamw_kernel[(num_blocks,)](
            kind.table,
            grads,
            kind.block_pieces,
            first_block,
            inputs.hyper,
            inputs.step,
            inputs.grad_scale,
            inputs.skip,
            inputs.scale_inv,
            inputs.scale_inv.stride(0),
            inputs.next_scale_inv,
            inputs.next_scale_inv.stride(0),
            inputs.amax,
            _seed_key(inputs.seed),
            GRAD_DTYPE=_GRAD_DTYPES[grad_dtype],
            LO_BITS=fmt.lo_bits,
            DROP_BITS=fmt.drop_bits,
            MAX_MAG=fmt.max_mag if fmt.is_split else 0,
            STOCHASTIC=fmt.stochastic,
            IS_FP8=fmt.is_fp8,
            DECOUPLED=inputs.decoupled,
            IS_EDGE=kind.is_edge,
            VECTORS=vectors,
            PTX=self.device.type == "cuda" and torch.version.hip is None,
            ROWS=launch.rows,
            NUM_TILES=launch.num_tiles,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
            **options,
        )


def _check_grad(shard: AdamShard, grad: Tensor | None, device: torch.device) -> None:
    if grad is None:
        return
    if grad.dtype not in _GRAD_DTYPES or grad.device != device or grad.shape != (shard.numel,) or grad.stride() != (1,):
        raise ValueError(
            f"grads: expected bf16 or float32 [{shard.numel}], contiguous, on {device} for {shard.name}, got "
            f"{grad.dtype} {tuple(grad.shape)} with strides {grad.stride()} on {grad.device}. Pass grad.view(-1)."
        )


def _seed_key(seed: int) -> int:
    """Return `rounding.seed_key` as a signed 32-bit number."""
    key = rounding.seed_key(seed)
    return key - (1 << 32) if key >= 1 << 31 else key


def decode_master(hi: Tensor, lo: Tensor, fmt: MasterFormat, scale_inv: Tensor | None, out: Tensor) -> None:
    """Triton version of `adamw.decode_master`, contiguous, `out` bf16 or float32; on CPU only under the interpreter."""
    decode_kernel[(ceil_div(out.numel(), DECODE_BLOCK),)](
        hi if fmt.is_fp8 else hi.view(torch.int16),
        lo,
        scale_inv,
        out,
        out.numel(),
        LO_BITS=fmt.lo_bits,
        DROP_BITS=fmt.drop_bits,
        IS_FP8=fmt.is_fp8,
        PTX=runs_ptx(out),
        BLOCK=DECODE_BLOCK,
        num_warps=DECODE_WARPS,
    )

"""How the parts of a weight that tensor-parallel ranks hold make the whole, as their model files say it.

The entry is the one by which DeepSpeed makes universal checkpoints: patterns of names, and, of AutoTP in DeepSpeed
0.19.8, the places of each part's elements besides (`affine_map`), which count where they are there.

Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py `merge_tp_slices`, checkpoint/affine.py and constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8_ds.comm.layout import ShardRange
from fp8_ds.errors import CheckpointError, Fp8DsError, UnsupportedError
from fp8_ds.nn.linear.payload import Granularity
from fp8_ds.ops.blockwise import BLOCK

Shape = tuple[int, ...]

INFO = "universal_checkpoint_info"
_REPLICATED = "tp_replicated_parameter_patterns"
_BY_COLUMNS = "parameter_with_row_parallelism_patterns"
_AVERAGED = "parameter_to_average_patterns"
_TWO_IN_ONE = "parameter_with_2_sub_params_cat_dim_0"
_SEVERAL_IN_ONE = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_VOCABULARY = "vocabulary_parameter_patterns"
_UNKNOWN = "autotp_unsupported_parameter_patterns"
_FORMAT = 1
"""Newest version of the affine map that is understood."""


@dataclass(frozen=True)
class Layout:
    """How parts, one of each tensor-parallel rank, make a tensor.

    Attributes:
        shape: of the whole.
        part_shapes: of the parts, by rank.
        dim: along which the whole consists of `runs`; None: each rank has the whole.
        runs: rows or columns of the parts of their ranks, in the order of the whole.
    """

    shape: Shape
    part_shapes: tuple[Shape, ...]
    dim: int | None = None
    runs: tuple[ShardRange, ...] = ()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole of all ranks' parts; the first of them where each is whole."""
        if self.dim is None:
            return parts[0]
        return torch.cat([run.narrow(parts[run.rank], self.dim) for run in self.runs], self.dim)

    def holds(self, stored: Granularity) -> bool:
        """Whether scales `stored` of the whole can be those that parts have, if those of a whole weight can.

        A scale of a row is none of a part's columns, and a block must not reach from one run into the next.
        """
        if self.dim is None or (len(self.runs) == 1 and self.runs[0].start == 0):
            return True
        if stored.is_row:
            return self.dim == 0
        ends = self.runs[:-1]
        return all(run.start % BLOCK == 0 for run in self.runs) and all(run.numel % BLOCK == 0 for run in ends)

    def join_scales(self, grids: Sequence[Tensor], stored: Granularity, own: Granularity) -> Tensor:
        """Return the whole's scales, which broadcast to the grid of `stored`, of those of all parts.

        Args:
            grids: by rank, as `own` says; `holds` is true.
        """
        if self.dim is None:
            return grids[0]
        size = stored.block[self.dim] or max(self.shape[self.dim], 1)
        found = []
        for run in self.runs:
            num, grid = -(-run.numel // size), grids[run.rank]
            if own.is_tensor:
                found.append(grid.reshape(1, 1).repeat_interleave(num, self.dim))
            else:
                found.append(grid.narrow(self.dim, run.start // size, num))
        return torch.cat(found, self.dim)


def layouts_of(info: Mapping[str, Any] | None, shapes: Sequence[Mapping[str, Any]]) -> dict[str, Layout]:
    """Return how each parameter's parts are joined, by name.

    Args:
        info: `universal_checkpoint_info` of a model file, or what would be saved there.
        shapes: of the trainable parameters by name, of each rank.

    Raises:
        CheckpointError: `info` is malformed, or of another model.
        UnsupportedError: there is none, or it describes parts that are no rows or columns.
    """
    if not info:
        raise without_info()
    try:
        patterns = _Patterns(info)
        return {name: patterns.layout(name, [tuple(own[name]) for own in shapes]) for name in shapes[0]}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, re.error) as error:
        if isinstance(error, Fp8DsError):
            raise
        raise CheckpointError(
            f"{INFO}: expected patterns of the parameters' names, as DeepSpeed writes them, got others "
            f"({type(error).__name__}: {error}). Save the checkpoint again."
        ) from error


def without_info() -> UnsupportedError:
    """Return the error for parts that nothing says how to join."""
    return UnsupportedError(
        f"convert: expected {INFO!r} in model files, by which parts of tensor-parallel ranks are joined, got none. "
        "Save it again with this fp8_ds (AutoTP: with DeepSpeed 0.19.8), or with that entry in client_state. A "
        "pipeline's stages have names of their own: load them without a pipeline, and export that."
    )


class _Patterns:
    def __init__(self, info: Mapping[str, Any]) -> None:
        self._lists = {
            key: [(re.compile(pattern), pattern) for pattern in info.get(key) or ()]
            for key in (_REPLICATED, _BY_COLUMNS, _AVERAGED, _TWO_IN_ONE, _VOCABULARY, _UNKNOWN, _WIDTHS)
        }
        self._unknown, self._widths = info.get(_UNKNOWN) or {}, info.get(_WIDTHS) or {}
        self._vocabulary_size = info.get("original_vocab_size")
        self._several = [(re.compile(p), one) for one in info.get(_SEVERAL_IN_ONE) or () for p in one["patterns"]]
        affine = info.get("affine_map") or {}
        if affine.get("version", _FORMAT) > _FORMAT:
            raise ValueError(f"affine_map of version {affine['version']}")
        self._maps = [(re.compile(pattern), one) for pattern, one in (affine.get("params") or {}).items()]

    def _find(self, key: str, name: str) -> str | None:
        return next((pattern for compiled, pattern in self._lists[key] if compiled.match(name)), None)

    def layout(self, name: str, parts: list[Shape]) -> Layout:
        if (pattern := self._find(_UNKNOWN, name)) is not None:
            raise _unknown(name, str(self._unknown[pattern]))
        found = next((one for compiled, one in self._maps if compiled.match(name)), None)
        layout = self._by_patterns(name, parts) if found is None else _by_places(name, found, parts)
        if self._find(_VOCABULARY, name) and layout.dim == 0 and self._vocabulary_size is not None:
            layout = _without_padding(layout, int(self._vocabulary_size))
        return layout

    def _by_patterns(self, name: str, parts: list[Shape]) -> Layout:
        if not parts[0] or self._find(_REPLICATED, name):
            if len(set(parts)) > 1:
                raise ValueError(f"{name} is said to be whole on each rank, and has shapes {parts}")
            return Layout(parts[0], tuple(parts))
        if self._find(_AVERAGED, name):
            raise _unknown(name, "it is averaged")
        several = next((one for compiled, one in self._several if compiled.match(name)), None)
        if self._find(_TWO_IN_ONE, name):
            return _in_order(name, parts, 0, [[part[0] // 2 for part in parts]] * 2)
        if several is not None:
            pattern = self._find(_WIDTHS, name)
            if pattern is None or len(several["shape"]) != len(parts[0]):
                raise _unknown(name, "it holds several, of widths that are not said")
            return _in_order(name, parts, int(several["partition_dim"]), self._widths[pattern])
        dim = 1 if self._find(_BY_COLUMNS, name) else 0
        return _in_order(name, parts, dim, [[part[dim] for part in parts]])


def _in_order(name: str, parts: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> Layout:
    """Return the layout of what consists of several tensors one after the other, of each rank a part of each.

    Args:
        widths: of each tensor, by rank.
    """
    starts = [0] * len(parts)
    runs = []
    for by_rank in widths:
        for rank, width in enumerate(by_rank):
            runs.append(ShardRange(starts[rank], starts[rank] + width, rank))
            starts[rank] += width
    if starts != [part[dim] for part in parts]:
        raise ValueError(f"{name} has shapes {list(parts)}, and parts of widths {[list(one) for one in widths]}")
    return _checked(name, parts, dim, runs)


def _checked(name: str, parts: Sequence[Shape], dim: int, runs: Iterable[ShardRange]) -> Layout:
    runs = tuple(run for run in runs if run.numel)
    shape = list(parts[0])
    shape[dim] = sum(run.numel for run in runs)
    others = {(*part[:dim], *part[dim + 1 :]) for part in parts}
    if len(others) > 1 or any(run.stop > parts[run.rank][dim] for run in runs):
        raise ValueError(f"{name} has shapes {list(parts)}")
    return Layout(tuple(shape), tuple(parts), dim, runs)


def _by_places(name: str, entry: Mapping[str, Any], parts: Sequence[Shape]) -> Layout:
    """Read an affine map: of each rank blocks of elements, with their places in the whole and in the part."""
    whole = tuple(int(size) for size in entry["logical_shape"])
    ranks = {int(rank): one for rank, one in entry["ranks"].items()}
    said = [tuple(ranks[rank]["shard_shape"]) for rank in range(len(parts))]
    if said != list(parts):
        raise _unknown(name, f"its parts are {list(map(list, parts))}, and are said to be {list(map(list, said))}")
    if any(piece.get("scale", 1.0) != 1.0 for one in ranks.values() for piece in one["pieces"]):
        raise _unknown(name, "a part is a multiple")
    if all(part == whole for part in parts):
        return Layout(whole, tuple(parts))
    dims = {dim for part in parts for dim, size in enumerate(part) if size != whole[dim]}
    if len(dims) != 1:
        raise _unknown(name, "they are no rows or columns")
    (dim,) = dims
    placed: list[tuple[int, ShardRange]] = []
    for rank, one in ranks.items():
        for piece in one["pieces"]:
            size = int(piece["shape"][dim])
            starts = [_start(name, piece, *pair, dim) for pair in (("source", whole), ("dest", parts[rank]))]
            placed.append((starts[0], ShardRange(starts[1], starts[1] + size, rank)))
    end, runs = 0, []
    for start, run in sorted(placed, key=lambda pair: (pair[0], pair[1].rank)):
        if start + run.numel <= end:  # another rank's copy
            continue
        if start != end:
            raise _unknown(name, "they overlap, or leave something out")
        runs.append(run)
        end += run.numel
    if end != whole[dim]:
        raise _unknown(name, "they leave something out")
    return _checked(name, parts, dim, runs)


def _start(name: str, piece: Mapping[str, Any], side: str, shape: Shape, dim: int) -> int:
    """Return where a block of rows or columns begins along `dim` in a tensor of `shape`."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    offset, given = piece[side]
    is_plain = all(size < 2 or have == want for size, have, want in zip(piece["shape"], given, strides, strict=True))
    is_band = all(size == shape[axis] for axis, size in enumerate(piece["shape"]) if axis != dim)
    start, rest = divmod(int(offset), strides[dim])
    if not is_plain or not is_band or rest:
        raise _unknown(name, "they are no rows or columns")
    return start


def _without_padding(layout: Layout, num_rows: int) -> Layout:
    runs, left = [], num_rows
    for run in layout.runs:
        runs.append(replace(run, stop=min(run.stop, run.start + left)))
        left -= runs[-1].numel
    return Layout((min(num_rows, layout.shape[0]), *layout.shape[1:]), layout.part_shapes, 0, tuple(runs))


def _unknown(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"convert: expected parts of tensor-parallel ranks that are rows or columns of the whole, got those of {name}: "
        f"{why.rstrip('.')}. Leave this layer whole when the model is sharded, or shard it by fp8_ds.tp.parallelize."
    )

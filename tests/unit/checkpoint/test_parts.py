"""Parts of tensor-parallel ranks are joined as DeepSpeed joins them, with their own scales where the form has room."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.inputs import many_scales
from torch import Tensor

from fp8_ds.checkpoint.parts import Layout, layouts_of
from fp8_ds.errors import CheckpointError, UnsupportedError
from fp8_ds.nn.linear.payload import ROW, TENSOR, TILE, Granularity, per_element

affine = pytest.importorskip("deepspeed.checkpoint.affine")

WHOLE = many_scales("per_tile", 12, 8, 0)
PATTERN = "^w$"


def cut(whole: Tensor, dim: int, widths: list[list[int]]) -> list[Tensor]:
    """Give each rank a part of each of the tensors that `whole` consists of along `dim`, of these widths by rank."""
    parts: list[list[Tensor]] = [[] for _ in widths[0]]
    for tensor, by_rank in zip(whole.split([sum(one) for one in widths], dim), widths, strict=True):
        for rank, part in enumerate(tensor.split(by_rank, dim)):
            parts[rank].append(part)
    return [torch.cat(found, dim) for found in parts]


def layout_by(info: dict[str, Any], parts: list[Tensor]) -> Layout:
    return layouts_of(info, [{"w": tuple(part.shape)} for part in parts])["w"]


@pytest.mark.parametrize(
    ("info", "dim", "widths"),
    [
        ({}, 0, [[6, 6]]),
        ({}, 0, [[7, 0, 5]]),
        ({"parameter_with_row_parallelism_patterns": [PATTERN]}, 1, [[3, 5]]),
        ({"parameter_with_2_sub_params_cat_dim_0": [PATTERN]}, 0, [[3, 3], [3, 3]]),
        ({"parameter_with_sub_params": True}, 0, [[4, 2], [2, 1], [2, 1]]),
        ({"parameter_with_sub_params": True}, 1, [[1, 3], [2, 2]]),
    ],
)
def test_parts_that_patterns_describe_make_the_whole_again(
    info: dict[str, Any], dim: int, widths: list[list[int]]
) -> None:
    parts = cut(WHOLE, dim, widths)
    info = {"universal_checkpoint_version": 0.4, **info}
    if "parameter_with_sub_params" in info:
        shape: list[Any] = list(WHOLE.shape)
        shape[dim] = tuple(sum(one) for one in widths)
        info["parameter_with_sub_params"] = [{"patterns": [PATTERN], "shape": shape, "partition_dim": dim}]
        info["sub_param_shard_widths"] = {PATTERN: widths}
    layout = layout_by(info, parts)
    assert layout.shape == WHOLE.shape and torch.equal(layout.join(parts), WHOLE)


MAPS = {
    "rows": affine.contiguous_split_map((12, 8), [7, 5], 0),
    "columns": affine.contiguous_split_map((12, 8), [2, 6], 1),
    "fused": affine.sub_param_map((12, 8), [6, 6], [[4, 2], [3, 3]], 0),
    "fused columns": affine.sub_param_map((12, 8), [6, 2], [[4, 2], [1, 1]], 1),
    "a block on all ranks": affine.segmented_map((12, 8), [(8, False), (4, True)], 0, 2, [[5, 3]]),
    "blocks out of order": affine.block_gather_map((12, 8), {0: [2, 0], 1: [1, 3]}, 3, 0),
    "whole": affine.replicated_map((12, 8), 2),
}


@pytest.mark.parametrize("kind", MAPS)
def test_places_of_deepspeeds_affine_map_count_before_patterns(kind: str) -> None:
    parts = [MAPS[kind].extract(WHOLE, rank) for rank in range(2)]
    info = {"tp_replicated_parameter_patterns": ["^other$"], "parameter_with_row_parallelism_patterns": [PATTERN]}
    info |= {"affine_map": {"version": 1, "params": {PATTERN: MAPS[kind].to_dict()}}}
    layout = layout_by(info, parts)
    assert layout.shape == WHOLE.shape and torch.equal(layout.join(parts), WHOLE)


def test_rows_that_pad_a_vocabulary_are_left_out() -> None:
    info = {"vocabulary_parameter_patterns": [PATTERN], "original_vocab_size": 9}
    parts = list(WHOLE.split(6))
    assert torch.equal(layout_by(info, parts).join(parts), WHOLE[:9])


def scaled(entry: dict[str, Any]) -> dict[str, Any]:
    entry["ranks"][1]["pieces"][0]["scale"] = 0.5
    return entry


OF_MAP: dict[str, Any] = {
    "multiples": scaled(MAPS["rows"].to_dict()),
    "another shape": affine.contiguous_split_map((12, 8), [6, 6], 0).to_dict(),
    "in three dims": affine.contiguous_split_map((2, 6, 8), [4, 2], 1).to_dict(),
    "a gap": affine.block_gather_map((12, 8), {0: [0, 2, 3, 4, 5, 6, 7], 1: [8, 9, 10, 11, 7]}, 1, 0).to_dict(),
}


@pytest.mark.parametrize(
    ("info", "error"),
    [
        ({}, UnsupportedError),
        ({"autotp_unsupported_parameter_patterns": {PATTERN: "it is turned"}}, UnsupportedError),
        ({"parameter_to_average_patterns": [PATTERN]}, UnsupportedError),
        (
            {"parameter_with_sub_params": [{"patterns": [PATTERN], "shape": [3, -1], "partition_dim": 0}]},
            UnsupportedError,
        ),
        *(({"affine_map": {"params": {PATTERN: entry}}}, UnsupportedError) for entry in OF_MAP.values()),
        ({"affine_map": {"version": 2, "params": {}}}, CheckpointError),
        ({"affine_map": {"params": {PATTERN: {}}}}, CheckpointError),
        ({"tp_replicated_parameter_patterns": [PATTERN]}, CheckpointError),
        ({"parameter_with_row_parallelism_patterns": [PATTERN]}, CheckpointError),
        ({"tp_replicated_parameter_patterns": ["("]}, CheckpointError),
        ({"tp_replicated_parameter_patterns": 3}, CheckpointError),
    ],
    ids=str,
)
def test_what_cannot_be_joined_is_refused_by_name(info: dict[str, Any], error: type[Exception]) -> None:
    parts = list(WHOLE.split([7, 5]))
    with pytest.raises(error, match=r"universal_checkpoint_info|those of w: "):
        layout_by(info, parts)


POW2_TENSOR, POW2_ROW = Granularity((None, None), is_pow2=True), Granularity((1, None), is_pow2=True)


@pytest.mark.parametrize(
    ("own", "stored", "dim", "widths", "is_held"),
    [
        (TENSOR, ROW, 0, [[100, 30], [7, 100]], True),
        (ROW, ROW, 0, [[100, 30], [7, 100]], True),
        (POW2_ROW, ROW, 1, [[100, 30]], False),
        (TENSOR, ROW, 1, [[128, 128]], False),
        (POW2_TENSOR, TILE, 0, [[256, 128], [128, 40]], True),
        (POW2_TENSOR, TILE, 1, [[128, 140]], True),
        (POW2_TENSOR, TILE, 1, [[100, 156]], False),
        (TILE, TILE, 0, [[128, 384]], True),
        (TILE, TILE, 1, [[256, 130], [128, 128]], False),
        (TILE, TILE, 1, [[256, 128], [128, 130]], True),
        (TILE, TILE, 0, [[64, 64]], False),
    ],
    ids=str,
)
def test_each_element_keeps_the_scale_of_its_part(
    own: Granularity, stored: Granularity, dim: int, widths: list[list[int]], is_held: bool
) -> None:
    size = sum(map(sum, widths))
    whole = many_scales("per_tile", *((size, 200) if dim == 0 else (200, size)), 1)
    parts = [part * 8**rank for rank, part in enumerate(cut(whole, dim, widths))]
    several = {"patterns": [PATTERN], "shape": list(whole.shape), "partition_dim": dim}
    info = {"parameter_with_sub_params": [several], "sub_param_shard_widths": {PATTERN: widths}}
    layout = layout_by(info, parts)
    assert layout.holds(stored) == is_held
    if is_held:
        grids = [own.scales(own.amax(part.reshape(-1), part.shape))[1] for part in parts]
        elements = layout.join(
            [per_element(grid, part.shape).expand(part.shape) for grid, part in zip(grids, parts, strict=True)]
        )
        found = layout.join_scales(grids, stored, own).expand(stored.grid(whole.shape))
        assert len(elements.unique()) > 1
        assert torch.equal(per_element(found, whole.shape).expand(whole.shape), elements)


def test_patterns_match_from_the_beginning_of_a_name_as_deepspeeds_do() -> None:
    info = {"tp_replicated_parameter_patterns": [f"^{re.escape('a.norm')}$", "b"]}
    shapes = [{"a.norm": (4,), "b.bias": (4,), "a.b": (4,)}] * 2
    found = layouts_of(info, shapes)
    assert [found[name].shape for name in shapes[0]] == [(4,), (4,), (8,)]

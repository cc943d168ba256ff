"""What a checkpoint that does not fit is told to become can be had."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8_ds.engine import checking


@pytest.mark.parametrize(
    ("saved", "now", "with_optimizer", "said"),
    [
        ((2, 2, 1), (2, 1, 2), True, "before it is sharded"),
        ((2, 2, 1), (2, 2, 1), True, ""),
        ((2, 2, 1), (2, 4, 1), False, ""),
        ((2, 2, 1), (2, 4, 1), True, "loads at any world size: `fp8-ds convert FOLDER .* --stage 2`"),
        ((2, 2, 1), (3, 2, 1), True, "loads in another stage: `fp8-ds convert FOLDER .* --stage 3`"),
        ((2, 1, 2), (3, 2, 1), True, "in stage 2, without tensor parallelism, .* --stage 2`.* goes to another stage"),
        ((3, 1, 2), (1, 1, 2), True, "in stage 3, without tensor parallelism, .* --stage 3`.* goes to another stage"),
    ],
)
def test_the_remedy_of_another_layout_is_one_that_convert_takes(
    monkeypatch: pytest.MonkeyPatch,
    saved: tuple[int, int, int],
    now: tuple[int, int, int],
    with_optimizer: bool,
    said: str,
) -> None:
    """(stage, data-parallel ranks, tensor-parallel ranks); parts of several of the latter change no stage."""
    header = dict(zip(("zero_stage", "dp_world_size", "mp_world_size"), saved, strict=True))
    stage, seq_dp_world_size, mp_world_size = now
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: stage,
        seq_dp_world_size=seq_dp_world_size,
        mp_world_size=mp_world_size,
        module="cut" if mp_world_size > 1 else "whole",
    )
    monkeypatch.setattr(checking, "contexts_of", lambda module: module == "cut")
    found = checking.other_run(engine, header, with_optimizer)
    assert (found == "") == (said == "") and re.search(said, found), found


AUTOTP = {"ds_autotp_universal_checkpoint_meta": {"logical_shape": (10, 4)}}


@pytest.mark.parametrize(
    ("saved", "more", "own", "attributes", "fits"),
    [
        ((8, 6), {"cat_dim": 0}, (4, 6), {}, True),
        ((8, 6), {"cat_dim": 1}, (8, 3), {}, True),
        ((8, 8), {"cat_dim": 0}, (8, 4), {}, False),  # as many numbers, and stock code cuts rows
        ((8, 6), {"cat_dim": 0}, (6, 6), {}, False),
        ((8,), {}, (8,), {}, True),  # whole on every rank
        ((), {}, (2,), {}, False),
        ((7, 6), {"cat_dim": 0, "vocab_tensor": True}, (4, 6), {}, True),  # the eighth row only pads
        ((9, 6), {"cat_dim": 0, "vocab_tensor": True}, (4, 6), {}, False),
        ((7, 5), {"cat_dim": 0, "vocab_tensor": True}, (4, 6), {}, False),
        ((10, 4), {}, (7, 4), AUTOTP, True),  # AutoTP's parts may be uneven
        ((2, 5, 4), {}, (7, 4), AUTOTP, True),
        ((4, 10), {}, (7, 4), AUTOTP, False),
        ((12, 4), {}, (6, 4), AUTOTP, False),
    ],
)
def test_a_tensor_parallel_rank_takes_the_shape_of_which_it_gets_its_part(
    tmp_path: Path, saved: tuple[int, ...], more: dict[str, Any], own: tuple[int, ...], attributes: Any, fits: bool
) -> None:
    """Of a universal checkpoint, on one of two ranks."""
    (tmp_path / "zero/w").mkdir(parents=True)
    torch.save({"param": torch.zeros(saved), **more}, tmp_path / "zero/w/fp32.pt")
    p = SimpleNamespace(**attributes)
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: 2,
        mp_world_size=2,
        module=SimpleNamespace(named_parameters=lambda: [("w", p)]),
        _get_zero_param_shapes=lambda: [{"w": torch.Size(own)}],
    )
    found = checking.other_universal(engine, tmp_path, tmp_path / "none.pt")
    assert (found == "") == fits and (fits or f"w {list(saved)} in the checkpoint" in found), found

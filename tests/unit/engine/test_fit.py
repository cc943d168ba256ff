"""What a checkpoint that does not fit is told to become can be had."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from fp8_ds.engine import fit


@pytest.mark.parametrize(
    ("saved", "now", "with_optimizer", "said"),
    [
        ((2, 2, 1), (2, 1, 2), True, "before it is cut"),
        ((2, 2, 1), (3, 1, 2), False, "before it is cut"),
        ((2, 2, 1), (2, 2, 1), True, ""),
        ((1, 2, 1), (2, 2, 1), True, ""),
        ((2, 2, 1), (2, 4, 1), False, ""),
        ((2, 2, 1), (2, 4, 1), True, "loads at any world size: `fp8-ds convert FOLDER .* --stage 2`"),
        ((2, 1, 2), (2, 1, 1), True, "loads at any world size: `fp8-ds convert FOLDER .* --stage 2`"),
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
    monkeypatch.setattr(fit, "is_cut", lambda module: module == "cut")
    found = fit.other_run(engine, header, with_optimizer)
    assert (found == "") == (said == "") and re.search(said, found), found

"""Amaxes of pieces are reduced to those of whole weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.threads import on_threads

from fp8_ds.comm.collectives import reduced_amaxes


def test_amaxes_of_pieces_are_those_of_all_ranks() -> None:
    def amaxes() -> list[float]:
        rank = dist.get_rank()
        pieces = [(0, torch.tensor([1.0, -2.0 - rank])), (2, torch.tensor([])), (0, torch.tensor([0.5]).bfloat16())]
        return reduced_amaxes(3, pieces[: 3 if rank else 0], dist.group.WORLD, "cpu").tolist()  # type: ignore[arg-type]

    assert on_threads(2, amaxes) == [[3.0, 0.0, 0.0]] * 2

"""Offload of FP8 states: what the kernel knows of where they lie is forgotten with each move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from fp8_ds.numerics.masters import E4M11
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.optim.core import AdamCore
from fp8_ds.optim.states import Flat, Piece, allocate_lo, read_dense
from fp8_ds.zero.stage import offload_adam, reload_adam

GROUPS = [{"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}]


@pytest.mark.parametrize("kind", ["optim_states", "hp_params"])
def test_addresses_are_forgotten_when_states_leave_and_when_they_come_back(kind: str) -> None:
    device = torch.device("cpu")
    shard = AdamShard("weight", 200, 0, 0, 0, 0, E4M11, torch.zeros(200, dtype=torch.uint8))
    allocate_lo(shard, device)
    core = AdamCore([Flat(0, 200, [Piece(0, shard)])], [0], PredictedScales(1, device), device, True, 0)
    zero: Any = SimpleNamespace(optimizer=SimpleNamespace(core=core), offloaded_states=set())

    def step() -> None:
        core.run([torch.ones(200)], core.begin(GROUPS))
        core.end()
        assert len(core._prepared) == 1

    step()
    offload_adam(zero, [OffloadStateTypeEnum(kind)], None)
    assert len(core._prepared) == 0
    step()  # on a CPU it never left
    reload_adam(zero)
    assert len(core._prepared) == 0


def test_a_master_whose_low_part_is_elsewhere_is_read_where_the_high_part_is() -> None:
    """As in a save while states are offloaded. "meta" stands in for a GPU, which refuses tensors of two devices too."""
    shard = AdamShard("weight", 200, 0, 0, 0, 0, E4M11, torch.zeros(200, dtype=torch.uint8, device="meta"))
    allocate_lo(shard, torch.device("cpu"))
    read_dense(shard, None, torch.empty(200, device="meta"), torch.ones(1))

"""ZeRO-3's gradients come where DeepSpeed adds them up. What comes: tests/unit/comm/test_shares.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training

from fp8_ds.comm import collectives
from fp8_ds.comm.reduce_scatter import reduce_scatter_shares
from fp8_ds.engine import deepspeed_fixes
from fp8_ds.engine.deepspeed_fixes import gradient_buffer
from fp8_ds.testing import assert_bitwise

pytestmark = pytest.mark.distributed


def accumulated(fp8: dict[str, Any], patched: dict[str, Any]) -> tuple[list[set[bool]], dict[str, torch.Tensor]]:
    """By micro-batch, whether shares of the blocks' gradients come in the place where DeepSpeed adds them up; and
    masters after three steps of two micro-batches."""
    engine = training.build(training.ds_config(3, fp8, gradient_accumulation_steps=2))
    kind, found = type(engine.optimizer), []
    stock = kind.partition_grads

    def partition_grads(self: Any, params: list[Any], shares: list[torch.Tensor]) -> list[torch.Tensor]:
        places = [gradient_buffer(self, p) for p in params]
        if len(params) > 1:
            found.append({a.data_ptr() == b.data_ptr() for a, b in zip(places, shares, strict=True)})
        return stock(self, params, shares)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MIN_BYTES", 0)
        patch.setattr(kind, "partition_grads", partition_grads)
        for name, value in patched.items():
            patch.setattr(deepspeed_fixes, name, value)
        training.train(engine, 3)
    masters = training.full_masters(engine)
    training.destroy(engine)
    return found, masters


def without_places(tensors: Any, group: Any, places: Any) -> list[torch.Tensor]:
    return reduce_scatter_shares(tensors, group)


@pytest.mark.parametrize("fp8", [{}, {"optimizer": {"states": "fp8", "master": "e4m19"}}], ids=["fp32", "e4m19"])
def test_the_first_gradients_of_a_step_come_where_they_are_added_up(ranks: Any, fp8: dict[str, Any]) -> None:
    copied = ranks(2).run(accumulated, fp8, {"reduce_scatter_shares": without_places})
    for (found, masters), (found_copied, masters_copied) in zip(
        ranks(2).run(accumulated, fp8, {}), copied, strict=True
    ):
        assert found == [{True}, {False}] * 3 and found_copied == [{False}] * 6
        for name, master in masters.items():
            assert_bitwise(master, masters_copied[name])

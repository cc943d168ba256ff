"""Gradients of CUDA graphs over several micro-batches, replays played by hand: a CPU has none."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import training

from fp8_ds.engine import deepspeed_fixes

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
NUM = 3


def masters_with_replays(
    mode: str, stage: int, fp8: dict[str, Any], is_contiguous: bool, replays: bool, is_told: bool
) -> dict[str, torch.Tensor]:
    """After two steps of three micro-batches.

    Args:
        mode: how they are summed up; "late": a weight has no gradient in the first.
        replays: whether what a backward has left is written over as soon as the next forward begins.
        is_told: what `deepspeed_fixes.are_replayed` says.
    """
    options: dict[str, Any] = {"zero_optimization": {"stage": stage, "contiguous_gradients": is_contiguous}}
    if mode == "unmanaged":
        options["managed_gradient_accumulation"] = False
    num_managed = NUM if mode in ("managed", "late") else 1
    engine = training.build(
        training.ds_config(stage, fp8, gradient_accumulation_steps=num_managed, **options), {"tiny": True}
    )
    net, tiny = engine.module, engine.module.tiny
    had: set[int] = set()
    left: list[torch.Tensor] = []

    def see(p: torch.nn.Parameter) -> None:
        if p.grad is not None and id(p) not in had:  # what autograd leaves; the next ones are added to it
            left.append(p.grad.detach())

    hooks = [p.register_post_accumulate_grad_hook(see) for p in net.parameters()]
    with patch.object(deepspeed_fixes, "are_replayed", lambda: is_told):
        for step in range(2):
            with engine.coalesce_grad_reduction() if mode == "coalesce" else contextlib.nullcontext():
                for number, batch in enumerate(training.micro_batches(step, NUM)):
                    net.tiny = None if mode == "late" and number == 0 else tiny
                    if replays and number:
                        for grad in left:
                            grad.fill_(float("nan"))
                    had = {id(p) for p in [*net.parameters(), tiny.weight] if p.grad is not None}
                    left.clear()
                    engine.backward(engine(batch))
                    if mode in ("managed", "late") or (mode == "unmanaged" and number == NUM - 1):
                        engine.step()
            if mode == "coalesce":
                engine.step()
            left.clear()
    for hook in hooks:
        hook.remove()
    found = training.full_masters(engine)
    training.destroy(engine)
    return found


@pytest.mark.parametrize(
    ("mode", "stage", "fp8", "is_contiguous"),
    [
        ("managed", 1, {}, True),
        ("managed", 2, STATES, True),
        ("unmanaged", 2, {}, False),
        ("coalesce", 1, {}, True),
        ("late", 1, {}, True),
    ],
)
def test_gradients_that_wait_leave_what_the_next_replay_writes(
    ranks: Any, mode: str, stage: int, fp8: dict[str, Any], is_contiguous: bool
) -> None:
    expected, got, spoiled = (
        ranks(1).run(masters_with_replays, mode, stage, fp8, is_contiguous, replays, is_told)[0]
        for replays, is_told in ((False, False), (True, True), (True, False))
    )
    for name, master in expected.items():
        assert torch.equal(master, got[name]), name
    assert any(not torch.equal(expected[name], master) for name, master in spoiled.items()), "nothing was written over"


@pytest.mark.parametrize("manager", [None, object()])
def test_graphs_are_replayed_where_this_device_has_a_manager_of_them(monkeypatch: Any, manager: Any) -> None:
    import torch._inductor.cudagraph_trees as trees

    assert not deepspeed_fixes.are_replayed(), "no CUDA here"
    containers = trees.get_obj(trees.local, "tree_manager_containers")
    monkeypatch.setitem(containers, 2, SimpleNamespace(tree_manager=object()))
    monkeypatch.setitem(containers, 3, SimpleNamespace(tree_manager=manager))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert deepspeed_fixes.are_replayed() == (manager is not None)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees")
    assert not deepspeed_fixes.are_replayed(), "and it is not imported for the question"

"""Loads through the module; our state in a checkpoint; frozen weights."""

from __future__ import annotations

from typing import Any

import pytest
import test_checkpoint as base
import torch
import training
from support.ranks import on_ranks
from torch import Tensor

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("states", ["fp32", "fp8"])
@on_ranks(2)
def test_a_module_loaded_through_the_engine_is_loaded_as_a_whole(states: str) -> None:
    engine = training.build(training.ds_config(2, {"optimizer": {"states": states}}))
    training.train(engine, 1)
    own = training.full_masters(engine)
    torch.manual_seed(7)
    loaded = {name: value.bfloat16() for name, value in training.TinyLM().state_dict().items()}
    left_out = {"blocks.1.up.weight", "embedding.weight", "norm.bias"}
    engine.load_module_state_dict({"module": {n: v for n, v in loaded.items() if n not in left_out}}, strict=False)
    masters = training.full_masters(engine)
    base.assert_same({name: masters[name] for name in left_out}, {name: own[name] for name in left_out})
    now = {name: value.float() for name, value in loaded.items() if name not in left_out}
    # Of what is not in FP8 an element that already rounds to the loaded value keeps its master.
    base.assert_same({name: masters[name].bfloat16().float() for name in now}, now)
    training.destroy(engine)


# --- our state ---


@pytest.mark.parametrize("writer", [None, {"linear": {"recipe": "delayed", "filter_fqns": ["lm_head", "blocks.1"]}}])
@on_ranks(2)
def test_histories_that_a_checkpoint_does_not_have_for_these_layers_start_anew(
    folder: str, writer: dict[str, Any] | None
) -> None:
    """In an engine that is new, and in one that has some of its own; with a guard, whose counts are of these layers."""
    guard = {"guard": {"action": "report"}}
    engine = base.build(3, None if writer is None else writer | guard)
    training.train(engine, 2)
    engine.save_checkpoint(folder)
    training.destroy(engine)
    losses = []
    for steps in (0, 2):
        reader = base.build(3, base.DELAYED | guard, seed=1)
        training.train(reader, steps)
        reader.load_checkpoint(folder)
        base.assert_bytes_follow_masters(reader)
        losses.append(training.train(reader, 2, first_step=2))
        training.destroy(reader)
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_module_only_load_takes_over_nothing_of_the_run_that_saved(folder: str) -> None:
    """Before a run's first step, and after it."""
    optimizer = {"states": "fp8", "master": "e4m11", "release": True, "release_clipping": "delayed_norm"}
    fp8 = {**base.DELAYED, "optimizer": optimizer, "guard": {"action": "bf16"}}
    writer = base.build(2, fp8)
    training.train(writer, 3)
    writer.set_layer_precision(["blocks.0.up"], "bf16")
    writer._fp8_step_callbacks._send(["blocks.1.up"], "bf16")
    writer.save_checkpoint(folder)
    training.destroy(writer)
    for steps in (0, 1):
        reader = base.build(2, fp8, seed=1)
        reader.set_layer_precision(["blocks.1.down"], "bf16")
        training.train(reader, steps)
        reader.load_checkpoint(folder, load_module_only=True)
        updates = reader.fp8.history.num_updates
        training.train(reader, 2, first_step=steps)
        assert updates == 0 and reader.fp8.precision.in_bf16 == {"blocks.1.down"}
        assert reader.fp8.precision.state_dict()["overrides"] == {"blocks.1.down": "bf16"}
        training.destroy(reader)


# --- frozen weights ---


def frozen_engine(stage: int, frozen: str, seed: int) -> Any:
    config = training.ds_config(stage, {"linear": {"frozen": frozen}})
    return training.build(config, {**base.MODEL, "frozen": "blocks.0"}, seed)


def frozen_values(engine: Any) -> dict[str, Tensor]:
    import deepspeed

    found = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                found[name] = p.detach().clone().cpu()
    return found


@pytest.mark.parametrize(
    ("stage", "kind", "exclude"),
    [
        (2, "fp8", True),
        (3, "fp8", False),
        (1, "bf16", False),
    ],
)
@on_ranks(2)
def test_frozen_weights_resume_bit_for_bit_saved_or_excluded(folder: str, stage: int, kind: str, exclude: bool) -> None:
    engine = frozen_engine(stage, kind, seed=0)
    training.train(engine, 2)
    before, values = training.fp8_state(engine), frozen_values(engine)
    assert len(before) == (4 if kind == "fp8" else 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=exclude)
    losses = training.train(engine, 2, first_step=2)
    training.destroy(engine)

    again = frozen_engine(stage, kind, seed=0 if exclude else 1)
    again.load_checkpoint(folder, load_module_strict=not exclude)
    base.assert_same(frozen_values(again), values)
    training.assert_fp8_equals(training.fp8_state(again), before)
    assert training.train(again, 2, first_step=2) == losses
    training.destroy(again)

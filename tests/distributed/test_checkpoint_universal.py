"""Universal checkpoints: FP8 on 2 ranks goes to 1 and 3 ranks, and from one stage to another."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import torch
import training
from torch import Tensor

from fp8_ds.errors import CheckpointError

pytestmark = pytest.mark.distributed

SOURCES = {2: base.DELAYED, 3: {**base.DELAYED, **base.E4M19}}
"""Stage -> "fp8" block."""


def write_all(folder: str) -> dict[int, tuple[dict[str, Tensor], list[float]]]:
    """Source stage -> (state when saved, losses of the two steps after it), on 2 ranks with 3 micro-batches each."""
    found = {}
    for stage, fp8 in SOURCES.items():
        engine = base.build(stage, fp8, gradient_accumulation_steps=3)
        training.train(engine, 2)
        state = base.snapshot(engine)
        engine.save_checkpoint(f"{folder}/{stage}")
        found[stage] = state, training.train(engine, 2, first_step=2)
        training.destroy(engine)
    return found


def convert(source: Path) -> None:
    """`source`/global_step2 becomes a universal checkpoint in `source`/universal, as ds_to_universal.py makes it."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(source / "global_step2"),
            output_folder=str(source / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def read_all(folder: str, targets: list[tuple[int, int]], world: int) -> list[Any]:
    """For every (source stage, target stage): (state after the load, losses of two steps)."""
    found = []
    for source, stage in targets:
        settings = {"gradient_accumulation_steps": 6 // world, "checkpoint": {"load_universal": True}}
        engine = base.build(stage, SOURCES[source], seed=1, **settings)
        path, client_state = engine.load_checkpoint(f"{folder}/{source}")
        assert path is not None
        assert "fp8_ds" not in client_state
        state = base.snapshot(engine)
        found.append((state, training.train(engine, 2, first_step=2)))
        training.destroy(engine)
    return found


# World size -> (source stage, target stage). Both stages of a first round are alike; then they differ.
Plan = dict[int, list[tuple[int, int]]]
COVERING: tuple[Plan, Plan] = {1: [(2, 2)], 3: [(3, 3)]}, {1: [(2, 3)], 2: [(3, 1)]}


def test_a_universal_checkpoint_gives_the_same_state_on_any_ranks_and_stage(ranks: Any, tmp_path: Path) -> None:
    """Masters, FP8 bytes, scales, histories and float32 moments are equal bit for bit; the training goes on alike."""
    from fp8_ds.tools import convert as conversion

    written = ranks(2).run(write_all, str(tmp_path))[0]
    for stage in SOURCES:
        convert(tmp_path / str(stage))

    def check(plan: Plan) -> None:
        for world, targets in plan.items():
            loaded = ranks(world).run(read_all, str(tmp_path), targets, world)[0]
            for (source, stage), (state, losses) in zip(targets, loaded, strict=True):
                expected, expected_losses = written[source]
                for name, value in expected.items():
                    if "exp_avg" in name and source == 3:  # where shards end decides which elements share a scale
                        assert (state[name] - value).norm() < 0.045 * value.norm(), name
                    else:
                        assert torch.equal(state[name], value), name
                assert state.keys() == expected.keys()
                assert losses == pytest.approx(expected_losses, rel=2e-3), (world, source, stage)

    check(COVERING[0])
    for source, stage in ((2, 3), (3, 1)):
        folder = tmp_path / str(source) / "universal"
        conversion.convert(folder, folder, "universal", stage=stage)
    check(COVERING[1])


# --- what does not fit ---


def save(folder: str) -> None:
    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    training.destroy(engine)


OTHER_MODELS = {
    "up.weight [72, 32] in the checkpoint, [80, 32] now": {"hidden": 80},
    "up.weight [72, 32] in the checkpoint, [64, 32] now": {"hidden": 64},
    "embedding.weight [96, 32] in the checkpoint, [96, 48] now": {"width": 48},
    "up.weight [72, 32] in the checkpoint, [32, 72] now": {"conv1d": True},
}
"""What is said of a model with other options than the one saved."""


def loads(folder: str, stage: int, fp8: dict[str, Any], models: list[dict[str, Any]]) -> list[str]:
    """What models with these options get for the universal checkpoint; the masters change where it is loaded alone."""
    said = []
    for model in models:
        config = training.ds_config(stage, fp8, checkpoint={"load_universal": True})
        engine = training.build(config, {**base.MODEL, **model}, seed=1)
        before = training.full_masters(engine)
        try:
            engine.load_checkpoint(folder, tag="universal")
            said.append("loaded")
        except CheckpointError as error:
            said.append(str(error))
            base.assert_same(training.full_masters(engine), before)
            assert engine.global_steps == 0
        training.destroy(engine)
    return said


def test_a_universal_checkpoint_of_other_shapes_or_another_stage_is_refused_on_all_ranks(
    ranks: Any, tmp_path: Path
) -> None:
    """DeepSpeed's stage 3 loads it in silence, with weights that are shifted, and no stage minds a transposed one; the
    form of another stage ended with an IndexError in the middle of the load."""
    from fp8_ds.tools.convert import convert

    ranks(2).run(save, str(tmp_path))
    universal = tmp_path / "universal"
    convert(tmp_path, universal, "universal")
    for stage, fp8 in ((3, {}), (2, base.E4M11)):
        remedy = f"fp8-ds convert {universal} {universal} --to universal --stage {stage}"
        assert all(remedy in said for (said,) in ranks(2).run(loads, str(tmp_path), stage, fp8, [{}]))
        convert(universal, universal, "universal", stage=stage)
        for found in ranks(2).run(loads, str(tmp_path), stage, fp8, [*OTHER_MODELS.values(), {}]):
            assert found[-1] == "loaded"
            for expected, text in zip(OTHER_MODELS, found, strict=False):
                assert expected in text

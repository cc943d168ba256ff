"""Universal checkpoints: FP8 on 2 ranks goes to 1 and 3 ranks, and from one stage to another."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import test_states
import torch
import training
from torch import Tensor

from fp8_ds.errors import CheckpointError

pytestmark = pytest.mark.distributed

SOURCES = (2, 3)


def write_all(folder: str) -> dict[int, tuple[dict[str, Tensor], list[float]]]:
    """Source stage -> (state when saved, losses of the two steps after it), on 2 ranks with 3 micro-batches each."""
    found = {}
    for stage in SOURCES:
        engine = base.build(stage, base.DELAYED, gradient_accumulation_steps=3)
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
        engine = base.build(stage, base.DELAYED, seed=1, **settings)
        path, client_state = engine.load_checkpoint(f"{folder}/{source}")
        assert path is not None
        assert "fp8_ds" not in client_state
        state = base.snapshot(engine)
        base.assert_bytes_follow_masters(engine)
        found.append((state, training.train(engine, 2, first_step=2)))
        training.destroy(engine)
    return found


# World size -> (source stage, target stage). Both stages of a first round are alike; then they differ.
Plan = dict[int, list[tuple[int, int]]]
COVERING: tuple[Plan, Plan] = {1: [(2, 2)], 3: [(3, 3)]}, {1: [(2, 3)], 2: [(3, 1)]}


def test_a_universal_checkpoint_gives_the_same_state_on_any_ranks_and_stage(ranks: Any, tmp_path: Path) -> None:
    """Masters, moments, FP8 bytes, scales and histories are equal bit for bit; the training goes on alike."""
    from fp8_ds.tools import convert as conversion

    written = ranks(2).run(write_all, str(tmp_path))[0]
    for stage in SOURCES:
        convert(tmp_path / str(stage))

    def check(plan: Plan) -> None:
        for world, targets in plan.items():
            loaded = ranks(world).run(read_all, str(tmp_path), targets, world)[0]
            for (source, stage), (state, losses) in zip(targets, loaded, strict=True):
                expected, expected_losses = written[source]
                base.assert_same(state, expected)
                assert losses == pytest.approx(expected_losses, rel=2e-3), (world, source, stage)

    check(COVERING[0])
    for source, stage in ((2, 3), (3, 1)):
        folder = tmp_path / str(source) / "universal"
        conversion.convert(folder, folder, "universal", stage=stage)
    check(COVERING[1])


# --- FP8 states: shards that are cut at multiples of 128 keep their bytes ---


def aligned(folder: str, stage: int, loads: bool) -> tuple[Any, Any]:
    """States of an engine over `Aligned`, before and after two steps: trained and saved, or loaded."""
    import deepspeed

    import fp8_ds  # noqa: F401

    config = training.ds_config(stage, base.E4M11, gradient_clipping=0.0, checkpoint={"load_universal": loads})
    torch.manual_seed(int(loads))
    net = test_states.Aligned()
    engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]

    def inject_steps(steps: range) -> Any:
        for step in steps:
            gradients = functools.partial(test_states.inject, engine.optimizer, test_states.many_scales(step))
            engine.optimizer._fp8_gradients = gradients
            engine.optimizer.step()
        return test_states.local_states(engine)

    if loads:
        assert engine.load_checkpoint(folder)[0] is not None
    before = inject_steps(range(0 if loads else 2))
    if not loads:
        engine.global_steps = 2
        engine.save_checkpoint(folder)
    after = inject_steps(range(2, 4))
    training.destroy(engine)
    return before, after


def test_a_universal_checkpoint_gives_the_same_codes_of_fp8_states_on_any_ranks_and_stage(
    ranks: Any, tmp_path: Path
) -> None:
    from fp8_ds.tools import convert as conversion

    def whole(results: list[Any]) -> list[dict[str, dict[str, Tensor]]]:
        return [test_states.assembled([result[part] for result in results]) for part in (0, 1)]

    written = whole(ranks(2).run(aligned, str(tmp_path), 2, False))
    convert(tmp_path)
    for world, stage in ((1, 1), (2, 3)):
        if stage == 3:
            conversion.convert(tmp_path / "universal", tmp_path / "universal", "universal", stage=3)
        read = whole(ranks(world).run(aligned, str(tmp_path), stage, True))
        for got, expected in zip(read, written, strict=True):
            test_states.assert_same_states(got, expected)


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

"""Universal checkpoints: FP8 on 2 ranks goes to 1 and 3 ranks, and from one stage to another."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import training
from torch import Tensor

pytestmark = pytest.mark.distributed

SOURCES = (1, 2, 3)


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


def read_all(folder: str, targets: list[tuple[int, int, bool]], world: int) -> list[Any]:
    """For every (source stage, target stage, keep): (state after the load, losses of two steps)."""
    found = []
    for source, stage, keep in targets:
        fp8 = {**base.DELAYED, **(base.KEPT if keep else {})}
        engine = base.build(
            stage, fp8, seed=1, gradient_accumulation_steps=6 // world, checkpoint={"load_universal": True}
        )
        path, client_state = engine.load_checkpoint(f"{folder}/{source}")
        assert path is not None
        assert "fp8_ds" not in client_state
        state = base.snapshot(engine)
        base.assert_bytes_follow_masters(engine)
        found.append((state, training.train(engine, 2, first_step=2)))
        training.destroy(engine)
    return found


# World size -> (source stage, target stage, keep_bf16_shard). Both stages of a first round are alike; then they differ.
Plan = dict[int, list[tuple[int, int, bool]]]
COVERING: tuple[Plan, Plan] = {1: [(1, 1, False)], 3: [(3, 3, True)]}, {1: [(2, 3, False)], 2: [(3, 1, False)]}
OTHERS: tuple[Plan, Plan] = (
    {1: [(3, 3, False)], 3: [(2, 2, False), (2, 1, False)]},
    {2: [(1, 3, True)]},
)


@pytest.mark.parametrize(
    ("same_stage", "other_stage", "comes_back"),
    [(*COVERING, False), pytest.param(*OTHERS, True, marks=pytest.mark.slow)],
    ids=["covering", "others"],
)
def test_a_universal_checkpoint_gives_the_same_state_on_any_ranks_and_stage(
    ranks: Any, tmp_path: Path, same_stage: Plan, other_stage: Plan, comes_back: bool
) -> None:
    """Masters, moments, FP8 bytes, scales and histories are equal bit for bit; the training goes on alike."""
    from fp8_ds.checkpoint.universal import prepare_universal

    written = ranks(2).run(write_all, str(tmp_path))[0]
    for stage in SOURCES:
        convert(tmp_path / str(stage))

    def check(plan: Plan) -> None:
        for world, targets in plan.items():
            loaded = ranks(world).run(read_all, str(tmp_path), targets, world)[0]
            for (source, stage, _), (state, losses) in zip(targets, loaded, strict=True):
                expected, expected_losses = written[source]
                base.assert_same(state, expected)
                assert losses == pytest.approx(expected_losses, rel=2e-3), (world, source, stage)

    check(same_stage)
    for source, stage in ((1, 3), (2, 3), (3, 1)):
        prepare_universal(tmp_path / str(source) / "universal", stage)
    check(other_stage)
    if comes_back:
        prepare_universal(tmp_path / "3/universal", 3)
        check({2: [(3, 3, False)]})


def test_what_is_no_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    from fp8_ds.checkpoint.universal import prepare_universal
    from fp8_ds.errors import ConfigError

    with pytest.raises(ConfigError, match=r"Name the output folder of ds_to_universal\.py"):
        prepare_universal(tmp_path, 3)
    with pytest.raises(ConfigError, match="expected 1, 2 or 3, got 0"):
        prepare_universal(tmp_path, 0)

"""Checkpoints that a load refuses: damaged, of another run, hostile."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import torch
import training
from support.hostile import Hostile
from support.ranks import on_ranks

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.folders import MANIFEST

pytestmark = pytest.mark.distributed


def refusal(engine: Any, folder: str, **options: Any) -> str:
    """What the load of `folder` raises; nothing of the engine has changed."""
    from fp8_ds.errors import CheckpointError

    before, bytes_before = training.full_masters(engine), training.fp8_state(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, **options)
    base.assert_same(training.full_masters(engine), before)
    training.assert_fp8_equals(training.fp8_state(engine), bytes_before)
    return str(caught.value)


def files_of(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).glob("global_step*/*") if path.is_file())


def on_rank_0(act: Callable[[], Any]) -> None:
    """Before and after it all ranks meet."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


# --- damage ---


@pytest.mark.parametrize(("stage", "has_manifest"), [(3, True), (2, False)], ids=["3", "2-without-manifest"])
@on_ranks(2)
def test_a_damaged_file_is_named_on_all_ranks_and_nothing_is_loaded(
    folder: str, stage: int, has_manifest: bool
) -> None:
    engine = base.build(stage, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    before, loss = base.snapshot(engine), training.train(engine, 1, first_step=1)
    training.destroy(engine)
    again = base.build(stage, {}, seed=1)
    (manifest,) = Path(folder).glob(f"*/{MANIFEST}")
    if not has_manifest:
        on_rank_0(manifest.unlink)
    files = files_of(folder)
    assert len(files) == (5 if has_manifest else 3), files
    for path in files:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 4
        for change in (flipped, content[:-1], content[: len(content) // 2], None):
            if (change is flipped and not has_manifest) or (change is None and path == manifest):
                continue  # a bit that nothing knows of; a checkpoint without a manifest
            on_rank_0(path.unlink if change is None else lambda change=change: path.write_bytes(change))  # noqa: B023
            # What is missing may be the model file that counts the others.
            is_named = change is not None or has_manifest or "optim" in path.name
            assert str(path if is_named else path.parent) in refusal(again, folder)
        on_rank_0(lambda: path.write_bytes(content))  # noqa: B023
    again.load_checkpoint(folder)
    base.assert_same(base.snapshot(again), before)
    assert training.train(again, 1, first_step=1) == loss
    training.destroy(again)


# --- our state ---


def record_again(path: Path) -> None:
    """Make the manifest fit a file that has been changed, as whoever can change a file can."""
    manifest = folders.read_manifest(path.parent)
    assert manifest is not None
    files = {**manifest.files, path.name: folders.record(path, manifest.files[path.name].rank)}
    folders.write_manifest(path.parent, folders.Manifest(manifest.header, files))


WEIGHT = "blocks.0.up.weight"


def set_number(number: float, *keys: str) -> Any:
    """A damage: the first element of a tensor, or a number, is another."""

    def damage(state: Any) -> None:
        *path, last = keys
        for key in path:
            state = state[key]
        if torch.is_tensor(state[last]):
            state[last].view(-1)[0] = number
        else:
            state[last] = number

    return damage


def set_entry(make: Any, *keys: str) -> Any:
    """A damage: an entry is what `make` makes of it; None: it is gone."""

    def damage(state: Any) -> None:
        *path, last = keys
        for key in path:
            state = state[key]
        if make is None:
            del state[last]
        else:
            state[last] = make(state.get(last))

    return damage


SCALE = ("scale_inv", WEIGHT)
DAMAGES: list[tuple[Any, tuple[str, ...]]] = [
    *((set_number(value, *SCALE), (f"fp8_ds['scale_inv']['{WEIGHT}']", f"got {value:g}"))
      for value in (float("inf"), 3e38, -1.0, float("nan"), 0.0)),
    *((set_number(value, "history", "amax_history"), ("fp8_ds['history']['amax_history']", f"got {value:g}"))
      for value in (float("inf"), -1.0, float("nan"))),
    (set_number(-1.0, "history", "amax_local"), ("fp8_ds['history']['amax_local']", "got -1")),
    (set_number(float("nan"), "history", "scale"), ("fp8_ds['history']['scale']", "got nan")),
    (set_number(-3, "history", "num_updates"), ("fp8_ds['history']['num_updates']", "got -3")),
    (set_entry(None, "history", "scale_inv"), ("fp8_ds['history'] lacks scale_inv",)),
    (set_entry(lambda x: x[:-1], "history", "scale"), ("['scale']: expected float32 of shape (8,)", "(7,)")),
    (set_entry(None, *SCALE), (f"fp8_ds['scale_inv'] lacks {WEIGHT}",)),
    (set_entry(lambda x: x.double(), *SCALE), (f"['{WEIGHT}']: expected float32 of shape ()", "got float64")),
    (set_entry(lambda x: x.repeat(2), *SCALE), (f"['{WEIGHT}']: expected float32 of shape ()", "of shape (2,)")),
    (set_entry(lambda x: float(x), *SCALE), (f"['{WEIGHT}']: expected float32", "got float")),
    (set_entry(lambda _: torch.ones(()), "scale_inv", "blocks.9.up.weight"), ("blocks.9.up.weight'] is of no weight",)),
    *((set_entry(None, key), (f"fp8_ds lacks {key}",)) for key in ("scale_inv", "history", "plan", "config")),
    (set_entry(lambda _: [1, 2], "plan"), ("fp8_ds['plan']: expected rows of layers, got [1, 2]",)),
    (set_entry(lambda _: {"overrides": {"up": "fp4"}}, "precision"), ("['precision']['overrides']['up']", "got fp4")),
    (set_entry(lambda _: {"last_norm": -1.0}, "release"), ("['last_norm']", "-1")),
    (set_entry(lambda _: {0: float("nan")}, "bound_sums"), ("fp8_ds['bound_sums'][0]", "nan")),
    (set_entry(lambda x: {**x, "guard": {}}, "following"), ("fp8_ds['following']", "KeyError: 'named'")),
    (set_number(0.3, *SCALE), (WEIGHT, "0.3")),
]  # fmt: skip


@on_ranks(2)
def test_values_that_no_save_writes_are_named_on_all_ranks_and_nothing_is_loaded(folder: str) -> None:
    """One rank's file has a value that no save writes: nothing is loaded on any rank."""
    engine = base.build(3, {"guard": {"action": "report"}, **base.DELAYED, **base.E4M11})
    training.train(engine, 1)
    engine.save_checkpoint(folder, tag="one")
    training.train(engine, 1, first_step=1)
    before = base.snapshot(engine)
    path = Path(folder, "one/zero_pp_rank_1_mp_rank_00_model_states.pt")
    whole = torch.load(path, weights_only=False)

    def write(content: Any) -> None:
        torch.save(content, path)
        record_again(path)

    for damage, parts in DAMAGES:
        content = copy.deepcopy(whole)
        damage(content["fp8_ds"])
        on_rank_0(lambda: write(content))  # noqa: B023
        message = refusal(engine, folder, tag="one")
        for part in (str(path), *parts):
            assert part in message, (part, message)
    base.assert_same(base.snapshot(engine), before)
    on_rank_0(lambda: write(whole))
    assert engine.load_checkpoint(folder, tag="one")[0] is not None
    training.destroy(engine)


@on_ranks(2)
def test_a_named_pipe_in_a_checkpoint_is_refused_by_name_and_not_waited_for(folder: str) -> None:
    engine = base.build(2, {})
    engine.save_checkpoint(folder, tag="one")
    for name in ("zero_pp_rank_7_mp_rank_00_optim_states.pt", MANIFEST):
        path = Path(folder, "one", name)

        def replace(path: Path = path) -> None:
            path.unlink(missing_ok=True)
            os.mkfifo(path)

        on_rank_0(replace)
        assert f"{path}: expected a file, got a named pipe" in refusal(engine, folder, tag="one")
    training.destroy(engine)


@on_ranks(2)
def test_what_is_unfinished_absent_or_added_is_refused(folder: str) -> None:
    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder, tag="whole")
    more = Path(folder, "whole/mp_rank_01_model_states.pt")

    def spoil() -> None:
        shutil.copytree(f"{folder}/whole", f"{folder}/torn.incomplete")
        Path(folder, "torn.incomplete", MANIFEST).unlink()
        shutil.copy(f"{folder}/whole/mp_rank_00_model_states.pt", more)

    on_rank_0(spoil)
    assert "torn.incomplete" in refusal(engine, folder, tag="torn.incomplete")
    assert "'whole'" in refusal(engine, folder, tag="absent")
    assert f"{more.name} is not in {MANIFEST}" in refusal(engine, folder)
    on_rank_0(more.unlink)
    for latest in ("who\0e", ""):
        on_rank_0(lambda: Path(folder, "latest").write_text(latest))  # noqa: B023
        assert "latest: expected names that stay in their folder" in refusal(engine, folder)
    assert engine.load_checkpoint(f"{folder}/nowhere") == (None, None)  # as stock
    training.destroy(engine)


# --- other runs ---


def saved(folder: str, stage: int, model: dict[str, Any]) -> None:
    engine = training.build(training.ds_config(stage, {}), model)
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    training.destroy(engine)


def load_elsewhere(folder: str, stage: int, model: dict[str, Any], options: dict[str, Any]) -> str:
    engine = training.build(training.ds_config(stage, {}), model, seed=1)
    message = refusal(engine, folder, **options)
    training.destroy(engine)
    return message


OTHER = {
    "shape": ((2, 2, {**base.MODEL, "hidden": 88}, {}), "blocks.0.up.weight [72, 32] in the checkpoint, [88, 32] now"),
    "names": ((2, 3, {**base.MODEL, "num_blocks": 1}, {}), "blocks.1.norm.weight [32] in the checkpoint, missing now"),
    "stage": ((2, (2, 3), base.MODEL, {}), "zero_stage 2 in the checkpoint, 3 now (a universal checkpoint"),
    "fewer-ranks": ((1, 2, base.MODEL, {}), "dp_world_size 2 in the checkpoint, 1 now (a universal"),
}


@pytest.mark.parametrize("case", OTHER)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(ranks: Any, tmp_path: Path, case: str) -> None:
    (world, stages, model, options), expected = OTHER[case]
    here, there = stages if isinstance(stages, tuple) else (stages, stages)
    ranks(2).run(saved, str(tmp_path), here, base.MODEL)
    for message in ranks(world).run(load_elsewhere, str(tmp_path), there, model, options):
        assert expected in message


def weights_alone(folder: str, options: dict[str, Any]) -> None:
    engine = base.build(2, {}, seed=1)
    assert engine.load_checkpoint(folder, **options)[0] is not None
    base.assert_bytes_follow_masters(engine)
    training.destroy(engine)


def test_weights_alone_load_at_another_world_size_without_the_optimizers_files(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(saved, str(tmp_path), 2, base.MODEL)
    for path in tmp_path.glob("*/*optim_states.pt"):
        path.unlink()
    no_states = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    for options in ({"load_module_only": True}, no_states):
        ranks(1).run(weights_alone, str(tmp_path), options)


@on_ranks(2)
def test_stage_3_takes_weights_from_the_optimizers_files_and_says_which_is_missing(folder: str) -> None:
    saved(folder, 3, base.MODEL)
    on_rank_0(lambda: [path.unlink() for path in Path(folder).glob("*/*optim_states.pt")])
    engine = base.build(3, {}, seed=1)
    assert engine.load_checkpoint(folder, load_module_only=True)[0] is not None  # as stock: its own weights
    for alone in (False, True):
        message = refusal(engine, folder, load_optimizer_states=False, load_module_only=alone)
        assert "optim_states.pt is missing" in message
    training.destroy(engine)


@on_ranks(2)
def test_parameters_in_another_order_are_refused(folder: str) -> None:
    import deepspeed

    saved(folder, 1, base.MODEL)
    torch.manual_seed(1)
    net = training.TinyLM(**base.MODEL)
    parameters = list(net.parameters())[::-1]  # the same flat length: stock code would load them into each other
    engine = deepspeed.initialize(model=net, config=training.ds_config(1, {}), model_parameters=parameters)[0]
    assert "in another order" in refusal(engine, folder)
    training.destroy(engine)


@on_ranks(2)
def test_a_checkpoint_of_other_versions_is_loaded(folder: str) -> None:
    saved(folder, 2, base.MODEL)

    def change() -> None:
        manifest = folders.read_manifest(Path(folder, "global_step1"))
        assert manifest is not None
        header = {**manifest.header, "deepspeed": "0.1.2"}
        folders.write_manifest(Path(folder, "global_step1"), folders.Manifest(header, manifest.files))

    on_rank_0(change)
    engine = training.build(training.ds_config(2, {}), base.MODEL, seed=1)
    assert engine.load_checkpoint(folder)[0] is not None
    training.destroy(engine)


# --- hostile pickles ---


@pytest.mark.parametrize("writer", [{}, None], ids=["ours", "stock"])
@on_ranks(2)
def test_a_hostile_pickle_in_a_checkpoint_is_not_executed_with_a_manifest_or_without(
    folder: str, writer: dict[str, Any] | None
) -> None:
    engine = base.build(2, writer)
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    training.destroy(engine)
    engine = base.build(2, {}, seed=1)
    mark, manifest = Path(folder, "mark"), Path(folder, "global_step1", MANIFEST)
    listed = manifest.read_bytes() if writer is not None else None
    for path in files_of(folder):
        if path == manifest:
            continue
        content = path.read_bytes()

        def spoil(path: Path = path) -> None:  # whoever can change a file can change the manifest
            torch.save({**torch.load(path, weights_only=False), "client": Hostile(mark)}, path)
            if listed is not None:
                record_again(path)

        def heal(path: Path = path, content: bytes = content) -> None:
            path.write_bytes(content)
            if listed is not None:
                manifest.write_bytes(listed)

        on_rank_0(spoil)
        message = refusal(engine, folder)
        assert "os.makedirs" in message and str(path) in message and not mark.exists()
        on_rank_0(lambda: manifest.unlink(missing_ok=True))
        assert str(path.parent) in refusal(engine, folder) and not mark.exists()
        on_rank_0(heal)
    assert engine.load_checkpoint(folder)[0] is not None
    training.destroy(engine)

"""Checkpoints of real engines that a load refuses, and saves that cannot be; on stubs of engines, with more kinds of
damage: tests/unit/engine/test_checkpoints.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import torch
import training
from support.ranks import on_ranks

from fp8_ds.checkpoint import folders
from fp8_ds.errors import CheckpointError

pytestmark = pytest.mark.distributed


def refusal(engine: Any, folder: str, **options: Any) -> str:
    """What the load of `folder` raises; nothing of the engine has changed."""
    before, bytes_before = training.full_masters(engine), training.fp8_state(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, **options)
    base.assert_same(training.full_masters(engine), before)
    training.assert_fp8_equals(training.fp8_state(engine), bytes_before)
    return str(caught.value)


def on_rank_0(act: Callable[..., Any], *args: Any) -> None:
    """Before and after it all ranks meet."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        act(*args)
    dist.barrier()


# --- our state ---


def record_again(path: Path) -> None:
    """Make the manifest fit a file that has been changed, as whoever can change a file can."""
    manifest = folders.read_manifest(path.parent)
    assert manifest is not None
    files = {**manifest.files, path.name: folders.record(path, manifest.files[path.name].rank)}
    folders.write_manifest(path.parent, folders.Manifest(manifest.header, files))


WEIGHT = "blocks.0.up.weight"


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


def set_number(number: float, *keys: str) -> Any:
    """A damage: the first element of a tensor, or a number, is another."""

    def made(value: Any) -> Any:
        if not torch.is_tensor(value):
            return number
        return torch.cat([torch.tensor([number]), value.flatten()[1:]]).view(value.shape)

    return set_entry(made, *keys)


SCALE = ("scale_inv", WEIGHT)
DAMAGES: list[tuple[Any, tuple[str, ...]]] = [
    *((set_number(value, *SCALE), (f"fp8_ds['scale_inv']['{WEIGHT}']", f"got {value:g}"))
      for value in (float("inf"), 3e38, -1.0, float("nan"), 0.0, 0.3)),
    *((set_number(value, "history", key), (f"fp8_ds['history']['{key}']", f"got {value:g}"))
      for key, value in (("amax_history", float("inf")), ("amax_local", -1.0), ("scale", 0.0), ("num_updates", -3))),
    *((set_entry(None, *keys), (f"lacks {keys[-1]}",))
      for keys in (("history", "scale_inv"), SCALE, ("scale_inv",), ("history",), ("plan",), ("config",))),
    (set_entry(lambda x: x[:-1], "history", "scale"), ("['scale']: expected float32 of shape (8,)",)),
    *((set_entry(make, *SCALE), (f"['{WEIGHT}']: expected float32",))
      for make in (lambda x: x.double(), lambda x: x.repeat(2), float)),
    (set_entry(lambda _: torch.ones(()), "scale_inv", "blocks.9.up.weight"), ("blocks.9.up.weight'] is of no weight",)),
    (set_entry(lambda _: [1, 2], "plan"), ("fp8_ds['plan']",)),
    (set_entry(lambda _: {"overrides": {"up": "fp4"}}, "precision"), ("['precision']['overrides']['up']", "got fp4")),
    (set_entry(lambda _: {"last_norm": -1.0}, "release"), ("['last_norm']",)),
    (set_entry(lambda _: {0: float("nan")}, "bound_sums"), ("fp8_ds['bound_sums'][0]",)),
    (set_entry(lambda x: {**x, "guard": {}}, "following"), ("fp8_ds['following']",)),
    (set_entry(lambda x: {**x, "counts": [[0.0]]}, "following", "overshoots"), ("counts of shape",)),
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
    on_rank_0(lambda: write(whole))
    files = sorted(path.parent.iterdir())
    assert len(files) == 5
    for file in files:
        content = file.read_bytes()
        on_rank_0(lambda: file.write_bytes(content[:-1]))  # noqa: B023
        assert str(file) in refusal(engine, folder, tag="one")
        on_rank_0(lambda: file.write_bytes(content))  # noqa: B023
    base.assert_same(base.snapshot(engine), before)
    assert engine.load_checkpoint(folder, tag="one")[0] is not None
    training.destroy(engine)


# --- other runs; layouts are in tests/unit/engine/test_checking.py ---


def saved(folder: str, stage: int, model: dict[str, Any]) -> None:
    engine = training.build(training.ds_config(stage, {}), model)
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    training.destroy(engine)


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
def test_parameters_in_another_order_or_shape_are_refused(folder: str) -> None:
    saved(folder, 1, base.MODEL)
    for model, reverses, said in (
        (base.MODEL, True, "in another order"),  # the same flat length: stock code would load them into each other
        ({**base.MODEL, "hidden": 88}, False, "blocks.0.up.weight [72, 32] in the checkpoint, [88, 32] now"),
        ({**base.MODEL, "num_blocks": 1}, False, "blocks.1.norm.weight [32] in the checkpoint, missing now"),
    ):

        def group(net: Any, reverses: bool = reverses) -> Any:
            parameters = list(net.parameters())
            return parameters[::-1] if reverses else parameters

        engine = training.build(training.ds_config(1, {}), model, seed=1, groups=group)
        assert said in refusal(engine, folder)
        training.destroy(engine)


# --- saves ---


@on_ranks(2)
def test_a_disk_that_is_full_on_one_rank_leaves_the_old_checkpoint_and_a_run_that_goes_on(folder: str) -> None:
    import torch.distributed as dist

    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder, tag="same")
    before = base.snapshot(engine)
    training.train(engine, 1, first_step=1)
    save = torch.save

    def fill(state: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if "zero_pp_rank_1" in str(path):
            Path(path).symlink_to("/dev/full")
        save(state, path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match=r"rank 1: OSError.*No space left"):
        patch.setattr(torch, "save", fill)
        engine.save_checkpoint(folder, tag="same")
    training.train(engine, 1, first_step=2)
    training.destroy(engine)
    again = base.build(2, {}, seed=1)
    again.load_checkpoint(folder)
    base.assert_same(base.snapshot(again), before)
    on_rank_0(Path(folder, "pytorch_model.bin").symlink_to, "/dev/full")
    with pytest.raises(OSError, match=r"pytorch_model\.bin") if dist.get_rank() == 0 else nullcontext():
        again.save_16bit_model(folder)
    training.destroy(again)


@on_ranks(2)
def test_hosts_with_disks_of_their_own_save_and_load(folder: str) -> None:
    """Two ranks that are hosts."""
    import torch.distributed as dist

    def one_rank_a_host(seed: int) -> Any:
        engine = base.build(3, {}, seed, checkpoint={"use_node_local_storage": True})
        engine.local_rank, engine.save_non_zero_checkpoint = 0, True
        return engine

    here = Path(folder, f"host{dist.get_rank()}")
    engine = one_rank_a_host(0)
    training.train(engine, 1)
    engine.save_checkpoint(str(here))
    before = base.snapshot(engine)
    training.destroy(engine)
    assert len(list(here.glob("global_step1/*.pt"))) == 2 and (here / "latest").exists()
    again = one_rank_a_host(1)
    again.load_checkpoint(str(here))
    base.assert_same(base.snapshot(again), before)
    training.destroy(again)

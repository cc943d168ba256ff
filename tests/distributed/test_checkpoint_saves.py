"""Saves that cannot be: a disk that is full or fails, files of several writers, hosts and their disks."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import training
from support.ranks import on_ranks
from test_checkpoint_faults import files_of, refusal

pytestmark = pytest.mark.distributed


def failing_save(folder: str, fails: str) -> str:
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine as Stock

    from fp8_ds.errors import CheckpointError

    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder, tag="same")
    before = base.snapshot(engine)
    training.train(engine, 1, first_step=1)
    stock_save = Stock.save

    def save(self: Any, state_dict: Any, path: Any) -> None:
        if dist.get_rank() == 1 and fails == "read-only":
            raise OSError(30, "Read-only file system", str(path))
        if dist.get_rank() == 1:
            Path(path).symlink_to("/dev/full")
        stock_save(self, state_dict, path)

    def replace(self: Path, target: Path) -> Path:
        if target.name == "latest":
            raise OSError(5, "Input/output error", str(target))
        return stock_replace(self, target)

    stock_replace = Path.replace
    if fails != "latest":
        Stock.save = save
    else:
        Path.replace = replace  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder, tag="same")
    finally:
        Stock.save = stock_save
        Path.replace = stock_replace  # type: ignore[method-assign]
    losses = training.train(engine, 1, first_step=2)  # the run can go on
    assert losses
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir() if path.is_dir()) == ["same"]
    training.destroy(engine)
    again = base.build(2, {}, seed=1)
    again.load_checkpoint(folder)
    base.assert_same(base.snapshot(again), before)
    if dist.get_rank() == 0:
        Path(folder, "pytorch_model.bin").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"pytorch_model\.bin") if dist.get_rank() == 0 else nullcontext():
        again.save_16bit_model(folder)
    training.destroy(again)
    return str(caught.value)


FAILURES = {
    "read-only": ("rank 1: OSError: [Errno 30] Read-only file system: '", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "full": ("rank 1: OSError: [Errno 28] No space left on device: '", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "latest": ("rank 0: OSError: [Errno 5] Input/output error", "latest"),
}
"""What is said where rank 1 may not write, its disk is full (torch: "unexpected pos 704 vs 598"), or rank 0 fails."""


@pytest.mark.parametrize("fails", FAILURES)
def test_one_rank_that_cannot_write_is_an_error_on_all_and_the_old_one_stays(
    ranks: Any, tmp_path: Path, fails: str
) -> None:
    for message in ranks(2).run(failing_save, str(tmp_path), fails):
        assert all(part in message for part in FAILURES[fails]), message


@on_ranks(2)
def test_tags_that_are_no_names_or_differ_and_a_client_state_with_our_key_are_refused_on_all_ranks(folder: str) -> None:
    import torch.distributed as dist

    from fp8_ds.errors import ConfigError

    engine = base.build(2, {})
    for tag in ("", "x.incomplete", f"rank{dist.get_rank()}"):
        with pytest.raises(ConfigError, match=f"'{tag}'"):
            engine.save_checkpoint(folder, tag=tag)
    client_state = {"epoch": 3, **({"fp8_ds": {"mine": 1}} if dist.get_rank() == 1 else {})}
    with pytest.raises(ConfigError, match=r"'fp8_ds'.* on rank 1"):
        engine.save_checkpoint(folder, client_state=client_state)
    assert not any(Path(folder).iterdir())
    training.destroy(engine)


# --- who else writes there ---


@on_ranks(2)
def test_a_save_waits_for_that_of_another_job(folder: str) -> None:
    import torch.distributed as dist

    from fp8_ds.checkpoint import folders

    engine = base.build(2, {})
    if dist.get_rank() == 0:
        threading.Timer(2.0, folders.take_lock(Path(folder), "", print).close).start()
    dist.barrier()
    start = time.monotonic()
    engine.save_checkpoint(folder, tag="mine")
    assert time.monotonic() - start > 1.8
    assert engine.load_checkpoint(folder)[0] is not None
    training.destroy(engine)


@pytest.mark.parametrize(
    ("says_disks_are_its_own", "shares_a_disk", "expected"),
    [(False, True, r"ranks \[0, 1\] at once"), (True, True, "node_local"), (False, False, "node_local")],
)
@on_ranks(2)
def test_a_file_that_several_ranks_write_or_disks_that_nobody_spoke_of_are_an_error_at_the_save(
    folder: str, says_disks_are_its_own: bool, shares_a_disk: bool, expected: str
) -> None:
    """On one disk every rank takes itself for the first of its host, and writes what such a one writes."""
    import torch.distributed as dist

    from fp8_ds.errors import CheckpointError

    engine = one_rank_a_host(2, 0, says_disks_are_its_own) if shares_a_disk else base.build(3, {})
    here = folder if shares_a_disk else f"{folder}/host{dist.get_rank()}"
    with pytest.raises(CheckpointError, match=expected):
        engine.save_checkpoint(here)
    assert not Path(here, "latest").exists()
    training.destroy(engine)


# --- hosts with disks of their own ---


@on_ranks(2)
def test_hosts_with_disks_of_their_own_have_a_manifest_and_a_latest_each(folder: str) -> None:
    import torch.distributed as dist

    here = f"{folder}/host{dist.get_rank()}"
    engine = one_rank_a_host(3)
    training.train(engine, 1)
    engine.save_checkpoint(here)
    before = base.snapshot(engine)
    assert Path(here, "latest").read_text() == "global_step1"
    assert len(files_of(here)) == 3
    training.destroy(engine)
    again = one_rank_a_host(3, seed=1)
    again.load_checkpoint(here)
    base.assert_same(base.snapshot(again), before)
    path = next(path for path in files_of(f"{folder}/host1") if "optim" in path.name)
    dist.barrier()
    if dist.get_rank() == 1:
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    assert str(path) in refusal(again, here)
    training.destroy(again)


def one_rank_a_host(stage: int = 2, seed: int = 0, says_disks_are_its_own: bool = True) -> Any:
    """An engine whose two ranks are hosts with disks of their own."""
    engine = base.build(stage, {}, seed, checkpoint={"use_node_local_storage": says_disks_are_its_own})
    engine.local_rank = 0
    engine.save_non_zero_checkpoint = True
    return engine


STEPS = ("prepare", "stage", "publish", "finish")
"""Of a save, between which hosts wait for each other."""


@on_ranks(2)
def test_hosts_load_a_save_that_all_have_wherever_one_was_killed(folder: str) -> None:
    """One has ended a step of a save, and the other has not begun it."""
    import torch.distributed as dist

    from fp8_ds.checkpoint import folders

    rank = dist.get_rank()
    here = Path(folder, f"host{rank}")
    engine = one_rank_a_host()
    training.train(engine, 1)
    engine.save_checkpoint(str(here), tag="old")
    masters = {1: training.full_masters(engine)}
    training.train(engine, 1, first_step=1)
    masters[2] = training.full_masters(engine)
    taken: list[str] = []

    def aside(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            shutil.copytree(here, f"{folder}/before {name} {rank}", symlinks=True)
            taken.append(name)
            return function(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for step in STEPS:
            patch.setattr(folders.Save, step, aside(step, getattr(folders.Save, step)))
        engine.save_checkpoint(str(here), tag="old")
    assert tuple(taken) == STEPS
    training.destroy(engine)

    again, found = one_rank_a_host(seed=1), []
    for i, step in enumerate(STEPS):
        after = f"{folder}/before {STEPS[i + 1]} {rank}" if i + 1 < len(STEPS) else here
        for ahead in (0, 1):
            at = Path(folder, f"{step} {ahead} {rank}")
            shutil.copytree(after if rank == ahead else f"{folder}/before {step} {rank}", at)
            path, _ = again.load_checkpoint(str(at))
            assert path is not None
            base.assert_same(training.full_masters(again), masters[again.global_steps])
            found.append(again.global_steps)
    training.destroy(again)
    assert found == [1, 1, 1, 1, 1, 1, 2, 2]  # steps of training


@on_ranks(2)
def test_a_host_that_cannot_rename_keeps_the_others_at_the_old_checkpoint(folder: str) -> None:
    import torch.distributed as dist

    from fp8_ds.checkpoint import folders
    from fp8_ds.errors import CheckpointError

    here = f"{folder}/host{dist.get_rank()}"
    engine = one_rank_a_host()
    training.train(engine, 1)
    engine.save_checkpoint(here, tag="old")
    before = base.snapshot(engine)
    training.train(engine, 1, first_step=1)
    publish = folders.Save.publish

    def fail(self: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error", here)
        publish(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match=r"rank 1: OSError: \[Errno 5\]"):
        patch.setattr(folders.Save, "publish", fail)
        engine.save_checkpoint(here, tag="old")
    assert sorted(path.name for path in Path(here).iterdir() if path.name[:4] not in ("zero", ".fp8")) == [
        "latest",
        "old",
    ]
    training.destroy(engine)
    again = one_rank_a_host(seed=1)
    again.load_checkpoint(here)
    base.assert_same(base.snapshot(again), before)
    training.destroy(again)


@on_ranks(2)
def test_hosts_with_parts_of_different_saves_or_of_other_ranks_are_refused(folder: str) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    here, aside = Path(folder, f"host{rank}"), Path(folder, f"aside{rank}")
    engine = one_rank_a_host()
    training.train(engine, 1)
    engine.save_checkpoint(str(here), tag="newest")
    shutil.copytree(here, aside)
    training.train(engine, 1, first_step=1)
    engine.save_checkpoint(str(here), tag="newest")
    dist.barrier()
    mixed = refusal(engine, f"{folder}/{'host0' if rank == 0 else 'aside1'}")  # host 1's disk came from a backup
    moved = refusal(engine, f"{folder}/host0")  # both ranks on a host that has rank 0's files alone
    engine.load_checkpoint(str(here))
    training.destroy(engine)
    assert "newest of step 1" in mixed and "newest of step 2" in mixed
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt of rank 1 is not in" in moved


@on_ranks(2)
def test_a_mount_that_fails_on_one_rank_is_an_error_on_all(folder: str) -> None:
    import torch.distributed as dist

    from fp8_ds.checkpoint import folders

    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    stock = folders.read_manifest

    def read(path: Path) -> Any:
        if dist.get_rank() == 1:
            raise OSError(116, "Stale file handle", str(path))
        return stock(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "read_manifest", read)
        assert "rank 1: OSError: [Errno 116] Stale file handle" in refusal(engine, folder)
    training.destroy(engine)

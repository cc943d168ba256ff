"""Checkpoints under fire: damage, disks that fill, kills, other runs' files, hostile pickles."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import torch
import training

from fp8_ds.testing.ranks import RankError, RankPool

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


# --- damage ---


def damage(folder: str, stage: int) -> list[str]:
    import torch.distributed as dist

    from fp8_ds.checkpoint.manifest import MANIFEST

    engine = base.build(stage, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    loss = training.train(engine, 1, first_step=1)
    training.destroy(engine)
    again = base.build(stage, {}, seed=1)
    files = files_of(folder)
    assert len(files) == {2: 4, 3: 5}[stage], files
    for path in files:
        content = path.read_bytes()
        dist.barrier()
        for kind in ("flip", "cut", "missing"):
            if dist.get_rank() == 0:
                flipped = bytearray(content)
                flipped[len(content) // 2] ^= 4
                path.write_bytes(flipped if kind == "flip" else content[:-1])
                if kind == "missing":
                    path.unlink()
            dist.barrier()
            if (path.name, kind) != (MANIFEST, "missing"):  # then it is as a stock checkpoint
                assert str(path) in refusal(again, folder)
            dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(content)
        dist.barrier()
    again.load_checkpoint(folder)
    assert training.train(again, 1, first_step=1) == loss
    training.destroy(again)
    return [path.name for path in files]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_damaged_file_is_named_on_all_ranks_and_nothing_is_loaded(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(2).run(damage, str(tmp_path), stage)


def unfinished(folder: str) -> None:
    import torch.distributed as dist

    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder, tag="whole")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(f"{folder}/whole", f"{folder}/torn.incomplete")
        Path(folder, "torn.incomplete/fp8_ds_manifest.json").unlink()
        shutil.copy(f"{folder}/whole/mp_rank_00_model_states.pt", f"{folder}/whole/mp_rank_01_model_states.pt")
    dist.barrier()
    assert "torn.incomplete is of a save that did not end" in refusal(engine, folder, tag="torn.incomplete")
    assert "Complete in" in refusal(engine, folder, tag="absent")
    assert "'whole'" in refusal(engine, folder, tag="absent")
    assert "mp_rank_01_model_states.pt is not in fp8_ds_manifest.json" in refusal(engine, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "whole/mp_rank_01_model_states.pt").unlink()
        Path(folder, "latest").write_text("who\0e")
    dist.barrier()
    assert "missing" in refusal(engine, folder)
    assert engine.load_checkpoint(f"{folder}/nowhere") == (None, None)  # as stock
    training.destroy(engine)


def test_what_is_unfinished_absent_or_added_is_refused(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(unfinished, str(tmp_path))


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
    "stage": ((2, (2, 3), base.MODEL, {}), "zero_stage 2 in the checkpoint, 3 now (make it universal"),
    "stage-of-weights": ((2, (3, 1), base.MODEL, {"load_module_only": True}), "zero_stage 3 in the checkpoint, 1 now"),
    "fewer-ranks": ((1, 2, base.MODEL, {}), "dp_world_size 2 in the checkpoint, 1 now (a universal"),
    "more-ranks": ((4, 3, base.MODEL, {"load_module_only": True}), "dp_world_size 2 in the checkpoint, 4 now"),
}


@pytest.mark.parametrize("case", OTHER)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(ranks: Any, tmp_path: Path, case: str) -> None:
    (world, stages, model, options), expected = OTHER[case]
    here, there = stages if isinstance(stages, tuple) else (stages, stages)
    ranks(2).run(saved, str(tmp_path), here, base.MODEL)
    for message in ranks(world).run(load_elsewhere, str(tmp_path), there, model, options):
        assert expected in message


def other_world(folder: str) -> None:
    saved(folder, 2, base.MODEL)


def weights_alone(folder: str) -> None:
    engine = base.build(2, {}, seed=1)
    assert engine.load_checkpoint(folder, load_module_only=True)[0] is not None
    base.assert_bytes_follow_masters(engine)
    training.destroy(engine)


def test_weights_alone_load_at_another_world_size_without_the_optimizers_files(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(other_world, str(tmp_path))
    for path in tmp_path.glob("*/*optim_states.pt"):
        path.unlink()
    ranks(1).run(weights_alone, str(tmp_path))


def reordered(folder: str) -> str:
    import deepspeed

    saved(folder, 1, base.MODEL)
    torch.manual_seed(1)
    net = training.TinyLM(**base.MODEL)
    parameters = list(net.parameters())[::-1]  # the same flat length: stock code would load them into each other
    engine = deepspeed.initialize(model=net, config=training.ds_config(1, {}), model_parameters=parameters)[0]
    message = refusal(engine, folder)
    training.destroy(engine)
    return message


def test_parameters_in_another_order_are_refused(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2).run(reordered, str(tmp_path)):
        assert "in another order" in message


def versions(folder: str) -> list[str]:
    import logging

    import torch.distributed as dist
    from deepspeed.utils import logger

    from fp8_ds.checkpoint import manifest as m

    saved(folder, 2, base.MODEL)
    dist.barrier()
    path = Path(folder, "global_step1")
    if dist.get_rank() == 0:
        manifest = m.read_manifest(path)
        assert manifest is not None
        assert manifest.header["deepspeed"]
        m.write_manifest(path, m.Manifest({**manifest.header, "deepspeed": "0.1.2"}, manifest.files))
    dist.barrier()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    engine = training.build(training.ds_config(2, {}), base.MODEL, seed=1)
    engine.load_checkpoint(folder)
    dist.barrier()
    (path / m.MANIFEST).unlink(missing_ok=True)
    dist.barrier()
    engine.load_checkpoint(folder)
    logger.removeHandler(handler)
    training.destroy(engine)
    return said


def test_other_versions_and_stock_checkpoints_are_loaded_with_a_notice(ranks: Any, tmp_path: Path) -> None:
    said, by_other = ranks(2).run(versions, str(tmp_path))
    assert sum("written by other versions: deepspeed 0.1.2 in the checkpoint" in line for line in said) == 1
    assert sum("not written by save_checkpoint of fp8_ds" in line for line in said) == 1
    assert not any("versions" in line or "not written" in line for line in by_other)


# --- hostile pickles ---


class Hostile:
    """Makes a file when a pickle of it is loaded."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def hostile(folder: str, stage: int) -> None:
    import torch.distributed as dist

    from fp8_ds.checkpoint import manifest as m

    engine = base.build(stage, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    mark = f"{folder}/mark"
    for path in files_of(folder):
        if path.name == m.MANIFEST:
            continue
        content = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:  # whoever can change a file can change the manifest
            state = torch.load(path, weights_only=False)
            torch.save({**state, "client": Hostile(mark)}, path)
            manifest = m.read_manifest(path.parent)
            assert manifest is not None
            changed = {path.name: m.record(path, manifest.files[path.name].rank)}
            m.write_manifest(path.parent, m.Manifest(manifest.header, {**manifest.files, **changed}))
        dist.barrier()
        message = refusal(engine, folder)
        assert "posix.mkdir" in message
        assert str(path) in message
        assert not Path(mark).exists()
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(content)
            m.write_manifest(path.parent, manifest)
        dist.barrier()
    training.destroy(engine)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_hostile_pickle_in_a_checkpoint_of_ours_is_not_executed(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(2).run(hostile, str(tmp_path), stage)


# --- saves that fail ---


def failing_save(folder: str, fails: str) -> str:
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine as Stock

    from fp8_ds.errors import CheckpointError

    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder, tag="same")
    before = base.snapshot(engine)
    training.train(engine, 1, first_step=1)
    stock_save, stock_copy = Stock.save, type(engine)._copy_recovery_script

    def save(self: Any, state_dict: Any, path: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error", str(path))
        stock_save(self, state_dict, path)

    def copy(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    host = next(kind for kind in type(engine).__mro__ if kind.__name__ == "DeepSpeedEngine")
    if fails == "shard":
        Stock.save = save  # type: ignore[method-assign]
    else:
        stock_copy, host._copy_recovery_script = host._copy_recovery_script, copy
    try:
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder, tag="same")
    finally:
        Stock.save = stock_save  # type: ignore[method-assign]
        if fails == "script":
            host._copy_recovery_script = stock_copy
    losses = training.train(engine, 1, first_step=2)  # the run can go on
    assert losses
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir() if path.is_dir()) == ["same"]
    training.destroy(engine)
    again = base.build(2, {}, seed=1)
    again.load_checkpoint(folder)
    base.assert_same(base.snapshot(again), before)
    training.destroy(again)
    return str(caught.value)


@pytest.mark.parametrize("fails", ["shard", "script"])
def test_one_rank_that_cannot_write_is_an_error_on_all_and_the_old_one_stays(
    ranks: Any, tmp_path: Path, fails: str
) -> None:
    for message in ranks(2).run(failing_save, str(tmp_path), fails):
        assert ("rank 1: OSError: [Errno 5]" if fails == "shard" else "rank 0: OSError: [Errno 28]") in message


def full_disk(folder: str, room: int) -> tuple[str, bool]:
    import torch.distributed as dist

    from fp8_ds.errors import CheckpointError

    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    before = base.snapshot(engine)
    training.train(engine, 1, first_step=1)
    dist.barrier()
    if dist.get_rank() == 0:
        free = shutil.disk_usage(folder).free
        Path(folder, "ballast").write_bytes(b"\0" * (free - room))
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder)
    dist.barrier()
    training.destroy(engine)
    again = base.build(2, {}, seed=1)
    again.load_checkpoint(folder)
    base.assert_same(base.snapshot(again), before)
    dist.barrier()
    Path(folder, "ballast").unlink(missing_ok=True)
    dist.barrier()
    assert again.save_checkpoint(folder, tag="after") is True
    training.destroy(again)
    return str(caught.value), Path(folder, "latest").read_text() == "after"


@pytest.mark.parametrize("room", [0, 150_000], ids=["nothing", "some-files"])
def test_a_full_disk_is_an_error_on_all_ranks_and_the_old_checkpoint_loads(
    ranks: Any, tmp_path: Path, room: int
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("NEEDS ROOT: mounts a tmpfs of 4 MiB as the disk that fills")
    try:
        for message, is_latest in ranks(2).run(full_disk, str(tmp_path), room):
            assert "expected every rank to write its part" in message
            assert is_latest
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- hosts with disks of their own ---


def node_local(folder: str) -> None:
    import torch.distributed as dist

    here = f"{folder}/host{dist.get_rank()}"
    config = training.ds_config(3, {}, checkpoint={"use_node_local_storage": True})
    engine = training.build(config, base.MODEL)
    engine.local_rank = 0  # one rank a host
    engine.save_non_zero_checkpoint = True
    training.train(engine, 1)
    engine.save_checkpoint(here)
    before = base.snapshot(engine)
    assert Path(here, "latest").read_text() == "global_step1"
    assert len(files_of(here)) == 3
    training.destroy(engine)
    again = training.build(config, base.MODEL, seed=1)
    again.local_rank = 0
    again.load_checkpoint(here)
    base.assert_same(base.snapshot(again), before)
    path = next(path for path in files_of(f"{folder}/host1") if "optim" in path.name)
    dist.barrier()
    if dist.get_rank() == 1:
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    assert str(path) in refusal(again, here)
    training.destroy(again)


def test_hosts_with_disks_of_their_own_have_a_manifest_and_a_latest_each(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(node_local, str(tmp_path))


def hosts_apart(folder: str) -> str:
    import torch.distributed as dist

    from fp8_ds.errors import CheckpointError

    engine = base.build(3, {})
    training.train(engine, 1)
    with pytest.raises(CheckpointError) as caught:  # a path that is another disk on each host
        engine.save_checkpoint(f"{folder}/host{dist.get_rank()}")
    assert not Path(folder, "host0", "latest").exists()
    training.destroy(engine)
    return str(caught.value)


def test_hosts_with_disks_of_their_own_that_nobody_spoke_of_fail_at_the_save(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2).run(hosts_apart, str(tmp_path)):
        assert "is not here as rank 1 wrote it" in message
        assert "use_node_local_storage" in message


def node_local_mixed(folder: str) -> tuple[str, str]:
    import torch.distributed as dist

    rank = dist.get_rank()
    here, aside = Path(folder, f"host{rank}"), Path(folder, f"aside{rank}")
    config = training.ds_config(2, {}, checkpoint={"use_node_local_storage": True})
    engine = training.build(config, base.MODEL)
    engine.local_rank = 0  # one rank a host
    engine.save_non_zero_checkpoint = True
    training.train(engine, 1)
    engine.save_checkpoint(str(here), tag="newest")
    shutil.copytree(here, aside)
    training.train(engine, 1, first_step=1)
    engine.save_checkpoint(str(here), tag="newest")
    dist.barrier()
    mixed = refusal(engine, f"{folder}/{'host0' if rank == 0 else 'aside1'}")  # killed before host 1 had renamed
    moved = refusal(engine, f"{folder}/host0")  # both ranks on a host that has rank 0's files alone
    engine.load_checkpoint(str(here))
    training.destroy(engine)
    return mixed, moved


def test_hosts_with_parts_of_different_saves_or_of_other_ranks_are_refused(ranks: Any, tmp_path: Path) -> None:
    for mixed, moved in ranks(2).run(node_local_mixed, str(tmp_path)):
        assert "ranks that see different checkpoints" in mixed
        assert "newest of step 1" in mixed
        assert "newest of step 2" in mixed
        assert "zero_pp_rank_1_mp_rank_00_optim_states.pt of rank 1 is not in" in moved


def broken_mount(folder: str) -> str:
    import torch.distributed as dist

    from fp8_ds.checkpoint import manifest as m

    engine = base.build(2, {})
    training.train(engine, 1)
    engine.save_checkpoint(folder)
    stock = m.find

    def find(load_dir: Path, tag: str) -> str:
        if dist.get_rank() == 1:
            raise OSError(116, "Stale file handle", str(load_dir))
        return stock(load_dir, tag)

    m.find = find
    try:
        message = refusal(engine, folder)
    finally:
        m.find = stock
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "latest").write_text("")
    dist.barrier()
    assert "latest is empty" in refusal(engine, folder)
    training.destroy(engine)
    return message


def test_a_mount_that_fails_on_one_rank_is_an_error_on_all(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2).run(broken_mount, str(tmp_path)):
        assert "rank 1: OSError: [Errno 116] Stale file handle" in message


# --- kills ---


def resume_and_save(folder: str, stage: int, expected: dict[int, dict[str, Any]], first: bool) -> Any:
    """Load the newest checkpoint, compare it with what was saved, train a step, and say when the save begins."""
    import torch.distributed as dist

    engine = base.build(stage, {}, seed=0 if first else 1)
    if not first:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        base.assert_same(base.snapshot(engine), expected[engine.global_steps])
    training.train(engine, 1, first_step=engine.global_steps)
    now = base.snapshot(engine)
    if dist.get_rank() == 0:
        torch.save(now, f"{folder}/state{engine.global_steps}.pt")
    dist.barrier()
    begin = time.monotonic()
    Path(folder, f"saving{dist.get_rank()}").touch()
    engine.save_checkpoint(folder, tag="newest")
    return time.monotonic() - begin, engine.global_steps


def kill_rounds(folder: Path, stage: int, num_kills: int, seed: int) -> tuple[int, int]:
    """(kills that left the old checkpoint, kills after which the new one was there)."""
    generator = random.Random(seed)
    pool = RankPool(2)
    outcomes = [0, 0]
    try:
        duration, step = pool.run(resume_and_save, str(folder), stage, {}, True)[0]
        pool.close()
        for _ in range(num_kills):
            for rank in range(2):
                (folder / f"saving{rank}").unlink(missing_ok=True)
            delay, victim = generator.uniform(0, 1.3 * duration), generator.randrange(2)
            killer = threading.Thread(target=kill_in_save, args=(pool, folder, victim, delay))
            killer.start()
            states = {
                step: torch.load(folder / f"state{step}.pt")
                for step in (step, step + 1)
                if (folder / f"state{step}.pt").exists()
            }
            try:
                _, step = pool.run(resume_and_save, str(folder), stage, states, False)[0]
                outcomes[1] += 1
            except RankError as error:
                assert "died" in str(error), error
                header = newest_header(folder)
                outcomes[header["global_steps"] > step] += 1
                step = header["global_steps"]
            killer.join()
            pool.close()
    finally:
        pool.close()
    return outcomes[0], outcomes[1]


def kill_in_save(pool: RankPool, folder: Path, victim: int, delay: float) -> None:
    """Kill one rank `delay` seconds after the save began, then the others, as a launcher does."""
    deadline = time.monotonic() + 120
    while not all((folder / f"saving{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    processes = list(pool._processes)
    processes[victim].kill()
    time.sleep(0.2)
    for process in processes:
        process.kill()


def newest_header(folder: Path) -> dict[str, Any]:
    from fp8_ds.checkpoint import manifest as m

    manifest = m.read_manifest(folder / m.find(folder, (folder / m.LATEST).read_text()))
    assert manifest is not None, "latest points to a checkpoint that is not complete"
    return manifest.header


def test_a_run_killed_while_saving_resumes_bit_for_bit_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    kill_rounds(tmp_path, stage=2, num_kills=3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [2, 3])
def test_twenty_kills_at_random_moments_of_a_save(tmp_path: Path, stage: int) -> None:
    old, new = kill_rounds(tmp_path, stage, num_kills=20, seed=stage)
    assert old + new == 20
    assert old >= 3, "the kills did not fall into the saves"

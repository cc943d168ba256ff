"""Saves are complete or absent, and what a load refuses is refused on all ranks, before anything is loaded: engines of
ours over stubs of DeepSpeed's, whose two ranks are threads."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.hostile import Hostile
from support.threads import on_threads
from torch import nn

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.folders import MANIFEST
from fp8_ds.engine import checking, ranks
from fp8_ds.engine.checkpoints import Fp8Checkpoints
from fp8_ds.errors import CheckpointError, ConfigError
from fp8_ds.tools.convert import convert

MODEL, SHARDS = "mp_rank_00_model_states.pt", [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]


class AtOnce:
    """A thread that has ended when it has been started: those of threads are not of their ranks' groups."""

    def __init__(self, target: Callable[[], None], **options: Any) -> None:
        self.start = target

    def join(self, timeout: float) -> None:
        pass


@pytest.fixture(autouse=True)
def file_work_of_ranks_is_done_in_their_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "threading", SimpleNamespace(Thread=AtOnce))


class DeepSpeedHost:
    """What DeepSpeed's engine of ZeRO-2 has of checkpoints: a model file and a shard of each rank, of one number.

    Args:
        number: what is saved, and how many steps there were.
        is_host: whether each rank is the first one of a host.
        has_disk: whether the hosts have said that they have disks of their own; default: if they are some.
        is_universal: whether it loads universal checkpoints.
    """

    fp8 = _fp8_unused = _fp8_step_callbacks = optimizer = None
    mp_world_size = 1

    def __init__(
        self, number: int = 0, is_host: bool = False, has_disk: bool | None = None, is_universal: bool = False
    ) -> None:
        self.number = self.global_steps = number
        self.rank, self.seq_dp_world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.save_non_zero_checkpoint = (0 if is_host else self.rank), is_host
        self.use_node_local_storage = lambda: is_host if has_disk is None else has_disk
        self.zero_optimization_stage, self.zero_optimization = lambda: 2, lambda: True
        self.load_universal_checkpoint = lambda: is_universal
        self.zero_optimization_partition_weights = lambda: False
        self.checkpoint_engine: Any = SimpleNamespace(save=torch.save, makedirs=os.makedirs)
        self.module = nn.Module()
        self.module.w = nn.Parameter(torch.ones(4))

    def _get_zero_param_shapes(self) -> Any:
        return [{"w": torch.Size([4])}]

    def _get_ckpt_name(self, folder: str, tag: str) -> str:
        return f"{folder}/{tag}/{MODEL}"

    def _get_all_ckpt_names(self, folder: str, tag: str) -> list[str]:
        return [str(path) for path in Path(folder, tag).glob("mp_rank_*_model_states.pt")]

    def _get_zero_ckpt_name(self, folder: str, tag: str) -> str:
        return f"{folder}/{tag}/{SHARDS[self.rank]}"

    def save_checkpoint(self, folder: str, tag: str, client_state: Any, **options: Any) -> bool:
        self.checkpoint_engine.makedirs(f"{folder}/{tag}", exist_ok=True)
        layout = {"dp_world_size": 2, "mp_world_size": 1, "ds_config": {"zero_optimization": {"stage": 2}}}
        model = {**client_state, **layout, "param_shapes": self._get_zero_param_shapes(), "number": self.number}
        if self.rank == 0 or self.save_non_zero_checkpoint:
            self.checkpoint_engine.save(model, self._get_ckpt_name(folder, tag))
        self.checkpoint_engine.save({"numbers": torch.full((500,), self.number)}, self._get_zero_ckpt_name(folder, tag))
        return True

    def load_checkpoint(self, folder: str, tag: str | None, *options: Any) -> Any:
        """As DeepSpeed does, with all that a pickle says."""
        if tag is None:
            return None, None
        if self.load_universal_checkpoint():
            self.number = int(torch.load(f"{folder}/{tag}/zero/w/fp32.pt", weights_only=False)["param"].sum())
            return f"{folder}/{tag}", {}
        names = self._get_ckpt_name(folder, tag), self._get_zero_ckpt_name(folder, tag)
        model, shard = (torch.load(name, weights_only=False) for name in names)
        assert set(shard["numbers"].tolist()) == {model["number"]}
        self.number = model["number"]
        return f"{folder}/{tag}", {}


class Engine(Fp8Checkpoints, DeepSpeedHost):
    pass


Place = Path | Callable[[int], Path]


def here(place: Place) -> str:
    return str(place if isinstance(place, Path) else place(dist.get_rank()))


def save(place: Place, number: int, tag: Any = "old", client_state: Any = None, **host: Any) -> list[str]:
    """By rank, what is raised, or "".

    Args:
        place: a folder, or one for each rank, as `tag` and `client_state`.
    """

    def act() -> str:
        mine = [value(dist.get_rank()) if callable(value) else value for value in (tag, client_state)]
        try:
            Engine(number, **host).save_checkpoint(here(place), *mine)
        except (CheckpointError, ConfigError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return on_threads(2, act)


def load(place: Place, tag: str | None = None, **host: Any) -> int:
    """The number that both ranks have loaded."""

    def act() -> int:
        engine = Engine(**host)
        assert engine.load_checkpoint(here(place), tag)[0] is not None
        return engine.number

    one, other = on_threads(2, act)
    assert one == other
    return int(one)


def refusal(place: Place, tag: str | None = None, **host: Any) -> str:
    """What a load raises, on both ranks; nothing has been loaded."""

    def act() -> str:
        engine = Engine(**host)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(here(place), tag)
        assert engine.number == 0
        return str(caught.value)

    one, other = on_threads(2, act)
    assert one == other or callable(place)  # each names its own
    return str(one)


def hosts_of(folder: Path) -> Callable[[int], Path]:
    return lambda rank: folder / f"host{rank}"


# --- saves ---


@pytest.mark.parametrize(
    ("fails", "parts"),
    [
        ("read-only", ("rank 1: OSError: [Errno 30] Read-only file system: '", SHARDS[1])),
        ("full", ("rank 1: OSError: [Errno 28] No space left on device: '", SHARDS[1])),  # torch: "unexpected pos 704"
        ("latest", ("rank 0: OSError: [Errno 5] Input/output error", "latest")),
    ],
)
def test_one_rank_that_cannot_write_is_an_error_on_all_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, parts: tuple[str, ...]
) -> None:
    save(tmp_path, 1)
    torch_save, replace = torch.save, Path.replace

    def fail(state: Any, path: Any) -> None:
        if str(path).endswith(SHARDS[1]) and fails == "read-only":
            raise OSError(30, "Read-only file system", str(path))
        if str(path).endswith(SHARDS[1]):
            Path(path).symlink_to("/dev/full")
        torch_save(state, path)

    def fail_to_replace(self: Path, target: Path) -> Path:
        if target.name == "latest":
            raise OSError(5, "Input/output error", str(target))
        return replace(self, target)

    with monkeypatch.context() as patch:
        if fails == "latest":
            patch.setattr(Path, "replace", fail_to_replace)
        else:
            patch.setattr(torch, "save", fail)
        for message in save(tmp_path, 2):
            assert all(part in message for part in parts), message
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["old"]
    assert load(tmp_path) == 1
    assert save(tmp_path, 3) == ["", ""] and load(tmp_path) == 3


def test_tags_that_are_no_names_or_differ_and_a_client_state_with_our_key_are_refused_on_all_ranks(
    tmp_path: Path,
) -> None:
    for tag in ("", "x.incomplete", "rank{}".format):
        assert all(said.startswith("ConfigError: tag: ") for said in save(tmp_path, 1, tag))
    for said in save(tmp_path, 1, client_state=lambda rank: {"fp8_ds": 1} if rank else {"epoch": 3}):
        assert "'fp8_ds'" in said and "on rank 1" in said
    assert not any(tmp_path.iterdir())


def test_a_save_waits_for_that_of_another_job(tmp_path: Path) -> None:
    threading.Timer(0.5, folders.take_lock(tmp_path, "", print).close).start()
    start = time.monotonic()
    assert save(tmp_path, 1) == ["", ""]
    assert time.monotonic() - start > 0.4 and load(tmp_path) == 1


@pytest.mark.parametrize(
    ("host", "shares_a_disk", "expected"),
    [
        ({"is_host": True, "has_disk": False}, True, "ranks [0, 1] at once"),
        ({"is_host": True}, True, "use_node_local_storage"),
        ({}, False, "use_node_local_storage"),
    ],
)
def test_a_file_that_several_ranks_write_or_disks_that_nobody_spoke_of_are_an_error_at_the_save(
    tmp_path: Path, host: dict[str, Any], shares_a_disk: bool, expected: str
) -> None:
    for said in save(tmp_path if shares_a_disk else hosts_of(tmp_path), 1, **host):
        assert expected in said
    assert not list(tmp_path.rglob("latest"))


def test_whatever_a_rank_raises_in_its_work_is_known_on_all() -> None:
    def work() -> int:
        if dist.get_rank() == 1:
            raise SystemExit("by zero")
        return 7

    assert on_threads(2, lambda: ranks.all_do("count", work)) == 2 * [([7, None], ["rank 1: SystemExit: by zero"])]


def test_ranks_of_a_save_wait_for_file_work_in_short_exchanges_and_say_who_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_faults.py has a load."""
    said, record, finish = list[str](), folders.record, folders.Save.finish
    with monkeypatch.context() as patch:
        patch.setattr(folders, "record", lambda path, rank: (time.sleep(rank), record(path, rank))[1])
        patch.setattr(folders.Save, "finish", lambda save: (time.sleep(1), finish(save))[1])
        times = {"SLICE_SECONDS": 0.05, "SAY_SECONDS": 0.2}
        for key, value in {**times, "threading": threading, "say_problem": said.append}.items():
            patch.setattr(ranks, key, value)
        assert save(tmp_path, 1) == ["", ""]
    assert load(tmp_path) == 1
    for rank in (0, 1):
        assert any("save_checkpoint: " in line and f"ranks [{rank}] are not done yet" in line for line in said)


# --- hosts with disks of their own ---


def test_hosts_with_disks_of_their_own_have_a_manifest_and_a_latest_each(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path)
    assert save(hosts, 1, is_host=True) == ["", ""]
    for rank in (0, 1):
        assert {path.name for path in (hosts(rank) / "old").iterdir()} == {MODEL, SHARDS[rank], MANIFEST}
        assert (hosts(rank) / "latest").read_text() == "old"
    assert load(hosts, is_host=True) == 1
    path = hosts(1) / "old" / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in refusal(hosts, is_host=True)


STEPS = ("prepare", "stage", "publish", "finish")
"""Of a save, between which hosts wait for each other."""


def test_hosts_load_a_save_that_all_have_wherever_one_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has ended a step of a save, and the other has not begun it."""
    hosts = hosts_of(tmp_path)
    save(hosts, 1, is_host=True)

    with monkeypatch.context() as patch:
        for step in STEPS:
            patch.setattr(folders.Save, step, copied_before(tmp_path, step, getattr(folders.Save, step)))
        save(hosts, 2, is_host=True)
    found = []
    for step, after in zip(STEPS, [*(tmp_path / f"before {step}" for step in STEPS[1:]), tmp_path], strict=True):
        for ahead in (0, 1):
            at = tmp_path / f"{step} {ahead}"
            for rank in (0, 1):
                shutil.copytree(
                    (after if rank == ahead else tmp_path / f"before {step}") / f"host{rank}", at / f"host{rank}"
                )
            found.append(load(hosts_of(at), is_host=True))
    assert found == [1, 1, 1, 1, 1, 1, 2, 2]


def copied_before(place: Path, step: str, function: Any) -> Any:
    """A step of a save that first sets aside what is there."""

    def run(self: Any, *args: Any) -> Any:
        host = self.folder.parent
        shutil.copytree(host, place / f"before {step}" / host.name, symlinks=True)
        return function(self, *args)

    return run


def test_a_host_that_cannot_rename_keeps_the_others_at_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, publish = hosts_of(tmp_path), folders.Save.publish
    save(hosts, 1, is_host=True)

    def fail(self: Any) -> None:
        if self.folder.parent == hosts(1):
            raise OSError(5, "Input/output error", str(self.folder))
        publish(self)

    with monkeypatch.context() as patch:
        patch.setattr(folders.Save, "publish", fail)
        assert all("rank 1: OSError: [Errno 5]" in said for said in save(hosts, 2, is_host=True))
    for rank in (0, 1):
        assert {path.name for path in hosts(rank).iterdir() if path.name[0] != "."} == {"latest", "old"}
    assert load(hosts, is_host=True) == 1


def test_hosts_with_parts_of_different_saves_or_of_other_ranks_are_refused(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path)
    save(hosts, 1, is_host=True)
    shutil.copytree(hosts(1), tmp_path / "backup")
    save(hosts, 2, is_host=True)
    mixed = refusal(lambda rank: tmp_path / ("backup" if rank else "host0"), is_host=True)
    assert "old of step 1" in mixed and "old of step 2" in mixed
    assert f"{SHARDS[1]} of rank 1 is not in" in refusal(hosts(0), is_host=True)
    assert load(hosts, is_host=True) == 2


def test_a_mount_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(hosts_of(tmp_path), 1, is_host=True)
    read_manifest = folders.read_manifest

    def read(path: Path) -> Any:
        if path.parent.name == "host1":
            raise OSError(116, "Stale file handle", str(path))
        return read_manifest(path)

    monkeypatch.setattr(folders, "read_manifest", read)
    assert "rank 1: OSError: [Errno 116] Stale file handle" in refusal(hosts_of(tmp_path), is_host=True)


# --- loads ---


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_damaged_file_is_named_on_all_ranks_and_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_manifest: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(checking, "say_problem", said.append)
    save(tmp_path, 1)
    folder = tmp_path / "old"
    if not has_manifest:
        (folder / MANIFEST).unlink()
    for path in list(folder.iterdir()):
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 4
        for change in (flipped, content[: len(content) // 2], None):
            if (change is flipped and not has_manifest) or (change is None and path.name == MANIFEST):
                continue  # a bit that nothing knows of; a checkpoint without a manifest
            path.unlink() if change is None else path.write_bytes(change)
            # What is missing may be the model file that counts the others.
            is_named = change is not None or has_manifest or path.name != MODEL
            assert str(path if is_named else folder) in refusal(tmp_path)
        path.write_bytes(content)
    assert load(tmp_path) == 1
    assert has_manifest or (said and all(MANIFEST in line for line in said))


def test_a_named_pipe_in_a_checkpoint_is_refused_by_name_and_not_waited_for(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in ("zero_pp_rank_7_mp_rank_00_optim_states.pt", MANIFEST):
        path = tmp_path / "old" / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        assert f"{path}: expected a file, got a named pipe" in refusal(tmp_path)


def test_what_is_unfinished_absent_or_added_is_refused(tmp_path: Path) -> None:
    assert on_threads(2, lambda: Engine().load_checkpoint(str(tmp_path))) == [(None, None)] * 2  # as stock
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "old", tmp_path / "torn.incomplete")
    (tmp_path / "torn.incomplete" / MANIFEST).unlink()
    assert "torn.incomplete" in refusal(tmp_path, "torn.incomplete")
    assert "['old']" in refusal(tmp_path, "absent")
    more = tmp_path / "old/mp_rank_01_model_states.pt"
    shutil.copy(tmp_path / "old" / MODEL, more)
    assert f"{more.name} is not in {MANIFEST}" in refusal(tmp_path)
    more.unlink()
    shutil.copytree(tmp_path / "old", tmp_path / "o[l]d")  # of it DeepSpeed opens the files of `old`
    assert "pattern" in refusal(tmp_path, "o[l]d")
    for latest in ("who\0e", "", "../old", str(tmp_path / "old")):
        (tmp_path / "latest").write_text(latest)
        assert "latest: expected names that stay in their folder" in refusal(tmp_path)


def test_a_checkpoint_of_other_versions_is_loaded_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(checking, "say", said.append)
    save(tmp_path, 1)
    assert load(tmp_path) == 1 and said == []
    manifest = folders.read_manifest(tmp_path / "old")
    assert manifest is not None
    header = {**manifest.header, "deepspeed": "0.1.2"}
    folders.write_manifest(tmp_path / "old", folders.Manifest(header, manifest.files))
    assert load(tmp_path) == 1 and all("deepspeed 0.1.2" in line for line in said) and said


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("name", [MODEL, *SHARDS])
def test_a_hostile_pickle_in_a_checkpoint_is_not_executed_with_a_manifest_or_without(
    tmp_path: Path, name: str, has_manifest: bool
) -> None:
    """Whoever can change a file can change the manifest."""
    save(tmp_path, 1)
    mark, path = tmp_path / "mark", tmp_path / "old" / name
    torch.save({**torch.load(path), "client": Hostile(mark)}, path)
    manifest = folders.read_manifest(tmp_path / "old")
    assert manifest is not None
    files = {**manifest.files, name: folders.record(path, manifest.files[name].rank)}
    folders.write_manifest(tmp_path / "old", folders.Manifest(manifest.header, files))
    if not has_manifest:
        (tmp_path / "old" / MANIFEST).unlink()
    said = refusal(tmp_path)
    assert "os.makedirs" in said and str(path) in said and not mark.exists()


@pytest.mark.parametrize("name", [MODEL, "zero/optimizer_state.pt", "zero/w/fp32.pt"])
def test_a_universal_checkpoint_that_is_damaged_or_hostile_is_refused_on_all_ranks(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(4)}, tmp_path / "model/model.safetensors")
    folder, mark = tmp_path / "universal", tmp_path / "mark"
    convert(tmp_path / "model", folder, "universal", stage=2)
    assert load(tmp_path, is_universal=True) == 4  # `latest_universal` names it
    path, manifest = folder / name, folder / MANIFEST
    content, listed = path.read_bytes(), manifest.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    for change, has_manifest in ((flipped, True), (None, True), (None, False), (Hostile(mark), False)):
        if not has_manifest:
            manifest.unlink()
        if change is None:
            path.unlink()
        elif isinstance(change, Hostile):
            torch.save(change, path)
        else:
            path.write_bytes(change)
        # A model file that is gone may have had another name.
        where = folder if change is None and not has_manifest and name == MODEL else path
        assert str(where) in refusal(tmp_path, is_universal=True) and not mark.exists()
        path.write_bytes(content)
        manifest.write_bytes(listed)
    assert load(tmp_path, is_universal=True) == 4

"""What a kill, a disk that fails or another job leaves is the old checkpoint or the new one, on one host and on two;
what a flipped bit has done to a file is known, and which file it was."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.checkpoint import folders as f
from fp8_ds.errors import CheckpointError, ConfigError

FILES = ("mp_rank_00_model_states.pt", "sub/zero_pp_rank_0_mp_rank_00_optim_states.pt")


def write_files(folder: Path, version: int) -> f.Manifest:
    """A checkpoint's files in `folder`, distinguishable by `version`, and their manifest (not written)."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"weights" * 1000 + bytes([version]))
    files = {name: f.record(folder / name, rank) for rank, name in enumerate(FILES)}
    return f.Manifest({"tag": folder.name.partition(".")[0], "version": version, "save": f"save {version}"}, files)


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps what a killed process wrote; only a machine that stops loses what is not on the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


IDS = (f"{number:08x}" for number in itertools.count())


def steps_of_a_save(host: Path, tag: str, version: int) -> list[Callable[[], object]]:
    """What one host does, in the steps between which hosts wait for each other."""
    save = f.Save(host, tag, next(IDS), is_latest=True)
    manifests: list[f.Manifest] = []
    return [
        save.prepare,
        lambda: manifests.append(write_files(save.staging, version)),
        lambda: save.stage(manifests[0]),
        save.publish,
        save.finish,
    ]


def save(save_dir: Path, tag: str, version: int) -> None:
    save_on([save_dir], tag, version)


def save_on(hosts: Sequence[Path], tag: str, version: int, before: int | None = None) -> None:
    """Save on all hosts. `before`: the version that a kill on the way to `publish` has to leave."""
    for number, step in enumerate(zip(*(steps_of_a_save(host, tag, version) for host in hosts), strict=True)):
        for act in step:
            act()
            assert before is None or number > 2 or load_on(hosts) == before


def version_in(folder: Path) -> int:
    """Of a checkpoint, checked as a load does."""
    manifest = f.read_manifest(folder)
    assert manifest is not None
    assert [f.damage(folder, name, entry) for name, entry in manifest.files.items()] == ["", ""]
    for name in FILES:
        assert (folder / name).read_bytes()[-1] == manifest.header["version"]
    return int(manifest.header["version"])


def load(save_dir: Path) -> int:
    """The version that `latest` leads to."""
    return version_in(save_dir / f.folders_of(save_dir, (save_dir / f.LATEST).read_text())[0])


def load_on(hosts: Sequence[Path]) -> int:
    """The version that hosts load together: what `latest` leads to, or else one that all of them have."""
    tags = [(host / f.LATEST).read_text() for host in hosts]
    firsts = {load(host) for host in hosts}
    if len(firsts) == 1:
        return firsts.pop()
    found = [
        {version_in(host / name) for tag in tags for name in f.folders_of(host, tag) if (host / name).exists()}
        for host in hosts
    ]
    common = set.intersection(*found)
    assert common, "no save that all hosts have"
    return max(common)


# --- kills ---


class Killed(BaseException):
    """No handler of errors sees it."""


def kill_at(call: int, action: Callable[[], Any]) -> bool:
    """Run `action` until its `call`-th operation on the file system, after which it does none; whether it got there.

    Processes that are killed leave the same (tests/distributed/test_checkpoint_kills.py), but take long to start.
    """
    count = 0

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == call:
                raise Killed
            count += 1
            return function(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "fsync", "rename", "replace", "rmdir", "unlink", "mkdir", "link"):
            patch.setattr(os, name, counting(getattr(os, name)))
        for name in ("open", "rename", "replace", "unlink", "mkdir"):
            patch.setattr(Path, name, counting(getattr(Path, name)))
        try:
            action()
        except Killed:
            return True
    return False


@pytest.mark.parametrize(
    ("tag", "killed"),
    [
        pytest.param("one", 1, id="another-tag-second-host"),
        pytest.param("two", 0, id="the-same-tag-first-host"),
    ],
)
def test_a_kill_at_any_operation_of_one_host_leaves_a_save_that_both_have(
    tmp_path: Path, tag: str, killed: int
) -> None:
    """The other host has ended the same step, or not begun it: between two steps hosts wait for each other. So it is
    without another host, whose save is the killed one's."""
    outcomes = []
    for step in range(5):
        for other_is_done in (False, True):
            for call in range(1000):
                hosts = [tmp_path / f"{step}{other_is_done}{call}/host{i}" for i in (0, 1)]
                save_on(hosts, "two", 1)
                (hosts[killed] / "two/notes.txt").write_text("mine")
                steps = [steps_of_a_save(host, tag, 2) for host in hosts]
                for i in range(step):
                    for host_steps in steps:
                        host_steps[i]()
                if other_is_done:
                    steps[1 - killed][step]()
                died = kill_at(call, steps[killed][step])
                outcomes.append(load_on(hosts))
                save_on(hosts, tag, 3, before=outcomes[-1])  # the next save clears up and succeeds
                assert load_on(hosts) == 3
                assert (hosts[killed] / "two/notes.txt").read_text() == "mine"
                for host in hosts:
                    assert sorted(path.name for path in host.iterdir()) == sorted({"latest", "two", tag})
                if not died:
                    break
    assert len(outcomes) > 60
    assert set(outcomes) == {1, 2}


def test_leftovers_that_cannot_be_removed_do_not_become_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "one", 1)
    write_files(tmp_path / "one.00000bad.incomplete", 2)
    (tmp_path / "one.00000bad.incomplete/mp_rank_07_model_states.pt").touch()
    monkeypatch.setattr(f.shutil, "rmtree", lambda path, ignore_errors: None)
    save(tmp_path, "one", 3)
    assert load(tmp_path) == 3
    assert not (tmp_path / "one/mp_rank_07_model_states.pt").exists()


@pytest.mark.parametrize("links", [True, False])
def test_files_that_others_put_beside_ours_stay_when_a_tag_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """They are linked; where a file system has no links, as some of the network, they are copied."""
    save(tmp_path, "best", 1)
    mine = ("notes.txt", "ema_states.pt", "tokenizer/vocabulary", "tokenizer/ema_model_states.pt")  # not DeepSpeed's
    (tmp_path / "best/tokenizer").mkdir()
    for name in mine:
        (tmp_path / "best" / name).write_text("mine")
    (tmp_path / "best/link").symlink_to("nowhere")
    others = ("mp_rank_07_model_states.pt", "layer_07-xmodel_states.pt")  # of a run with more ranks or layers
    for name in others:
        (tmp_path / "best" / name).write_text("old")
    assert f.own_files(tmp_path / "best") == {FILES[0]: 7001, **dict.fromkeys(others, 3)}
    before = (tmp_path / "best" / mine[2]).stat().st_ino

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(95, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, "best", 2)
    assert load(tmp_path) == 2
    assert {(tmp_path / "best" / name).read_text() for name in mine} == {"mine"}
    assert ((tmp_path / "best" / mine[2]).stat().st_ino == before) == links
    assert os.readlink(tmp_path / "best/link") == "nowhere"
    assert not any((tmp_path / "best" / name).exists() for name in others)


def test_a_tag_that_is_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    save(tmp_path, "step1", 1)
    (tmp_path / "step1/notes.txt").write_text("mine")
    (tmp_path / "best").symlink_to("step1")
    (tmp_path / "gone").symlink_to("nowhere")
    for tag in ("best", "gone"):
        save(tmp_path, tag, 2)
        assert load(tmp_path) == version_in(tmp_path / tag) == 2 and not (tmp_path / tag).is_symlink()
    assert version_in(tmp_path / "step1") == 1
    assert (tmp_path / "step1/notes.txt").read_text() == (tmp_path / "best/notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"step1", "best", "gone", "latest"}


# --- names ---


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", "../x", "/x", "a/", "./a", "a//b", "x.incomplete", "x.replaced", "x\0y", "x\ny", " x", "latest"],
)
def test_a_tag_that_is_no_name_or_a_saves_own_is_refused(tag: str) -> None:
    with pytest.raises(ConfigError, match=r"tag: expected the name of a folder.*got"):
        f.refuse_tag(tag)


@pytest.mark.parametrize("tag", ["global_step1", "runs/best", "3", "a[b]", "a.b", "\u00e9 e", "x.incomplete.1"])
def test_other_tags_can_be_saved_and_found(tmp_path: Path, tag: str) -> None:
    f.refuse_tag(tag)
    save(tmp_path, tag, 1)
    (tmp_path / tag).rename(tmp_path / f"{tag}.0000abcd.replaced")  # a kill
    assert load(tmp_path) == 1
    save(tmp_path, tag, 2)
    assert load(tmp_path) == 2
    assert [path.name for path in (tmp_path / tag).parent.iterdir() if path.name.startswith(Path(tag).name)] == [
        Path(tag).name
    ]


# --- two jobs ---


@pytest.mark.parametrize("is_shared", [True, False])
def test_saves_and_loads_wait_for_the_save_of_another_job_and_loads_not_for_each_other(
    tmp_path: Path, is_shared: bool
) -> None:
    said: list[str] = []
    for loads in [f.take_lock(tmp_path, "", said.append, is_shared=True) for _ in range(2)]:
        loads.close()
    assert list(tmp_path.iterdir()) == []
    f.take_lock(tmp_path, "8", said.append).close()  # of a host that says that its disk is its own
    lock = f.take_lock(tmp_path, "", said.append)
    assert said == []
    held: list[ExitStack] = []
    thread = threading.Thread(
        target=lambda: held.append(f.take_lock(tmp_path, "", said.append, is_shared=is_shared)), daemon=True
    )
    thread.start()
    thread.join(0.3)
    assert held == [] and f"process {os.getpid()} of " in said.pop()
    lock.close()
    thread.join(60)
    held.pop().close()


# --- what a disk does to files ---


def test_every_flipped_bit_of_a_file_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f, "_CHUNK_BYTES", 1000)  # smaller than the files, as for real ones
    manifest = write_files(tmp_path, 1)
    for name, entry in manifest.files.items():
        path = tmp_path / name
        content = path.read_bytes()
        for place in (0, 1, len(content) // 2, len(content) - 1):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            assert str(path) in f.damage(tmp_path, name, entry)
        path.write_bytes(content[:-1])
        assert f"{path} has {len(content) - 1} bytes of" in f.damage(tmp_path, name, entry)
        path.unlink()
        assert f.damage(tmp_path, name, entry) == f"{path} is missing"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_files(tmp_path, 1)

    class BadSector:
        crc32 = staticmethod(lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))  # without a name

    monkeypatch.setattr(f, "zlib", BadSector)
    for name, entry in manifest.files.items():
        path = str(tmp_path / name)
        assert f.damage(tmp_path, name, entry) == f"{path} cannot be read ([Errno 5] Input/output error)"
        with pytest.raises(OSError, match="Input/output error") as caught:
            f.record(tmp_path / name, 0)
        assert caught.value.filename == path


def test_files_of_a_universal_checkpoint_are_found_behind_links_too(tmp_path: Path) -> None:
    for name in (f.GLOBAL_STATE, "zero/w/fp32.pt", "zero/w/notes.txt", "mp_rank_00_model_states.pt", "mine/fp32.pt"):
        (tmp_path / "whole" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "whole" / name).write_bytes(b"12")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/fp32.pt").write_bytes(b"1234")
    (tmp_path / "whole/zero/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/circle").symlink_to(tmp_path / "whole/zero")
    found = f.own_files(tmp_path / "whole")
    whole = (f.GLOBAL_STATE, "zero/w/fp32.pt", "mp_rank_00_model_states.pt")
    assert found == {**dict.fromkeys(whole, 2), "zero/linked/fp32.pt": 4}


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    f.write_manifest(tmp_path, write_files(tmp_path, 1))
    path = tmp_path / f.MANIFEST
    content = path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=f.MANIFEST):
            f.read_manifest(tmp_path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        f.read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/model.pt"])
def test_a_manifest_names_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    f.write_manifest(tmp_path, f.Manifest({}, {name: f.FileRecord(1, "00000000", 0)}))
    with pytest.raises(CheckpointError, match="damaged"):
        f.read_manifest(tmp_path)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(f, "_FORMAT", 2)
        f.write_manifest(tmp_path, f.Manifest({"fp8_ds": "9.1"}, {}))
    with pytest.raises(CheckpointError, match=r"expected format 1, got 2"):
        f.read_manifest(tmp_path)


def test_a_save_that_is_damaged_or_did_not_end_is_not_named_among_the_complete(tmp_path: Path) -> None:
    for name in ("one", "two", f"three{f.INCOMPLETE}"):
        f.write_manifest(tmp_path / name, write_files(tmp_path / name, 1))
    assert f.describe_complete(tmp_path, "one").endswith(": ['two'].")

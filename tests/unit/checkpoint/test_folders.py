"""Commits: what a kill or a disk that fails leaves is the old checkpoint or the new one, on one host and on two."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.checkpoint import folders as f
from fp8_ds.checkpoint import manifest as m
from fp8_ds.errors import CheckpointError

FILES = ("mp_rank_00_model_states.pt", "sub/zero_pp_rank_0_mp_rank_00_optim_states.pt")


def write_files(folder: Path, version: int) -> m.Manifest:
    """A checkpoint's files in `folder`, distinguishable by `version`, and their manifest (not written)."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"weights" * 1000 + bytes([version]))
    files = {name: m.record(folder / name, rank) for rank, name in enumerate(FILES)}
    return m.Manifest({"tag": folder.name, "version": version, "save": f"save {version}"}, files)


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps what a killed process wrote; only a machine that stops loses what is not on the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def steps_of_a_save(host: Path, tag: str, version: int, keep: str | None = None) -> list[Callable[[], object]]:
    """What one host does, in the steps between which hosts wait for each other."""

    commits: list[f.Commit] = []

    def write() -> None:
        manifest = write_files(host / (tag + f.INCOMPLETE), version)
        commits.append(f.Commit(host, tag, manifest, is_latest=True))

    return [
        lambda: f.prepare(host, tag, keep),
        write,
        lambda: commits[0].stage(),
        lambda: commits[0].publish(),
        lambda: commits[0].finish(),
    ]


def save(save_dir: Path, tag: str, version: int) -> None:
    save_on([save_dir], tag, version)


def save_on(hosts: Sequence[Path], tag: str, version: int) -> None:
    keep = f.common_save([written_times(host, [tag]) for host in hosts])
    for step in zip(*(steps_of_a_save(host, tag, version, keep) for host in hosts), strict=True):
        for act in step:
            act()


def written_times(host: Path, tags: Sequence[str]) -> dict[str, int]:
    return {name: found.written for name, found in f.complete_saves(host, tags).items()}


def version_in(folder: Path) -> int:
    """Of a checkpoint, checked as a load does."""
    manifest = m.read_manifest(folder)
    assert manifest is not None
    assert [m.damage(folder, name, entry) for name, entry in manifest.files.items()] == ["", ""]
    for name in FILES:
        assert (folder / name).read_bytes()[-1] == manifest.header["version"]
    return int(manifest.header["version"])


def load(save_dir: Path) -> int:
    """The version that `latest` leads to."""
    return version_in(save_dir / f.find(save_dir, (save_dir / f.LATEST).read_text()))


def load_on(hosts: Sequence[Path]) -> int:
    """The version that hosts load together: what `latest` leads to, or else the newest that all of them have."""
    tags = [(host / f.LATEST).read_text() for host in hosts]
    versions = {version_in(host / f.find(host, tag)) for host, tag in zip(hosts, tags, strict=True)}
    if len(versions) == 1:
        return versions.pop()
    common = f.common_save([written_times(host, sorted(set(tags))) for host in hosts])
    assert common is not None, "no save that all hosts have"
    return {version_in(host / f.complete_saves(host, tags)[common].tag) for host in hosts}.pop()


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


@pytest.mark.parametrize("tag", ["one", "two"], ids=["another-tag", "the-same-tag"])
def test_a_kill_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, tag: str) -> None:
    outcomes = []
    for call in range(1000):
        save_dir = tmp_path / str(call)
        save(save_dir, "two", 1)
        (save_dir / "two/notes.txt").write_text("mine")
        died = kill_at(call, lambda save_dir=save_dir: save(save_dir, tag, 2))  # type: ignore[misc]
        outcomes.append(load(save_dir))
        save(save_dir, tag, 3)  # the next save clears up and succeeds
        assert load(save_dir) == 3
        assert (save_dir / "two/notes.txt").read_text() == "mine"
        assert sorted(path.name for path in save_dir.iterdir()) == sorted({"latest", "two", tag})
        if not died:
            break
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes)
    assert outcomes[0] == 1
    assert outcomes[-1] == 2


@pytest.mark.parametrize(
    ("tag", "killed"),
    [
        pytest.param("one", 0, id="another-tag-first-host", marks=pytest.mark.slow),
        pytest.param("one", 1, id="another-tag-second-host"),
        pytest.param("two", 0, id="the-same-tag-first-host"),
        pytest.param("two", 1, id="the-same-tag-second-host", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_operation_of_one_host_leaves_a_save_that_both_have(
    tmp_path: Path, tag: str, killed: int
) -> None:
    """The other host has ended the same step, or not begun it: between two steps hosts wait for each other."""
    outcomes = []
    for step in range(5):
        for other_is_done in (False, True):
            for call in range(1000):
                hosts = [tmp_path / f"{step}{other_is_done}{call}/host{i}" for i in (0, 1)]
                save_on(hosts, "two", 1)
                steps = [steps_of_a_save(host, tag, 2, "save 1" if tag == "two" else None) for host in hosts]
                for i in range(step):
                    for host_steps in steps:
                        host_steps[i]()
                if other_is_done:
                    steps[1 - killed][step]()
                died = kill_at(call, steps[killed][step])
                outcomes.append(load_on(hosts))
                save_on(hosts, tag, 3)
                assert load_on(hosts) == 3
                for host in hosts:
                    assert sorted(path.name for path in host.iterdir()) == sorted({"latest", "two", tag})
                if not died:
                    break
    assert len(outcomes) > 60
    assert set(outcomes) == {1, 2}


def test_a_save_that_both_hosts_have_outlives_the_start_of_the_next_one(tmp_path: Path) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    save_on(hosts, "two", 1)
    steps = [steps_of_a_save(host, "two", 2, "save 1") for host in hosts]
    for i in range(3):
        for host_steps in steps:
            host_steps[i]()
    steps[0][3]()  # killed before the second host renamed
    assert load_on(hosts) == 1
    keep = f.common_save([written_times(host, ["two"]) for host in hosts])
    for host in hosts:
        f.prepare(host, "two", keep)
        assert load_on(hosts) == 1
    assert [load(host) for host in hosts] == [1, 1]


def test_a_latest_that_cannot_be_written_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "one", 1)
    write, replace = f.write_text, Path.replace

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    def broken(self: Path, target: Path) -> Path:
        if target.name == f.LATEST:
            raise OSError(5, "Input/output error", str(target))
        return replace(self, target)

    for tag in ("one", "two"):
        for name, value in (("write_text", full), ("replace", broken)):
            monkeypatch.setattr(*((f, name, value) if name == "write_text" else (Path, name, value)))
            steps = steps_of_a_save(tmp_path, tag, 2)
            steps[0]()
            steps[1]()
            with pytest.raises(OSError, match=f.LATEST):
                for step in steps[2:]:
                    step()
            monkeypatch.setattr(f, "write_text", write)
            monkeypatch.setattr(Path, "replace", replace)
            assert load(tmp_path) == 1
            f.discard(tmp_path, tag)
            assert {path.name for path in tmp_path.iterdir()} <= {"one", "latest", "latest.next"}
    save(tmp_path, "two", 2)
    assert load(tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "latest"}


@pytest.mark.parametrize("tag", ["one", "two"])
def test_a_commit_that_another_host_cannot_make_is_undone(tmp_path: Path, tag: str) -> None:
    save(tmp_path, "one", 1)
    f.prepare(tmp_path, tag)
    manifest = write_files(tmp_path / (tag + f.INCOMPLETE), 2)
    commit = f.Commit(tmp_path, tag, manifest, is_latest=True)
    commit.stage()
    commit.publish()
    assert load(tmp_path) == 2
    commit.undo()
    f.discard(tmp_path, tag)
    assert load(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"one", "latest"}


def test_the_newest_save_that_every_host_has_is_the_one_to_load() -> None:
    assert f.common_save([{"a": 1, "b": 2, "c": 3}, {"b": 9, "a": 10}]) == "b"
    assert f.common_save([{"a": 1}, {"b": 1}]) is None
    assert f.common_save([{}, {"b": 1}]) is None
    assert f.common_save([]) is None


def test_a_failed_rename_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "one", 1)
    manifest = write_files(tmp_path / "one.incomplete", 2)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "one.incomplete":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    commit = f.Commit(tmp_path, "one", manifest, is_latest=True)
    commit.stage()
    with pytest.raises(OSError, match="Input/output"):
        commit.publish()
    assert load(tmp_path) == 1


def test_leftovers_that_cannot_be_removed_do_not_become_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "one", 1)
    write_files(tmp_path / "one.incomplete", 2)
    monkeypatch.setattr(f.shutil, "rmtree", lambda path, ignore_errors: None)
    with pytest.raises(CheckpointError, match=r"one\.incomplete.*cannot be removed"):
        f.prepare(tmp_path, "one")
    assert load(tmp_path) == 1


def test_files_that_the_committing_rank_does_not_see_are_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, "one", 1)
    manifest = write_files(tmp_path / "two.incomplete", 2)
    (tmp_path / "two.incomplete" / list(FILES)[1]).unlink()
    with pytest.raises(CheckpointError, match=r"optim_states\.pt is not here as rank 1 .*use_node_local_storage"):
        f.Commit(tmp_path, "two", manifest, is_latest=True).stage()
    assert load(tmp_path) == 1


def test_files_that_others_put_beside_ours_stay_when_a_tag_is_saved_again(tmp_path: Path) -> None:
    save(tmp_path, "best", 1)
    (tmp_path / "best/notes.txt").write_text("mine")
    (tmp_path / "best/tokenizer").mkdir()
    (tmp_path / "best/tokenizer/vocabulary").write_text("a b")
    (tmp_path / "best/mp_rank_07_model_states.pt").write_text("of a run with more ranks")
    save(tmp_path, "best", 2)
    assert load(tmp_path) == 2
    assert (tmp_path / "best/notes.txt").read_text() == "mine"
    assert (tmp_path / "best/tokenizer/vocabulary").read_text() == "a b"
    assert not (tmp_path / "best/mp_rank_07_model_states.pt").exists()


def test_files_of_others_are_not_copied_where_they_can_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "best", 1)
    (tmp_path / "best/data").mkdir()
    (tmp_path / "best/data/large").write_text("mine")
    (tmp_path / "best/notes").symlink_to("nowhere")
    before = (tmp_path / "best/data/large").stat().st_ino
    save(tmp_path, "best", 2)
    assert (tmp_path / "best/data/large").stat().st_ino == before

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(95, "Operation not supported")  # as some network file systems do

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, "best", 3)
    assert load(tmp_path) == 3
    assert (tmp_path / "best/data/large").stat().st_ino != before
    assert (tmp_path / "best/data/large").read_text() == "mine"
    assert os.readlink(tmp_path / "best/notes") == "nowhere"


def test_complete_tags_leave_out_unfinished_ones(tmp_path: Path) -> None:
    save(tmp_path, "one", 1)
    os.utime(tmp_path / "one" / m.MANIFEST, (1, 1))
    save(tmp_path, "two", 2)
    m.write_manifest(tmp_path / "two", write_files(tmp_path / "two", 2))
    write_files(tmp_path / "three.incomplete", 3)
    (tmp_path / "stock").mkdir()
    assert f.complete_tags(tmp_path) == ["two", "one"]

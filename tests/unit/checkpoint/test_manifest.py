"""Manifests and commits: what a kill, a full disk or a flipped bit leaves is known for what it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.checkpoint import manifest as m
from fp8_ds.errors import CheckpointError

FILES = {
    "mp_rank_00_model_states.pt": b"model" * 1000,
    "sub/zero_pp_rank_0_mp_rank_00_optim_states.pt": b"shard" * 3000,
}


def write_files(folder: Path, version: int) -> m.Manifest:
    """A checkpoint's files in `folder`, distinguishable by `version`, and their manifest (not written)."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content + bytes([version]))
    records = {name: m.record(folder / name, rank) for rank, name in enumerate(FILES)}
    return m.Manifest({"tag": folder.name, "fp8_ds": "0", "version": version}, records)


def save(save_dir: Path, tag: str, version: int) -> None:
    m.prepare(save_dir, tag)
    manifest = write_files(save_dir / (tag + m.INCOMPLETE), version)
    m.commit(save_dir, tag, manifest, is_latest=True)


def load(save_dir: Path) -> int:
    """The version that `latest` leads to, checked as a load does."""
    tag = m.find(save_dir, (save_dir / m.LATEST).read_text())
    manifest = m.read_manifest(save_dir / tag)
    assert manifest is not None
    assert [m.damage(save_dir / tag, name, entry) for name, entry in manifest.files.items()] == ["", ""]
    for name in FILES:
        assert (save_dir / tag / name).read_bytes()[-1] == manifest.header["version"]
    return int(manifest.header["version"])


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = write_files(tmp_path, 1)
    m.write_manifest(tmp_path, manifest)
    assert m.read_manifest(tmp_path) == manifest
    assert manifest.files["mp_rank_00_model_states.pt"] == m.FileRecord(
        5001, manifest.files[next(iter(FILES))].crc32, 0
    )
    assert m.read_manifest(tmp_path / "sub") is None


def test_checksums_are_crc32_over_all_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"123456789")
    monkeypatch.setattr(m, "_CHUNK_BYTES", 4)
    assert m.record(tmp_path / "file", 0).crc32 == "cbf43926"  # the check value of CRC-32/ISO-HDLC


def test_every_flipped_bit_of_a_file_is_found_and_named(tmp_path: Path) -> None:
    manifest = write_files(tmp_path, 1)
    for name, entry in manifest.files.items():
        path = tmp_path / name
        content = path.read_bytes()
        for place in (0, 1, len(content) // 2, len(content) - 1):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            assert str(path) in m.damage(tmp_path, name, entry)
        path.write_bytes(content[:-1])
        assert f"{path} has {len(content) - 1} bytes where {len(content)} were written" in m.damage(
            tmp_path, name, entry
        )
        path.unlink()
        assert m.damage(tmp_path, name, entry) == f"{path} is missing"


def test_files_are_checked_on_a_file_system_that_refuses_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_files(tmp_path, 1)

    def refuse(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")  # as squashfs does

    monkeypatch.setattr(os, "fsync", refuse)
    assert [m.damage(tmp_path, name, entry) for name, entry in manifest.files.items()] == ["", ""]
    with pytest.raises(OSError, match="Invalid"):  # a save needs it
        m.record(tmp_path / next(iter(FILES)), 0)


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    m.write_manifest(tmp_path, write_files(tmp_path, 1))
    path = tmp_path / m.MANIFEST
    content = path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=m.MANIFEST):
            m.read_manifest(tmp_path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        m.read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/model.pt"])
def test_a_manifest_names_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    m.write_manifest(tmp_path, m.Manifest({}, {name: m.FileRecord(1, "00000000", 0)}))
    with pytest.raises(CheckpointError, match="damaged"):
        m.read_manifest(tmp_path)


def test_another_format_is_refused_with_the_version_that_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "_FORMAT", 2)
    m.write_manifest(tmp_path, m.Manifest({"fp8_ds": "9.1"}, {}))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"expected format 1, got 2 of fp8_ds 9\.1"):
        m.read_manifest(tmp_path)


SHARDS = {f"bf16_zero_pp_rank_{i}": 1200 for i in range(8)}


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({**SHARDS, "mp_rank_00": 1600}, range(8)),
        ({**SHARDS, "mp_rank_00": 90_000}, range(8)),
        ({f"layer{i}": 10 * (i % 5) for i in range(50)}, range(4)),
        (SHARDS, [4, 5, 6]),  # of the second host
        ({"mp_rank_00": 1}, range(3)),
        ({}, range(2)),
    ],
)
def test_files_are_shared_out_by_size(sizes: dict[str, int], ranks: Any) -> None:
    files = {name: m.FileRecord(size, "", 0) for name, size in sizes.items()}
    shares = m.share_out(files, ranks)
    assert sorted(shares) == list(ranks)
    assert sorted(name for share in shares.values() for name in share) == sorted(files)
    loads = [sum(sizes[name] for name in share) for share in shares.values()]
    assert max(loads) <= sum(sizes.values()) / len(loads) + max(sizes.values(), default=0)
    if sizes.get("mp_rank_00", 0) > 2000:
        assert ["mp_rank_00"] in shares.values()  # who reads the largest file reads no other
    assert m.share_out(dict(reversed(files.items())), ranks) == shares


# --- kills ---


def kill_at(call: int, action: Callable[[], Any]) -> bool:
    """Run `action` in a process that dies at its `call`-th operation on the file system; whether it died."""
    child = os.fork()
    if child == 0:
        count = 0

        def counting(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if count == call:
                    os._exit(9)
                count += 1
                return function(*args, **kwargs)

            return run

        for name in ("open", "fsync", "rename", "replace", "rmdir", "unlink", "mkdir"):
            setattr(os, name, counting(getattr(os, name)))
        Path.open = counting(Path.open)  # type: ignore[method-assign]
        Path.rename = counting(Path.rename)  # type: ignore[method-assign]
        Path.replace = counting(Path.replace)  # type: ignore[method-assign]
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


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


def test_a_failed_rename_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "one", 1)
    manifest = write_files(tmp_path / "one.incomplete", 2)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "one.incomplete":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        m.commit(tmp_path, "one", manifest, is_latest=True)
    assert load(tmp_path) == 1


def test_leftovers_that_cannot_be_removed_do_not_become_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "one", 1)
    write_files(tmp_path / "one.incomplete", 2)
    monkeypatch.setattr(m.shutil, "rmtree", lambda path, ignore_errors: None)
    with pytest.raises(CheckpointError, match=r"one\.incomplete.*cannot be removed"):
        m.prepare(tmp_path, "one")
    assert load(tmp_path) == 1


def test_files_that_the_committing_rank_does_not_see_are_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, "one", 1)
    manifest = write_files(tmp_path / "two.incomplete", 2)
    (tmp_path / "two.incomplete" / list(FILES)[1]).unlink()
    with pytest.raises(CheckpointError, match=r"optim_states\.pt is not here as rank 1 .*use_node_local_storage"):
        m.commit(tmp_path, "two", manifest, is_latest=True)
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
    assert m.complete_tags(tmp_path) == ["two", "one"]

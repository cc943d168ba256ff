"""Manifests: what a flipped bit or a disk that fails has done to a file is known, and which file it was."""

from __future__ import annotations

import os
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


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_files(tmp_path, 1)

    def fail(file: Any) -> Any:
        raise OSError(5, "Input/output error")  # as a read of a bad sector does, without a name

    monkeypatch.setattr(m, "_checksum", fail)
    for name, entry in manifest.files.items():
        path = str(tmp_path / name)
        assert m.damage(tmp_path, name, entry) == f"{path} cannot be read ([Errno 5] Input/output error)"
        with pytest.raises(OSError, match="Input/output error") as caught:
            m.record(tmp_path / name, 0)
        assert caught.value.filename == path


def test_files_in_a_folder_are_found_behind_links_too(tmp_path: Path) -> None:
    write_files(tmp_path / "whole", 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/more_states.pt").write_bytes(b"1234")
    (tmp_path / "whole/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/circle").symlink_to(tmp_path / "whole")
    (tmp_path / "whole/notes.txt").write_text("mine")
    found = m.files_in(tmp_path / "whole", "_states.pt")
    assert found == {**{name: len(content) + 1 for name, content in FILES.items()}, "linked/more_states.pt": 4}


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
    shares = m.share_out(sizes, ranks)
    assert sorted(shares) == list(ranks)
    assert sorted(name for share in shares.values() for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares.values()]
    assert max(loads) <= sum(sizes.values()) / len(loads) + max(sizes.values(), default=0)
    if sizes.get("mp_rank_00", 0) > 2000:
        assert ["mp_rank_00"] in shares.values()  # who reads the largest file reads no other
    assert m.share_out(dict(reversed(sizes.items())), ranks) == shares

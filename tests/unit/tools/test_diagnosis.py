from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fp8_ds.errors import SeamError
from fp8_ds.tools.doctor import diagnosis
from fp8_ds.tools.doctor.diagnosis import abandoned, build_root, checks


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch locks the build of one extension."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "some_op"
    folder.mkdir()
    return folder / "lock"


def test_a_lock_is_abandoned_when_its_builder_is_killed_and_not_before(lock: Path) -> None:
    hold = (
        "import sys, time; from torch.utils.file_baton import FileBaton;"
        f"assert FileBaton({str(lock)!r}).try_acquire(); print('held', flush=True); time.sleep(600)"
    )
    builder = subprocess.Popen([sys.executable, "-c", hold], stdout=-1, text=True)
    assert builder.stdout is not None and builder.stdout.readline() == "held\n"
    assert abandoned(build_root()) == [] and lock.exists()
    builder.kill()
    builder.wait()
    assert lock.exists() and abandoned(build_root()) == [lock]
    lock.unlink()
    assert abandoned(build_root()) == []


def test_doctor_names_an_abandoned_lock(lock: Path) -> None:
    assert not [check for check in checks() if check.name == "extension build"]
    lock.touch()
    (found,) = (check for check in checks() if check.name == "extension build")
    assert found.status == "warning" and str(lock) in found.remedy


def test_what_a_machine_lacks_or_was_not_tested_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ("deepspeed", "ninja")
    monkeypatch.setattr(diagnosis, "installed", lambda name: None if name in lacking else "0.1")
    monkeypatch.setattr("shutil.which", lambda tool: None)
    found = {check.name: check for check in checks()}
    assert {name: found[name].status for name in lacking} == {"deepspeed": "missing", "ninja": "optional"}
    assert all("pip install" in found[name].remedy for name in lacking)
    monkeypatch.setattr(diagnosis, "installed", lambda name: "0.1")
    assert {check.name: check.status for check in diagnosis._deepspeed()} == {"deepspeed": "warning", "seams": "ok"}

    def fails() -> None:
        raise SeamError("gone")

    monkeypatch.setattr("fp8_ds.engine.seam_check.check_seams", fails)
    assert [check.status for check in diagnosis._deepspeed()] == ["warning", "missing"]


def test_a_clone_of_megatron_is_looked_at_in_place_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "clone"
    monkeypatch.setenv("MEGATRON_LM_PATH", str(clone))
    assert diagnosis._megatron().status == "warning" and "git clone" in diagnosis._megatron().remedy
    (clone / "megatron/core").mkdir(parents=True)
    for minor, status in ((16, "ok"), (99, "warning")):
        text = f"MAJOR, MINOR, PATCH, PRE_RELEASE = 0, {minor}, 1, ''\n"
        (clone / "megatron/core/package_info.py").write_text(text)
        assert diagnosis._megatron().status == status
        assert status == "ok" or "checkout" in diagnosis._megatron().remedy

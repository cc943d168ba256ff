from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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

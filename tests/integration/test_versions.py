"""The seam guard, training and a bit-exact resume in every tested DeepSpeed. docs/versions.md records the result.

FP8_DS_DEEPSPEED_DIRS names a folder with a subfolder ds-VERSION per version, each made by
`pip install --no-deps --target ds-VERSION deepspeed==VERSION`. The installed version needs none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.engine.seams import TESTED_VERSIONS

STAGES = (1, 2, 3)


def train_and_resume(folder: str) -> dict[int, list[float]]:
    """Stage -> losses; the FP8 bytes follow the masters, and a resumed run repeats the first. Runs on every rank."""
    import test_checkpoint
    import training

    found = {}
    for stage in STAGES:
        engine = test_checkpoint.build(stage, {})
        found[stage] = training.train(engine, 4)
        test_checkpoint.assert_bytes_follow_masters(engine)
        training.destroy(engine)
        test_checkpoint.resume(f"{folder}/{stage}", stage, test_checkpoint.DELAYED)
    return found


def child(folder: str) -> dict[str, Any]:
    """What this interpreter's DeepSpeed does: version, warnings of the guard, losses by stage."""
    import warnings

    from support.ranks import RankPool

    from fp8_ds.engine import seam_check, seams

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seam_check.check_seams()
    said = [str(warning.message) for warning in caught if str(warning.message).startswith("fp8_ds is tested")]
    pool = RankPool(2)
    try:
        losses = pool.run(train_and_resume, folder)[0]
    finally:
        pool.close()
    return {"version": seams.installed_version(), "guard": said, "losses": losses}


def installed_version() -> str:
    from importlib.metadata import version

    return version("deepspeed")


@pytest.mark.slow
@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_every_stage_trains_and_resumes_in_a_tested_version(
    version: str, tmp_path: Path, root: Path, cpu_environment: dict[str, str]
) -> None:
    paths = [str(root / folder) for folder in ("", "tests", "tests/distributed")]
    if version != installed_version():
        folders = os.environ.get("FP8_DS_DEEPSPEED_DIRS")
        if not folders:
            pytest.skip(f"DeepSpeed {version} NOT TESTED: FP8_DS_DEEPSPEED_DIRS is unset (see test_versions.py)")
        folder = Path(folders) / f"ds-{version}"
        assert folder.is_dir(), f"FP8_DS_DEEPSPEED_DIRS: expected {folder}. pip install --no-deps --target it."
        paths.insert(0, str(folder))
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        stdout=-1,
        stderr=-2,
        text=True,
        env={**cpu_environment, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=600,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert result.returncode == 0 and lines, result.stdout[-6000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    print(f"\n{found}")
    assert found["version"] == version
    assert found["guard"] == []
    assert sorted(found["losses"]) == [str(stage) for stage in STAGES]
    assert all(losses[-1] < losses[0] for losses in found["losses"].values())


if __name__ == "__main__":
    print("RESULT", json.dumps(child(sys.argv[1])))

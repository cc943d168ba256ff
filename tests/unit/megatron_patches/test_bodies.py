"""Bodies of Megatron's functions: those of tested versions pass in silence, others are named."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

from packaging.specifiers import SpecifierSet

from megatron_patches import compat, patches


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    patches._warn_of_other_bodies.cache_clear()


def test_hashes_of_every_tested_version_are_stored_for_every_function() -> None:
    tested = json.loads(patches._BODIES.read_text())
    assert tuple(sorted(tested)) == compat.TESTED_VERSIONS
    constants = {row.path for row in patches.PATCHES if row.name.rsplit(".", 1)[-1][0].isupper()}
    assert len(constants) == 8
    for version, table in tested.items():
        there = {row.path for row in patches.PATCHES if SpecifierSet(row.versions).contains(version)}
        assert set(table) == there - constants, version


def test_the_installed_version_passes_in_silence() -> None:
    if compat.version().public not in compat.TESTED_VERSIONS:
        pytest.skip(f"Megatron {compat.version()} is none of the tested {compat.TESTED_VERSIONS}")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*bodies differ")
        patches.check("core")


def test_a_body_that_was_not_tested_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def state_dict(self: Any) -> Any:
        return {"another": "body"}

    monkeypatch.setattr(DistributedOptimizer, "state_dict", state_dict)
    with pytest.warns(UserWarning, match=r"these bodies differ: [\w.]+\.DistributedOptimizer\.state_dict\. Run"):
        patches.check("core")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*bodies differ")
        patches.check("core")


def test_a_version_is_merged_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "bodies.json"
    file.write_text('{"0.1": {"a": "b"}}')
    rows = [row for row in patches.rows() if row.part == "core"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "rows", lambda *parts: rows)
        patches.update_bodies(file)
    text = file.read_text()
    assert '"0.1"' in text and f'"{compat.version().public}"' in text and "RowParallelLinear.forward" in text


def test_a_library_that_scripts_need_is_told_from_a_version_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'six'", name="six")

    row = next(row for row in patches.PATCHES if row.part == "training")
    monkeypatch.setattr(patches.importlib, "import_module", absent)
    with pytest.raises(patches.SeamError, match=r"No module named 'six'\. Install .*fp8-ds\[megatron\]"):
        patches._current(row)

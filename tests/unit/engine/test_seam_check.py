from __future__ import annotations

import functools
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.engine import seam_check, seams
from fp8_ds.errors import SeamError

HASHES = json.loads(Path(seam_check.__file__).with_name("seam_hashes.json").read_text())
S12 = "deepspeed.runtime.zero.stage_1_and_2"


@pytest.fixture(autouse=True)
def deepspeed_is_imported() -> None:
    pytest.importorskip("deepspeed")


def test_hashes_of_every_tested_version_are_stored_for_every_function() -> None:
    assert tuple(sorted(HASHES)) == seams.TESTED_VERSIONS
    functions = set(seam_check.installed_hashes())
    assert len(functions) > 30
    for version, table in HASHES.items():
        newer = {seam.path for seam in seams.SEAMS if seam.since > version}
        assert set(table) | newer >= functions and not set(table) & newer, version
    assert {seam.path for seam in seams.rows()} - functions == {
        "deepspeed.DeepSpeedEngine",
        "deepspeed.PipelineEngine",
        "deepspeed.runtime.engine.DeepSpeedZeroOptimizer",
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    }


def test_the_installed_version_passes_in_silence() -> None:
    if seams.installed_version() not in seams.TESTED_VERSIONS:
        pytest.skip(f"DeepSpeed {seams.installed_version()} is none of the tested {seams.TESTED_VERSIONS}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seam_check.check_seams()


def test_a_missing_symbol_is_refused_by_name_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{S12}.all_gather_dp_groups")
    with pytest.raises(SeamError) as caught:
        seam_check.check_seams()
    message = str(caught.value)
    assert f"{S12}.all_gather_dp_groups" in message
    assert f"got DeepSpeed {seams.installed_version()}" in message
    assert all(version in message for version in seams.TESTED_VERSIONS)
    assert "Install a tested version" in message


def test_a_missing_method_and_a_missing_module_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        seams.Seam(S12, "DeepSpeedZeroOptimizer.no_such_step", ("self",), "override", "x"),
        seams.Seam("deepspeed.no_such_module", "f", (), "rely", "x"),
    )
    known = seams.SEAMS
    for row in rows:
        monkeypatch.setattr(seams, "SEAMS", (*known, row))
        with pytest.raises(SeamError, match=row.path):
            seam_check.check_seams()


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed import DeepSpeedEngine

    def save_checkpoint(self: Any, folder: str, tag: Any = None, client_state: Any = None) -> None: ...

    monkeypatch.setattr(DeepSpeedEngine, "save_checkpoint", save_checkpoint)
    with pytest.raises(SeamError, match=r"save_checkpoint.*parameters are \('self', 'folder', 'tag', 'client_state'\)"):
        seam_check.check_seams()


def test_a_changed_body_is_one_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    def _post_step(self: Any, timer_names: Any) -> None:
        self.changed = timer_names

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "_post_step", _post_step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seam_check.check_seams()
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "stage3.DeepSpeedZeroOptimizer_Stage3._post_step." in message
    assert seams.installed_version() in message


def test_every_row_is_checked_before_any_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row fails: nothing is patched, and the engine classes are stock."""
    import deepspeed
    from deepspeed.runtime.zero import stage_1_and_2
    from torch import nn

    import fp8_ds
    from fp8_ds.engine.patches import RECORD

    fp8_ds.uninstall()
    fp8_ds.install()
    before = list(RECORD.patches), stage_1_and_2.all_gather_dp_groups, deepspeed.DeepSpeedEngine
    last = seams.Seam("deepspeed", "no_such_symbol", (), "rely", "x")
    monkeypatch.setattr(seams, "SEAMS", (*seams.SEAMS, last))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "fp8": {"enabled": True},
    }
    with pytest.raises(SeamError, match="no_such_symbol"):
        deepspeed.initialize(model=nn.Linear(4, 4), config=config)
    assert (list(RECORD.patches), stage_1_and_2.all_gather_dp_groups, deepspeed.DeepSpeedEngine) == before


def source_of(tmp_path: Path, name: str, text: str) -> Any:
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def test_a_body_hash_ignores_comments_docstrings_and_space_and_sees_code(tmp_path: Path) -> None:
    one = source_of(tmp_path, "one", 'def f(x):\n    """Text."""\n    y = x + 1  # why\n    return "# no comment"\n')
    two = source_of(tmp_path, "two", 'def f(x):\n    y = x+1\n\n    return "# no comment"\n')
    other = source_of(tmp_path, "other", 'def f(x):\n    y = x + 2\n    return "# no comment"\n')
    string = source_of(tmp_path, "string", 'def f(x):\n    y = x + 1\n    return "# a comment"\n')

    @functools.wraps(one)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return one(*args, **kwargs)

    assert seam_check.body_hash(one) == seam_check.body_hash(two) == seam_check.body_hash(wrapped)
    assert len({seam_check.body_hash(function) for function in (one, other, string)}) == 3

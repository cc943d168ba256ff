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


@pytest.mark.parametrize(
    ("name", "module"), [("DeepSpeedZeroOptimizer.no_such_step", S12), ("f", "deepspeed.no_such_module")]
)
def test_a_missing_symbol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    row = seams.Seam(module, name, ("self",), "override", "x")
    monkeypatch.setattr(seams, "SEAMS", (*seams.SEAMS, row))
    with pytest.raises(SeamError, match=row.path):
        seam_check.check_seams()


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed import DeepSpeedEngine

    def save_checkpoint(self: Any, folder: str, tag: Any = None, client_state: Any = None) -> None: ...

    monkeypatch.setattr(DeepSpeedEngine, "save_checkpoint", save_checkpoint)
    with pytest.raises(SeamError, match=r"save_checkpoint.*folder"):
        seam_check.check_seams()


def test_a_changed_body_is_one_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    def _post_step(self: Any, timer_names: Any) -> None:
        self.changed = timer_names

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "_post_step", _post_step)
    with pytest.warns(match=r"stage3\.DeepSpeedZeroOptimizer_Stage3\._post_step\.") as caught:
        seam_check.check_seams()
    assert len(caught) == 1


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


def test_a_body_hash_ignores_comments_docstrings_and_space_and_sees_code(tmp_path: Path) -> None:
    bodies = {
        "one": 'def f(x):\n    """Text."""\n    y = x + 1  # why\n    return "# no comment"\n',
        "two": 'def f(x):\n    y = x+1\n\n    return "# no comment"\n',
        "other": 'def f(x):\n    y = x + 2\n    return "# no comment"\n',
        "string": 'def f(x):\n    y = x + 1\n    return "# a comment"\n',
    }
    found = {}
    for name, text in bodies.items():
        (tmp_path / f"{name}.py").write_text(text)
        found[name] = seam_check.body_hash(runpy_function(tmp_path / f"{name}.py"))
    assert found["one"] == found["two"] and len(set(found.values())) == 3


def runpy_function(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return functools.wraps(module.f)(lambda *args, **kwargs: module.f(*args, **kwargs))

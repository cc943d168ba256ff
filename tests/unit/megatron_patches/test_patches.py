"""The table of what is touched in Megatron: checked as a whole, applied as a whole, undone."""

from __future__ import annotations

import json
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

from packaging.specifiers import SpecifierSet

from fp8_ds.errors import SeamError
from megatron_patches import compat, patches
from megatron_patches.patches import Patch

HOST = "megatron_patches_test_host"


def stock_one(a: int, b: int) -> int:
    return a + b


def stock_two(a: int) -> int:
    return -a


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of two functions and a class, with a row each."""
    module = ModuleType(HOST)
    module.one, module.two = stock_one, stock_two  # type: ignore[attr-defined]
    module.Layer = type("Layer", (), {"forward": lambda self, x: x})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, HOST, module)
    rows = (
        Patch(HOST, "one", ("a", "b"), "wrap", "why", "tried"),
        Patch(HOST, "two", ("a",), "swap", "why", "tried"),
        Patch(HOST, "Layer.forward", ("self", "x"), "rely", "why"),
        Patch(HOST, "absent", (), "swap", "why", "tried", "<0.1"),
    )
    monkeypatch.setattr(patches, "PATCHES", rows)
    yield module
    assert patches.applied() == ()


def test_all_are_replaced_and_undone(host: ModuleType) -> None:
    applied = patches.apply(
        {f"{HOST}.one": lambda stock: lambda a, b: 10 * stock(a, b), f"{HOST}.two": lambda stock: max}
    )
    assert (host.one(1, 2), host.two) == (30, max)
    assert patches.applied() == (f"{HOST}.one", f"{HOST}.two")
    applied.remove()
    assert (host.one, host.two) == (stock_one, stock_two)


@pytest.mark.parametrize("broken", ["two", "Layer"])
def test_nothing_is_replaced_if_one_row_does_not_hold(host: ModuleType, broken: str) -> None:
    """Also one that is relied on, and not asked for."""
    delattr(host, broken)
    with pytest.raises(SeamError, match=rf"expected {HOST}\.{broken}.* as in Megatron 0\.16\.1"):
        patches.apply({f"{HOST}.one": lambda stock: max})
    assert host.one is stock_one


def test_another_signature_is_refused(host: ModuleType) -> None:
    host.two = lambda other: 0  # type: ignore[attr-defined]
    with pytest.raises(SeamError, match=r"its parameters are \('other',\), expected \('a',\) first"):
        patches.check("core")


def test_a_symbol_without_a_row_is_refused(host: ModuleType) -> None:
    for name in ("three", "Layer.forward"):
        with pytest.raises(SeamError, match=r"expected a row of megatron_patches/patches.py"):
            patches.apply({f"{HOST}.one": lambda stock: max, f"{HOST}.{name}": lambda stock: max})
    assert host.one is stock_one


def test_twice_is_refused_and_rows_hold_while_applied(host: ModuleType) -> None:
    applied = patches.apply({f"{HOST}.one": lambda stock: lambda *args: stock(*args)})
    patches.check("core")  # by the stock signature
    with pytest.raises(SeamError, match=r"expected Megatron.s own symbol, got ours"):
        patches.apply({f"{HOST}.one": lambda stock: max})
    applied.remove()


def test_what_somebody_else_has_replaced_since_is_not_undone(host: ModuleType) -> None:
    applied = patches.apply({f"{HOST}.one": lambda stock: max, f"{HOST}.two": lambda stock: max})
    host.two = min  # type: ignore[attr-defined]
    with pytest.raises(SeamError, match=r"Undo what replaced it since"):
        applied.remove()
    assert host.one is max
    host.two = max  # type: ignore[attr-defined]
    applied.remove()


def test_rows_of_other_versions_are_left_out(host: ModuleType) -> None:
    patches.apply({f"{HOST}.absent": lambda stock: max, f"{HOST}.two": lambda stock: max}).remove()
    assert not hasattr(host, "absent")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_command_lists_every_row_that_the_installed_megatron_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wheels to 0.16 are megatron.core alone: their rows of training code are not listed as missing."""
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    monkeypatch.setattr(sys, "argv", ["patches.py"])
    runpy.run_module("megatron_patches.patches", run_name="__main__")
    listed = capsys.readouterr().out
    assert listed.count("\nrely  ") > 40 and "megatron.training." not in listed and str(compat.version()) in listed
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=f"{tmp_path}: expected a clone of Megatron-LM"):
        runpy.run_module("megatron_patches.patches", run_name="__main__")


# --- bodies of functions ---


def test_bodies_of_tested_versions_are_stored_and_pass_in_silence() -> None:
    tested = json.loads(patches._BODIES.read_text())
    assert tuple(sorted(tested)) == compat.TESTED_VERSIONS
    constants = {row.path for row in patches.PATCHES if row.name.rsplit(".", 1)[-1][0].isupper()}
    for version, table in tested.items():
        there = {row.path for row in patches.PATCHES if SpecifierSet(row.versions).contains(version)}
        assert set(table) == there - constants, version
    patches._warn_of_other_bodies.cache_clear()
    with warnings.catch_warnings():
        if compat.version().public in tested:
            warnings.filterwarnings("error", message=".*bodies differ")
        patches.check("core")


def test_a_body_that_was_not_tested_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    patches._warn_of_other_bodies.cache_clear()
    monkeypatch.setattr(DistributedOptimizer, "state_dict", lambda self: {"another": "body"})
    with pytest.warns(UserWarning, match=r"bodies differ: [\w.]+\.DistributedOptimizer\.state_dict\."):
        patches.check("core")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*bodies differ")
        patches.check("core")


def test_the_bodies_of_a_version_are_stored_beside_those_of_others(tmp_path: Path) -> None:
    file = tmp_path / "bodies.json"
    file.write_text('{"0.1": {"a": "b"}}')
    rows = [row for row in patches.rows() if row.part == "core"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "rows", lambda *parts: rows)
        patches.update_bodies(file)
    found = json.loads(file.read_text())
    assert found["0.1"] == {"a": "b"} and len(found[compat.version().public]) > 40


def test_a_library_that_scripts_need_is_told_from_a_version_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'six'", name="six")

    monkeypatch.setattr(patches.importlib, "import_module", absent)
    with pytest.raises(SeamError, match=r"'six'\. Install .*fp8-ds\[megatron\]"):
        patches.find(next(row for row in patches.PATCHES if row.part == "training"))


def test_versions(tmp_path: Path) -> None:
    info = tmp_path / "megatron" / "core" / "package_info.py"
    with pytest.raises(SeamError, match=r"expected a clone of Megatron-LM"):
        compat.version_of_clone(tmp_path)
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ''\n")
    assert str(compat.version_of_clone(tmp_path)) == "0.16.1"
    info.write_text("MAJOR = 0\nMINOR = 15\nPATCH = 3\nPRE_RELEASE = ''\n")
    with pytest.raises(SeamError, match=r"expected Megatron 0\.16\.0 or later, got 0\.15\.3"):
        compat.version_of_clone(tmp_path)
    info.write_text("MAJOR = 0\nMINOR = 17\nPATCH = 0\nPRE_RELEASE = 'rc1'\n")
    with pytest.warns(UserWarning, match=r"tested with Megatron 0\.16\.1, .* this is 0\.17\.0rc1"):
        compat.version_of_clone(tmp_path)

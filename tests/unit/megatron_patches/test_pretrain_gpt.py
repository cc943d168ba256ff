"""How the wrapper finds a clone, and which it refuses."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

from fp8_ds.errors import ConfigError, SeamError
from megatron_patches import pretrain_gpt
from megatron_patches.compat import use_clone
from megatron_patches.pretrain_gpt import find_clone


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return make_clone(tmp_path / "clone")


def make_clone(path: Path, version: str = "0, 16, 1") -> Path:
    core = path / "megatron" / "core"
    core.mkdir(parents=True)
    (path / "pretrain_gpt.py").touch()
    major, minor, patch = version.split(", ")
    (core / "package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n")
    return path


def test_the_argument_wins_then_the_variable_then_the_working_directory(clone: Path, tmp_path: Path) -> None:
    other = make_clone(tmp_path / "other")
    assert find_clone(str(clone), str(other), tmp_path) == clone
    assert find_clone(None, str(other), clone) == other
    assert find_clone(None, None, clone) == clone


@pytest.mark.parametrize(
    ("argument", "environment", "source"),
    [("", "", "the working directory"), ("", "empty", r"\$MEGATRON_LM_PATH"), ("empty", "clone", "--megatron-path")],
)
def test_what_is_no_clone_is_refused(clone: Path, argument: str, environment: str, source: str) -> None:
    """The first that is given must hold: it is not passed over for the next."""
    empty = clone.parent / "empty"
    empty.mkdir()
    paths = {"": None, "empty": str(empty), "clone": str(clone)}
    with pytest.raises(ConfigError, match=rf"{source}: expected a clone of Megatron-LM, got .*empty"):
        find_clone(paths[argument], paths[environment], empty)


def test_a_version_that_needs_another_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("typing.override", raising=False)
    path = make_clone(tmp_path / "new", "0, 19, 1")
    before = list(sys.path)
    with pytest.raises(SeamError, match=r"expected Python 3\.12 or later for Megatron 0\.19\.1"):
        use_clone(path)
    assert sys.path == before


def test_megatron_imported_from_elsewhere_is_refused(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SeamError, match=r"Import no Megatron before the wrapper"):
        use_clone(clone)


def test_the_wrappers_own_words_are_read_before_megatrons() -> None:
    own = pretrain_gpt._own_arguments(["--num-layers", "2", "--megatron-path", "x", "--on-cpu", "--spec", "a", "b"])
    assert (own.megatron_path, own.on_cpu) == ("x", True)


def test_a_refusal_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("sys.argv", ["pretrain_gpt", "--megatron-path", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        pretrain_gpt.main()
    assert ended.value.code == 2 and ended.value.__suppress_context__
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[rank 1] ConfigError: ") and str(tmp_path) in line


def test_every_spec_of_ours_has_its_final_norm() -> None:
    ours, parallel = ["megatron_patches.layer_specs", "gpt_sdpa"], {"sequence_parallel": True}
    for spec, impl, options, expected in (
        (ours, "local", parallel, True),
        (ours, "local", {"sequence_parallel": False}, False),
        (ours, "transformer_engine", parallel, False),
        (["elsewhere", "gpt"], "local", parallel, False),
        (None, "local", parallel, False),
    ):
        args = argparse.Namespace(spec=spec, transformer_impl=impl, **options)
        assert pretrain_gpt.needs_own_final_norm(args) is expected

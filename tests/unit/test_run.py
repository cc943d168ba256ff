import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8_ds.cli.app import app
from fp8_ds.run import PTH_NAME, autoload_state, default_site_dir, split_arguments, turn_autoload_on


@pytest.fixture
def script(tmp_path: Path) -> str:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "helper.py").write_text("VALUE = 7\n")
    path = folder / "train.py"
    path.write_text("import sys, helper\nprint(__name__, sys.argv[1:], helper.VALUE, 'fp8_ds' in sys.modules)\n")
    return str(path)


@pytest.mark.parametrize("moved", [[], ["--local_rank=1"], ["--local-rank=1"]])
def test_local_rank_moves_behind_the_script(script: str, moved: list[str]) -> None:
    more = ["--lr", "1", "--local_rank=9"]
    assert split_arguments([*moved, script, *more]) == (script, [*moved, *more])


@pytest.mark.parametrize("arguments", [[], ["--local_rank=1"], ["--lr", "1"], ["missing.py"]])
def test_what_is_no_script_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"fp8_ds\.run: expected"):
        split_arguments(arguments)


def test_the_script_runs_as_main_beside_its_modules(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fp8_ds.run", "--local_rank=0", script, "--lr", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "__main__ ['--local_rank=0', '--lr', '1'] 7 True"


def test_a_refusal_is_the_last_line_of_a_rank_and_other_errors_have_their_traceback(tmp_path: Path) -> None:
    path = tmp_path / "refused.py"
    for raised, status, lines in (
        ("errors.ConfigError('fp8.x: expected 1, got 2. Write 1.')", 2, 1),
        ("errors.UnsupportedError('fp8: expected no MiCS, got it. Leave it.')", 2, 1),
        ("errors.CheckpointError('load_checkpoint: expected 2 ranks, got 1. Convert it.')", 2, 1),
        ("ZeroDivisionError('of the script itself')", 1, 5),
    ):
        path.write_text(f"from fp8_ds import errors\nraise {raised}\n")
        environment = {**os.environ, "RANK": "3"}
        command = [sys.executable, "-m", "fp8_ds.run", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert result.returncode == status, result.stderr
        told = result.stderr.splitlines()
        assert told[-1].startswith("[rank 3] " if lines == 1 else "ZeroDivisionError")
        assert ("Traceback" in result.stderr) == (lines > 1)


def run(command: str, folder: Path) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(app, ["autoload", command, "--json", "--site-dir", str(folder)])
    return result.exit_code, json.loads(result.stdout)


def test_on_writes_one_file_and_off_removes_it(tmp_path: Path) -> None:
    file = str(tmp_path / PTH_NAME)
    assert run("status", tmp_path) == (1, {"autoload": "off", "changed": False, "file": file})
    assert run("on", tmp_path) == (0, {"autoload": "on", "changed": True, "file": file})
    assert [path.name for path in tmp_path.iterdir()] == [PTH_NAME]
    assert run("status", tmp_path) == (0, {"autoload": "on", "changed": False, "file": file})
    assert run("off", tmp_path) == (0, {"autoload": "off", "changed": True, "file": file})
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_another_version_is_reported_and_renewed(tmp_path: Path) -> None:
    (tmp_path / PTH_NAME).write_text("import fp8_ds.older\n")
    assert run("status", tmp_path)[1]["autoload"] == "outdated"
    assert run("on", tmp_path)[1]["changed"] is True
    assert autoload_state(tmp_path) == "on"


def test_a_folder_that_cannot_be_written_is_exit_code_3(tmp_path: Path) -> None:
    code, output = run("on", tmp_path / "missing")
    assert code == 3 and str(tmp_path / "missing") in str(output["error"])


def start_python(site_dir: Path, packages: Path | None, code: str) -> subprocess.CompletedProcess[str]:
    """A Python that treats `site_dir` as a site folder, as start-up does, and sees `packages` only."""
    start = f"import site, sys; sys.path[:0] = {[str(packages)] if packages else []!r}\n"
    # -S: no site-packages at all, so this environment's fp8_ds is out of sight.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", f"{start}site.addsitedir({str(site_dir)!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=site_dir, check=False)


def test_the_line_loads_fp8_ds_when_python_starts_and_is_silent_where_there_is_none(tmp_path: Path) -> None:
    packages, folder = tmp_path / "packages", tmp_path / "site"
    (packages / "fp8_ds").mkdir(parents=True)
    (packages / "fp8_ds/__init__.py").write_text("print('loaded')")
    folder.mkdir()
    turn_autoload_on(folder)
    for place, said in ((packages, "loaded\nalive\n"), (None, "alive\n")):
        result = start_python(folder, place, "print('alive')")
        assert (result.stdout, result.stderr, result.returncode) == (said, "", 0)


def test_the_default_folder_is_one_that_python_reads_at_start() -> None:
    assert default_site_dir() in [Path(folder) for folder in site.getsitepackages()]

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_ds.run import split_arguments


@pytest.fixture
def script(tmp_path: Path) -> str:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "helper.py").write_text("VALUE = 7\n")
    path = folder / "train.py"
    path.write_text("import sys, helper\nprint(__name__, sys.argv[1:], helper.VALUE, 'fp8_ds' in sys.modules)\n")
    return str(path)


@pytest.mark.parametrize(
    ("before", "moved"),
    [
        ([], []),
        (["--local_rank=1"], ["--local_rank=1"]),
        (["--local-rank=1"], ["--local-rank=1"]),
    ],
)
def test_local_rank_moves_behind_the_script(script: str, before: list[str], moved: list[str]) -> None:
    assert split_arguments([*before, script, "--lr", "1", "--local_rank=9"]) == (
        script,
        [*moved, "--lr", "1", "--local_rank=9"],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a script to run, got none"),
        (["--local_rank=0"], "expected a script to run, got none"),
        (["--lr", "1"], "expected a script before any option, got '--lr'"),
        (["absent.py"], "got 'absent.py' .no such file"),
    ],
)
def test_no_script_is_a_clear_error(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
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

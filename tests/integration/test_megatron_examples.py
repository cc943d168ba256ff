"""The scripts of examples/megatron without a clone: they parse, and every flag of ours in them exists."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

from megatron_patches.arguments import add_arguments

SCRIPTS = ("cpu_trial.sh", "llama3_8b_8gpus.sh")
OF_MEGATRON = {"--fp8-format", "--fp8-recipe"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_parses(root: Path, name: str) -> None:
    subprocess.run(["bash", "-n", root / "examples/megatron" / name], check=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_of_ours_exist(root: Path, name: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp8-recipe", choices=("tensorwise",))
    known = {option for action in add_arguments(parser)._actions for option in action.option_strings}
    used = set(re.findall(r"--(?:fp8|on-cpu)[\w-]*", (root / "examples/megatron" / name).read_text()))
    assert len(used) >= 3 and used <= known | OF_MEGATRON


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missing_clone_is_named(root: Path, name: str) -> None:
    run = subprocess.run(
        [root / "examples/megatron" / name], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert run.returncode != 0 and "MEGATRON_LM_PATH" in run.stderr


def words_of_8b(root: Path, tmp_path: Path, has_apex: bool, **env: str) -> list[str]:
    """What the script passes on, where Apex's kernel for gradient accumulation imports or not."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exit {int(not has_apex)}\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    given = dict.fromkeys(("MEGATRON_LM_PATH", "TOKENIZER", "DATA", "OUTPUT"), str(tmp_path))
    run = subprocess.run(
        [root / "examples/megatron/llama3_8b_8gpus.sh", "--last", "1"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python), **given, **env},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("engine", "has_apex", "fuses"),
    [("te", True, True), ("te", False, False), ("fp8_ds", True, False), ("fp8_ds", False, False)],
)
def test_8b_fuses_gradient_accumulation_only_where_it_can(
    root: Path, tmp_path: Path, engine: str, has_apex: bool, fuses: bool
) -> None:
    """Megatron's head stops without Apex; linears of fp8_ds refuse it."""
    words = words_of_8b(root, tmp_path, has_apex, ENGINE=engine)
    assert words.count("--no-gradient-accumulation-fusion") == int(not fuses)
    assert words[-2:] == ["--last", "1"]
    assert words[words.index("--transformer-impl") + 1] == ("transformer_engine" if engine == "te" else "local")


def test_8b_has_the_attention_that_8192_tokens_are_advised(root: Path, tmp_path: Path) -> None:
    words = words_of_8b(root, tmp_path, True)
    assert words[words.index("--seq-length") + 1] == "8192"
    assert words[words.index("--fp8-attention-backend") + 1] == "fa3"
    assert "--fp8-attention-backend" not in words_of_8b(root, tmp_path, True, ATTENTION="none")
    assert "fa3_fp8" in words_of_8b(root, tmp_path, True, ATTENTION="fa3_fp8")


def test_text_comes_back_from_megatrons_format(root: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    script = root / "examples/megatron/prepare_data.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True, timeout=120)
    sys.path.insert(0, str(root / "examples/deepspeed"))
    try:
        from data import read_stdlib
    finally:
        sys.path.pop(0)
    text = read_stdlib("held_out")
    dataset = IndexedDataset(str(tmp_path / "held_out"))
    assert bytes(dataset[1][:-1].astype("uint8")) == bytes(text[1 << 16 : 2 << 16].numpy())
    assert dataset[0][-1] == 256
    assert sum(len(document) - 1 for document in dataset) == len(text)

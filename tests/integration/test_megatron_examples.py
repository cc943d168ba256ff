"""The scripts of examples/megatron without a clone: they parse, and every flag of ours in them exists."""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from pretrain_arguments import words_of_8b

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

from megatron_patches.arguments import add_arguments

SCRIPTS = ("cpu_trial.sh", "llama3_8b_8gpus.sh")
OF_MEGATRON = {"--fp8-format", "--fp8-recipe"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_parses_and_flags_of_ours_exist(root: Path, name: str) -> None:
    subprocess.run(["bash", "-n", root / "examples/megatron" / name], check=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp8-recipe", choices=("tensorwise",))
    known = {option for action in add_arguments(parser)._actions for option in action.option_strings}
    used = set(re.findall(r"--(?:fp8|on-cpu)[\w-]*", (root / "examples/megatron" / name).read_text()))
    assert len(used) >= 3 and used <= known | OF_MEGATRON


@pytest.mark.parametrize(
    ("env", "has_apex", "fuses", "has_states"),
    [
        ({"ENGINE": "te"}, True, True, False),
        ({"ENGINE": "te", "STATES": "1"}, False, False, True),
        ({"ENGINE": "fp8_ds"}, True, False, True),
        ({"ENGINE": "fp8_ds", "STATES": "0"}, False, False, False),
    ],
)
def test_8b_fuses_gradient_accumulation_where_it_can_and_has_an_optimizer_that_resumes(
    root: Path, tmp_path: Path, env: dict[str, str], has_apex: bool, fuses: bool, has_states: bool
) -> None:
    """Megatron's head stops without Apex; linears of fp8_ds refuse it. Megatron's distributed optimizer does not resume
    without Transformer Engine and Apex."""
    words = words_of_8b(root, tmp_path, has_apex, **env)
    assert words.count("--no-gradient-accumulation-fusion") == int(not fuses)
    assert words.count("--fp8-optimizer-states") == int(has_states)
    assert words[-2:] == ["--last", "1"]
    assert words[words.index("--transformer-impl") + 1] == ("transformer_engine" if env["ENGINE"] == "te" else "local")


@pytest.fixture
def prepared(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What prepare_data.py has written, in this process: a start of Megatron takes seconds."""
    script = root / "examples/megatron/prepare_data.py"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    return tmp_path


def test_text_comes_back_from_megatrons_format_and_the_trials_vocabulary_has_every_token(
    root: Path, prepared: Path
) -> None:
    """NullTokenizer of core 0.16 adds a token for the end of a document to --vocab-size; that of 0.19 does not."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    train, held_out = (IndexedDataset(str(prepared / split)) for split in ("train", "held_out"))
    largest = max(int(document.max()) for dataset in (train, held_out) for document in dataset)
    for name in ("cpu_trial.sh", "prepare_data.py"):
        (size,) = re.findall(r"--vocab-size (\d+)", (root / "examples/megatron" / name).read_text())
        assert largest < int(size), name
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "examples/deepspeed"))
        from data import read_stdlib
    text = read_stdlib("held_out")
    assert bytes(held_out[1][:-1].astype("uint8")) == bytes(text[1 << 16 : 2 << 16].numpy())
    assert held_out[0][-1] == 256 and sum(len(document) - 1 for document in held_out) == len(text)

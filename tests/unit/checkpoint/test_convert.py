"""What `fp8-ds convert` and a load refuse before they read a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8_ds.checkpoint import manifest as m
from fp8_ds.checkpoint.convert import convert
from fp8_ds.engine import checking
from fp8_ds.errors import CheckpointError, ConfigError

MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def save(folder: Path, tag: str) -> None:
    (folder / tag).mkdir(parents=True)
    torch.save({"module": {}}, folder / tag / MODEL_FILE)
    m.write_manifest(folder / tag, m.Manifest({"tag": tag}, {MODEL_FILE: m.record(folder / tag / MODEL_FILE, 0)}))
    (folder / "latest").write_text(tag)


@pytest.mark.parametrize("name", ["gone", "empty", "file.csv"])
def test_a_model_without_a_configuration_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save(tmp_path / "ckpt", "one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.csv").touch()
    monkeypatch.setattr("fp8_ds.checkpoint.convert._of_deepspeed", lambda *_: pytest.fail("has been read"))
    with pytest.raises(ConfigError, match=f"--model: expected a folder with config.json, got .*{name}"):
        convert(tmp_path / "ckpt", tmp_path / "out", "safetensors", model=tmp_path / name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("tags", "shown"), [(("one",), "none else"), (("two", "one"), r"\['two'\]")])
def test_a_damaged_save_is_not_named_among_those_that_are_complete(
    tmp_path: Path, tags: tuple[str, ...], shown: str
) -> None:
    for tag in tags:
        save(tmp_path, tag)
    with (tmp_path / "one" / MODEL_FILE).open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=rf"{MODEL_FILE} has .*Complete in '.*': {shown}\.$"):
        convert(tmp_path, tmp_path / "out", "safetensors")
    with pytest.raises(CheckpointError, match=rf"load_checkpoint: .* got: cut\. Complete in '.*': {shown}\.$"):
        checking._refuse(tmp_path, ["cut"], "one")

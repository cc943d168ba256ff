"""What a universal checkpoint made of safetensors holds, and which files are refused before it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from fp8_ds.checkpoint.contents import read_data
from fp8_ds.checkpoint.folders import read_manifest
from fp8_ds.cli.app import app
from fp8_ds.errors import CheckpointError, ConfigError, Fp8DsError, UnsupportedError
from fp8_ds.tools.convert import convert

WEIGHTS = {
    "a.weight": torch.randn(33, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "scale": torch.tensor(0.1, dtype=torch.float16),
    "b.weight": torch.full((7,), 1 + 2.0**-20),
}


def write(folder: Path, **files: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_are_the_tensors_and_moments_are_zero_and_take_no_room(tmp_path: Path, stage: int) -> None:
    big = {"big.weight": torch.ones(1000, 1000)}
    source = write(tmp_path / "model", one=WEIGHTS, two=big | {"position_ids": torch.arange(4)})
    found = convert(source, tmp_path / "out", "universal", stage=stage)
    everything = WEIGHTS | big
    numel = sum(tensor.numel() for tensor in everything.values())
    assert (found["num_tensors"], found["num_bytes"]) == (3 * len(everything), 12 * numel)
    assert {path.name for path in (tmp_path / "out/zero").iterdir()} == {*everything, "optimizer_state.pt"}
    assert read_manifest(tmp_path / "out") is not None
    for name, tensor in everything.items():
        for file in ("fp32", "exp_avg", "exp_avg_sq"):
            content = read_data(tmp_path / "out/zero" / name / f"{file}.pt")
            value = content if stage == 3 else content["param"]
            expected = tensor.float() if file == "fp32" else torch.zeros(tensor.shape)
            assert torch.equal(value, expected.reshape(-1) if stage == 3 else expected), (name, file)
        assert read_data(tmp_path / "out/zero" / name / "step.pt") == 0
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.pt")) < 4 * numel + 100_000


def test_the_command_says_which_file_it_leaves_beside_the_result(tmp_path: Path) -> None:
    source = write(tmp_path / "model", one=WEIGHTS)

    def run(source: Path, out: str, *more: str) -> str:
        words = ["convert", str(source), str(tmp_path / "start" / out), "--to", "universal", "--stage", "2", *more]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    latest = tmp_path / "start/latest_universal"
    assert f"{latest} names it now: load_checkpoint('{tmp_path}/start')" in run(source, "universal")
    assert json.loads(run(source, "again", "--json"))["latest"] == str(latest) and latest.read_text() == "again"
    assert json.loads(run(tmp_path / "start/again", "other", "--json"))["latest"] is None
    assert latest.read_text() == "again" and "names it" not in run(tmp_path / "start/again", "third")
    before = read_data(tmp_path / "start/again/zero/a.weight/fp32.pt")["param"]
    run(tmp_path / "start/again", "again", "--stage", "3")  # in place
    assert torch.equal(read_data(tmp_path / "start/again/zero/a.weight/fp32.pt"), before.flatten())


def indexed(folder: Path, names: dict[str, str], **files: dict[str, torch.Tensor]) -> Path:
    write(folder, **files)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_only_the_files_of_the_index_are_read(tmp_path: Path) -> None:
    source = indexed(
        tmp_path / "model", dict.fromkeys(WEIGHTS, "part.safetensors"), part=WEIGHTS, whole={"other": torch.ones(2)}
    )
    assert convert(source, tmp_path / "out", "universal", stage=2)["num_tensors"] == 3 * len(WEIGHTS)


def with_index(folder: Path, text: str) -> Path:
    (write(folder, one=WEIGHTS) / "model.safetensors.index.json").write_text(text)
    return folder


def cut(folder: Path) -> Path:
    path = write(folder, model=WEIGHTS) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    return folder


REFUSED: list[tuple[Any, type[Fp8DsError], str]] = [
    (
        lambda f: write(f, one=WEIGHTS, two=WEIGHTS),
        CheckpointError,
        "two.safetensors: expected .* once, got a.weight again",
    ),
    (lambda f: indexed(f, {"c": "one.safetensors"}, one=WEIGHTS), CheckpointError, r"in the files, got \['c'\]"),
    (lambda f: write(f, one={"w": torch.ones(2).to(torch.float8_e4m3fn)}), UnsupportedError, "got w in torch.float8"),
    (lambda f: write(f, one={"ids": torch.arange(3)}), ConfigError, "expected weights in .*, got none"),
    (cut, CheckpointError, "got a damaged file"),
    (lambda f: with_index(f, "{"), CheckpointError, 'index.json: expected JSON with "weight_map"'),
    (
        lambda f: write(f, one={"../../outside": torch.ones(2)}),
        CheckpointError,
        r"stay in their folder, got '../../out",
    ),
    (lambda f: write(f, one={str(f.parent / "a"): torch.ones(2)}), CheckpointError, "stay in their folder, got"),
    (lambda f: indexed(f, {"a": "../x.safetensors"}, one=WEIGHTS), CheckpointError, r"got '\.\./x.safetensors'"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_what_is_no_whole_model_is_refused_and_leaves_nothing(
    tmp_path: Path, make: Any, error: type[Fp8DsError], message: str
) -> None:
    source = make(tmp_path / "model")
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out", "universal", stage=2)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_schedulers_of_torch_stay_at_their_start(tmp_path: Path) -> None:
    """DeepSpeed hands them the file's state."""
    schedules = torch.optim.lr_scheduler
    source = write(tmp_path / "model", one=WEIGHTS)
    convert(source, tmp_path / "out", "universal", stage=2)
    state = read_data(tmp_path / "out/mp_rank_00_model_states.pt")["lr_scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    halves = [schedules.LambdaLR(optimizer, lambda step: 0.5**step) for _ in range(2)]
    for scheduler in (
        halves[0],
        schedules.SequentialLR(optimizer, halves, [3]),
        schedules.ChainedScheduler(halves),
        schedules.CosineAnnealingLR(optimizer, 10),
        schedules.OneCycleLR(optimizer, 1.0, 10),
    ):
        before = scheduler.get_last_lr()
        scheduler.load_state_dict({**state})
        assert scheduler.get_last_lr() == before
        optimizer.step()
        scheduler.step()


def test_options_that_safetensors_need_and_that_they_do_not_have(tmp_path: Path) -> None:
    source = write(tmp_path / "model", one=WEIGHTS)
    with pytest.raises(ConfigError, match=r"--stage: expected the stage that is to load it.*Name 1, 2 or 3"):
        convert(source, tmp_path / "out", "universal")
    with pytest.raises(ConfigError, match="stage: expected 1, 2 or 3, got 0"):
        convert(source, tmp_path / "out", "universal", stage=0)
    with pytest.raises(ConfigError, match=r"--trust-pickle: expected it with files of torch.save"):
        convert(source, tmp_path / "out", "universal", stage=2, trust_pickle=True)

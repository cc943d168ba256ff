"""What `fp8-ds convert` and a load refuse before they read a tensor."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fp8_ds.checkpoint import folders as m
from fp8_ds.checkpoint.folders import GLOBAL_STATE
from fp8_ds.cli.app import app
from fp8_ds.engine import checking
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError
from fp8_ds.tools.convert import convert, kind_of, model_folder

MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def save(folder: Path, tag: str) -> None:
    (folder / tag).mkdir(parents=True)
    torch.save({"module": {}}, folder / tag / MODEL_FILE)
    m.write_manifest(folder / tag, m.Manifest({"tag": tag}, {MODEL_FILE: m.record(folder / tag / MODEL_FILE, 0)}))
    (folder / "latest").write_text(tag)


@pytest.mark.parametrize("name", ["gone", "empty", "file.csv"])
def test_a_model_without_a_configuration_is_refused_before_the_weights_are_read(tmp_path: Path, name: str) -> None:
    """What `save` has written would be refused as a save without a rank's file."""
    save(tmp_path / "ckpt", "one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.csv").touch()
    with pytest.raises(ConfigError, match=f"--model: expected a folder with config.json, got .*{name}"):
        convert(tmp_path / "ckpt", tmp_path / "out", "safetensors", model=tmp_path / name)
    assert not (tmp_path / "out").exists()


def test_weights_beside_a_save_that_did_not_end_are_not_taken_in_its_place(tmp_path: Path) -> None:
    """Trainer writes model.safetensors before DeepSpeed's save: a universal checkpoint of it would be at step 0."""
    from safetensors.torch import save_file

    save(tmp_path, "global_step8")
    (tmp_path / "latest").unlink()
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"file 'latest' in .* got none\. Name one of .* by --tag: global_step8\.$"
    ):
        convert(tmp_path, tmp_path / "out", "universal", stage=2)
    with pytest.raises(ConfigError, match=r"expected a folder in .*, got 'other'"):
        convert(tmp_path, tmp_path / "out", "universal", tag="other")
    assert not (tmp_path / "out").exists()
    (tmp_path / "global_step8" / GLOBAL_STATE).parent.mkdir()
    (tmp_path / "global_step8" / GLOBAL_STATE).touch()  # a universal checkpoint is no save of its own
    assert kind_of(tmp_path) == "safetensors"
    with pytest.raises(UnsupportedError, match="They are safetensors already"):
        convert(tmp_path, tmp_path / "out", "safetensors")


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


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A longer one cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_is_an_error_of_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(1 << 16)}, tmp_path / "model/model.safetensors")
    convert(tmp_path / "model", tmp_path / "whole", "universal", stage=2)
    commands = [("model", "--to", "universal", "--stage", "2"), ("whole", "--to", "universal", "--stage", "3")]
    for source, *more in [*commands, ("whole", "--to", "safetensors")]:
        with files_of_at_most(1 << 15):
            result = CliRunner().invoke(app, ["convert", str(tmp_path / source), str(tmp_path / "out"), *more])
        assert result.exit_code == 3, result.stderr
        assert "File too large" in result.stderr and str(tmp_path / "out") in result.stderr.replace("\n", "")
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def universal_of(folder: Path) -> Path:
    from safetensors.torch import save_file

    (folder / "model").mkdir()
    save_file({"w": torch.ones(4)}, folder / "model/model.safetensors")
    convert(folder / "model", folder / "universal", "universal", stage=2)
    (folder / "universal" / m.MANIFEST).unlink()
    return folder / "universal"


def make_pipe(path: Path) -> None:
    """Who opens it all the same gets nothing after two seconds, and does not wait for ever."""
    os.mkfifo(path)

    def end_reads() -> None:
        while path.is_fifo():
            time.sleep(2)
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    threading.Thread(target=end_reads, daemon=True).start()


SPECIAL = {
    "a named pipe": make_pipe,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
}


def in_place_of(path: Path, kind: str) -> Path:
    """`path` is no file any more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    return path


def assert_refused(path: Path, kind: str, act: Callable[[], object]) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: expected a file, got {kind}. Remove it"):
        act()


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_by_name_among_safetensors(tmp_path: Path, kind: str) -> None:
    universal = universal_of(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/config.json").write_text("{}")
    for name in ("model/model-2.safetensors", "model/model.safetensors.index.json"):
        path = in_place_of(tmp_path / name, kind)
        assert_refused(path, kind, lambda: convert(tmp_path / "model", tmp_path / "out", "universal", stage=2))
        shutil.rmtree(path) if kind == "a folder" else path.unlink()
    path = in_place_of(tmp_path / "configs/tokenizer.json", kind)
    assert_refused(path, kind, lambda: convert(universal, tmp_path / "out", "safetensors", model=tmp_path / "configs"))


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_by_name_in_checkpoints(tmp_path: Path, kind: str) -> None:
    for number, name in enumerate(("zero/w/fp32.pt", m.MANIFEST, "mp_rank_00_model_states.pt")):
        place = tmp_path / str(number)
        place.mkdir()
        universal = universal_of(place)
        path = in_place_of(universal / name, kind)
        if kind == "a folder" and "/" in name:  # a parameter may have such a name
            continue
        for act in (
            lambda: convert(universal, place / "out", "universal", stage=3),  # noqa: B023
            lambda: convert(universal, place / "out", "safetensors"),  # noqa: B023
            lambda: convert(universal, universal, "universal", stage=3),  # noqa: B023
        ):
            assert_refused(path, kind, act)
    place = in_place_of(tmp_path / "save/global_step1/mp_rank_00_model_states.pt", kind).parent
    path = in_place_of(tmp_path / "save/latest", kind)
    assert_refused(path, kind, lambda: convert(tmp_path / "save", tmp_path / "out", "universal"))
    for target in ("universal", "safetensors"):
        assert_refused(
            place / "mp_rank_00_model_states.pt",
            kind,
            lambda: convert(tmp_path / "save", tmp_path / "out", target, tag="global_step1"),  # noqa: B023
        )


@pytest.mark.parametrize("name", ["../../elsewhere", "{}/elsewhere"])
def test_names_in_a_universal_checkpoint_lead_to_no_other_folder(tmp_path: Path, name: str) -> None:
    universal = universal_of(tmp_path)
    (universal / "zero/w").rename(tmp_path / "elsewhere")
    before = {path: path.read_bytes() for path in (tmp_path / "elsewhere").iterdir()}
    for path in universal.glob("*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "param_shapes": [{name.format(tmp_path): torch.Size([4])}]}, path)
    for act in (
        lambda: convert(universal, tmp_path / "out", "universal", stage=3),
        lambda: convert(universal, tmp_path / "out", "safetensors"),
        lambda: convert(universal, universal, "universal", stage=3),
    ):
        with pytest.raises(CheckpointError, match=r"expected names that stay in their folder, got '.*elsewhere'"):
            act()
    assert {path: path.read_bytes() for path in (tmp_path / "elsewhere").iterdir()} == before


@pytest.mark.parametrize("linked", ["zero/w", "zero/w/fp32.pt", "zero/w/fp32.pt.tmp"])
def test_a_link_in_a_universal_checkpoint_is_not_written_through(tmp_path: Path, linked: str) -> None:
    universal = universal_of(tmp_path)
    path, elsewhere = universal / linked, tmp_path / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_text("something else")
    path.symlink_to(elsewhere)
    files = list(elsewhere.iterdir()) if elsewhere.is_dir() else [elsewhere]
    before = {file: file.read_bytes() for file in files}
    convert(universal, universal, "universal", stage=3)
    assert {file: file.read_bytes() for file in files} == before
    assert torch.equal(torch.load(universal / "zero/w/fp32.pt"), torch.ones(4))  # the form of stage 3


@pytest.mark.parametrize("at", [0, 1])
def test_a_conversion_that_was_killed_leaves_nothing_that_passes_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At the first of three shards, and between their last names."""
    tensors = ((str(number), torch.ones(4)) for number in range(3))
    monkeypatch.setattr(model_folder, "_SHARD_BYTES", 16)
    named: list[Path] = []
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        named.append(target)
        if len(named) > at:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        model_folder.write_tensors(tensors, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == at
    with pytest.raises((FileNotFoundError, ConfigError)):
        convert(tmp_path / "out", tmp_path / "again", "universal", stage=2)


@pytest.mark.parametrize(("prefix", "stages", "other"), [("", (1, 2), 3), ("zero_pp_rank_0_", (3,), 2)])
def test_model_files_of_tensor_parallel_ranks_stay_where_the_stage_reads_them(
    tmp_path: Path, prefix: str, stages: tuple[int, ...], other: int
) -> None:
    """The way that a refused load at another tensor-parallel size names, `--stage` and all."""
    universal = tmp_path / "universal"
    (universal / GLOBAL_STATE).parent.mkdir(parents=True)
    for name in (f"{prefix}mp_rank_00_model_states.pt", f"{prefix}mp_rank_01_model_states.pt", GLOBAL_STATE):
        torch.save({}, universal / name)
    before = {path: path.read_bytes() for path in universal.rglob("*.pt")}
    for stage in stages:
        convert(universal, universal, "universal", stage=stage)
    assert {path: path.read_bytes() for path in universal.rglob("*.pt")} == before
    with pytest.raises(UnsupportedError, match=r"expected one tensor-parallel rank, .* got 2\. Name the stage"):
        convert(universal, universal, "universal", stage=other)


@pytest.mark.parametrize("prefix", ["", "zero_pp_rank_0_"])
def test_parts_of_tensor_parallel_ranks_become_no_safetensors_in_any_stage(tmp_path: Path, prefix: str) -> None:
    """Of stage 3 a defect of ours was named: DeepSpeed's reader counts more files than data-parallel ranks."""
    (tmp_path / "one").mkdir()
    for rank in range(2):
        torch.save({"module": {}}, tmp_path / "one" / f"{prefix}mp_rank_0{rank}_model_states.pt")
    with pytest.raises(UnsupportedError, match="expected one tensor-parallel rank, got several"):
        convert(tmp_path / "one", tmp_path / "out", "safetensors")


@pytest.mark.parametrize("target", ["safetensors", "universal"])
def test_a_stock_checkpoint_without_a_ranks_file_is_called_incomplete(tmp_path: Path, target: str) -> None:
    """Nothing of stock's says which files there are; its readers fail on what they find."""
    (tmp_path / "one").mkdir()
    torch.save({"module": {}, "ds_version": "0.19.8"}, tmp_path / "one/mp_rank_00_model_states.pt")
    states = {"zero_stage": 2, "partition_count": 2, "single_partition_of_fp32_groups": [torch.ones(2)]}
    torch.save({"optimizer_state_dict": states}, tmp_path / "one/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"expected the files of all ranks in .*one, got some .* Copy the"):
        convert(tmp_path / "one", tmp_path / "out", target)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layers", [(), ("layer_01-model_00-model_states.pt", "layer_01-model_01-model_states.pt")])
def test_parts_that_nothing_says_how_to_join_are_not_joined_along_their_rows(
    tmp_path: Path, layers: tuple[str, ...]
) -> None:
    """Layers of pipeline stages are whole, and joined (test_pipeline.py), unless tensor parallelism has cut them."""
    (tmp_path / "one").mkdir()
    for name in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt", *layers):
        torch.save({"module": {}}, tmp_path / "one" / name)
    with pytest.raises(UnsupportedError, match="by which parts of tensor-parallel ranks are joined, got none"):
        convert(tmp_path / "one", tmp_path / "out", "universal")
